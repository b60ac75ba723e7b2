"""Table comparewithsw: CE against other norms that decorrelate.

    python experiments/table_decorrelation.py --data IMAGENET --device cuda
    python experiments/table_decorrelation.py --scale smoke

Claim of the paper: CE is more accurate than IterNorm and switchable whitening.
Expected cost: 6 runs on ImageNet, days each on eight GPUs; about 20 s of a CPU core with
--scale smoke.
"""

from _comparisons import accuracies
from _experiment import study

ROWS = (
    ("ResNet-50", "IterNorm", "resnet50_iternorm", 77.1),
    ("ResNet-50", "SW", "resnet50_sw", 77.9),
    ("ResNet-50", "CE", "resnet50_ce", 78.3),
    ("ResNet-18", "IterNorm", "resnet18_iternorm", 71.1),
    ("ResNet-18", "SW", "resnet18_sw", 71.6),
    ("ResNet-18", "CE", "resnet18_ce", 71.9),
)

if __name__ == "__main__":
    accuracies(study(__doc__, "table_decorrelation"), ROWS)
