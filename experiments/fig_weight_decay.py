"""Fig. CEeuqal d, e: inhibited channels and accuracy of VGG under growing weight decay.

    python experiments/fig_weight_decay.py --data CIFAR10 --device cuda
    python experiments/fig_weight_decay.py --scale smoke

Claim of the paper: weight decay puts channels of BN to sleep and costs accuracy; BD prevents
most of it, CE more.
Expected cost: 15 runs of VGG-16, 160 epochs, three minutes each on an H200; about 60 s of a CPU
core with --scale smoke.
"""

from matplotlib import pyplot as plt

from _experiment import study

ROWS = (("BN", "vgg16_plain"), ("BD", "vgg16_bd"), ("CE", "vgg16_ce"))
DECAYS = (1e-4, 5e-4, 1e-3, 2e-3, 5e-3)


def main() -> None:
    """Train what is missing, measure, draw."""
    found = study(__doc__, "fig_weight_decay")
    rows = []
    for label, recipe in ROWS:
        for decay in DECAYS:
            run = found.run(recipe, weight_decay=decay)
            rows.append(
                {"row": label, "weight_decay": decay, "inhibited": run.inhibited, "top1": run.top1}
            )
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2))
    for axes, key, name in (
        (panels[0], "inhibited", "inhibited channels, first six layers"),
        (panels[1], "top1", "top-1 accuracy"),
    ):
        for label, _ in ROWS:
            values = [row[key] for row in rows if row["row"] == label]
            axes.plot(DECAYS, values, marker="o", ms=3, label=label)
        axes.set(xlabel="weight decay", ylabel=name, xscale="log")
        axes.legend()
    found.write(rows, figure)


if __name__ == "__main__":
    main()
