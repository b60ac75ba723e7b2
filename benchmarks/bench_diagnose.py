"""Extra time of the scale-invariant measures in a diagnosis without ablation.

The same batches go alternately through the recorder as it is, and through one without the sums that
these measures need (squares, signed sums, spread between images, firing, and the readers of each
channel). At the end of each, the measures of the layers are computed from the sums.

    python benchmarks/bench_diagnose.py                                  # CPU
    python benchmarks/bench_diagnose.py --device cuda --batch 128 --batches 20
"""

import argparse
import statistics
import time
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import cenet.analysis.channels as measures
from cenet.analysis import Recorder
from cenet.analysis.recorder import LayerStatistics, pooled
from cenet.formatting import percent
from cenet.models.lookup import create_named

TARGET = 0.10


def see_after_without(self: LayerStatistics, y: Tensor) -> None:
    """Absolute values and the map of magnitudes alone."""
    self.size = (y.shape[2], y.shape[3])
    self.images += len(y)
    self.outputs += y.numel() // y.shape[1]
    values = y if y.dtype == torch.float64 else y.float()
    self.abs_sum += torch.linalg.vector_norm(values, 1, (2, 3)).sum(0, dtype=torch.float64)
    self.magnitude_sum += pooled(measures.channel_magnitude(values), self.magnitude_sum).sum(0)


class Without(Recorder):
    def __enter__(self):
        found = super().__enter__()
        self.readers = None
        return found


def seconds(model: nn.Module, batches: list[Tensor], new: bool) -> float:
    start = time.perf_counter()
    recorder = (Recorder if new else Without)(model)
    see_after = LayerStatistics.see_after if new else see_after_without
    with torch.no_grad(), mock.patch.object(LayerStatistics, "see_after", see_after):
        for batch in batches:
            with recorder:
                model(batch)
    for name, layer in recorder.layers.items():
        measures.channel_correlation(layer.mean, layer.covariance)
        measures.inhibited_ratio(layer.mean_abs)
        if new:
            measures.relative_activity(layer.mean_abs)
            measures.saturated(layer.mean_abs, layer.deviation)
            measures.duplicates(layer.mean, layer.covariance)
            measures.participation_ratio(layer.covariance)
            if name in recorder.reads:
                measures.contribution(layer.mean_abs, recorder.reads[name])
    if batches[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", nargs="*", default=["resnet18", "resnet50", "cevgg16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--size", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    table = Table(
        title=f"{arguments.batches} batches of {arguments.batch}, {arguments.device}, "
        f"torch {torch.__version__}"
    )
    for column in ("network", "size", "without s", "with s", "share", "range", "n", "target"):
        table.add_column(column, justify="right")
    for name in arguments.network:
        size = arguments.size or (32 if "vgg" in name else 224)
        model = create_named(name).to(arguments.device).eval()
        shape = (arguments.batch, 3, size, size)
        batches = [torch.randn(shape, device=arguments.device) for _ in range(arguments.batches)]
        seconds(model, batches[:1], True)
        pairs = [
            (seconds(model, batches, False), seconds(model, batches, True))
            for _ in range(arguments.rounds)
        ]
        shares = [new / old - 1 for old, new in pairs]
        share = statistics.median(shares)
        medians = (f"{statistics.median(column):.2f}" for column in zip(*pairs, strict=True))
        table.add_row(
            name, str(size), *medians,
            percent(share), f"{percent(min(shares))} to {percent(max(shares))}", str(len(pairs)),
            f"{'met' if share <= TARGET else 'missed'}: ≤ {percent(TARGET, '.0f')}",
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
