"""Table 2: MobileNetV2 and ShuffleNetV2 plain, with SE and with CE.

    python experiments/table2_lightweight.py --data IMAGENET --device cuda
    python experiments/table2_lightweight.py --scale smoke

Claim of the paper: CE gains up to 2.1 over plain networks, more than SE, at the same
multiply-adds.
Expected cost: 9 runs on ImageNet, days each on eight GPUs; about 30 s of a CPU core with
--scale smoke.
"""

from _experiment import study
from _networks_table import networks_table

ROWS = (
    ("mobilenetv2_100", "plain", 72.5, 0.33),
    ("mobilenetv2_100", "se", 73.5, 0.33),
    ("mobilenetv2_100", "ce", 74.6, 0.33),
    ("shufflenetv2_x0_5", "plain", 59.2, 0.05),
    ("shufflenetv2_x0_5", "se", 60.2, 0.05),
    ("shufflenetv2_x0_5", "ce", 60.5, 0.05),
    ("shufflenetv2_x1_0", "plain", 69.0, 0.15),
    ("shufflenetv2_x1_0", "se", 70.7, 0.15),
    ("shufflenetv2_x1_0", "ce", 71.2, 0.16),
)

if __name__ == "__main__":
    networks_table(study(__doc__, "table2_lightweight"), ROWS)
