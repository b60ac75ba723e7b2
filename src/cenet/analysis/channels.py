"""Measures over the channels of one layer: pure functions of recorded statistics."""

from torch import Tensor


def inhibited_ratio(magnitude: Tensor, threshold: float = 1e-2) -> float:
    """Share of inhibited channels: those whose mean absolute activation is below `threshold`.

    Args:
        magnitude: mean over images and pixels of the absolute post-activation value, (C,).
        threshold: the paper uses 1e-2.
    """
    if magnitude.dim() != 1:
        raise ValueError(f"magnitude must be one value per channel, got {tuple(magnitude.shape)}")
    return (magnitude < threshold).float().mean().item()
