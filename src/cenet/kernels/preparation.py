"""Compiling the kernels of a network in parallel, before its first step.

Steps are rehearsed on a copy of the network: what they would launch is collected, and nothing is
launched. Kernels are then loaded from Triton's cache one by one, which is Python code that threads
would only slow down. After the first one that is not in the cache, threads compile all of the rest
at once: Triton's compiler holds Python's lock for only a tenth of its time.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from copy import deepcopy
from threading import Lock
from typing import Any

import torch
from torch import nn
from triton import knobs

from cenet.kernels.launch import (
    INTERPRETED,
    Key,
    Wanted,
    collecting,
    compile_kernel,
    driver,
    is_compiled,
)
from cenet.kernels.tiles import TUNED_ON

Step = Callable[[nn.Module], object]


def prepare(network: nn.Module, *steps: Step, shown: bool = True) -> None:
    """Compile the kernels that these steps will launch, or load them from Triton's cache.

    Kernels that cannot be compiled are left to the step that needs them, which raises. Meanwhile no
    other thread may run CE layers.

    Args:
        network: the network, on its GPU; it is not changed.
        steps: each is called with a copy of the network, and does with it what training or
            evaluation will do: same shapes, dtypes, layout and mode. CE layers return zeros then.
        shown: whether to print a line when something has to be compiled.

    Example:
        ```python
        def step(copy):
            with torch.autocast("cuda", torch.bfloat16):
                loss = criterion(copy.train()(images), labels)
            loss.backward()


        prepare(network, step)
        ```
    """
    found = rehearse(network, *steps)
    if not INTERPRETED:
        _compile({key: one for key, one in found.items() if not is_compiled(key)}, shown)


def rehearse(network: nn.Module, *steps: Step) -> dict[Key, Wanted]:
    """The kernels that `steps` would launch, as far as memory allows a copy of the network."""
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    with collecting() as found, _same_chance(device), suppress(torch.OutOfMemoryError):
        copy = deepcopy(network)
        for step in steps:
            step(copy)
            copy.zero_grad()
    return found


@contextmanager
def _same_chance(device: torch.device) -> Iterator[None]:
    """Restore the states of all random number generators afterwards."""
    numpy: Any = sys.modules.get("numpy")  # torch imports it where it is installed
    python = random.getstate()
    legacy = None if numpy is None else numpy.random.get_state()  # timm draws from this one
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(legacy)


def _compile(wanted: dict[Key, Wanted], shown: bool) -> None:
    if not wanted:
        return
    # processes of torchrun share the cores
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, min(cores, len(wanted)))
    device = driver.active.get_current_device()  # made here: threads would each make a driver
    for kernel in {id(one.kernel): one.kernel for one in wanted.values()}.values():
        # likewise: threads would see incomplete keys of kernels that share a function, and miss
        # them in the cache
        kernel.cache_key  # noqa: B018
    started = time.perf_counter()
    words = f"compiling kernels for this GPU in {threads} threads; they are kept in "
    words += f"{knobs.cache.dir} (TRITON_CACHE_DIR)"
    if torch.cuda.get_device_name(device) != TUNED_ON:
        words += f"; their tiles were tuned on an {TUNED_ON}"
    with _counted(words if shown else "") as counted:
        pool = ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(device,))
        rest = iter(wanted.items())
        try:
            for key, one in rest:
                wait([pool.submit(_load, key, one)])  # an error is left to the step, too
                if counted:
                    break
            wait([pool.submit(_load, key, one) for key, one in rest])
        finally:
            pool.shutdown(cancel_futures=True)
    if counted and shown:
        print(f"compiled {len(counted)} in {time.perf_counter() - started:.1f} s", flush=True)


def _load(key: Key, wanted: Wanted) -> None:
    """Compile a kernel and its launcher, without launching it."""
    compile_kernel(key, wanted)[(1, 1, 1)]


@contextmanager
def _counted(words: str) -> Iterator[list[str]]:
    """Names of the kernels that were not in the cache; `words` are printed at the first of them."""
    names: list[str] = []
    lock = Lock()
    before = knobs.compilation.listener

    def listener(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        if before is not None:
            before(src=src, cache_hit=cache_hit, **rest)
        if cache_hit:
            return
        with lock:
            if not names and words:
                print(words, flush=True)
            names.append(src.name)

    knobs.compilation.listener = listener
    try:
        yield names
    finally:
        knobs.compilation.listener = before
