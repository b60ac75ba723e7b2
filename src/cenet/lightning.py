"""SyncCE for Lightning: `Trainer(strategy="ddp", plugins=[SyncCE()])`."""

from cenet.extras import require

require("lightning")

from lightning.pytorch.plugins import LayerSync
from torch import nn
from typing_extensions import override

from cenet.nn import convert_sync_ce, revert_sync_ce


class SyncCE(LayerSync):
    """Statistics of CE, and of the norms it follows, over all processes.

    Norms without CE stay as they are; `nn.SyncBatchNorm.convert_sync_batchnorm` synchronizes them.
    """

    @override
    def apply(self, model: nn.Module) -> nn.Module:
        return convert_sync_ce(model)

    @override
    def revert(self, model: nn.Module) -> nn.Module:
        return revert_sync_ce(model)
