"""Fig. 1b: inhibited channels and test error of ELU and leaky ReLU, without and with CE.

    python experiments/fig1b_activations.py --data CIFAR10 --device cuda
    python experiments/fig1b_activations.py --scale smoke

Claim of the paper: the same holds for other rectifiers behind batch norm.
Expected cost: 4 runs of VGG-16, 160 epochs, three minutes each on an H200; about 20 s of a CPU
core with --scale smoke.
"""

from _comparisons import inhibited_and_error
from _experiment import study

ROWS = (
    ("ELU", "vgg16_elu"),
    ("ELU+CE", "vgg16_elu_ce"),
    ("LReLU", "vgg16_leaky_relu"),
    ("LReLU+CE", "vgg16_leaky_relu_ce"),
)

if __name__ == "__main__":
    inhibited_and_error(study(__doc__, "fig1b_activations"), ROWS)
