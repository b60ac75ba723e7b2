"""Time and memory of norm + CE + ReLU as a layer, compared with norm + ReLU and with a copy.

The implementations (providers) are timed alternately in one run. A row is written only after the
provider's output and all its gradients agreed with float64. The floor of a mode is the time of the
smallest possible number of passes over memory, at the speed of a device copy: 8 for a training step
(x | x, y | g, x | g, x, dx), 3 for forward (x | x, y).

    PYTHONPATH=src python benchmarks/bench_layer.py --out layer.csv               # one H200
    PYTHONPATH=src python benchmarks/bench_layer.py --dtypes float16 float32 --layouts contiguous
    python benchmarks/bench_layer.py --device cpu --shapes 4x32x8x8 --rounds 2    # smoke test

Modes: `forward+backward` (training, gradients of x and parameters), `forward` (training, no
gradients), `evaluation`, and `graph`: forward+backward in a CUDA graph, which is left out for
shapes of more than 2³⁰ elements.
"""

import argparse
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchvision.ops import SqueezeExcitation

from _runner import (
    MB,
    RESULTS,
    Failures,
    Run,
    Timing,
    append_rows,
    dimensions,
    environment,
    first_run,
    free_memory,
    interleave,
    peak_mb,
    relative_error,
    require,
    row,
    shape_text,
    static_compile,
)
from cenet import ChannelEquilibrium2d, NormCE2d, ops

BIG = ((256, 64, 112, 112), (256, 256, 56, 56), (256, 512, 28, 28), (256, 1024, 14, 14))
# these fit in the L2 cache and stay there: they show launch and small-tensor cost, not bandwidth
SMALL = ((32, 64, 32, 32), (8, 256, 14, 14))
GRAPH_ELEMENTS = 2**30
PASSES = {"forward+backward": 8, "graph": 8, "forward": 3, "evaluation": 3}
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
# relative norm errors: of y; of a gradient, looser because the backward may round P and g to half
Y_TOLERANCE = {torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
GRADIENT_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 5e-2}


def random_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias, std=0.2)
    return norm


