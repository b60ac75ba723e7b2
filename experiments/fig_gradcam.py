"""Fig. inputIDbranch: where the last feature map of ResNet-50 looks, plain, BD and CE.

    python experiments/fig_gradcam.py --data IMAGENET --device cuda
    python experiments/fig_gradcam.py --scale smoke

Claim of the paper: CE covers the object more and the background less than BD, so IR helps.
Pictures only: the paper gives no number, and neither does this.
Expected cost: 3 runs on ImageNet, days each on eight GPUs; about 10 s of a CPU core with
--scale smoke. Needs the extra `gradcam`.
"""

import base64
import io

from matplotlib import pyplot as plt

from _experiment import study

ROWS = (("plain", "resnet50_plain"), ("BD", "resnet50_bd"), ("CE", "resnet50_ce"))


def main() -> None:
    """Train what is missing, measure, draw."""
    found = study(__doc__, "fig_gradcam")
    cams = {label: found.run(recipe).diagnosis.gradcam for label, recipe in ROWS}
    count = min(map(len, cams.values()))
    if count == 0:
        raise SystemExit("there are no pictures; pip install 'cenet[gradcam]', and remove "
                         f"diagnosis.json from the runs in {found.runs}")  # fmt: skip
    figure, panels = plt.subplots(count, 1 + len(ROWS), figsize=(8, 2 * count), squeeze=False)
    rows = []
    for i, line in enumerate(panels):
        first = next(iter(cams.values()))[i]
        line[0].imshow(_picture(first.image))
        line[0].set_title(first.label)
        for axes, (label, pictures) in zip(line[1:], cams.items(), strict=True):
            axes.imshow(_picture(pictures[i].overlay))
            axes.set_title(f"{label}: {pictures[i].predicted}")
            rows.append({"row": label, "image": i, "label": pictures[i].label,
                         "predicted": pictures[i].predicted})  # fmt: skip
        for axes in line:
            axes.set(xticks=[], yticks=[])
    found.write(rows, figure)


def _picture(url: str):
    return plt.imread(io.BytesIO(base64.b64decode(url.partition(",")[2])), "png")


if __name__ == "__main__":
    main()
