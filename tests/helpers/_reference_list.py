"""Batch norm → CE over a list of batches whose images differ in size, in float64.

Written from the paper's equations, independent of the library: pixels are put in one long row per
channel for the norm and for the covariance, images are taken one by one for s and the gate.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d

from _reference import Block, Parameters, newton_printed


@dataclass
class Result:
    outputs: list[Tensor]
    mean: Tensor  # of the norm's input
    unbiased_var: Tensor
    inv_sqrt: list[Tensor]
    inv_std: Tensor


def rows(batches: list[Tensor]) -> Tensor:
    """All values of each channel: (C, pixels)."""
    return torch.cat([batch.transpose(0, 1).flatten(1) for batch in batches], 1)


def equilibrium(batches: list[Tensor], p: Parameters, block: Block) -> Result:
    """The block's outputs before the activation, and what its buffers average."""
    values = rows(batches)
    mean = values.sum(1) / values.shape[1]
    deviation = (values - mean[:, None]).square().sum(1)
    std = (deviation / values.shape[1] + block.norm_eps).sqrt()
    per_channel = (1, -1, 1, 1)
    normalized = [
        p.gamma.view(per_channel) * (batch - mean.view(per_channel)) / std.view(per_channel)
        + p.beta.view(per_channel)
        for batch in batches
    ]

    pooled = normalized
    if block.pool > 1:
        pooled = [max_pool2d(b, block.pool, ceil_mode=True) for b in normalized if len(b)]
    values_of_cov = rows(pooled)
    operators = []
    for start in range(0, len(mean), block.group_size):
        group = values_of_cov[start : start + block.group_size]
        group = group - group.mean(1, keepdim=True)
        sigma, k = group @ group.T / group.shape[1], len(group)
        sigma = sigma + (1e-5 * sigma.trace() / k + 1e-10) * torch.eye(k, dtype=sigma.dtype)
        operators.append(newton_printed(sigma / sigma.trace(), block.steps))
    whole = torch.block_diag(*operators)

    images = [image for batch in normalized for image in batch]
    variances = [image.flatten(1).var(1, correction=0) for image in images]
    s = sum(variance.mean() for variance in variances) / len(images) + block.eps

    lam = 1 / (1 + (-p.mix_logit).exp())
    outputs = []
    for image, variance in zip(images, variances, strict=True):
        hidden = p.w1 @ (variance / s)
        hidden = (hidden - hidden.mean()) / (hidden.var(correction=0) + 1e-5).sqrt()
        hidden = (hidden * p.ln_weight + p.ln_bias).clamp_min(0)
        gate = 1 / (1 + (-(p.w2 @ hidden)).exp())
        decorrelated = torch.einsum("ij,jhw->ihw", whole, image)
        outputs.append(lam * decorrelated + (1 - lam) * (gate / s.sqrt())[:, None, None] * image)

    stacked, start = [], 0
    for batch in batches:
        images_of_rank = outputs[start : start + len(batch)]
        stacked.append(torch.stack(images_of_rank) if images_of_rank else torch.empty_like(batch))
        start += len(batch)
    return Result(stacked, mean, deviation / (values.shape[1] - 1), operators, s.rsqrt())
