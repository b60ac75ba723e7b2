"""One process, or the processes that torchrun started, and the values they exchange."""

import gc
import os
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# imported after `start`, its functions would keep the process group as a default argument
import torch.distributed.nn.functional
from torch import Tensor, nn

TIMEOUT = timedelta(minutes=10)


class Processes(NamedTuple):
    """This process and how many there are.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
        device: device of this process.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0


def rank() -> int:
    """Number of this process as torchrun set it, also before `start`; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def is_first_process() -> bool:
    """Whether this is the process that prints; known before `start`."""
    return rank() == 0


def start(device: str = "auto") -> Processes:
    """Join the processes that torchrun has started; without torchrun, there is one process.

    Args:
        device: cpu, cuda, or auto for cuda where there is one.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no CUDA device; use --device cpu")
    place = torch.device(device)
    if device == "cuda":
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(place)
    if "RANK" not in os.environ:
        return Processes(0, 1, place)
    if not dist.is_initialized():
        # hosts exchange values over gloo, without waiting for GPUs
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=TIMEOUT)
    return Processes(dist.get_rank(), dist.get_world_size(), place)


def finish() -> None:
    """Leave the process group and end its threads.

    A thread that frees a tensor while the interpreter exits aborts the process. The threads of gloo
    end with the last reference to the group, so the caller must not hold a
    `DistributedDataParallel`.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # wrapped networks refer to themselves


def total(values: Tensor, processes: Processes) -> Tensor:
    """The sum of a tensor over all processes."""
    if processes.world > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values


def highest(value: int, processes: Processes) -> int:
    """The maximum over all processes, exchanged by the hosts without waiting for a GPU."""
    if processes.world == 1:
        return value
    values = torch.tensor(value)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return int(values)


def any_of(flag: bool, processes: Processes) -> bool:
    """Whether the flag is set in any process."""
    return bool(highest(int(flag), processes))


def share_buffers_(module: nn.Module, processes: Processes) -> None:
    """Broadcast the buffers of the first process, which are the ones that are saved."""
    if processes.world > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)


def gathered(value: Any, processes: Processes) -> list[Any]:
    """The values of all processes, in order of their rank."""
    if processes.world == 1:
        return [value]
    values: list[Any] = [None] * processes.world
    dist.all_gather_object(values, value)
    return values
