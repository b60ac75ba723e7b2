"""Table BCDAVICE: the two branches alone and together, ResNet-50.

    python experiments/table_branches.py --data IMAGENET --device cuda
    python experiments/table_branches.py --scale smoke

Claim of the paper: BD and IR alone gain 0.4 and 0.7, together in CE 1.7.
Expected cost: 4 runs on ImageNet, days each on eight GPUs; about 15 s of a CPU core with
--scale smoke.
"""

from _comparisons import accuracies
from _experiment import study

ROWS = (
    ("ResNet-50", "baseline", "resnet50_plain", 76.6),
    ("ResNet-50", "+BD", "resnet50_bd", 77.0),
    ("ResNet-50", "+IR", "resnet50_ir", 77.3),
    ("ResNet-50", "+CE", "resnet50_ce", 78.3),
)

if __name__ == "__main__":
    accuracies(study(__doc__, "table_branches"), ROWS)
