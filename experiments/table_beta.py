"""Table gammabeta: share of β ≤ 0 in the norms of trained plain ResNets.

    python experiments/table_beta.py --data IMAGENET --device cuda
    python experiments/table_beta.py --scale smoke

Claim of the paper: most β are not positive, as Remark 1 assumes of inhibited channels. Only
norms that feed an activation alone count: behind the others an addition follows.
Expected cost: 3 runs on ImageNet, days each on eight GPUs; about 5 s of a CPU core with --scale
smoke.
"""

from _experiment import study

ROWS = (
    ("ResNet-18", "resnet18_plain", 76.0),
    ("ResNet-50", "resnet50_plain", 76.7),
    ("ResNet-101", "resnet101_plain", 81.8),
)


def main() -> None:
    """Train what is missing, measure, draw."""
    found = study(__doc__, "table_beta")
    rows = []
    for label, recipe, paper in ROWS:
        layers = [layer for layer in found.run(recipe).diagnosis.layers if layer.beta is not None]
        channels = sum(layer.channels for layer in layers)
        share = sum(layer.channels * layer.beta.share_nonpositive for layer in layers) / channels
        rows.append({"row": label, "channels": channels, "beta_nonpositive": share,
                     "paper": paper / 100})  # fmt: skip
    found.write(rows)


if __name__ == "__main__":
    main()
