"""Cost of SyncCE in DDP with several processes on this machine: time of a step, and bytes.

Networks without CE, with CE of each rank alone and with SyncCE train alternately, so that other
work on the machine affects all of them. The bytes of SyncCE are counted when its collectives are
called.

    python benchmarks/bench_sync.py                                    # two gloo processes, CPU
    python benchmarks/bench_sync.py --ranks 8 --backend nccl --size 224 --batch 32    # 8 GPUs

With --layer SHAPE, one layer is timed instead, forward and backward, on one GPU: not synchronized,
synchronized over one NCCL rank, and over gloo processes that share the GPU. A row is printed only
after its outputs and gradients agreed with float64 on the images of all ranks.

    python benchmarks/bench_sync.py --layer 256x512x28x28
"""

import argparse
import copy
import os
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import cenet
from _runner import dimensions, percentiles, relative_error, require, shape_text, synchronize
from cenet import ChannelEquilibrium2d, NormCE2d, ops
from cenet.models import create_model
from cenet.nn.sync import sync_bytes

ROWS = ("plain", "ce", "sync")
# of a layer: title, synchronized, backend of cenet
LAYER_ROWS = (("CE", False, "auto"), ("SyncCE", True, "auto"))
PLAIN_ROWS = (("CE, plain PyTorch", False, "torch"), ("SyncCE, plain PyTorch", True, "torch"))
CHECKED = 8  # images per rank that are compared with float64
Y_TOLERANCE, GRADIENT_TOLERANCE = 1.5e-2, 5e-2  # of bfloat16
REPEATS = 10  # steps of a sample


