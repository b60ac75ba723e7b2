"""The two passes of the kernels over x as differentiable operators of their own.

    cenet::measure             moments of a batch
    cenet::measure_backward    their part of the gradient of x
    cenet::apply_map           y = act(P x̂ + w_n ⊙ (γ ⊙ x̂ + β) + b [+ residual]),  x̂ = x − center
    cenet::apply_map_backward  its gradients

A layer that merges the statistics of several ranks uses them: it measures, merges in plain
PyTorch, and applies. A layer that works alone is one operator, `ops.norm_ce`.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cenet import functional as F
from cenet import ops

_library: Any = torch.library.Library("cenet", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "measure(Tensor x, Tensor? sign, int group_size, int pool, bool gram) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    "measure_backward(Tensor x, Tensor grad, Tensor origin, Tensor? sign, Tensor? Q, Tensor e, "
    "Tensor f, Tensor? pooled_offset, int group_size, int pool) -> Tensor"
)
_library.define(
    "apply_map(Tensor x, Tensor? residual, Tensor values, Tensor? P, Tensor? w, int group_size, "
    "str act, float slope) -> Tensor"
)
_library.define(
    "apply_map_backward(Tensor x, Tensor grad, Tensor? y, Tensor values, Tensor? P, Tensor? w, "
    "int group_size, str act, float slope) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_operators = torch.ops.cenet
WITHOUT_GROUPS = 16  # group size of kernels that find no covariance


class Seen(NamedTuple):
    """What `measure` returns."""

    x: Tensor  # for the second pass: gradients of both passes are then added in one
    moments: F.Moments  # means are relative to the center
    center: Tensor  # (C,)


def measure(x: Tensor, group_size: int | None, pool: int, sign: Tensor | None) -> Seen:
    """Moments of x by the kernels; arguments as of `functional.moments`."""
    height, width = x.shape[2:]
    x, center, mean, var, cov, window_mean = _Measure.apply(x, sign, group_size, pool)
    if group_size is None:
        return Seen(x, F.Moments(mean, var, None, height * width), center)
    # the mean over images is all that is asked of it
    windows = mean if pool == 1 else window_mean[None]
    return Seen(x, F.Moments(mean, var, cov, height * width, windows), center)


def apply(
    x: Tensor,
    operator: F.Operator,
    center: Tensor,
    scale: Tensor,
    shift: Tensor,
    residual: Tensor | None,
    act: str,
    slope: float,
) -> Tensor:
    """act(operator(scale ⊙ (x − center) + shift) + residual) by the kernels.

    Args:
        x: that of `Seen`.
        operator, scale, shift: as of `functional.with_norm`, for x − center.
        center: that of `Seen`; no gradient goes through it.
        residual: added before the activation, in the dtype of x.
        act, slope: a key of FUSED_ACTIVATIONS, and LeakyReLU's slope or ELU's α.
    """
    A, w = operator
    P, b, group_size = None, torch.zeros_like(scale), WITHOUT_GROUPS
    if A is not None:
        group_size = A.shape[-1]
        P, _, shifted = F.with_norm(F.Operator(A, None), scale, shift)
        b = shifted[0]
    if w is not None:
        w = w.expand(x.shape[:2]).to(scale.dtype).contiguous()
    values = torch.stack([center, torch.ones_like(center), scale, shift, b])
    y: Tensor = _ApplyMap.apply(x, residual, values, P, w, group_size, act, slope)
    return y


class _Measure(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sign: Tensor | None, group_size: int | None, pool: int
    ) -> tuple[Tensor, ...]:
        ctx.gram, ctx.pool = group_size is not None, pool if group_size else 1
        ctx.group_size = group_size or WITHOUT_GROUPS
        found = _operators.measure(x, sign, ctx.group_size, ctx.pool, ctx.gram)
        origin, mean, _, _, window_mean = found
        ctx.save_for_backward(x, sign, origin, mean, window_mean)
        ctx.mark_non_differentiable(origin)
        return x.view_as(x), *found

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _, grad_mean, grad_var, grad_cov, grad_window_mean = grads
        x, sign, origin, mean, window_mean = ctx.saved_tensors
        n, channels, height, width = x.shape
        Q = pooled_offset = None
        e = 2 / (height * width) * grad_var
        f = grad_mean / (height * width) - e * mean
        if ctx.gram:
            windows = -(-height // ctx.pool) * -(-width // ctx.pool)
            Q = (grad_cov + grad_cov.mT) / (n * windows)
            whole = mean.mean(0) if ctx.pool == 1 else window_mean
            through = -(Q @ F.grouped(whole, ctx.group_size)[..., None]).flatten()[:channels]
            if ctx.pool == 1:
                f = f + through
            else:
                pooled_offset = through + grad_window_mean / (n * windows)
        dx = _operators.measure_backward(
            x, grad, origin, sign, Q, e, f, pooled_offset, ctx.group_size, ctx.pool
        )
        return dx, None, None, None


class _ApplyMap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        values: Tensor,
        P: Tensor | None,
        w: Tensor | None,
        *constants: Any,
    ) -> Tensor:
        y: Tensor = _operators.apply_map(x, residual, values, P, w, *constants)
        _, act, _ = ctx.constants = constants
        ctx.has_residual = residual is not None
        # with a residual, the sign of the activation's argument cannot be recomputed from x
        kept = y if ctx.has_residual and act != "none" else None
        ctx.save_for_backward(x, kept, values, P, w)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, values, P, w = ctx.saved_tensors
        dx, masked, grad_P, d, c = _operators.apply_map_backward(
            x, grad, y, values, P, w, *ctx.constants
        )
        shortcut = (grad if y is None else masked) if ctx.has_residual else None
        _, _, scale, shift, _ = values
        nothing = torch.zeros_like(scale)
        grad_scale = grad_shift = nothing
        grad_w = None
        if w is not None:
            grad_scale, grad_shift = (w * d).sum(0), (w * c).sum(0)
            grad_w = scale * d + shift * c
        # the result does not depend on center and 1 / deviation, which are constants
        grad_values = torch.stack([nothing, nothing, grad_scale, grad_shift, c.sum(0)])
        return dx, shortcut, grad_values, None if P is None else grad_P, grad_w, None, None, None


def _measure(x: Tensor, sign: Tensor | None, group_size: int, pool: int, gram: bool) -> Any:
    from cenet.kernels.passes import measure_batch

    with ops.device_of(x):
        return tuple(measure_batch(x, sign, group_size, pool, gram=gram))


def _measure_backward(
    x: Tensor, grad: Tensor, origin: Tensor, sign: Tensor | None, *rest: Any
) -> Tensor:
    from cenet.kernels.mix import StatisticsGradient
    from cenet.kernels.passes import measure_backward

    *through, group_size, pool = rest
    with ops.device_of(x):
        return measure_backward(
            x, grad, origin, sign, StatisticsGradient(*through), group_size, pool
        )


def _apply_map(x: Tensor, residual: Tensor | None, *mapping: Any) -> Tensor:
    from cenet.kernels.mix import Map
    from cenet.kernels.passes import apply_map

    with ops.device_of(x):
        return apply_map(x, residual, Map(*mapping))


def _apply_map_backward(x: Tensor, grad: Tensor, y: Tensor | None, *mapping: Any) -> Any:
    from cenet.kernels.mix import Map
    from cenet.kernels.passes import apply_map_backward

    with ops.device_of(x):
        return tuple(apply_map_backward(x, grad, y, Map(*mapping)))


def _fake_measure(x: Tensor, sign: Tensor | None, group_size: int, pool: int, gram: bool) -> Any:
    n, channels = x.shape[:2]
    groups = F.num_groups(channels, group_size)
    cov = (groups, group_size, group_size) if gram else (0,)
    window_mean = (channels,) if gram and pool > 1 else (0,)
    shapes = ((channels,), (n, channels), (n, channels), cov, window_mean)
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _fake_apply_map_backward(x: Tensor, grad: Tensor, y: Any, values: Any, P: Any, *_: Any) -> Any:
    masked = x.new_empty(0) if y is None else ops.dense_like(x)
    grad_P = x.new_empty((0,) if P is None else P.shape, dtype=torch.float32)
    sums = [x.new_empty(x.shape[:2], dtype=torch.float32) for _ in range(2)]
    return ops.dense_like(x), masked, grad_P, *sums


for _name, _cuda, _fake in (
    ("measure", _measure, _fake_measure),
    ("measure_backward", _measure_backward, ops.dense_like),
    ("apply_map", _apply_map, ops.dense_like),
    ("apply_map_backward", _apply_map_backward, _fake_apply_map_backward),
):
    _library.impl(_name, _cuda, "CUDA")
    torch.library.register_fake(f"cenet::{_name}", _fake, lib=_library)
for _operator in (_operators.measure_backward.default, _operators.apply_map_backward.default):
    _library.impl(_operator, partial(ops.without_derivative, _operator), "Autograd")
