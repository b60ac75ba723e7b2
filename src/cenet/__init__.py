"""Channel equilibrium for convolutional networks."""

from cenet import functional
from cenet.analysis import diagnose
from cenet.calibration import update_ce_stats
from cenet.checkpoints import load_released_ce_
from cenet.folding import fold_ce, fold_conv_norm_ce
from cenet.nn import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
    NormCE2d,
    convert_sync_ce,
    revert_sync_ce,
)
from cenet.sharing import load, save
from cenet.surgery import CESite, ce_sites, freeze_ce_, insert_ce_, remove_ce_, unfreeze_ce_
from cenet.version import VERSION

__version__ = VERSION

__all__ = [
    "BatchDecorrelation2d",
    "CESite",
    "ChannelEquilibrium2d",
    "InstanceReweighting2d",
    "NormCE2d",
    "ce_sites",
    "convert_sync_ce",
    "diagnose",
    "fold_ce",
    "fold_conv_norm_ce",
    "freeze_ce_",
    "functional",
    "insert_ce_",
    "load",
    "load_released_ce_",
    "remove_ce_",
    "revert_sync_ce",
    "save",
    "unfreeze_ce_",
    "update_ce_stats",
]
