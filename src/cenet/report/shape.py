"""Checks before anything is drawn: rows and settings of a run, and the parts of a diagnosis.

The shape of a row is data: a type stands for itself (float: any finite number), a dict for its
keys. A name that ends in `?` may be missing or null.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from cenet.analysis.diagnosis import AblationCurve, Diagnosis, Importance, Layer

DATA_URI = "data:image/png;base64,"
LARGEST = 1e100
BY_CHANNEL = ("mean_abs", "activity", "firing", "contribution")
NUMBERS_OF_CHANNELS = (
    "dormant", "dormant_strict", "rare", "saturated", "duplicates", "prunable", "inhibited",
)  # fmt: skip


def first_problem(value: Any, shape: Any, where: str = "") -> str | None:
    """Where a value first differs from a shape, in words; None if it does not."""
    if isinstance(shape, type):
        accepted = (int, float) if shape is float else shape
        wrong = not isinstance(value, accepted) or (isinstance(value, bool) and shape is not bool)
        if wrong:
            return f"{where} is {_brief(value)}, not {_noun(shape)}"
        return first_large(value, where)
    if not isinstance(value, dict):
        return f"{where or 'it'} is {_brief(value)}, not an object"
    for name, inner in shape.items():
        key = name.removesuffix("?")
        if name != key and value.get(key) is None:
            continue
        place = _join(where, key)
        if key not in value:
            return f"{place} is missing"
        problem = first_problem(value[key], inner, place)
        if problem:
            return problem
    return None


def first_large(value: Any, where: str = "") -> str | None:
    """Where a number is too large to be drawn, in words; None if there is none."""
    if isinstance(value, int | float):
        large = not -LARGEST <= value <= LARGEST
        return f"{where or 'it'} is {_brief(value)}, too large to be drawn" if large else None
    inside: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, dict):
        inside = ((_join(where, key), item) for key, item in value.items())
    elif isinstance(value, list):
        inside = ((f"{where}[{index}]", item) for index, item in enumerate(value))
    return next(filter(None, (first_large(item, place) for place, item in inside)), None)


def first_mismatch(found: Diagnosis) -> str | None:
    """Where two parts of a diagnosis do not fit together, in words; None if all do."""
    problems = chain(
        *(_of_layer(layer, f"layers[{index}]") for index, layer in enumerate(found.layers)),
        _of_matrices(found),
        _of_ablation(found.ablation),
        _of_importance(found.importance),
        _of_pictures(found),
    )
    return next(problems, None)


def _of_layer(layer: Layer, where: str) -> Iterator[str]:
    count = layer.channels
    for name in BY_CHANNEL:
        values = getattr(layer, name)
        if values is not None and len(values) != count:
            yield f"{where} has {count} channels and {len(values)} in {name}"
    for name in NUMBERS_OF_CHANNELS:
        if any(not 0 <= channel < count for channel in getattr(layer, name)):
            yield f"{where}.{name} names a channel that is not one of its {count}"
    for name in ("magnitude", "magnitude_before"):
        if not _is_grid(getattr(layer, name) or ()):
            yield f"{where}.{name} has rows of different lengths"


def _of_matrices(found: Diagnosis) -> Iterator[str]:
    for index, matrix in enumerate(found.matrices):
        size, values = len(matrix.channels), matrix.values
        if len(values) != size or any(len(row) != size for row in values):
            yield f"matrices[{index}] is not {size} × {size}, as its channels say"


def _of_ablation(curve: AblationCurve | None) -> Iterator[str]:
    if curve is None:
        return
    for name in ("top1", "least_important_first"):
        values = getattr(curve, name)
        if len(values) != len(curve.ratios):
            yield f"ablation has {len(curve.ratios)} ratios and {len(values)} in {name}"
    if not all(curve.top1):
        yield "ablation.top1 has a ratio without a draw"


def _of_importance(found: Importance | None) -> Iterator[str]:
    if found is not None and len(found.divergence) != len(found.standard_error):
        yield (
            f"importance has {len(found.divergence)} in divergence and "
            f"{len(found.standard_error)} in standard_error"
        )


def _of_pictures(found: Diagnosis) -> Iterator[str]:
    for index, cam in enumerate(found.gradcam):
        for name in ("image", "overlay"):
            if not re.fullmatch(f"{DATA_URI}[A-Za-z0-9+/]+=*", getattr(cam, name)):
                yield f"gradcam[{index}].{name} is not {DATA_URI}…"


def _is_grid(rows: Sequence[Sequence[Any]]) -> bool:
    return len({len(row) for row in rows}) <= 1


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else str(key)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _noun(shape: type) -> str:
    return {float: "a number", int: "a whole number", str: "text", dict: "an object"}.get(
        shape, shape.__name__
    )
