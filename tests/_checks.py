"""Comparisons, with every tolerance in one place."""

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
