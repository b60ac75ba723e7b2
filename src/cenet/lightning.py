"""SyncCE for Lightning: `Trainer(strategy="ddp", plugins=[SyncCE()])`."""

from cenet.extras import require

require("lightning")

from lightning.pytorch.plugins import LayerSync
from torch import nn

from cenet.nn import convert_sync_ce, revert_sync_ce


class SyncCE(LayerSync):
    """Statistics of CE, and of the norms it follows, over all processes.

    Norms without CE stay as they are; `nn.SyncBatchNorm.convert_sync_batchnorm` synchronizes them.
    """

    def apply(self, model: nn.Module) -> nn.Module:
        """See `convert_sync_ce`."""
        return convert_sync_ce(model)

    def revert(self, model: nn.Module) -> nn.Module:
        """See `revert_sync_ce`."""
        return revert_sync_ce(model)
