"""Cost of CE in ResNet-50 on a GPU, as ratios to the plain network inside one run.

CE is placed as in the paper: after the norm of the stem (with 2×2 pooling) and after the last norm
of every block except the 2048-channel ones, 14 sites, with the addition of the shortcut and the
ReLU in the same kernel. SE is squeeze-excite after the last norm of every block. Networks are timed
alternately. Rows are written only after these checks: loss and gradients against plain PyTorch in
float32, first loss of the timed step, folded against unfolded network.

    PYTHONPATH=src python benchmarks/bench_resnet50.py --parts train-eager --out resnet50.csv
    PYTHONPATH=src python benchmarks/bench_resnet50.py --parts train-compiled    # takes minutes
    PYTHONPATH=src python benchmarks/bench_resnet50.py --parts inference-tf32 inference-bf16
    … --compile-mode reduce-overhead      # compiled parts in CUDA graphs
    python benchmarks/bench_resnet50.py --device cpu --batch 2 --size 64 --rounds 2  # smoke test

A training step is forward, cross-entropy, backward, SGD with momentum, in bfloat16 autocast and
channels_last. Its peak memory counts the network's own weights, momentum and batch, without those
of the other networks. Inference is compiled; both networks have folded batch norms (`plain` is also
timed unfolded, because torch.compile does not fold batch norms).
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet
from torchvision.ops import SqueezeExcitation

from _runner import (
    MB,
    RESULTS,
    Failures,
    Run,
    Timing,
    append_rows,
    environment,
    first_run,
    folded_plain,
    free_memory,
    interleave,
    peak_mb,
    relative_error,
    require,
    row,
    shape_text,
    static_compile,
)
from cenet import NormCE2d, fold_ce, insert_ce_, ops

PARTS = ("train-eager", "train-compiled", "inference-tf32", "inference-bf16")
# of logits, against eager float32; an untrained network, plain too, amplifies rounding that much
LOGITS_TOLERANCE = {"tf32": 5e-2, "bfloat16": 2e-1}
CLASSES = 1000


class SEBottleneck(Bottleneck):
    """Squeeze-excite on the output of the last norm."""

    def __init__(self, inplanes: int, planes: int, *args: object, **kwargs: object) -> None:
        super().__init__(inplanes, planes, *args, **kwargs)
        channels = planes * self.expansion
        self.bn3 = nn.Sequential(self.bn3, SqueezeExcitation(channels, channels // 16))


class FusedBottleneck(Bottleneck):
    """The last norm takes over the addition and the ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return self.bn3(self.conv3(out), residual=shortcut)


def plain_resnet50() -> nn.Module:
    return torchvision.models.resnet50()


def se_resnet50() -> nn.Module:
    return ResNet(SEBottleneck, [3, 4, 6, 3])


def ce_resnet50(*, fused: bool = True) -> nn.Module:
    model = plain_resnet50()
    insert_ce_(model, lambda norm, name: name == "bn1", pool=2)
    insert_ce_(model, lambda norm, name: name.endswith("bn3") and norm.num_features < 2048)
    if fused:
        take_over_activations_(model)
    return model


def take_over_activations_(model: ResNet) -> None:
    """Hand the ReLU, and in blocks the shortcut, to the norm with CE."""
    model.bn1.act, model.relu = nn.ReLU(), nn.Identity()
    for block in model.modules():
        if isinstance(block, Bottleneck) and isinstance(block.bn3, NormCE2d):
            block.bn3.act = nn.ReLU()
            block.__class__ = FusedBottleneck


MAKERS = {"plain": plain_resnet50, "se": se_resnet50, "ce": ce_resnet50, "ce_torch": ce_resnet50}
# `plain` twice: torch.compile does not fold batch norms by itself
DEPLOYED = {"plain": ("plain", "plain_folded"), "se": ("se",), "ce": ("ce_folded",)}


def build(name: str, **options: bool) -> nn.Module:
    torch.manual_seed(0)
    return MAKERS[name](**options)


