"""Whitening of groups of channels, shared by IterNorm and switchable whitening.

N samples, C channels, G groups of K contiguous channels. The last group takes the remainder and is
padded: with zeros in a covariance, with the identity in a whitening matrix.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from cenet import functional as F


class InstanceMoments(NamedTuple):
    """Mean, variance and group covariance of each sample over its pixels."""

    mean: Tensor  # (N, C)
    var: Tensor  # (N, C)
    cov: Tensor  # (N, G, K, K)


def identity(channels: int, group_size: int, like: Tensor) -> Tensor:
    """(G, K, K): ones on the diagonal of true channels, zeros in the padding."""
    return torch.diag_embed(F.grouped(like.new_ones(channels), group_size))


def diagonal_part(cov: Tensor) -> Tensor:
    """The matrices (…, K, K) with zeros off their diagonals."""
    return torch.diag_embed(cov.diagonal(dim1=-2, dim2=-1))


def whitening_matrix(cov: Tensor, channels: int, eps: float, steps: int) -> Tensor:
    """Newton iterate for S^{-1/2}, S = cov + eps·I: that of (S/tr S)^{-1/2}, over √tr S.

    Shape: (…, G, K, K) -> (…, G, K, K).
    """
    eye = identity(channels, cov.shape[-1], cov)
    sigma = cov + eps * eye
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    inv_sqrt = F.newton_inverse_sqrt(sigma, steps) * trace.rsqrt()
    if channels % cov.shape[-1] == 0:
        return inv_sqrt
    valid = eye.sum(-1, keepdim=True)
    return inv_sqrt * valid + torch.diag_embed(1 - valid[..., 0])


def instance_moments(x: Tensor, group_size: int) -> InstanceMoments:
    """Measure every sample of x by itself.

    The groups of all samples go through `moments` as the groups of one sample, whose covariance is
    then that of each.
    """
    n, channels = x.shape[:2]
    flat = _as_one_sample(x, group_size)
    mean, var, cov, *_ = F.moments(flat, group_size)
    assert cov is not None
    groups = F.num_groups(channels, group_size)
    return InstanceMoments(
        mean.reshape(n, groups * group_size)[:, :channels],
        var.reshape(n, groups * group_size)[:, :channels],
        cov.reshape(n, groups, group_size, group_size),
    )


def whiten(x: Tensor, mean: Tensor, matrix: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """γ ⊙ W(x − μ) + β, with W (G, K, K) and μ (C,) for all samples, or (N, …) for each its own.

    Shape: x (N, C, H, W) -> (N, C, H, W), in the memory format of x.
    """
    n, channels, height, width = x.shape
    group_size = matrix.shape[-1]
    matrix = F.grouped(weight, group_size)[..., None] * matrix
    # sums and not a matrix product, which autocast would round
    shift = (matrix * F.grouped(mean, group_size)[..., None, :]).sum(-1).flatten(-2)
    if matrix.dim() == 3:
        return F.mix(x, matrix, None, (bias - shift[:channels])[None])
    shift = F.grouped(bias, group_size).flatten() - shift
    flat = _as_one_sample(x, group_size)
    y = F.mix(flat, matrix.flatten(0, 1), None, shift.reshape(1, -1))
    y = y.reshape(n, shift.shape[1], height, width)[:, :channels]
    return F.in_layout_of(x, y)


def groups_repr(channels: int, group_size: int) -> str:
    """The sizes of the groups, as in 3x16+10."""
    full, rest = divmod(channels, group_size)
    return f"{full}x{group_size}" + (f"+{rest}" if rest else "")


def _as_one_sample(x: Tensor, group_size: int) -> Tensor:
    """(N, C, H, W) -> (1, N·G·K, H, W), the last group of each sample padded with zeros."""
    n, channels, height, width = x.shape
    padded = F.num_groups(channels, group_size) * group_size
    if padded != channels:
        x = pad(x, (0, 0, 0, 0, 0, padded - channels))
    return x.reshape(1, n * padded, height, width)
