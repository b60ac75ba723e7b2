"""Comparisons, with every tolerance in one place."""

from collections import OrderedDict

import torch
from torch import Tensor

RTOL = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-12)).item()


def assert_close(name: str, actual: Tensor | None, expected: Tensor, rtol: float) -> None:
    assert actual is not None, f"{name} is missing"
    assert actual.shape == expected.shape, f"{name}: {actual.shape} is not {expected.shape}"
    assert actual.isfinite().all(), f"{name} is not finite"
    error = relative_error(actual, expected)
    assert error <= rtol, f"{name}: relative error {error:.2e} > {rtol:.0e}"


def version_1(state):
    """A state dict as it was written before version 2 of the CE layers, whatever its prefixes.

    `released` was a key of its own, which only layers of that variant had.
    """
    old = OrderedDict()
    for key, value in state.items():
        if not key.endswith("_extra_state"):
            old[key] = value
        elif bool(value):
            old[key.removesuffix("_extra_state") + "released"] = torch.tensor(True)
    if hasattr(state, "_metadata"):
        old._metadata = {name: {**about, "version": 1} for name, about in state._metadata.items()}
    return old
