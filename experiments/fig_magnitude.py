"""Fig. CEplot: magnitude of the channels of the first layer at each location, BN and CE.

    python experiments/fig_magnitude.py --data CIFAR10 --device cuda
    python experiments/fig_magnitude.py --scale smoke

Claim of the paper: behind CE the ℓ2 norm over channels is larger everywhere.
Expected cost: 2 runs of VGG-16, 160 epochs, three minutes each on an H200; about 10 s of a CPU
core with --scale smoke.
"""

from matplotlib import pyplot as plt

from _experiment import study

ROWS = (("BN", "vgg16_plain"), ("BN+CE", "vgg16_ce"))


def main() -> None:
    """Train what is missing, measure, draw."""
    found = study(__doc__, "fig_magnitude")
    maps = {label: found.run(recipe).diagnosis.layers[0].magnitude for label, recipe in ROWS}
    largest = max(max(map(max, values)) for values in maps.values())
    figure, panels = plt.subplots(1, 2, figsize=(7, 3.2))
    rows = []
    for axes, (label, values) in zip(panels, maps.items(), strict=True):
        drawn = axes.imshow(values, vmin=0, vmax=largest, cmap="viridis")
        axes.set(title=label, xticks=[], yticks=[])
        rows += [
            {"row": label, "i": i, "j": j, "magnitude": value}
            for i, line in enumerate(values)
            for j, value in enumerate(line)
        ]
    figure.colorbar(drawn, ax=panels, label="ℓ2 norm over channels, mean over images")
    found.write(rows, figure)


if __name__ == "__main__":
    main()
