"""Build optimizer, schedule and loss of a recipe with timm."""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from inspect import signature
from typing import Any

import timm.loss
import torch
from timm.data.mixup import Mixup
from timm.layers.norm_act import convert_sync_batchnorm
from timm.optim import (  # type: ignore[attr-defined]
    create_optimizer_v2,
    get_optimizer_class,
)
from timm.scheduler import create_scheduler_v2  # type: ignore[attr-defined]
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.poly_lr import PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from cenet.data.datasets import InputSpec
from cenet.nn import ce_layers, convert_sync_ce, param_groups
from cenet.ops import backend
from cenet.train.recipes import Recipe, TrainingRecipe

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def check_size(network: nn.Module, recipe: Recipe, inputs: InputSpec) -> None:
    """Raise ValueError if the network cannot train on images of the recipe's size."""
    size = recipe.image_size
    shadow = deepcopy(network).to("meta").train()  # computes shapes only
    try:
        with backend("torch"):  # the kernels do not run on meta tensors
            logits = shadow(torch.empty(2, inputs.channels, size, size, device="meta"))
    # timm's networks of fixed size have assertions
    except (ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).partition("; ")[0]  # the rest is advice for users of the Python API
        raise ValueError(
            f"{recipe.network} cannot train on images of {size}×{size}: {reason}; "
            f"{'change' if recipe.stock else 'raise'} --image-size"
        ) from error
    wanted = (2, len(inputs.classes))
    if not isinstance(logits, Tensor) or logits.shape != wanted:
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"{recipe.network} is not a classifier that can be trained here: for two images it "
            f"returns {found} in training, and not logits of shape {wanted}"
        )


def synchronized(network: nn.Module, device: torch.device) -> nn.Module:
    """The network with statistics of norms and CE over all processes.

    On a CPU, torch has no synchronized batch norm: only norms followed by CE are synchronized.
    """
    convert: Any = convert_sync_batchnorm
    if device.type == "cuda":
        network = convert(network)
    return convert_sync_ce(network) if dict(ce_layers(network)) else network


def build_optimizer(
    recipe: TrainingRecipe, model: nn.Module, *, images_per_update: int
) -> Optimizer:
    """The optimizer of all parameters that require a gradient, at the rate for this batch size."""
    groups = param_groups(model, recipe.weight_decay, decay_norms=recipe.decay_norms)
    on_gpu = groups[0]["params"][0].is_cuda
    optimizer: Optimizer = create_optimizer_v2(
        groups,
        recipe.opt,
        lr=recipe.lr * images_per_update / recipe.lr_batch,
        weight_decay=recipe.weight_decay,
        momentum=recipe.momentum,
        **dict.fromkeys(options_of_graphs(recipe.opt), on_gpu),
    )
    return optimizer


def options_of_graphs(name: str) -> set[str]:
    """Arguments with which an optimizer keeps all of its state on the GPU, as CUDA graphs need it.

    Those of torch have them: SGD is fused, others are capturable. Empty for timm's own.
    """
    kind: Any = get_optimizer_class(name, bind_defaults=False)
    if issubclass(kind, torch.optim.SGD):
        return {"fused"}
    arguments = set(signature(kind).parameters)
    is_of_torch = kind.__module__.startswith("torch.") and "capturable" in arguments
    return arguments & {"fused", "capturable"} if is_of_torch else set()


def build_schedule(
    recipe: TrainingRecipe, optimizer: Optimizer, *, updates_per_epoch: int
) -> Scheduler:
    """The learning rate as a function of the number of updates."""
    total = recipe.epochs * updates_per_epoch
    warmup = round(recipe.warmup_epochs * updates_per_epoch)
    shared: dict[str, Any] = {
        "warmup_t": warmup, "warmup_lr_init": 0.0, "t_in_epochs": False, "warmup_prefix": False,
    }  # fmt: skip
    if recipe.schedule == "step":
        # timm's scheduler is one update ahead
        steps = [epoch * updates_per_epoch + 1 for epoch in recipe.milestones]
        return MultiStepLRScheduler(optimizer, steps, recipe.gamma, **shared)
    if recipe.schedule == "cosine":
        return CosineLRScheduler(optimizer, total, **shared)
    if recipe.schedule == "poly":
        return PolyLRScheduler(optimizer, total, power=recipe.power, **shared)
    found: Scheduler | None
    try:
        found, _ = create_scheduler_v2(
            optimizer, recipe.schedule, total, warmup_epochs=warmup, warmup_lr=0.0,
            step_on_epochs=False, updates_per_epoch=1,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"schedule={recipe.schedule} cannot be used: {error}") from error
    if found is None:  # timm before 1.0.31 does not know all of them
        raise ValueError(f"this version of timm has no schedule {recipe.schedule}; use cosine")
    return found


def build_loss(recipe: Recipe) -> nn.Module:
    """Cross-entropy, with label smoothing or for the soft targets of mixup."""
    losses: Any = timm.loss
    loss: nn.Module = nn.CrossEntropyLoss()
    if recipe.mixup > 0:
        loss = losses.SoftTargetCrossEntropy()
    elif recipe.label_smoothing > 0:
        loss = losses.LabelSmoothingCrossEntropy(recipe.label_smoothing)
    return loss


def build_mixup(recipe: Recipe, classes: int) -> Any:
    """Timm's mixup, or None if the recipe has none."""
    if recipe.mixup == 0:
        return None
    make: Any = Mixup
    return make(recipe.mixup, label_smoothing=recipe.label_smoothing, num_classes=classes)


def autocast(recipe: TrainingRecipe, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast context of a recipe."""
    dtype = PRECISIONS.get(recipe.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
