"""Table other-normalizer: CE behind other norms and another rectifier.

    python experiments/table_normalizers.py --data IMAGENET --device cuda
    python experiments/table_normalizers.py --scale smoke

Claim of the paper: CE improves all of them.
Expected cost: 10 runs on ImageNet, days each on eight GPUs; about 30 s of a CPU core with
--scale smoke.
"""

from _comparisons import accuracies
from _experiment import study

ROWS = (
    ("ResNet-50", "GN", "resnet50_gn", 75.6),
    ("ResNet-50", "GN+CE", "resnet50_gn_ce", 76.2),
    ("ResNet-50", "IN", "resnet50_in", 74.2),
    ("ResNet-50", "IN+CE", "resnet50_in_ce", 76.0),
    ("ResNet-50", "LN", "resnet50_ln", 71.6),
    ("ResNet-50", "LN+CE", "resnet50_ln_ce", 73.3),
    ("ResNet-18", "BN+ReLU", "resnet18_plain", 70.5),
    ("ResNet-18", "BN+CE+ReLU", "resnet18_ce", 71.9),
    ("ResNet-18", "BN+ELU", "resnet18_elu", 68.1),
    ("ResNet-18", "BN+CE+ELU", "resnet18_elu_ce", 68.7),
)

if __name__ == "__main__":
    accuracies(study(__doc__, "table_normalizers"), ROWS)
