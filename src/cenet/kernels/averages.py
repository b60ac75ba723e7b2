"""Running averages of norm, BD and IR, moved by one program each.

The rule is that of `nn.norms.average_`: a non-finite batch changes nothing and is not counted.
The programs run beside those of the gate, or in a launch of their own.
"""

import triton
import triton.language as tl
from torch import Tensor

from cenet.kernels.call import NormCECall
from cenet.kernels.launch import await_previous_launch, launch
from cenet.kernels.tiles import CENTER, VARIANCE

JOBS = 3
BLOCK = tl.constexpr(2048)


@triton.jit
def _is_finite(values, running_ptr):
    """1 if every value is finite in the dtype of the average, else 0."""
    values = values.to(running_ptr.dtype.element_ty).to(tl.float32)
    return tl.min(tl.where(tl.abs(values) < float("inf"), 1, 0))


@triton.jit
def _all_finite(ptr, running_ptr, size, factor):
    finite = 1
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(ptr + i, mask=i < size, other=1.0) * factor
        finite = tl.minimum(finite, _is_finite(values, running_ptr))
    return finite


@triton.jit
def _moved(running_ptr, batch, weight):
    running = tl.load(running_ptr).to(tl.float32)
    return (running + weight * (batch - running)).to(running_ptr.dtype.element_ty)


@triton.jit
def _move(running_ptr, batch_ptr, size, factor, weight, finite):
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask = tl.where(i < size, finite, 0) > 0
        running = tl.load(running_ptr + i, mask=mask, other=0.0).to(tl.float32)
        batch = tl.load(batch_ptr + i, mask=mask, other=0.0) * factor
        moved = running + weight * (batch - running)
        tl.store(running_ptr + i, moved.to(running_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight(count_ptr, finite, momentum, DEBIAS: tl.constexpr):
    """Count this batch; return its weight in the average."""
    if count_ptr is None:
        return tl.where(momentum < 0, 1.0, momentum)
    else:
        count = tl.load(count_ptr) + finite
        tl.debug_barrier()
        tl.store(count_ptr, count)
        alike = 1 / tl.maximum(count, 1).to(tl.float32)
        weight = tl.where(momentum < 0, alike, momentum)
        return tl.maximum(weight, alike) if DEBIAS else weight


@triton.jit
def average(
    job,
    mean_ptr,  # (C,), or None
    var_ptr,  # (C,)
    norm_count_ptr,  # (), or None
    inv_sqrt_ptr,  # (G, K, K), or None
    bd_count_ptr,  # ()
    inv_std_ptr,  # (), or None
    ir_count_ptr,  # ()
    batch_mean_ptr,  # (C,)
    batch_var_ptr,  # (C,)
    batch_inv_sqrt_ptr,  # (G, K, K)
    batch_inv_std,
    channels,
    entries,
    correction,
    correction_ptr,  # (), or None
    norm_momentum,
    bd_momentum,
    ir_momentum,
):
    """Move the averages of the norm (job 0), of BD (1) or of IR (2)."""
    if mean_ptr is not None:
        if job == 0:
            unbiased = correction
            if correction_ptr is not None:
                unbiased = tl.load(correction_ptr)
            finite = _all_finite(batch_mean_ptr, mean_ptr, channels, 1.0)
            finite *= _all_finite(batch_var_ptr, var_ptr, channels, unbiased)
            weight = _weight(norm_count_ptr, finite, norm_momentum, False)
            _move(mean_ptr, batch_mean_ptr, channels, 1.0, weight, finite)
            _move(var_ptr, batch_var_ptr, channels, unbiased, weight, finite)
    if inv_sqrt_ptr is not None:
        if job == 1:
            finite = _all_finite(batch_inv_sqrt_ptr, inv_sqrt_ptr, entries, 1.0)
            weight = _weight(bd_count_ptr, finite, bd_momentum, True)
            _move(inv_sqrt_ptr, batch_inv_sqrt_ptr, entries, 1.0, weight, finite)
    if inv_std_ptr is not None:
        if job == 2:
            # an s that overflowed has the finite inverse root 0, which must not enter the average
            kept = batch_inv_std.to(inv_std_ptr.dtype.element_ty).to(tl.float32)
            finite = tl.where((kept > 0) & (kept < float("inf")), 1, 0)
            weight = _weight(ir_count_ptr, finite, ir_momentum, True)
            tl.store(inv_std_ptr, _moved(inv_std_ptr, batch_inv_std, weight), mask=finite > 0)


@triton.jit
def _average_kernel(
    mean_ptr,  # (C,), or None
    var_ptr,  # (C,)
    norm_count_ptr,  # (), or None
    inv_sqrt_ptr,  # (G, K, K), or None
    bd_count_ptr,  # ()
    inv_std_ptr,  # (), or None
    ir_count_ptr,  # ()
    batch_mean_ptr,  # (C,)
    batch_var_ptr,  # (C,)
    batch_inv_sqrt_ptr,  # (G, K, K)
    batch_inv_std_ptr,  # (), or None
    channels,
    entries,
    correction,
    correction_ptr,  # (), or None
    norm_momentum,
    bd_momentum,
    ir_momentum,
):
    await_previous_launch()
    batch_inv_std = 0.0
    if batch_inv_std_ptr is not None:
        batch_inv_std = tl.load(batch_inv_std_ptr)
    average(
        tl.program_id(0), mean_ptr, var_ptr, norm_count_ptr, inv_sqrt_ptr, bd_count_ptr,
        inv_std_ptr, ir_count_ptr, batch_mean_ptr, batch_var_ptr, batch_inv_sqrt_ptr,
        batch_inv_std, channels, entries, correction, correction_ptr, norm_momentum, bd_momentum,
        ir_momentum,
    )  # fmt: skip


def average_(
    call: NormCECall,
    values: Tensor,
    inv_sqrt: Tensor,
    inv_std: Tensor | None = None,
    correction: Tensor | None = None,
) -> None:
    """Move the averages of `call` in a launch of their own.

    Args:
        call: says which averages move, and with which momenta.
        values: as in `moments.Statistics`.
        inv_sqrt, inv_std: W and s^{-1/2} of this batch.
        correction: the factor that makes the variance unbiased, if not that of the samples of x.
    """
    launch(
        _average_kernel, (JOBS,),
        *call.averages(), values[CENTER.value], values[VARIANCE.value], inv_sqrt, inv_std,
        values.shape[1], *matrix_entries_and_correction(call), correction, *call.momenta,
        num_warps=8,
    )  # fmt: skip


def matrix_entries_and_correction(call: NormCECall) -> tuple[int, float]:
    """Number of entries of W, and the factor that makes the variance of the batch unbiased."""
    matrices = call.average_inv_sqrt
    n, _, height, width = call.x.shape
    count = n * height * width
    return 0 if matrices is None else matrices.numel(), count / max(count - 1, 1)
