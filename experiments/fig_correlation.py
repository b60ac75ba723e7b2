"""Fig. CE-corr: correlation among channels while VGG trains, and by layer afterwards.

    python experiments/fig_correlation.py --data CIFAR10 --device cuda
    python experiments/fig_correlation.py --scale smoke

Claim of the paper: BD, IR and CE all have lower correlations than BN, at every depth.
Expected cost: 4 runs of VGG-16, 160 epochs, a quarter of an hour each on an H200 (they are
watched, which CUDA graphs do not allow); about 20 s of a CPU core with --scale smoke.
"""

from matplotlib import pyplot as plt

from _experiment import study

ROWS = (("BN", "vgg16_plain"), ("BD", "vgg16_bd"), ("IR", "vgg16_ir"), ("CE", "vgg16_ce"))


def main() -> None:
    """Train what is missing, measure, draw."""
    found = study(__doc__, "fig_correlation")
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.3))
    rows = []
    for label, recipe in ROWS:
        run = found.run(recipe, watched=True)
        names = list(dict.fromkeys(look["layer"] for look in run.looks))
        for axes, depth in ((panels[0], 1), (panels[1], len(names) - 2)):
            looks = [look for look in run.looks if look["layer"] == names[depth]]
            steps = [int(look["step"]) for look in looks]
            values = [float(look["correlation"] or "nan") for look in looks]
            axes.plot(steps, values, label=label)
            axes.set(title=f"layer {depth + 1}", xlabel="update", ylabel="mean |correlation|")
            rows += [
                {"row": label, "layer": depth + 1, "update": step, "correlation": value}
                for step, value in zip(steps, values, strict=True)
            ]
        final = [layer.correlation or 0.0 for layer in run.diagnosis.layers]
        panels[2].plot(range(1, len(final) + 1), final, marker="o", ms=3, label=label)
        rows += [
            {"row": label, "layer": i + 1, "update": "trained", "correlation": value}
            for i, value in enumerate(final)
        ]
    panels[2].set(title="after training", xlabel="layer", ylabel="mean |correlation|")
    panels[2].legend()
    found.write(rows, figure)


if __name__ == "__main__":
    main()
