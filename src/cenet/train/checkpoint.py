"""Checkpoints: their content, and a writer that works while the training continues.

A checkpoint is a safetensors file. It holds the tensors of the run, and in its header the metadata
(everything that is not a tensor, as JSON) and a digest of both. It is written to another name,
synced to the disk and renamed, so a file with the name of a checkpoint is complete. Reading a
checkpoint compares the digest and never executes code.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from cenet.files import check_regular, digest, replacing
from cenet.internals import copy_each
from cenet.run_folder import CHECKPOINT

Metadata = dict[str, Any]
Tensors = dict[str, Tensor]

KEPT = 2  # checkpoints of a run
GROUP = "group "  # before the number of a group of an optimizer's parameters


class DamagedCheckpoint(ValueError):
    """A file whose content does not match its digest."""


# files


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a checkpoint; if that fails, `path` holds what it held before.

    Args:
        path: the file.
        tensors: by name; on the CPU, dense, and no two in the same memory.
        metadata: everything else, in types of JSON.
    """
    text = json.dumps(metadata, allow_nan=True, sort_keys=True)
    header = {"facts": text, "digest": digest(tensors, text)}
    with replacing(path) as room:
        # this does not hold Python's lock; its temporary files are beside the one it writes
        save_file(dict(tensors), room / path.name, header)


def read(path: Path) -> tuple[Tensors, Metadata]:
    """Tensors and metadata of a checkpoint; DamagedCheckpoint if one bit of it has changed."""
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamagedCheckpoint(f"{path} cannot be read as a checkpoint: {reason}") from error
    if "facts" not in header or "digest" not in header:
        raise DamagedCheckpoint(f"{path} was not written by `cenet train`: it has no digest")
    if digest(tensors, header["facts"]) != header["digest"]:
        raise DamagedCheckpoint(f"{path} is damaged: its content does not match its digest")
    metadata: Metadata = json.loads(header["facts"])
    return tensors, metadata


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a run, newest first; copies that a user has made are not among them."""
    found = [(re.fullmatch(CHECKPOINT, path.name), path) for path in folder.glob("step-*")]
    numbered = {int(name[1]): path for name, path in found if name}
    return [numbered[updates] for updates in sorted(numbered, reverse=True)]


def checkpoint_path(folder: Path, updates: int) -> Path:
    """Path of the checkpoint after this many updates."""
    return folder / f"step-{updates:09d}.safetensors"


def forget_old(folder: Path) -> None:
    """Remove all but the newest checkpoints."""
    for path in checkpoints(folder)[KEPT:]:
        path.unlink(missing_ok=True)


def newest(folder: Path) -> tuple[Path, Tensors, Metadata, list[str]] | None:
    """The newest undamaged checkpoint, and the errors of newer ones; None without checkpoints.

    Raises:
        DamagedCheckpoint: there are checkpoints, and all are damaged.
    """
    problems: list[str] = []
    for path in checkpoints(folder):
        try:
            return path, *read(path), problems
        except DamagedCheckpoint as error:
            problems.append(str(error))
    if problems:
        raise DamagedCheckpoint(
            f"{'; '.join(problems)}. None is intact: start again in another --out"
        )
    return None


# content


def strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors whose names start with `prefix.`, by the rest of their names."""
    start = f"{prefix}."
    return {
        name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
    }


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors with `prefix.` in front of their names."""
    return {f"{prefix}.{name}": value for name, value in tensors.items()}


def module_state(module: nn.Module) -> Tensors:
    """The state dict of a module, whose values are all tensors."""
    return dict(module.state_dict())


def optimizer_state(optimizer: Optimizer) -> tuple[Tensors, Metadata]:
    """Tensors of an optimizer by `INDEX.NAME`, and everything else as metadata.

    Tensors of a group (LAMB counts its steps there) are named `group INDEX.NAME`.
    """
    state = optimizer.state_dict()
    tensors: Tensors = {}
    rest: dict[str, Metadata] = {}
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                rest.setdefault(str(index), {})[name] = value
    groups: list[Metadata] = []
    for number, group in enumerate(state["param_groups"]):
        own = {name: value for name, value in group.items() if isinstance(value, Tensor)}
        tensors |= with_prefix(f"{GROUP}{number}", own)
        groups.append({name: value for name, value in group.items() if name not in own})
    return tensors, {"groups": groups, "rest": rest}


def load_optimizer_(optimizer: Optimizer, tensors: Tensors, metadata: Metadata) -> None:
    """Load what `optimizer_state` returned, in place."""
    state: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in metadata["rest"].items()
    }
    groups = [dict(group) for group in metadata["groups"]]
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        if index.startswith(GROUP):
            groups[int(index.removeprefix(GROUP))][name] = value
        else:
            state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                # fused optimizers need the strides of the parameter; files keep no channels_last
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def seed_everything(seed: int) -> None:
    """Seed all random number generators of this process."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # noqa: NPY002, timm uses it


