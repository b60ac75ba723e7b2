"""Cost of `cenet.analysis.Monitor` in training, relative to the time of plain steps.

Plain steps and steps that the monitor measures alternate in one run, so that other work on the
machine affects both. Measuring one step in `every` costs (watched − plain) / (every · plain).

    python benchmarks/bench_monitor.py                                 # CPU, ResNet-18 and a VGG
    python benchmarks/bench_monitor.py --device cuda --batch 128 --size 224 --network resnet50
"""

import argparse
import statistics
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from _runner import seconds
from cenet.analysis import Monitor
from cenet.analysis.monitor import EVERY
from cenet.formatting import percent
from cenet.models.lookup import create_named

TARGET = 0.02


def train_step(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, optimizer) -> None:
    loss = nn.functional.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def alternate(name: str, arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Seconds of a plain and of a watched step, in turns, after a warm-up."""
    torch.manual_seed(0)
    model = create_named(name).to(arguments.device).train()
    x = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=arguments.device)
    labels = torch.randint(10, (arguments.batch,), device=arguments.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    step = partial(train_step, model, x, labels, optimizer)
    pairs = []
    for _ in range(arguments.rounds + 2):
        plain = seconds(step, x.device)
        looks: list[int] = []
        monitor = Monitor(model, every=1, to=lambda step, values, looks=looks: looks.append(step))
        watched = seconds(step, x.device)
        monitor.close()
        assert looks == [0]
        pairs.append((plain, watched))
    return pairs[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", nargs="*", default=["resnet18", "cevgg16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = Table(
        title=f"a look at every {EVERY}th step, batch {arguments.batch}, {arguments.size}×"
        f"{arguments.size}, {arguments.device}, torch {torch.__version__}",
        caption="share of a plain step, amortised; median and 20th to 80th percentile of the pairs",
    )
    for column in ("network", "plain ms", "watched ms", "share", "spread", "n", "target"):
        table.add_column(column, justify="left" if column == "network" else "right")
    for name in arguments.network:
        pairs = alternate(name, arguments)
        shares = [(watched - plain) / plain / EVERY for plain, watched in pairs]
        fifths = statistics.quantiles(shares, n=5)
        share = statistics.median(shares)
        table.add_row(
            name,
            *(f"{1e3 * statistics.median(column):.0f}" for column in zip(*pairs, strict=True)),
            percent(share, ".2f"),
            f"{percent(fifths[0], '.2f')} to {percent(fifths[-1], '.2f')}",
            str(len(pairs)),
            f"{'met' if share < TARGET else 'missed'}: < {percent(TARGET, '.0f')}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
