"""What SyncCE costs in DDP on several processes of this machine: time of a step, and bytes.

Networks without CE, with each rank's own CE and with SyncCE train in turns, so that other work on
the machine hits all. What SyncCE sends is counted as its collectives are called.

    python benchmarks/bench_sync.py                                    # two gloo processes, CPU
    python benchmarks/bench_sync.py --ranks 8 --backend nccl --size 224 --batch 32    # 8 GPUs
"""

import argparse
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
from cenet.models import create_model
from cenet.nn.sync import sync_bytes

ROWS = ("plain", "ce", "sync")


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
    with Collectives() as seen:
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
    arguments = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(work, (arguments, port), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
