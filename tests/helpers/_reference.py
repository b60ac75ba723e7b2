"""norm → CE → activation written out in float64, one group at a time, independent of the library.

Newton's iteration is the printed one, variances come from their definition, nothing is folded.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d


@dataclass
class Parameters:
    """Everything that gets a gradient, in float64."""

    gamma: Tensor
    beta: Tensor
    w1: Tensor
    ln_weight: Tensor
    ln_bias: Tensor
    w2: Tensor
    mix_logit: Tensor


@dataclass
class Block:
    """The block's constants."""

    norm: str = "bn"
    groups_of_norm: int = 1
    group_size: int = 16
    steps: int = 3
    pool: int = 1
    eps: float = 1e-5
    norm_eps: float = 1e-5
    branches: tuple[str, ...] = field(default=("bd", "ir"))


def normalize(x: Tensor, p: Parameters, block: Block) -> Tensor:
    n, c = x.shape[:2]
    if block.norm == "none":
        return x
    dims = {"bn": (0, 2, 3), "in": (2, 3), "ln2d": (1,)}
    if block.norm == "gn":
        grouped = x.reshape(n, block.groups_of_norm, -1)
        centered = grouped - grouped.mean(-1, keepdim=True)
        spread = (centered.square().mean(-1, keepdim=True) + block.norm_eps).sqrt()
        standard = (centered / spread).reshape(x.shape)
    else:
        axes = dims[block.norm]
        centered = x - x.mean(axes, keepdim=True)
        standard = centered / (centered.square().mean(axes, keepdim=True) + block.norm_eps).sqrt()
    return p.gamma.view(1, c, 1, 1) * standard + p.beta.view(1, c, 1, 1)


def newton_printed(s: Tensor, steps: int) -> Tensor:
    z = torch.eye(len(s), dtype=s.dtype)
    for _ in range(steps):
        z = 0.5 * (3 * z - z @ z @ z @ s)
    return z


def operator(sample: Tensor, steps: int) -> Tensor:
    """W of one group from its feature map (N, K, H, W)."""
    k = sample.shape[1]
    rows = sample.transpose(0, 1).reshape(k, -1)
    rows = rows - rows.mean(1, keepdim=True)
    sigma = rows @ rows.T / rows.shape[1]
    sigma = sigma + (1e-5 * sigma.trace() / k + 1e-10) * torch.eye(k, dtype=sigma.dtype)
    return newton_printed(sigma / sigma.trace(), steps)


def decorrelate(x: Tensor, block: Block) -> Tensor:
    pooled = max_pool2d(x, block.pool, ceil_mode=True) if block.pool > 1 else x
    parts = []
    for start in range(0, x.shape[1], block.group_size):
        group = slice(start, start + block.group_size)
        w = operator(pooled[:, group], block.steps)
        parts.append(torch.einsum("ij,njhw->nihw", w, x[:, group]))
    return torch.cat(parts, 1)


def reweight(x: Tensor, p: Parameters, block: Block) -> Tensor:
    n, c, h, w = x.shape
    centered = x - x.mean((2, 3), keepdim=True)
    variance = centered.square().sum((2, 3)) / (h * w)
    s = variance.sum() / (n * c) + block.eps
    hidden = (variance / s) @ p.w1.T
    spread = (hidden - hidden.mean(1, keepdim=True)).square().mean(1, keepdim=True)
    hidden = (hidden - hidden.mean(1, keepdim=True)) / (spread + 1e-5).sqrt()
    hidden = (hidden * p.ln_weight + p.ln_bias).clamp_min(0)
    gate = 1 / (1 + (-(hidden @ p.w2.T)).exp())
    return (gate / s.sqrt())[:, :, None, None] * x


def equilibrium(x: Tensor, p: Parameters, block: Block) -> Tensor:
    """The block's output before the activation."""
    normalized = normalize(x, p, block)
    if block.branches == ("bd",):
        return decorrelate(normalized, block)
    if block.branches == ("ir",):
        return reweight(normalized, p, block)
    lam = 1 / (1 + (-p.mix_logit).exp())
    return lam * decorrelate(normalized, block) + (1 - lam) * reweight(normalized, p, block)


def activate(y: Tensor, act: str, positive: Tensor) -> Tensor:
    """Activation with a given set of positive elements (rounding may flip the sign near zero)."""
    negative = {
        "relu": lambda: torch.zeros_like(y),
        "leaky_relu": lambda: 0.1 * y,
        "elu": lambda: y.exp() - 1,
        "none": lambda: y,
        "silu": lambda: y / (1 + (-y).exp()),
    }[act]()
    return negative if act in ("none", "silu") else torch.where(positive, y, negative)
