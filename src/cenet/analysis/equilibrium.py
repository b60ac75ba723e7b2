"""What a CE layer has learned: λ, and how far its W is from the identity."""

import torch
from torch import Tensor

from cenet.nn import BatchDecorrelation2d, ChannelEquilibrium2d
from cenet.nn.base import EquilibriumLayer


def mixing_ratio(ce: EquilibriumLayer) -> float | None:
    """λ, the share of batch decorrelation; None for a layer of one branch, which has none."""
    return ce.mix.item() if isinstance(ce, ChannelEquilibrium2d) else None


@torch.no_grad()
def decorrelation_spectrum(ce: EquilibriumLayer) -> Tensor | None:
    """Eigenvalues of the running W, all groups together, ascending, (C,); None without W.

    They are between 1 and 1.5ᵀ; all equal to 1 means that nothing has been decorrelated yet.
    """
    bd = ce.bd if isinstance(ce, ChannelEquilibrium2d) else ce
    if not isinstance(bd, BatchDecorrelation2d):
        return None
    values = []
    for group, matrix in enumerate(bd.running_inv_sqrt.double()):
        # the last group may be padded
        size = min(bd.group_size, bd.num_features - group * bd.group_size)
        values.append(torch.linalg.eigvalsh(matrix[:size, :size]))
    return torch.cat(values).sort().values
