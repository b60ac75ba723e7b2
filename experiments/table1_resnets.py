"""Table 1: ResNets plain, with SE and with CE: accuracy, multiply-adds, inference time.

    python experiments/table1_resnets.py --data IMAGENET --device cuda
    python experiments/table1_resnets.py --scale smoke

Claim of the paper: CE is more accurate than SE at the same cost. Times are ratios to the plain
network, and CE is folded.
Expected cost: 9 runs on ImageNet, days each on eight GPUs; about 40 s of a CPU core with
--scale smoke.
"""

from _experiment import study
from _networks_table import networks_table

ROWS = (
    ("resnet18", "plain", 70.4, 1.82),
    ("resnet18", "se", 71.4, 1.82),
    ("resnet18", "ce", 71.9, 1.83),
    ("resnet50", "plain", 76.6, 4.14),
    ("resnet50", "se", 77.6, 4.15),
    ("resnet50", "ce", 78.3, 4.16),
    ("resnet101", "plain", 78.0, 7.87),
    ("resnet101", "se", 78.5, 7.88),
    ("resnet101", "ce", 79.0, 7.89),
)

if __name__ == "__main__":
    networks_table(study(__doc__, "table1_resnets"), ROWS)
