"""Fig. 1c: accuracy while random channels of the third layer of VGG are set to zero.

    python experiments/fig1c_ablation.py --data CIFAR10 --device cuda
    python experiments/fig1c_ablation.py --scale smoke

Claim of the paper: with CE accuracy falls more gently, behind ReLU and ELU: no channel matters
much more than others.
Expected cost: 4 runs of VGG-16, 160 epochs, three minutes each on an H200; about 20 s of a CPU
core with --scale smoke.
"""

from _comparisons import ablation_curves
from _experiment import study

ROWS = (
    ("BN+ReLU", "vgg16_plain"),
    ("BN+CE+ReLU", "vgg16_ce"),
    ("BN+ELU", "vgg16_elu"),
    ("BN+CE+ELU", "vgg16_elu_ce"),
)

if __name__ == "__main__":
    ablation_curves(study(__doc__, "fig1c_ablation"), ROWS)
