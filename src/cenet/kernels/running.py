"""Running averages of one training step in one launch: a program for each of norm, BD and IR.

The rule is that of `nn.running.average_`: a non-finite batch changes nothing and is not counted.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.launch import launch
from cenet.kernels.tiles import power_of_2


@triton.jit
def _is_finite(ptr, running_ptr, size, factor, POSITIVE: tl.constexpr, BLOCK: tl.constexpr):
    """1 if every value is finite (and positive, if asked) in the dtype of the average, else 0."""
    fine = tl.full((BLOCK,), 1, tl.int32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(ptr + i, mask=i < size, other=1.0) * factor
        value = value.to(running_ptr.dtype.element_ty).to(tl.float32)
        fine = tl.where(tl.abs(value) < float("inf"), fine, 0)
        if POSITIVE:
            fine = tl.where(value > 0, fine, 0)
    return tl.min(fine)


@triton.jit
def _move(running_ptr, batch_ptr, size, factor, weight, finite, BLOCK: tl.constexpr):
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = tl.where(i < size, finite, 0) > 0
        running = tl.load(running_ptr + i, mask=mask, other=0.0).to(tl.float32)
        batch = tl.load(batch_ptr + i, mask=mask, other=0.0) * factor
        moved = running + weight * (batch - running)
        tl.store(running_ptr + i, moved.to(running_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight(count_ptr, finite, momentum, DEBIAS: tl.constexpr):
    """Count this batch, and say how much it weighs. A negative momentum weighs all alike."""
    weight = momentum
    if count_ptr is not None:
        count = tl.load(count_ptr) + finite
        tl.debug_barrier()
        tl.store(count_ptr, count)
        alike = 1 / tl.maximum(count, 1).to(tl.float32)
        weight = tl.where(momentum < 0, alike, momentum)
        if DEBIAS:
            weight = tl.maximum(weight, alike)
    return weight


@triton.jit
def _average_kernel(
    mean_ptr,  # (C,), or None
    var_ptr,  # (C,)
    batch_mean_ptr,  # (C,)
    batch_var_ptr,  # (C,)
    norm_count_ptr,  # (), or None
    inv_sqrt_ptr,  # (G, K, K), or None
    batch_inv_sqrt_ptr,  # (G, K, K)
    bd_count_ptr,  # ()
    inv_std_ptr,  # (), or None
    batch_inv_std_ptr,  # ()
    ir_count_ptr,  # ()
    channels,
    entries,
    correction,
    norm_momentum,
    bd_momentum,
    ir_momentum,
    BLOCK: tl.constexpr,
):
    which = tl.program_id(0)
    if mean_ptr is not None:
        if which == 0:
            finite = _is_finite(batch_mean_ptr, mean_ptr, channels, 1.0, False, BLOCK)
            finite *= _is_finite(batch_var_ptr, var_ptr, channels, correction, False, BLOCK)
            weight = _weight(norm_count_ptr, finite, norm_momentum, False)
            _move(mean_ptr, batch_mean_ptr, channels, 1.0, weight, finite, BLOCK)
            _move(var_ptr, batch_var_ptr, channels, correction, weight, finite, BLOCK)
    if inv_sqrt_ptr is not None:
        if which == 1:
            finite = _is_finite(batch_inv_sqrt_ptr, inv_sqrt_ptr, entries, 1.0, False, BLOCK)
            weight = _weight(bd_count_ptr, finite, bd_momentum, True)
            _move(inv_sqrt_ptr, batch_inv_sqrt_ptr, entries, 1.0, weight, finite, BLOCK)
    if inv_std_ptr is not None:
        if which == 2:
            # an overflowing s has the finite inverse root 0, which must not pass for a statistic
            finite = _is_finite(batch_inv_std_ptr, inv_std_ptr, 1, 1.0, True, BLOCK)
            weight = _weight(ir_count_ptr, finite, ir_momentum, True)
            _move(inv_std_ptr, batch_inv_std_ptr, 1, 1.0, weight, finite, BLOCK)


def average_(
    norm: tuple[Tensor | None, Tensor | None, Tensor | None],
    bd: tuple[Tensor | None, Tensor | None],
    ir: tuple[Tensor | None, Tensor | None],
    values: Tensor,
    batch_inv_sqrt: Tensor,
    batch_inv_std: Tensor,
    count: int,
    momenta: Sequence[float],
) -> None:
    """Move the running values towards those of this batch.

    Args:
        norm: running mean and variance of the norm, and its count; None leaves them out.
        bd, ir: running value and count of the two branches, likewise.
        values: as in `statistics.Statistics`.
        batch_inv_sqrt, batch_inv_std: values of this batch.
        count: values per channel in this batch, for the unbiased variance.
        momenta: of norm, BD and IR; negative to weigh all batches alike.
    """
    correction = count / max(count - 1, 1)
    entries = 0 if bd[0] is None else bd[0].numel()
    block = min(16384, power_of_2(max(entries, values.shape[1])))
    launch(
        _average_kernel, (3,),
        norm[0], norm[1], values[0], values[5], norm[2], bd[0], batch_inv_sqrt, bd[1], ir[0],
        batch_inv_std, ir[1], values.shape[1], entries, correction, *momenta, BLOCK=block,
        num_warps=max(4, block // 1024),
    )  # fmt: skip
