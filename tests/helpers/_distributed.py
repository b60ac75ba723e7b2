"""Runs a function on several gloo processes of this machine and brings its results back."""

import atexit
import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils._python_dispatch import TorchDispatchMode

TIMEOUT = timedelta(seconds=60)
# ranks are copies of a process that has imported what takes seconds, and computed nothing
SERVER = mp.get_context("forkserver")
SERVER.set_forkserver_preload(["torch.distributed", "torchvision", "timm", "cenet.models"])


def run(function: Callable[..., Any], ranks: int, *args: Any, timeout: float = 120) -> list[Any]:
    """`function(rank, *args)` on every rank; what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        _processes(_work, (function, ranks, folder, args), ranks, timeout)
        results = [Path(folder, f"{rank}.pt") for rank in range(ranks)]
        return [torch.load(result, weights_only=False) for result in results]


def run_alone(function: Callable[..., Any], *args: Any, timeout: float = 120) -> None:
    """`function(*args)` in a process that has no threads and no process group: it may fork."""
    _processes(_call, (function, args), 1, timeout)


def _processes(
    work: Callable[..., None], args: tuple[Any, ...], ranks: int, timeout: float
) -> None:
    context = mp.start_processes(work, args, ranks, join=False, start_method="forkserver")
    deadline = time.monotonic() + timeout
    while not context.join(1):  # true when the last rank has ended
        if time.monotonic() > deadline:
            for process in context.processes:
                process.kill()
            raise TimeoutError(f"the processes did not end within {timeout} s")


def torchrun(*arguments: str, processes: int = 2) -> subprocess.Popen[bytes]:
    """A command of cenet in several processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(20000 + os.getpid() % 20000), "-m", "cenet"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *arguments], env=environment)


def once(name: str, function: Callable[[], Any]) -> Any:
    """The result of `function`, which one of pytest's workers computes for all."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        return function()
    folder = Path(tempfile.gettempdir(), f"cenet-{session}")
    folder.mkdir(exist_ok=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = folder / f"{name}.pt"
        if not result.exists():
            torch.save(function(), result)
        return torch.load(result, weights_only=False)


def _work(rank: int, function: Callable[..., Any], ranks: int, folder: str, args: Any) -> None:
    torch.set_num_threads(1)
    with joined(rank, ranks, folder, TIMEOUT):
        result = function(rank, *args)
    torch.save(result, Path(folder, f"{rank}.pt"))


def _call(rank: int, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    function(*args)


@contextlib.contextmanager
def joined(rank: int, ranks: int, folder: str, timeout: timedelta) -> Iterator[None]:
    """A gloo process group of all ranks, met through a file."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Collectives(TorchDispatchMode):
    """Names of the collectives that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            self.names.append(func.name().split("::")[1].split(".")[0])
        return func(*args, **(kwargs or {}))
