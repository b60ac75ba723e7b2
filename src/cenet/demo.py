"""The main job in two minutes on a CPU: one small VGG with batch norm, one with CE, on digits.

Strong weight decay puts channels of the plain network to sleep; the table shows what CE changes.
"""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from cenet.analysis import inhibited_ratio
from cenet.surgery import insert_ce_

WIDTHS = (32, 32, "pool", 64, 64, "pool", 128, 128)


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's handwritten digits, 16×16, in (N, 1, 16, 16) tensors of zero mean."""

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
        message = "the demo needs scikit-learn for its digits; pip install 'cenet[demo]'"
        raise SystemExit(message) from error
    bunch = embedded_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    images = interpolate(images - images.mean(), size=16, mode="bilinear")
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
    """Train with SGD, cosine schedule and strong weight decay on every weight; then measure."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(seed)
    task = progress.add_task(name, total=epochs, loss=float("nan"))
    for _ in range(epochs):
        model.train()
        for batch in torch.randperm(len(data.train_x), generator=generator).split(128):
            loss = cross_entropy(model(data.train_x[batch]), data.train_y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        progress.update(task, advance=1, loss=loss.item())
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


def run_demo(epochs: int = 60, seed: int = 0) -> dict[str, Result]:
    """Train both networks and print the comparison.

    Args:
        epochs: of training, per network.
        seed: of the split, the initial weights and the order of the images.
    """
    if epochs < 1:
        raise SystemExit(f"epochs={epochs} must be at least 1")
    console = Console()
    data = load_digits(seed)
    results = {}
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs, loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for name in ("BN", "BN + CE"):
            torch.manual_seed(seed)
            model = small_vgg()
            if name == "BN + CE":
                insert_ce_(model)
            results[name] = train(model, data, progress, name=name, epochs=epochs, seed=seed)
    console.print(_table(results, epochs=epochs, seed=seed))
    return results


def _table(results: dict[str, Result], *, epochs: int, seed: int) -> Table:
    table = Table(
        title="small VGG on scikit-learn's digits, weight decay 5e-3",
        caption=f"{epochs} epochs, seed {seed}, n = 1. A channel is inhibited when its mean "
        "activation over the test images is below 0.01.",
    )
    table.add_column("")
    for name in results:
        table.add_column(name, justify="right")
    accuracies = [f"{result.accuracy:.1%}" for result in results.values()]
    table.add_row("test accuracy", *accuracies, end_section=True)
    for layer in next(iter(results.values())).inhibited:
        shares = [f"{result.inhibited[layer]:.1%}" for result in results.values()]
        table.add_row(f"inhibited channels, {layer}", *shares)
    means = [sum(r.inhibited.values()) / len(r.inhibited) for r in results.values()]
    table.add_section()
    table.add_row("inhibited channels, mean", *(f"{mean:.1%}" for mean in means))
    return table
