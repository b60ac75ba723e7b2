"""Fig. relu-norm-drop b: ablation curves of batch norm, switchable norm and CE, ResNet-50.

    python experiments/fig_ablation_norms.py --data IMAGENET --device cuda
    python experiments/fig_ablation_norms.py --scale smoke

Claim of the paper: CE is the gentlest and the most accurate of the three.
Expected cost: 3 runs on ImageNet, days each on eight GPUs; about 20 s of a CPU core with
--scale smoke.
"""

from _comparisons import ablation_curves
from _experiment import study

ROWS = (
    ("BN+ReLU", "resnet50_plain"),
    ("SN+ReLU", "resnet50_sn"),
    ("BN+CE+ReLU", "resnet50_ce"),
)

if __name__ == "__main__":
    ablation_curves(study(__doc__, "fig_ablation_norms"), ROWS)