def bn_relu(channels: int, dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(OrderedDict(norm=random_norm(channels), act=nn.ReLU()))


def bn_se_relu(channels: int, dtype: torch.dtype) -> nn.Module:
    # its convolutions want weights of the input's dtype; the norms take float32 with any
    se = SqueezeExcitation(channels, max(1, channels // 16)).to(dtype)
    return nn.Sequential(OrderedDict(norm=random_norm(channels), se=se, act=nn.ReLU()))


def bn_ce_relu(channels: int, dtype: torch.dtype) -> nn.Module:
    return NormCE2d(random_norm(channels), ChannelEquilibrium2d(channels), nn.ReLU())


class Provider(NamedTuple):
    build: Callable[[int, torch.dtype], nn.Module]
    backend: str = "auto"
    compiled: bool = False


PROVIDERS = {
    "bn_relu": Provider(bn_relu),
    "bn_relu_compiled": Provider(bn_relu, compiled=True),
    "bn_se_relu": Provider(bn_se_relu),
    "ce_torch": Provider(bn_ce_relu, "torch"),
    "ce_torch_compiled": Provider(bn_ce_relu, "torch", compiled=True),
    "ce": Provider(bn_ce_relu, "triton"),
    "ce_compiled": Provider(bn_ce_relu, "triton", compiled=True),
}


@dataclass
class Case:
    """One input and the gradient that comes back to it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    device: torch.device

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        n, channels, *_ = self.shape
        per_channel = (1, channels, 1, 1)
        x = self._noise()
        # images differ in contrast, so that their variances do
        x *= torch.empty(n, channels, 1, 1, device=self.device).uniform_(0.5, 1.5)
        x *= torch.empty(per_channel, device=self.device).uniform_(0.5, 2)
        x += torch.randn(per_channel, device=self.device)
        self.x = self._laid_out(x).requires_grad_()
        self.upstream = self._laid_out(self._noise())

    def _noise(self) -> Tensor:
        return torch.randn(self.shape, device=self.device)

    def _laid_out(self, values: Tensor) -> Tensor:
        return values.to(self.dtype).contiguous(memory_format=LAYOUTS[self.layout])

    def __str__(self) -> str:
        return " ".join(self.columns.values())

    @property
    def columns(self) -> dict[str, str]:
        dtype = str(self.dtype).removeprefix("torch.")
        return {"shape": shape_text(self.shape), "dtype": dtype, "layout": self.layout}


class Candidate:
    """A provider's layer for one case."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case = name, case
        self.provider = PROVIDERS[name]
        torch.manual_seed(1)
        self.layer = self.provider.build(case.shape[1], case.dtype).to(case.device)
        self.callable: Callable[[Tensor], Tensor] = self.layer
        if self.provider.compiled:
            self.callable = static_compile(self.layer)

    def run(self, mode: str) -> Run:
        """One call of the layer in `mode`, under the provider's backend."""
        self.layer.train(mode != "evaluation")
        step = self._step() if mode in ("forward+backward", "graph") else self._no_grad()

        def run() -> object:
            with ops.backend(self.provider.backend):
                return step()

        return run

    def _step(self) -> Run:
        # autograd.grad hands gradients over instead of accumulating: there is none to clear
        inputs = [self.case.x, *self.layer.parameters()]

        def step() -> object:
            y = self.callable(self.case.x)
            return y, torch.autograd.grad(y, inputs, self.case.upstream)

        return step

    def _no_grad(self) -> Run:
        return torch.no_grad()(lambda: self.callable(self.case.x))


def check(candidate: Candidate, evaluation: bool) -> None:
    """Compare with the same layer in float64 and plain PyTorch."""
    compiled = candidate.provider.compiled
    run = candidate.run("forward+backward")
    y, gradients = first_run(candidate.name, run, candidate.case.device, compiled=compiled)
    check_training(candidate, y, gradients)
    del y, gradients
    if evaluation:
        check_evaluation(candidate)


def float64_reference(candidate: Candidate) -> nn.Module:
    """The layer up to its activation."""
    reference = deepcopy(candidate.layer).double()
    reference.act = nn.Identity()
    return reference


def check_training(candidate: Candidate, y: Tensor, gradients: tuple[Tensor, ...]) -> None:
    case = candidate.case
    reference = float64_reference(candidate)
    x = case.x.detach().double().requires_grad_()
    with ops.backend("torch"):
        z = reference(x)
        # rounding flips signs near zero: gradients are judged under the provider's own mask
        masked = case.upstream.double() * (y > 0)
        expected = torch.autograd.grad(z, [x, *reference.parameters()], masked)
    require("y", relative_error(y, z.relu()), Y_TOLERANCE[case.dtype])
    names = ["x", *(name for name, _ in reference.named_parameters())]
    for name, ours, theirs in zip(names, gradients, expected, strict=True):
        error = relative_error(ours, theirs)
        require(f"gradient of {name}", error, GRADIENT_TOLERANCE[case.dtype])


@torch.no_grad()
def check_evaluation(candidate: Candidate) -> None:
    """After a training pass, so that the running statistics are not the initial ones."""
    case = candidate.case
    y = candidate.run("evaluation")()
    with ops.backend("torch"):
        expected = float64_reference(candidate)(case.x.double()).relu()
    require("y in evaluation", relative_error(y, expected), Y_TOLERANCE[case.dtype])


def captured(run: Run) -> Run:
    """`run` as the replay of a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def device_copy(case: Case) -> Run:
    source = case.x.detach()
    target = torch.full_like(source, torch.nan)
    target.copy_(source)
    if not torch.equal(target, source):
        raise AssertionError("the copy differs")
    return lambda: target.copy_(source)


def candidates(case: Case, names: list[str], modes: list[str], failures: Failures) -> list:
    """The providers that can run here and are correct."""
    correct = []
    for name in names:
        if PROVIDERS[name].backend == "triton" and case.device.type != "cuda":
            print(f"  {name} skipped: the kernels need a CUDA device")
            continue
        with failures.caught(f"{name} {case}", case.device):
            candidate = Candidate(name, case)
            check(candidate, "evaluation" in modes)
            correct.append(candidate)
    return correct


def prepared(case: Case, mode: str, chosen: list[Candidate], failures: Failures) -> tuple:
    """Runs of the mode, warmed up, and their peak memory."""
    runs, peaks = {}, {}
    for candidate in chosen:
        with failures.caught(f"{candidate.name} {case} {mode}", case.device):
            run = candidate.run(mode)
            run()
            peaks[candidate.name] = peak_mb(run, case.device)
            runs[candidate.name] = captured(run) if mode == "graph" else run
    copy = device_copy(case)
    runs["copy"] = captured(copy) if mode == "graph" else copy
    return runs, {**peaks, "copy": None}


def measure(
    case: Case, mode: str, chosen: list[Candidate], rounds: int, failures: Failures
) -> tuple[list[dict[str, str]], str]:
    """Rows of one mode, without the columns of the environment, and their table."""
    runs, peaks = prepared(case, mode, chosen, failures)
    timings = interleave(runs, rounds, case.device)
    timings["copy"] = timings["copy"].scaled(PASSES[mode] / 2)
    rows = []
    for name, timing in timings.items():
        op = "copy" if name == "copy" else "layer"
        columns = {"op": op, "provider": name, "mode": mode, **case.columns}
        rows.append(row(timing, peaks[name], columns))
    return rows, table(case, mode, timings, peaks)


def table(case: Case, mode: str, timings: dict[str, Timing], peaks: dict[str, float | None]) -> str:
    size = case.x.numel() * case.x.element_size() / MB
    baselines = ("bn_relu", "bn_relu_compiled", "copy")
    lines = [
        f"{case} {mode}",
        f"  {'provider':18} {'ms p50':>9} {'p20':>9} {'p80':>9}"
        f" {'/bn_relu':>9} {'/compiled':>9} {'/floor':>9} {'peak MB':>9} {'in x':>5}",
    ]
    for name, timing in timings.items():
        ratios = [
            f"{timing.p50 / timings[base].p50:9.2f}" if base in timings else f"{'':9}"
            for base in baselines
        ]
        peak = peaks[name]
        memory = "" if peak is None else f"{peak:9.1f} {peak / size:5.2f}"
        lines.append(
            f"  {name:18} {timing.p50:9.4f} {timing.p20:9.4f} {timing.p80:9.4f}"
            f" {' '.join(ratios)} {memory}".rstrip()
        )
    return "\n".join(lines)


def modes_for(case: Case, modes: list[str]) -> list[str]:
    # a graph hides launch gaps, which big shapes do not have
    small = case.x.numel() <= GRAPH_ELEMENTS and case.device.type == "cuda"
    return [mode for mode in modes if mode != "graph" or small]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    add("--shapes", nargs="+", type=dimensions, default=[*BIG, *SMALL], metavar="NxCxHxW")
    add("--dtypes", nargs="+", choices=("bfloat16", "float16", "float32"), default=["bfloat16"])
    add("--layouts", nargs="+", choices=LAYOUTS, default=["channels_last"])
    add("--modes", nargs="+", choices=PASSES, default=["forward+backward", "graph"])
    add("--rounds", type=int, default=20)
    add("--device", default="cuda")
    add("--out", type=Path, default=RESULTS / "layer.csv", help="CSV file to append rows to")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    device = torch.device(options.device)
    # float32 means float32, in the convolutions of squeeze-excite too
    torch.backends.cudnn.allow_tf32 = False
    columns = environment(device)
    failures = Failures()
    tables = []
    for shape, dtype, layout in itertools.product(options.shapes, options.dtypes, options.layouts):
        torch._dynamo.reset()
        case = Case(shape, getattr(torch, dtype), layout, device)
        print(case, flush=True)
        modes = modes_for(case, options.modes)
        chosen = candidates(case, options.providers, modes, failures)
        for mode in modes:
            rows, text = measure(case, mode, chosen, options.rounds, failures)
            tables.append(text)
            append_rows(options.out, [{**entry, **columns} for entry in rows])
        del case, chosen
        free_memory(device)
    print("\n\n".join(["", *tables]))
    print(f"\n{columns}\nrows in {options.out}")
    return failures.exit_code()


if __name__ == "__main__":
    sys.exit(main())