class Collectives(TorchDispatchMode):
    """Counts what functional collectives are given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in func.name():
            self.calls += 1
            self.bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


class Runner:
    """One network under DDP."""

    def __init__(self, network: str, row: str, rank: int, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        block = "plain" if row == "plain" else "ce"
        model = create_model(network, block=block, num_classes=10)
        if row == "sync":
            cenet.convert_sync_ce(model)
        self.computed = 0 if row == "plain" else sync_bytes(model)
        device = torch.device("cuda", rank) if arguments.backend == "nccl" else torch.device("cpu")
        self.model = DistributedDataParallel(model.to(device).train())
        self.gradients = sum(p.numel() * p.element_size() for p in model.parameters())
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        shape = (arguments.batch, 3, arguments.size, arguments.size)
        self.images = torch.randn(shape, device=device)
        self.labels = torch.randint(10, shape[:1], device=device)

    def step(self) -> float:
        """Seconds of one."""
        dist.barrier()
        started = time.perf_counter()
        loss = nn.functional.cross_entropy(self.model(self.images), self.labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.images.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started


def work(rank: int, arguments: argparse.Namespace, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if arguments.backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(arguments.backend, rank=rank, world_size=arguments.ranks)
    table = Table(
        title=f"{arguments.ranks} {arguments.backend} processes, {arguments.batch} images of "
        f"{arguments.size}² each, n = {arguments.rounds} steps in turns"
    )
    for column in ("network", "CE / plain", "SyncCE / plain", "SyncCE / CE", "collectives",
                   "bytes", "computed", "gradients, MB"):  # fmt: skip
        table.add_column(column, justify="left" if column == "network" else "right", no_wrap=True)
    for network in arguments.networks:
        table.add_row(network, *measure(network, rank, arguments))
    if rank == 0:
        Console(width=140).print(table)
    dist.destroy_process_group()


def measure(network: str, rank: int, arguments: argparse.Namespace) -> list[str]:
    """A row of the table."""
    runners = {row: Runner(network, row, rank, arguments) for row in ROWS}
    for runner in runners.values():
        runner.step()  # DDP makes its buckets anew after the first
    # inside the kernels' operators they are out of sight, and send the same messages
    with Collectives() as seen, ops.backend("torch"):
        runners["sync"].step()
    forward = seen.bytes // (1 + arguments.ranks)  # what comes back is of all ranks
    seconds: dict[str, list[float]] = {row: [] for row in ROWS}
    for _ in range(arguments.rounds):
        for row, runner in runners.items():
            seconds[row].append(slowest(runner.step(), runner.images))
    ratios = []
    for over, under in (("ce", "plain"), ("sync", "plain"), ("sync", "ce")):
        found = [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
        ratios.append(f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})")
    return [
        *ratios, str(seen.calls), str(forward), str(runners["sync"].computed),
        f"{runners['sync'].gradients / 1e6:.1f}",
    ]  # fmt: skip


def slowest(seconds: float, like: Tensor) -> float:
    """The time of the last rank."""
    time_ = torch.tensor(seconds, device=like.device)
    dist.all_reduce(time_, dist.ReduceOp.MAX)
    return time_.item()


class LayerRunner:
    """One layer in bfloat16, channels_last."""

    def __init__(self, row: tuple[str, bool, Any], shape: tuple[int, ...], rank: int) -> None:
        self.title, self.synchronized, self.backend = row
        torch.manual_seed(0)
        channels, device = shape[1], torch.device("cuda")
        exact = NormCE2d(nn.BatchNorm2d(channels), ChannelEquilibrium2d(channels))
        self.exact = exact.double().to(device)
        self.layer = copy.deepcopy(exact).float()
        self.layer.act = nn.ReLU()
        if self.synchronized:
            cenet.convert_sync_ce(self.layer)
        generator = torch.Generator("cuda").manual_seed(1 + rank)
        whole = torch.randn(shape, generator=generator, device=device) * (1 + rank) + rank
        self.x = whole.bfloat16().contiguous(memory_format=torch.channels_last).requires_grad_()
        self.grad = torch.randn_like(self.x)

    def step(self, images: int | None = None) -> tuple[Tensor, ...]:
        x = self.x if images is None else self.x.detach()[:images].requires_grad_()
        with ops.backend(self.backend):
            y = self.layer(x)
            parameters = tuple(self.layer.parameters())
            gradients = torch.autograd.grad(y, (x, *parameters), self.grad[:images])
        return y.detach(), *gradients

    def check(self, rank: int, ranks: int) -> None:
        """Raise AssertionError unless outputs and gradients are those of all images in float64."""
        found = [tensor.float() for tensor in self.step(CHECKED)]
        y, dx, *parameters = found
        x = self.x.detach()[:CHECKED].float()
        # rounding flips signs near zero: gradients are judged under the provider's own mask
        masked = self.grad[:CHECKED] * (y > 0)
        if self.synchronized and ranks > 1:
            x, masked = (gathered(tensor, ranks) for tensor in (x, masked.float()))
            for gradient in parameters:
                dist.all_reduce(gradient)
        mine = slice(rank * CHECKED, (rank + 1) * CHECKED) if len(x) > CHECKED else slice(None)
        leaf = x.double().requires_grad_()
        z = self.exact(leaf)
        leaves = (leaf, *self.exact.parameters())
        exact_dx, *exact = torch.autograd.grad(z, leaves, masked.double())
        require(f"y of {self.title}", relative_error(y, z.detach().relu()[mine]), Y_TOLERANCE)
        for own, value in zip((dx, *parameters), (exact_dx[mine], *exact), strict=True):
            error = relative_error(own, value)
            require(f"a gradient of {self.title}", error, GRADIENT_TOLERANCE)


def gathered(tensor: Tensor, ranks: int) -> Tensor:
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def layer_work(
    rank: int, arguments: argparse.Namespace, ranks: int, backend: str, port: int
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group(backend, rank=rank, world_size=ranks)
    rows = LAYER_ROWS + (PLAIN_ROWS if ranks > 1 else PLAIN_ROWS[:1])
    runners = [LayerRunner(row, arguments.layer, rank) for row in rows]
    samples: dict[str, list[float]] = {runner.title: [] for runner in runners}
    for runner in runners:
        runner.check(rank, ranks)
        for _ in range(3):
            runner.step()
    for _ in range(arguments.rounds):
        for runner in runners:
            synchronize(runner.x.device)
            dist.barrier()
            started = time.perf_counter()
            for _ in range(REPEATS):
                runner.step()
            synchronize(runner.x.device)
            passed = 1e3 * (time.perf_counter() - started) / REPEATS
            samples[runner.title].append(slowest(passed, runner.x))
    if rank == 0:
        shape = shape_text(arguments.layer)
        print(f"{ranks} {backend} rank(s) on one GPU, {shape} each, ms of forward and backward:")
        fastest = percentiles(samples["CE"]).p50
        for title, values in samples.items():
            p20, p50, p80 = percentiles(values)
            print(f"  {title:24} {p50:7.3f} ({p20:.3f} to {p80:.3f}) {p50 / fastest:6.2f}")
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--networks", nargs="*", default=["resnet18", "resnet50", "mobilenetv2_100"]
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--layer",
        type=dimensions,
        metavar="NxCxHxW",
        help="time one layer of this shape, on one GPU",
    )
    arguments = parser.parse_args()
    if arguments.layer is None:
        mp.spawn(work, (arguments, free_port()), nprocs=arguments.ranks)
        return
    if not torch.cuda.is_available():
        parser.error("--layer needs a GPU, and torch sees none")
    for ranks, backend in ((1, "nccl"), (arguments.ranks, "gloo")):
        mp.spawn(layer_work, (arguments, ranks, backend, free_port()), nprocs=ranks)


if __name__ == "__main__":
    main()
