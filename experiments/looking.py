"""Figures of maps: magnitude of channels by location, and Grad-CAM of several networks."""

from collections.abc import Mapping
from functools import partial
from statistics import fmean
from typing import Any

from cenet.formatting import percent
from experiments.figures import Labelled, all_of, labelled
from experiments.result import Built, Result, Rows
from experiments.runs import Run
from experiments.tables import Row
from experiments.uncertainty import spread

Grid = list[list[float]]


def magnitude(
    name: str, title: str, claim: str, compared: Labelled, seeds: Mapping[str, int]
) -> Result:
    """ℓ2 over channels before the first activation, by location; the first recipe is compared."""
    found = labelled(compared, seeds)
    return Result(name, title, claim, all_of(found), partial(_magnitude, found), parts=("maps",))


def _magnitude(compared: tuple[tuple[str, tuple[Run, ...]], ...], rows: Rows) -> Built:
    from experiments.drawing import drawn, plt

    figure, axes = plt.subplots(1, len(compared), figsize=(3.4 * len(compared), 3.2))
    means: list[Grid] = []
    table = []
    for label, own in compared:
        maps = [_grid(rows.of(run, "maps")) for run in own if rows.of(run, "maps")]
        cells = {"": label, "n": str(len(maps))}
        mean = _mean(maps)
        means.append(mean)
        over_map = [fmean(_flat(one)) for one in maps]
        cells["mean over locations"] = spread(over_map, 1, 3, "") if maps else "not run"
        cells["smallest"] = f"{min(_flat(mean)):.3f}" if maps else ""
        cells["largest"] = f"{max(_flat(mean)):.3f}" if maps else ""
        pairs = list(zip(_flat(means[0]), _flat(mean), strict=False))
        if len(means) > 1 and pairs:
            share = fmean(one < other for one, other in pairs)
            cells[f"locations where it is larger than {compared[0][0]}"] = percent(share, ".0f")
        table.append(cells)
    top = max((max(_flat(mean)) for mean in means if mean), default=0.0)
    shown = None
    for panel, (label, _), mean in zip(axes, compared, means, strict=True):
        panel.set(title=label, xticks=[], yticks=[])
        if mean:
            shown = panel.imshow(mean, vmin=0, vmax=top, cmap="viridis")
    if shown is not None:
        figure.colorbar(shown, ax=axes, label="ℓ2 over channels")
    return Built(table, drawn(figure))


def gradcam(name: str, title: str, claim: str, compared: Labelled) -> Result:
    """Evidence for the true class of a few images, as fields of the image; a row per network."""
    found = tuple((label, own[0]) for label, own in labelled(compared, {}))
    needs = tuple(run for _, run in found)
    return Result(name, title, claim, needs, partial(_gradcam, found), parts=("cams",))


def _gradcam(compared: tuple[tuple[str, Run], ...], rows: Rows) -> Built:
    from experiments.drawing import drawn, plt

    by_run = [_by_image(rows.of(run, "cams")) for _, run in compared]
    images = sorted({image for found in by_run for image in found})
    size = (len(images) or 1, len(compared))
    figure, axes = plt.subplots(*size, figsize=(1.8 * size[1], 0.4 + 1.8 * size[0]), squeeze=False)
    table = []
    for place, ((label, _), found) in enumerate(zip(compared, by_run, strict=True)):
        cells = {"": label, "images": str(len(found))}
        if not found:
            cells["predictions"] = "not run"
        axes[0][place].set_title(label)
        for line, image in zip(axes, images, strict=False):
            panel = line[place]
            panel.set(xticks=[], yticks=[])
            if image in found:
                first = found[image][0]
                panel.imshow(_grid(found[image]), vmin=0, vmax=1, cmap="inferno")
                panel.set_xlabel(f"predicted {first['predicted']}", fontsize=8)
                panel.set_ylabel(first["target"] if place == 0 else "", fontsize=8)
                cells[f"image {int(image) + 1}, {first['target']}"] = first["predicted"]
        table.append(cells)
    return Built(table, drawn(figure))


def _by_image(rows: list[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["image"], []).append(row)
    return found


def _grid(rows: list[Row]) -> Grid:
    """Values by location."""
    height, width = (1 + max(int(row[side]) for row in rows) for side in ("i", "j"))
    found = [[float("nan")] * width for _ in range(height)]
    for row in rows:
        found[int(row["i"])][int(row["j"])] = float(row["value"])
    return found


def _mean(grids: list[Grid]) -> Grid:
    """Location by location; none of none."""
    return [[fmean(cell) for cell in zip(*line, strict=True)] for line in zip(*grids, strict=True)]


def _flat(grid: Any) -> list[float]:
    return [value for line in grid for value in line]
