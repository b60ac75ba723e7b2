"""CE on the statistics of several ranks: kernels pass over x, plain PyTorch merges between them."""

from typing import Any

from torch import Tensor, nn

from cenet import passes
from cenet.nn.fused import inside_and_after
from cenet.nn.norms import affine, weight_sign


def run(
    x: Tensor,
    norm: Any,
    ce: Any,
    act: nn.Module | None,
    residual: Tensor | None,
    *,
    norm_batch: bool,
) -> Tensor:
    """act(CE(norm(x)) + residual), measured over the images of all ranks.

    Args:
        x: images of this rank, at least one: input of `norm`, or of the CE layer if there is none.
        norm: a batch norm, or None.
        ce: a synchronized CE layer in training.
        act, residual: the activation, and the tensor that is added before it.
        norm_batch: the norm uses the statistics of the batch, not the running ones.
    """
    if residual is not None and residual.dtype != x.dtype:
        # the sum has the wider of the two dtypes; the kernels would return that of x
        y = run(x, norm, ce, None, None, norm_batch=norm_batch) + residual
        return y if act is None else act(y)
    bd = ce.branches().bd
    group_size, pool = (None, 1) if bd is None else (bd.group_size, bd.pool)
    sign = None if norm is None else weight_sign(norm, x)
    seen, moments, center = passes.measure(x, group_size, pool, sign)
    statistics = ce.summarize(x, moments, center, norm=norm_batch)
    scale, shift = moments.mean.new_ones(x.shape[1]), center
    if norm is not None:
        scale, shift = affine(norm, x, statistics if norm_batch else None, center)
    operator = ce.operator(moments, scale, statistics)
    name, slope, after = inside_and_after(act)
    y = passes.apply(seen, operator, center, scale, shift, residual, name, slope)
    return y if after is None else after(y)
