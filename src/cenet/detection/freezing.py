"""Freeze or synchronize norms and CE of a detector, as in Section 5.3, or train all of it."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from cenet import functional as F
from cenet.messages import Layout
from cenet.nn import NormCE2d, ce_layers, convert_sync_ce
from cenet.nn.norms import BATCH_NORMS, affine, uses_batch_statistics
from cenet.nn.ranks import SyncGroup, gather
from cenet.nn.statistics import merge, message

Setting = Literal["frozen", "synchronized", "scratch"]
# stages of a ResNet from the last to the first, as torchvision counts trainable layers
STAGES = (("layer4",), ("layer3",), ("layer2",), ("layer1",), ("conv1", "bn1"))


def apply_setting_(body: nn.Module, setting: Setting, trainable_layers: int = 3) -> None:
    """Freeze the parts of a ResNet that are not trained, in place. `.train()` does not undo this.

    | setting | γ, β | statistics of norms and CE | gate, λ |
    |---|---|---|---|
    | frozen | fixed | fixed | fixed |
    | synchronized | trained | over all ranks | fixed |
    | scratch | trained | over all ranks | trained |

    Args:
        body: a ResNet with or without CE.
        setting: row of the table, for the stages that are trained.
        trainable_layers: number of stages that are trained, counted from the last: 3 freezes stem
            and first stage, 5 freezes none. All other stages are frozen completely.
    """
    if setting not in get_args(Setting):
        raise ValueError(f"setting={setting!r} must be one of {', '.join(get_args(Setting))}")
    if trainable_layers not in range(len(STAGES) + 1):
        raise ValueError(f"trainable_layers={trainable_layers!r} must be 0 to {len(STAGES)}")
    closed = {name for stage in STAGES[trainable_layers:] for name in stage}

    def is_fixed(name: str) -> bool:
        return setting == "frozen" or name.partition(".")[0] in closed

    for name, layer in ce_layers(body):
        if is_fixed(name):
            layer.freeze()
        elif setting == "synchronized":
            layer.requires_grad_(False)
    # `convert_sync_ce` synchronizes the norms that CE follows
    joined = {module.norm for module in body.modules() if isinstance(module, NormCE2d)}
    for name, norm in list(body.named_modules()):
        if isinstance(norm, BATCH_NORMS):
            if is_fixed(name):
                body.set_submodule(name, _frozen(norm))
            elif norm not in joined:
                body.set_submodule(name, _synchronized(norm))
    for name, parameter in body.named_parameters():
        if name.partition(".")[0] in closed:
            parameter.requires_grad_(False)
    if dict(ce_layers(body)):
        convert_sync_ce(body)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the batches of all ranks, on any device; torch's own needs GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize by the statistics of all ranks in training."""
        ranks = SyncGroup().ranks()
        if ranks is None or not uses_batch_statistics(self):
            y: Tensor = super().forward(x)
            return y
        values = x.to(F.statistics_dtype(x))
        layout = Layout(self.num_features, None, pool=1, norm=True, instance=False)
        moments = F.moments(values, group_size=None) if x.numel() > 0 else None
        statistics = merge(gather(message(values, moments, None, None, layout), ranks), layout)
        scale, shift = affine(self, values, statistics)
        return (values * scale[:, None, None] + shift[:, None, None]).to(x.dtype)


@torch.no_grad()
def _frozen(norm: Any) -> nn.Module:
    frozen: nn.Module = FrozenBatchNorm2d(norm.num_features, eps=norm.eps)
    return _filled(frozen, norm)


@torch.no_grad()
def _synchronized(norm: Any) -> nn.Module:
    same = SyncBatchNorm2d(norm.num_features, norm.eps, norm.momentum)
    return _filled(same, norm)


def _filled(new: nn.Module, norm: nn.Module) -> nn.Module:
    state = norm.state_dict()
    for name, value in new.state_dict().items():
        value.copy_(state[name])
    return new.to(norm.get_buffer("running_mean").device).train(norm.training)
