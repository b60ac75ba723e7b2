"""Fig. CEeuqal b: test error of VGG trained on labels of which a share is wrong.

    python experiments/fig_label_corruption.py --data CIFAR10 --device cuda
    python experiments/fig_label_corruption.py --scale smoke

Claim of the paper: CE generalizes better at every share. The paper trains CE until its training
error is that of BN; both are reported here, after equal epochs and at the epoch of CE whose
training error is nearest to BN's last.
Expected cost: 10 runs of VGG-16, 160 epochs, three minutes each on an H200; about 40 s of a CPU
core with --scale smoke.
"""

from matplotlib import pyplot as plt

from _experiment import study

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)


def main() -> None:
    """Train what is missing, measure, draw."""
    found = study(__doc__, "fig_label_corruption")
    rows = []
    for share in SHARES:
        plain = found.run("vgg16_plain", label_corruption=share).metrics
        ce = found.run("vgg16_ce", label_corruption=share).metrics
        reached = plain[-1]["train_top1"]
        matched = min(ce, key=lambda row: abs(row["train_top1"] - reached))
        for label, row in (("BN", plain[-1]), ("CE", ce[-1]), ("CE, as BN in training", matched)):
            rows.append(
                {"row": label, "corrupted": share, "epoch": row["epoch"],
                 "train_error": 1 - row["train_top1"], "test_error": 1 - row["test_top1"]}
            )  # fmt: skip
    figure, axes = plt.subplots(figsize=(4.6, 3.4))
    for label in dict.fromkeys(row["row"] for row in rows):
        errors = [row["test_error"] for row in rows if row["row"] == label]
        axes.plot(SHARES, errors, marker="o", ms=3, label=label)
    axes.set(xlabel="share of wrong labels", ylabel="top-1 test error")
    axes.legend()
    found.write(rows, figure)


if __name__ == "__main__":
    main()
