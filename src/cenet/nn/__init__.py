"""Layers: CE and its branches, and the wrapper that puts them after a norm."""

from cenet.nn.base import EquilibriumLayer, ce_layers, param_groups
from cenet.nn.equilibrium import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
)
from cenet.nn.norm_ce import NormCE2d
from cenet.nn.sync import convert_sync_ce, revert_sync_ce

__all__ = [
    "BatchDecorrelation2d",
    "ChannelEquilibrium2d",
    "EquilibriumLayer",
    "InstanceReweighting2d",
    "NormCE2d",
    "ce_layers",
    "convert_sync_ce",
    "param_groups",
    "revert_sync_ce",
]
