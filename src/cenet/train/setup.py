"""From a recipe to network, optimizer, schedule and loss: timm's, with the paper's weight decay."""

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import timm.loss
import torch
from timm.data.mixup import Mixup
from timm.layers.norm_act import convert_sync_batchnorm
from timm.optim._optim_factory import create_optimizer_v2
from timm.scheduler.cosine_lr import CosineLRScheduler
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.poly_lr import PolyLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch import nn
from torch.optim import Optimizer

from cenet.data.input_spec import InputSpec
from cenet.models import create_model
from cenet.nn import ce_layers, convert_sync_ce
from cenet.ops import backend
from cenet.train.course import Course
from cenet.train.recipes import RD_RATIO, Recipe

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# λ and α are never decayed
UNDECAYED = ("mix_logit", "blend")


def build_network(recipe: Recipe, inputs: InputSpec) -> nn.Module:
    """The network of a recipe, for these images and classes."""
    return create_model(
        recipe.network,
        None if recipe.block == "plain" else recipe.block,
        norm=recipe.norm,
        norm_places=recipe.norm_places,
        ce_position=recipe.ce_position,
        start=recipe.ce_start,
        layer_args=None if recipe.rd_ratio == RD_RATIO else {"rd_ratio": recipe.rd_ratio},
        act=None if recipe.act == "default" else recipe.act,
        num_classes=len(inputs.classes),
        in_chans=inputs.channels,
    )


def check_size(network: nn.Module, recipe: Recipe, inputs: InputSpec) -> None:
    """Raise ValueError if the network cannot train on images of the recipe's size."""
    size = recipe.image_size
    shadow = deepcopy(network).to("meta").train()  # shapes alone
    try:
        with backend("torch"):  # kernels compute no shapes
            shadow(torch.empty(2, inputs.channels, size, size, device="meta"))
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{recipe.network} cannot train on images of {size}×{size}: {error}; raise --image-size"
        ) from error


def synchronized(network: nn.Module, device: torch.device) -> nn.Module:
    """The network with norms and CE that take their statistics over all processes.

    On a CPU, where torch has no synchronized batch norm, only norms that CE follows do.
    """
    convert: Any = convert_sync_batchnorm
    if device.type == "cuda":
        network = convert(network)
    return convert_sync_ce(network) if dict(ce_layers(network)) else network


def build_optimizer(recipe: Course, model: nn.Module, *, images_per_update: int) -> Optimizer:
    """SGD on what is not fixed; its learning rate is that of the recipe for so many images."""
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
        # one kernel, and one that a CUDA graph can hold
        fused=(decayed or spared)[0].is_cuda,
    )
    return optimizer


def build_schedule(recipe: Course, optimizer: Optimizer, *, updates_per_epoch: int) -> Scheduler:
    """The learning rate as a function of the number of updates."""
    total = recipe.epochs * updates_per_epoch
    warmup = round(recipe.warmup_epochs * updates_per_epoch)
    shared: dict[str, Any] = {
        "warmup_t": warmup, "warmup_lr_init": 0.0, "t_in_epochs": False, "warmup_prefix": False,
    }  # fmt: skip
    if recipe.schedule == "step":
        # timm looks one ahead
        steps = [epoch * updates_per_epoch + 1 for epoch in recipe.milestones]
        return MultiStepLRScheduler(optimizer, steps, recipe.gamma, **shared)
    if recipe.schedule == "cosine":
        return CosineLRScheduler(optimizer, total, **shared)
    return PolyLRScheduler(optimizer, total, power=recipe.power, **shared)


def build_loss(recipe: Recipe) -> nn.Module:
    """Cross-entropy, smoothed, or of soft targets."""
    losses: Any = timm.loss
    loss: nn.Module = nn.CrossEntropyLoss()
    if recipe.mixup > 0:
        loss = losses.SoftTargetCrossEntropy()
    elif recipe.label_smoothing > 0:
        loss = losses.LabelSmoothingCrossEntropy(recipe.label_smoothing)
    return loss


def build_mixup(recipe: Recipe, classes: int) -> Any:
    """Timm's mixup, or None."""
    if recipe.mixup == 0:
        return None
    make: Any = Mixup
    return make(recipe.mixup, label_smoothing=recipe.label_smoothing, num_classes=classes)


def autocast(recipe: Course, device: torch.device) -> AbstractContextManager[Any]:
    """The precision of a recipe."""
    dtype = PRECISIONS.get(recipe.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
