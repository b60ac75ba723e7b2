"""SyncCE: CE layers that measure the batches of all ranks as one."""

from typing import Any

from torch import nn

from cenet.nn.base import EquilibriumLayer, ce_layers
from cenet.nn.norm_ce import NormCE2d
from cenet.nn.norms import BATCH_NORMS, is_batch_norm
from cenet.nn.ranks import SyncGroup

FLOAT32_BYTES = 4


def convert_sync_ce(model: nn.Module, process_group: Any = None) -> nn.Module:
    """Let every CE layer take its training statistics over all ranks, in place; return the model.

    A batch norm that is joined with CE in a `NormCE2d` takes part, be it a BatchNorm2d or a
    SyncBatchNorm: one all-gather per layer in the forward pass and one reduce-scatter in the
    backward pass carry the statistics of both. Ranks may have different numbers of images of
    different sizes, or none. Parameters, buffers and the keys of the state dict stay as they are.
    Evaluation, frozen layers and a single rank communicate nothing.

    Args:
        model: a network with CE.
        process_group: the ranks to merge, from `torch.distributed.new_group`; None takes all.

    Raises:
        ValueError: the model has no CE layer.
    """
    layers = _layers(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no CE layer to synchronize; insert_ce_ puts them in"
        )
    group = SyncGroup(process_group)
    for layer in layers:
        layer.sync = group
    return model


def revert_sync_ce(model: nn.Module) -> nn.Module:
    """Undo `convert_sync_ce`, in place: statistics are each rank's own again. Return the model.

    A norm that is itself a SyncBatchNorm stays one.
    """
    layers = [layer for layer in _layers(model) if layer.sync is not None]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no synchronized CE layer; convert_sync_ce makes them"
        )
    for layer in layers:
        layer.sync = None
    return model


def sync_bytes(model: nn.Module) -> int:
    """Bytes that a rank contributes to the all-gathers of one synchronized forward pass.

    In the backward pass, the reduce-scatters return as many. Counted in float32, for every CE
    layer of `model` in training that is not frozen, synchronized already or not.
    """
    joined = {
        module.ce: is_batch_norm(module.norm) and isinstance(module.norm, BATCH_NORMS)
        for module in model.modules()
        if isinstance(module, NormCE2d)
    }
    layers = [layer for layer in _layers(model) if not layer.frozen]
    layouts = [layer.layout(norm=joined.get(layer, False)) for layer in layers]
    return FLOAT32_BYTES * sum(layout.size() for layout in layouts)


def _layers(model: nn.Module) -> list[EquilibriumLayer]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, got {type(model).__name__}")
    return [layer for _, layer in ce_layers(model)]
