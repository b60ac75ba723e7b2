"""The shape of a diagnosis, as data, and the first place where a value differs from it.

A type stands for itself (float: any finite number), `[shape]` for a list, a dict for its keys. A
name that ends in `?` may be missing or null, and so may the numbers in a list.
"""

import re
from typing import Any

DATA_URI = "data:image/png;base64,"
LAYER: dict[str, Any] = {
    "name": str,
    "channels": int,
    "mean_abs": [float],
    "asleep": [int],
    "inhibited_ratio": float,
    "norm?": str,
    "height?": int,
    "width?": int,
    "correlation?": float,
    "constant?": int,
    "magnitude?": [[float]],
    "gamma?": {"mean?": float, "abs_below_1e-2?": float},
    "beta?": {"mean?": float, "share_nonpositive?": float},
    "ce_site?": bool,
    "has_ce?": bool,
    "lambda?": float,
    "spectrum?": {"min?": float, "median?": float, "max?": float},
}
SHAPE: dict[str, Any] = {
    "model": {"name": str, "checkpoint?": str, "parameters?": int},
    "environment?": dict,
    "data?": {
        "folder?": str,
        "images?": int,
        "size?": [int],
        "skipped?": [{"path": str, "reason": str}],
    },
    "accuracy?": {"top1": float, "top5?": float},
    "threshold": float,
    "layers": [LAYER],
    "first_six?": float,
    "matrices?": [{"layer": str, "channels": [int], "values": [[float]]}],
    "ablation?": {"layer": str, "ratios": [float], "top1": [[float]]},
    "importance?": {"layer": str, "drop": [float], "gini?": float},
    "sites?": [str],
    "gradcam?": [{"image": DATA_URI, "overlay": DATA_URI, "label?": str, "predicted": str}],
}


LARGEST = 1e100


def first_problem(value: Any, shape: Any = SHAPE, where: str = "") -> str | None:
    """Where a value first differs from a shape, in words; None if it does not."""
    if shape == DATA_URI:
        whole = isinstance(value, str) and re.fullmatch(f"{DATA_URI}[A-Za-z0-9+/]+=*", value)
        return None if whole else f"{where} is not {DATA_URI}…"
    if isinstance(shape, type):
        accepted = (int, float) if shape is float else shape
        wrong = not isinstance(value, accepted) or (isinstance(value, bool) and shape is not bool)
        if wrong:
            return f"{where} is {_brief(value)}, not {_noun(shape)}"
        large = isinstance(value, int | float) and not -LARGEST <= value <= LARGEST
        return f"{where} is {_brief(value)}, too large to be drawn" if large else None
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is {_brief(value)}, not a list"
        for index, item in enumerate(value):
            if item is None and shape == [float]:
                continue
            problem = first_problem(item, shape[0], f"{where}[{index}]")
            if problem:
                return problem
        return None
    if not isinstance(value, dict):
        return f"{where or 'it'} is {_brief(value)}, not an object"
    for name, inner in shape.items():
        key = name.removesuffix("?")
        if name != key and value.get(key) is None:
            continue
        place = f"{where}.{key}" if where else key
        if key not in value:
            return f"{place} is missing"
        problem = first_problem(value[key], inner, place)
        if problem:
            return problem
    return None


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def _noun(shape: type) -> str:
    return {float: "a number", int: "a whole number", str: "text", dict: "an object"}.get(
        shape, shape.__name__
    )


def first_mismatch(found: dict[str, Any]) -> str | None:
    """Where two parts of a diagnosis of the right shape do not fit together; None if all do."""
    for index, layer in enumerate(found["layers"]):
        where, channels = f"layers[{index}]", layer["channels"]
        if len(layer["mean_abs"]) != channels:
            return f"{where} has {channels} channels and {len(layer['mean_abs'])} in mean_abs"
        if any(not 0 <= channel < channels for channel in layer["asleep"]):
            return f"{where}.asleep names a channel that is not one of its {channels}"
        if not _is_grid(layer.get("magnitude") or []):
            return f"{where}.magnitude has rows of different lengths"
    for index, matrix in enumerate(found.get("matrices") or []):
        values, size = matrix["values"], len(matrix["channels"])
        if len(values) != size or not _is_grid(values) or any(len(row) != size for row in values):
            return f"matrices[{index}] is not {size} × {size}, as its channels say"
    ablation = found.get("ablation")
    if ablation and None in ablation["ratios"]:
        return f"ablation.ratios[{ablation['ratios'].index(None)}] is None, not a number"
    if ablation and len(ablation["ratios"]) != len(ablation["top1"]):
        return f"ablation has {len(ablation['ratios'])} ratios and {len(ablation['top1'])} in top1"
    return None


def _is_grid(rows: list[list[Any]]) -> bool:
    return len({len(row) for row in rows}) <= 1