class Bench:
    """Options, rows and failures of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.environment = environment(self.device)
        self.failures = Failures()
        self.tables: list[str] = []

    def backend(self, name: str) -> str:
        """Which implementation of CE the network `name` is to use."""
        if name == "ce_torch":
            return "torch"
        on_gpu = self.device.type == "cuda"
        return self.options.backend if name == "ce" and on_gpu else "auto"

    def images(self, batch: int, size: int | None = None) -> Tensor:
        torch.manual_seed(1)
        size = self.options.size if size is None else size
        x = torch.randn(batch, 3, size, size, device=self.device)
        return x.contiguous(memory_format=torch.channels_last)

    def labels(self, batch: int) -> Tensor:
        torch.manual_seed(2)
        return torch.randint(CLASSES, (batch,), device=self.device)

    def mode(self, kind: str, *, compiled: bool) -> str:
        """What is measured, as in the rows."""
        return " ".join(filter(None, (kind, self.options.compile_mode if compiled else None)))

    def placed(self, model: nn.Module) -> nn.Module:
        return model.to(self.device, memory_format=torch.channels_last)

    def measure(self, runs: dict[str, Run], peaks: dict[str, float | None], **columns: str) -> None:
        """Time, keep a table and write the rows."""
        if not runs:
            return
        timings = interleave(runs, self.options.rounds, self.device)
        shared = {"op": "resnet50", "layout": "channels_last", **columns, **self.environment}
        rows = [
            row(timing, peaks.get(name), {"provider": name, **shared})
            for name, timing in timings.items()
        ]
        append_rows(self.options.out, rows)
        self.tables.append(table(" ".join(columns.values()), timings, peaks))


def table(title: str, timings: dict[str, Timing], peaks: dict[str, float | None]) -> str:
    """Times and memory, with ratios to the plain network (the first whose name says so)."""
    plain = next((name for name in timings if name.startswith("plain")), None)
    lines = [
        title,
        f"  {'provider':22} {'ms p50':>9} {'p20':>9} {'p80':>9} {'/plain':>7}"
        f" {'peak MB':>9} {'/plain':>7}",
    ]
    for name, timing in timings.items():
        peak, base = peaks.get(name), peaks.get(plain)
        slower = f"{timing.p50 / timings[plain].p50:7.3f}" if plain else f"{'':7}"
        memory = f"{peak:9.0f}" if peak else ""
        larger = f"{peak / base:7.3f}" if peak and base else ""
        lines.append(
            f"  {name:22} {timing.p50:9.3f} {timing.p20:9.3f} {timing.p80:9.3f} {slower}"
            f" {memory} {larger}".rstrip()
        )
    return "\n".join(lines)


@contextlib.contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


# training


def check_kernels(bench: Bench) -> None:
    """Loss and gradients of the CE network in float32 against plain PyTorch, on a small batch."""
    x, labels = bench.images(8, 64), bench.labels(8)
    model = bench.placed(build("ce"))

    def loss_and_gradients(backend: str) -> tuple[Tensor, list[Tensor]]:
        network = deepcopy(model).train()
        with tf32(False), ops.backend(backend):
            loss = nn.functional.cross_entropy(network(x), labels)
            return loss.detach(), torch.autograd.grad(loss, list(network.parameters()))

    ours, our_gradients = loss_and_gradients(bench.backend("ce"))
    expected, gradients = loss_and_gradients("torch")
    require("loss in float32", relative_error(ours, expected), 1e-3)
    # loose, and over all parameters at once: an error of 1e-6 in the input flips signs at ReLUs and
    # moves the gradient of the untrained network, plain or with CE, by 5 percent
    flat = [torch.cat([g.flatten() for g in gs]) for gs in (our_gradients, gradients)]
    require("gradients in float32", relative_error(*flat), 2e-1)


class Trainer:
    """A network with its optimizer and one batch."""

    def __init__(self, bench: Bench, name: str, compiled: bool) -> None:
        options = bench.options
        self.bench, self.backend = bench, bench.backend(name)
        self.x, self.labels = bench.images(options.batch), bench.labels(options.batch)
        self.model = bench.placed(build(name)).train()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4
        )
        self.forward: Callable[[Tensor], Tensor] = self.model
        if compiled:
            self.forward = static_compile(self.model, options.compile_mode)

    def loss(self, forward: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.autocast(self.bench.device.type, torch.bfloat16):
            return nn.functional.cross_entropy(forward(self.x), self.labels)

    def step(self) -> Tensor:
        with ops.backend(self.backend):
            loss = self.loss(self.forward)
            loss.backward()
        self.optimizer.step()
        # at the end, so that a step begins and ends with no gradients in memory
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def plain_loss(self) -> Tensor:
        """What the next step should give: eager, plain PyTorch, on a copy."""
        with ops.backend("torch"):
            return self.loss(deepcopy(self.model))

    def own_mb(self) -> float:
        momentum = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        own = [*self.model.parameters(), *self.model.buffers(), *momentum, self.x, self.labels]
        return sum(tensor.numel() * tensor.element_size() for tensor in own) / MB


def train(bench: Bench, *, compiled: bool) -> None:
    runs, peaks = {}, {}
    suffix = "_compiled" if compiled else ""
    for network in bench.options.networks:
        name = network + suffix
        with bench.failures.caught(f"{name} train", bench.device):
            if network == "ce":
                check_kernels(bench)
            trainer = Trainer(bench, network, compiled)
            expected = trainer.plain_loss()
            loss = first_run(name, trainer.step, bench.device, compiled=compiled)
            require("first loss in bfloat16", relative_error(loss, expected), 5e-2)
            peak = peak_mb(trainer.step, bench.device)
            peaks[name] = None if peak is None else peak + trainer.own_mb()
            runs[name] = trainer.step
    shape = shape_text((bench.options.batch, 3, bench.options.size, bench.options.size))
    mode = bench.mode("train", compiled=compiled)
    bench.measure(runs, peaks, mode=mode, shape=shape, dtype="bfloat16")


# inference


def settle_statistics_(model: nn.Module, x: Tensor) -> None:
    """Give the network the running statistics of some batches."""
    model.train()
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn_like(x))
    model.eval()


def folded_ce(model: nn.Module) -> nn.Module:
    # folded in float64, because fold_ce allows less change than float32 weights have by rounding
    with ops.backend("torch"):
        return fold_ce(deepcopy(model).double()).float()


@torch.no_grad()
def check_folded(folded: nn.Module, model: nn.Module, x: Tensor) -> None:
    with tf32(False), ops.backend("torch"):
        expected = model(x)
    with tf32(False):
        require("folded logits", relative_error(folded(x), expected), 1e-3)


def deployed_network(bench: Bench, name: str) -> nn.Module:
    """A network in evaluation; a folded one is checked against what it was folded from."""
    x = bench.images(8)
    network, _, folded = name.partition("_")
    options = {"fused": bench.options.fold_fused} if network == "ce" else {}
    model = bench.placed(build(network, **options))
    settle_statistics_(model, x)
    if not folded:
        return model
    deployed = bench.placed(folded_ce(model) if network == "ce" else folded_plain(model))
    check_folded(deployed, model, x)
    return deployed


def deployed_run(bench: Bench, name: str, x: Tensor, dtype: str) -> Run:
    """Compiled inference in `dtype`, checked against eager float32."""
    model = deployed_network(bench, name.removesuffix("_compiled"))
    with torch.no_grad(), tf32(False):
        expected = model(x)
    if dtype == "bfloat16":
        model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    compiled = static_compile(model, bench.options.compile_mode)
    run = torch.no_grad()(lambda: compiled(x))
    logits = first_run(name, run, bench.device, compiled=True)
    require(f"logits in {dtype}", relative_error(logits, expected), LOGITS_TOLERANCE[dtype])
    return run


def infer(bench: Bench, dtype: str) -> None:
    options = bench.options
    x = bench.images(options.inference_batch)
    runs = {}
    for network in options.networks:
        for name in (f"{deployed}_compiled" for deployed in DEPLOYED.get(network, ())):
            with bench.failures.caught(f"{name} inference {dtype}", bench.device):
                runs[name] = deployed_run(bench, name, x, dtype)
    mode = bench.mode("inference", compiled=True)
    bench.measure(runs, {}, mode=mode, shape=shape_text(tuple(x.shape)), dtype=dtype)


def run_part(bench: Bench, part: str) -> None:
    print(part, flush=True)
    torch._dynamo.reset()
    kind, _, variant = part.partition("-")
    if kind == "train":
        train(bench, compiled=variant == "compiled")
    else:
        with tf32(variant == "tf32"):
            infer(bench, {"bf16": "bfloat16"}.get(variant, variant))
    free_memory(bench.device)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--networks", nargs="+", choices=MAKERS, default=["plain", "se", "ce"])
    add("--batch", type=int, default=256)
    add("--inference-batch", type=int, default=32)
    add("--size", type=int, default=224)
    add("--rounds", type=int, default=20)
    add("--backend", choices=("triton", "auto"), default="triton", help="backend of `ce` on a GPU")
    add("--compile-mode", choices=("reduce-overhead",), help="reduce-overhead: CUDA graphs")
    add(
        "--fold-fused",
        action="store_true",
        help="for inference, fold the network whose layers take the shortcut",
    )
    add("--device", default="cuda")
    add("--out", type=Path, default=RESULTS / "resnet50.csv", help="CSV file to append rows to")
    return parser.parse_args()


def main() -> int:
    bench = Bench(arguments())
    if bench.device.type != "cuda":
        print("no CUDA device: `ce` runs plain PyTorch")
    for part in bench.options.parts:
        run_part(bench, part)
    print("\n\n".join(["", *bench.tables]))
    print(f"\n{bench.environment}\nrows in {bench.options.out}")
    return bench.failures.exit_code()


if __name__ == "__main__":
    sys.exit(main())
