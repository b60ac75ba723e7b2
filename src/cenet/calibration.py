"""Re-estimate the running statistics of CE, which evaluation uses, from data."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from cenet.evaluating import evaluating
from cenet.nn import BatchDecorrelation2d, EquilibriumLayer, InstanceReweighting2d, ce_layers


@torch.no_grad()
def update_ce_stats(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    num_batches: int | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Replace the running statistics of every CE layer by their plain average over batches of data.

    The rest of the network runs in evaluation mode. So the statistics are those that evaluation
    will meet, and nothing else changes. If batch norms need it too, recalibrate them first by
    `torch.optim.swa_utils.update_bn`. Frozen layers keep their statistics. If the loader fails or
    is empty, the old statistics are restored.

    Args:
        model: the network.
        loader: yields input batches, or tuples and lists whose first element is one.
        num_batches: number of batches to use; None uses all.
        device: device that batches are moved to; by default that of the model.

    Returns:
        The number of batches used.
    """
    found = [layer for _, layer in ce_layers(model)]
    layers = [layer for layer in found if not layer.frozen]
    if not layers:
        reason = "only frozen CE layers; unfreeze_ce_ them" if found else "no CE layer"
        raise ValueError(f"{type(model).__name__} has {reason}")
    if isinstance(loader, Tensor):
        raise TypeError("loader must yield batches; wrap a single batch in a list")
    if num_batches is not None and num_batches < 1:
        raise ValueError(f"num_batches={num_batches} must be at least 1")
    branches = [branch for layer in layers for branch in _branches(layer)]
    device = next(layers[0].buffers()).device if device is None else device
    momenta = [branch.momentum for branch in branches]
    saved = [[buffer.clone() for buffer in branch.buffers()] for branch in branches]
    count = 0
    try:
        with evaluating(model):
            for layer in layers:
                layer.train()
                layer.reset_running_stats()
            for branch in branches:
                branch.momentum = None
            for batch in islice(loader, num_batches):
                inputs = batch[0] if isinstance(batch, list | tuple) else batch
                if not isinstance(inputs, Tensor):
                    raise TypeError(
                        "loader must yield tensors, or tuples and lists that start with one, got "
                        f"{type(batch).__name__}"
                    )
                model(inputs.to(device))
                count += 1
        if count == 0:
            raise ValueError("loader yielded no batch; the running statistics are unchanged")
        silent = [name for name, layer in ce_layers(model) if layer in layers and _saw_none(layer)]
        if silent:
            raise ValueError(
                "no usable batch (empty, not finite, or the layer does not run in evaluation) "
                f"reached {', '.join(silent)}; the running statistics are unchanged"
            )
    except BaseException:
        for branch, values in zip(branches, saved, strict=True):
            _restore(branch, values)
        raise
    finally:
        for branch, momentum in zip(branches, momenta, strict=True):
            branch.momentum = momentum
    return count


def _branches(layer: EquilibriumLayer) -> list[BatchDecorrelation2d | InstanceReweighting2d]:
    kinds = (BatchDecorrelation2d, InstanceReweighting2d)
    return [module for module in layer.modules() if isinstance(module, kinds)]


def _saw_none(layer: EquilibriumLayer) -> bool:
    return any(bool(branch.num_batches_tracked == 0) for branch in _branches(layer))


def _restore(branch: nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(branch.buffers(), values, strict=True):
        buffer.copy_(value)
