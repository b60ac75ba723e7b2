"""Fig. CEeuqal a: error of training and validation by epoch, ResNet-50 with BN, SE and CE.

    python experiments/fig_curves.py --data IMAGENET --device cuda
    python experiments/fig_curves.py --scale smoke

Claim of the paper: CE errs less than SE and BN, in training and in validation.
Expected cost: 3 runs on ImageNet, days each on eight GPUs; about 10 s of a CPU core with
--scale smoke.
"""

from matplotlib import pyplot as plt

from _experiment import study

ROWS = (("BN", "resnet50_plain"), ("SE", "resnet50_se"), ("CE", "resnet50_ce"))


def main() -> None:
    """Train what is missing, measure, draw."""
    found = study(__doc__, "fig_curves")
    figure, axes = plt.subplots(figsize=(5, 3.6))
    rows = []
    for number, (label, recipe) in enumerate(ROWS):
        metrics = found.run(recipe).metrics
        epochs = [row["epoch"] for row in metrics]
        for part, key, style in (
            ("training", "train_top1", "--"),
            ("validation", "test_top1", "-"),
        ):
            errors = [1 - row[key] for row in metrics]
            name = f"{label}, {part}"
            axes.plot(epochs, errors, style, color=f"C{number}", marker=".", label=name)
            rows += [
                {"row": label, "part": part, "epoch": epoch, "error": error}
                for epoch, error in zip(epochs, errors, strict=True)
            ]
    axes.set(xlabel="epoch", ylabel="top-1 error")
    axes.legend(ncols=3, fontsize=8)
    found.write(rows, figure)


if __name__ == "__main__":
    main()
