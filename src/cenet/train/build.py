"""Build optimizer, schedule and loss of a recipe with timm."""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import timm.loss
import torch
from timm.data.mixup import Mixup
from timm.layers.norm_act import convert_sync_batchnorm
from timm.optim import create_optimizer_v2  # type: ignore[attr-defined]
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.poly_lr import PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from cenet.data.datasets import InputSpec
from cenet.nn import ce_layers, convert_sync_ce
from cenet.ops import backend
from cenet.train.recipes import Recipe, TrainingRecipe

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# λ and α, which the paper does not decay
UNDECAYED = ("mix_logit", "blend")


def check_size(network: nn.Module, recipe: Recipe, inputs: InputSpec) -> None:
    """Raise ValueError if the network cannot train on images of the recipe's size."""
    size = recipe.image_size
    shadow = deepcopy(network).to("meta").train()  # computes shapes only
    try:
        with backend("torch"):  # the kernels do not run on meta tensors
            shadow(torch.empty(2, inputs.channels, size, size, device="meta"))
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{recipe.network} cannot train on images of {size}×{size}: {error}; raise --image-size"
        ) from error


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
    """SGD on all parameters that require a gradient, with the learning rate for this batch size."""
    decayed: list[nn.Parameter] = []
    spared: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        spare = name.rpartition(".")[2] in UNDECAYED or (
            not recipe.decay_norms and parameter.dim() <= 1
        )
        (spared if spare else decayed).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    optimizer: Optimizer = create_optimizer_v2(
        [group for group in groups if group["params"]],
        "momentum",  # timm's "sgd" is Nesterov's
        lr=recipe.lr * images_per_update / recipe.lr_batch,
        weight_decay=recipe.weight_decay,
        momentum=recipe.momentum,
        # a single kernel, which a CUDA graph can contain
        fused=(decayed or spared)[0].is_cuda,
    )
    return optimizer


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
    return PolyLRScheduler(optimizer, total, power=recipe.power, **shared)


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
