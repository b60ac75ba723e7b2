"""Fig. CEeuqal c: ablation curves of ResNet-50 and MobileNetV2 in their first norm layer.

    python experiments/fig_ablation_imagenet.py --data IMAGENET --device cuda
    python experiments/fig_ablation_imagenet.py --scale smoke

Claim of the paper: CE makes channels more equal on ImageNet too.
Expected cost: 4 runs on ImageNet, days each on eight GPUs; about 20 s of a CPU core with
--scale smoke.
"""

from _comparisons import ablation_curves
from _experiment import study

ROWS = (
    ("ResNet-50", "resnet50_plain"),
    ("CE-ResNet-50", "resnet50_ce"),
    ("MobileNetV2", "mobilenetv2_100_plain"),
    ("CE-MobileNetV2", "mobilenetv2_100_ce"),
)

if __name__ == "__main__":
    ablation_curves(study(__doc__, "fig_ablation_imagenet"), ROWS)
