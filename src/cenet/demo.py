"""The main job in two minutes on a CPU: one small VGG with batch norm, one with CE, on digits.

Strong weight decay puts channels of the plain network to sleep; the table shows what CE changes.
The setting was chosen to show the effect: of about ten tried on these digits, those at learning
rate 0.1 left CE with as many inhibited channels as batch norm, or more.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cenet.analysis import inhibited_ratio
from cenet.surgery import insert_ce_

WIDTHS = (32, 32, "pool", 64, 64, "pool", 128, 128)
LEARNING_RATE = 0.03
WEIGHT_DECAY = 0.025
WARM_UP_EPOCHS = 5
BATCH_SIZE = 64


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's handwritten digits in (N, 1, 8, 8) tensors of zero mean."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Result:
    """What training one network showed."""

    accuracy: float
    inhibited: dict[str, float]  # by layer


def load_digits(seed: int) -> Digits:
    """Split the 1,797 images into 1,347 for training and 450 for the test."""
    try:
        from sklearn.datasets import load_digits as embedded_digits
    except ImportError as error:
        message = "the demo needs scikit-learn for its digits; pip install '.[demo]' in the clone"
        raise SystemExit(message) from error
    bunch = embedded_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    images = images - images.mean()
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, test = order[:-450], order[-450:]
    return Digits(images[train], labels[train], images[test], labels[test])


def small_vgg() -> nn.Sequential:
    """Six convolutions, each followed by batch norm and ReLU."""
    layers: list[nn.Module] = []
    channels = 1
    for width in WIDTHS:
        if isinstance(width, str):
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
        ]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def train(
    model: nn.Module, data: Digits, progress: Progress, *, name: str, epochs: int, seed: int
) -> Result:
    """Train with SGD, warm-up, cosine schedule and strong weight decay; then measure."""

    def rate(epoch: int) -> float:
        warm_up = min(1.0, (epoch + 1) / (WARM_UP_EPOCHS + 1))
        return warm_up * 0.5 * (1 + math.cos(math.pi * epoch / epochs))

    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for key, p in named if not key.endswith("mix_logit")]},
        {"params": [p for key, p in named if key.endswith("mix_logit")], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=LEARNING_RATE, momentum=0.9, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    generator = torch.Generator().manual_seed(seed)
    task = progress.add_task(f"{name}, seed {seed}", total=epochs, loss=float("nan"))
    for _ in range(epochs):
        model.train()
        losses = []
        order = torch.randperm(len(data.train_x), generator=generator)
        for batch in torch.split(order, BATCH_SIZE):
            loss = cross_entropy(model(data.train_x[batch]), data.train_y[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        schedule.step()
        progress.update(task, advance=1, loss=fmean(losses))
    return measure(model, data)


@torch.no_grad()
def measure(model: nn.Module, data: Digits) -> Result:
    """Test accuracy, and behind each ReLU the share of inhibited channels on the test images."""
    inhibited: dict[str, float] = {}
    activations = [module for module in model.modules() if isinstance(module, nn.ReLU)]

    def record(name: str, output: Tensor) -> None:
        inhibited[name] = inhibited_ratio(output.abs().mean((0, 2, 3)))

    handles = [
        module.register_forward_hook(lambda _m, _i, output, name=f"conv{i}": record(name, output))
        for i, module in enumerate(activations, start=1)
    ]
    model.eval()
    predicted = model(data.test_x).argmax(1)
    for handle in handles:
        handle.remove()
    return Result((predicted == data.test_y).float().mean().item(), inhibited)


def run_demo(epochs: int = 40, seeds: int = 3) -> dict[str, list[Result]]:
    """Train both networks once per seed and print the comparison.

    Args:
        epochs: of training, per network.
        seeds: how many times, each with its own split, initial weights and order of the images.
    """
    for name, value in {"epochs": epochs, "seeds": seeds}.items():
        if value < 1:
            raise SystemExit(f"{name}={value} must be at least 1")
    # the maps are small, and threads would spend their time waiting for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    console = Console()
    results: dict[str, list[Result]] = {"BN": [], "BN + CE": []}
    columns = (
        TextColumn("{task.description:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs, loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for seed in range(seeds):
            data = load_digits(seed)
            for name, runs in results.items():
                torch.manual_seed(seed)
                model = small_vgg()
                if name == "BN + CE":
                    insert_ce_(model)
                runs.append(train(model, data, progress, name=name, epochs=epochs, seed=seed))
    torch.set_num_threads(threads)
    console.print(_table(results, epochs=epochs))
    return results


def _table(results: dict[str, list[Result]], *, epochs: int) -> Table:
    seeds = len(results["BN"])
    table = Table(
        title=f"small VGG on scikit-learn's digits, weight decay {WEIGHT_DECAY}",
        caption=f"{epochs} epochs; mean over {seeds} seeds (lowest to highest). A channel is "
        "inhibited when its mean activation over the test images is below 0.01.",
    )
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")

    def add_row(title: str, values: list[list[float]]) -> None:
        table.add_row(title, *(_spread(by_seed) for by_seed in values))

    runs = list(results.values())
    add_row("test accuracy", [[run.accuracy for run in by_seed] for by_seed in runs])
    table.add_section()
    for layer in runs[0][0].inhibited:
        shares = [[run.inhibited[layer] for run in by_seed] for by_seed in runs]
        add_row(f"inhibited channels, {layer}", shares)
    table.add_section()
    means = [[fmean(run.inhibited.values()) for run in by_seed] for by_seed in runs]
    add_row("inhibited channels, mean", means)
    return table


def _spread(values: list[float]) -> str:
    return f"{fmean(values):.1%} ({min(values):.1%} to {max(values):.1%})"
