"""Fig. relu-norm-drop a: ablation curves of three rectifiers and of CE, VGG.

    python experiments/fig_ablation_activations.py --data CIFAR10 --device cuda
    python experiments/fig_ablation_activations.py --scale smoke

Claim of the paper: leaky ReLU makes channels more equal than ReLU, ELU does not, CE does most.
Expected cost: 4 runs of VGG-16, 160 epochs, three minutes each on an H200; about 20 s of a CPU
core with --scale smoke.
"""

from _comparisons import ablation_curves
from _experiment import study

ROWS = (
    ("BN+ReLU", "vgg16_plain"),
    ("BN+ELU", "vgg16_elu"),
    ("BN+LReLU", "vgg16_leaky_relu"),
    ("BN+CE+ReLU", "vgg16_ce"),
)

if __name__ == "__main__":
    ablation_curves(study(__doc__, "fig_ablation_activations"), ROWS)
