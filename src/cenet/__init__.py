"""Channel equilibrium for convolutional networks."""

from cenet import functional
from cenet.calibration import update_ce_stats
from cenet.nn import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
    NormCE2d,
)
from cenet.surgery import CESite, ce_sites, freeze_ce_, insert_ce_, remove_ce_, unfreeze_ce_

__version__ = "0.1.0"