def rng_state(device: torch.device) -> tuple[Tensors, Metadata]:
    """The state of all random number generators of this process."""
    kind, keys, position, has_gauss, gauss = numpy.random.get_state()  # noqa: NPY002
    version, internal, next_gauss = random.getstate()
    tensors = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
        "python": torch.tensor(internal),
    }
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    return tensors, {
        "numpy": [kind, int(position), int(has_gauss), float(gauss)],
        "python": [version, next_gauss],
    }


def set_rng_state(device: torch.device, tensors: Tensors, metadata: Metadata) -> None:
    """Set the generators to the state that `rng_state` returned."""
    torch.set_rng_state(tensors["torch"])
    kind, position, has_gauss, gauss = metadata["numpy"]
    keys = tensors["numpy"].numpy().astype(numpy.uint32)
    numpy.random.set_state((kind, keys, position, has_gauss, gauss))  # noqa: NPY002
    version, next_gauss = metadata["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), next_gauss))
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)


# writing while the training continues


class Staging:
    """Copies of tensors as they are at one moment, made without stopping the device.

    Tensors of a GPU are copied twice: first to other memory of the GPU, which takes little time,
    and from there to pinned memory of the host, on a stream of its own while training changes the
    originals. The memory for both copies is kept for the next call.
    """

    def __init__(self) -> None:
        """Memory is allocated when the first copy is taken."""
        self._device: Tensors = {}
        self._host: Tensors = {}
        self._stream: Any = None

    def take(self, tensors: Mapping[str, Tensor]) -> Callable[[], Tensors]:
        """Copy the tensors as they are now; the function waits for the copies and returns them.

        Copies are dense and share no memory. Those of a GPU are valid until the next `take`.
        """
        here = {name: value.detach() for name, value in tensors.items() if not value.is_cuda}
        there = {name: value.detach() for name, value in tensors.items() if value.is_cuda}
        copies = {
            name: value.clone(memory_format=torch.contiguous_format) for name, value in here.items()
        }
        arrived = self._from_device(there) if there else None

        def wait() -> Tensors:
            if arrived is not None:
                arrived.synchronize()
            return copies if arrived is None else {**copies, **self._host}

        return wait

    def _from_device(self, tensors: Tensors) -> Any:
        """Start the copies and return the event of their arrival."""
        if not _alike(tensors, self._device):
            self._device = {
                name: torch.empty_like(value, memory_format=torch.contiguous_format)
                for name, value in tensors.items()
            }
            self._host = {
                name: torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
                for name, value in tensors.items()
            }
            make: Any = torch.cuda.Stream
            self._stream = make()
        copy_each(list(self._device.values()), list(tensors.values()))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, value in self._device.items():
                self._host[name].copy_(value, non_blocking=True)
        return self._stream.record_event()


def _alike(one: Tensors, other: Tensors) -> bool:
    """Whether both have the same names in the same order, with the same shapes and types."""
    return list(one) == list(other) and all(
        value.shape == other[name].shape and value.dtype == other[name].dtype
        for name, value in one.items()
    )


class BackgroundWriter:
    """Runs one job at a time in a thread; the error of a job is raised at the next call.

    The end of a `with` statement waits for the job that is running.
    """

    def __init__(self) -> None:
        """The thread starts with the first job."""
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None

    def __enter__(self) -> "BackgroundWriter":
        """Return the writer itself; jobs can be started outside of a `with` statement, too."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait for the job; its error is not raised if the run itself failed."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if kind is None:
            self.wait()

    def start(self, job: Callable[[], None]) -> None:
        """Start a job after waiting for the one before it."""
        self.wait()
        self._thread = self._thread or ThreadPoolExecutor(1, "cenet writes")
        self._job = self._thread.submit(job)

    def look(self) -> None:
        """Raise the error of a failed job, without waiting for one that is running."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait until no job is running, and raise the error of the last one."""
        job, self._job = self._job, None
        if job is not None:
            job.result()
