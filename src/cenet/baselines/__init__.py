"""Normalization layers the paper compares with, written from the equations of their papers."""

from cenet.baselines.iter_norm import IterNorm2d
from cenet.baselines.switchable_norm import SwitchableNorm2d
from cenet.baselines.switchable_whitening import SwitchableWhitening2d

__all__ = ["IterNorm2d", "SwitchableNorm2d", "SwitchableWhitening2d"]
