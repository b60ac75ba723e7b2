"""Cost of CE in ResNet-50 on a CPU, as ratios to the plain network inside one run.

CE is placed as in the paper: after the norm of the stem (with 2×2 pooling) and after the last norm
of every block except the 2048-channel ones. Inference compares both networks with their batch norms
folded. Plain and CE runs alternate, so that other work on the machine affects both. The ratio is
that of the medians; its spread is that of the pairs.

    make bench                                      # 2 threads, batch 8, 224×224
    python benchmarks/bench_resnet50_cpu.py --help

With --out, a row for each ratio is added to a CSV file.
"""

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import cenet
from _runner import append_rows, commit, cpu_name, folded_plain, seconds
from cenet import fold_ce, insert_ce_

CPU = torch.device("cpu")
TARGETS = {"inference, folded": 1.08, "training step": 1.12}
FIELDS = (
    *("work", "batch", "size", "layout", "compiled", "threads"),
    *("ratio", "ratio_p20", "ratio_p80", "rounds", "plain_ms", "ce_ms"),
    *("cpu", "torch", "version", "commit", "command"),
)


def ce_resnet50() -> nn.Module:
    model = torchvision.models.resnet50()
    insert_ce_(model, lambda norm, name: name == "bn1", pool=2)
    insert_ce_(model, lambda norm, name: name.endswith("bn3") and norm.num_features < 2048)
    return model


def training_step(model: nn.Module, x: Tensor, labels: Tensor) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def inference(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return torch.no_grad()(lambda: model(x))


def check_folded(folded: nn.Module, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        expected = model(x)
        error = ((folded(x) - expected).norm() / expected.norm()).item()
    assert error < 1e-4, f"folded network is off by {error:.1e}"


def alternate(
    plain: Callable[[], object], ours: Callable[[], object], rounds: int
) -> list[tuple[float, float]]:
    """Seconds of both in each round, after one warm-up round."""
    pairs = []
    for _ in range(rounds + 1):
        pairs.append((seconds(plain, CPU), seconds(ours, CPU)))
    return pairs[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--channels-last", action="store_true", help="use channels_last for the images"
    )
    parser.add_argument("--compiled", action="store_true", help="torch.compile both networks")
    parser.add_argument(
        "--inference", action="store_true", help="measure inference only, no training steps"
    )
    parser.add_argument("--out", type=Path, help="CSV file to add a row for each ratio to")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
    x = torch.randn(arguments.batch, 3, arguments.size, arguments.size)
    x = x.contiguous(memory_format=layout)
    labels = torch.randint(1000, (arguments.batch,))
    plain, ours = (
        network.to(memory_format=layout)
        for network in (torchvision.models.resnet50(), ce_resnet50())
    )

    def form(network: nn.Module) -> nn.Module:
        return torch.compile(network) if arguments.compiled else network

    measured = {}
    if not arguments.inference:
        measured["training step"] = alternate(
            training_step(form(plain), x, labels),
            training_step(form(ours), x, labels),
            arguments.rounds,
        )
    plain.eval()
    ours.eval()
    plain_folded, ours_folded = folded_plain(plain), fold_ce(ours)
    check_folded(plain_folded, plain, x)
    check_folded(ours_folded, ours, x)
    plain, ours, plain_folded, ours_folded = map(form, (plain, ours, plain_folded, ours_folded))
    rounds = 2 * arguments.rounds
    measured["inference, folded"] = alternate(
        inference(plain_folded, x), inference(ours_folded, x), rounds
    )
    measured["inference, not folded"] = alternate(inference(plain, x), inference(ours, x), rounds)

    table = Table(
        title=f"ResNet-50 + CE over ResNet-50, {arguments.threads} CPU threads, "
        f"batch {arguments.batch}, {arguments.size}×{arguments.size}, torch {torch.__version__}",
        caption="ratio of medians; spread: 20th and 80th percentile of the ratio in a round",
    )
    for column in ("work", "ratio", "spread", "n", "target", "verdict"):
        table.add_column(column, justify="left" if column == "work" else "right")
    rows = []
    for work, pairs in measured.items():
        before, after = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = after / before
        spread = statistics.quantiles((b / a for a, b in pairs), n=5)
        target = TARGETS.get(work)
        verdict = "" if target is None else ("met" if ratio <= target else f"{ratio - target:+.2f}")
        table.add_row(
            work,
            f"{ratio:.2f}",
            f"{spread[0]:.2f} to {spread[-1]:.2f}",
            str(len(pairs)),
            "" if target is None else f"{target:.2f}",
            verdict,
        )
        shared = {"batch": arguments.batch, "size": arguments.size, "threads": arguments.threads}
        rows.append(
            {
                **{name: str(value) for name, value in shared.items()},
                "work": work,
                "layout": "channels_last" if arguments.channels_last else "contiguous",
                "compiled": str(arguments.compiled),
                "ratio": f"{ratio:.3f}",
                "ratio_p20": f"{spread[0]:.3f}",
                "ratio_p80": f"{spread[-1]:.3f}",
                "rounds": str(len(pairs)),
                "plain_ms": f"{before:.1f}",
                "ce_ms": f"{after:.1f}",
                "cpu": cpu_name(),
                "torch": torch.__version__,
                "version": cenet.__version__,
                "commit": commit(),
                "command": shlex.join(["python", *sys.argv]),
            }
        )
    Console(width=110).print(table)
    if arguments.out is not None:
        append_rows(arguments.out, rows, FIELDS)


if __name__ == "__main__":
    main()
