"""The state of a run: network, optimizer, schedule and position, saved and restored."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import cenet.train.checkpoint as checkpoint
from cenet.checkpoints import load_state_
from cenet.data.datasets import InputSpec
from cenet.data.order import Shard
from cenet.data.sources import are_same_images
from cenet.distributed import Processes, gathered, total
from cenet.run_folder import WEIGHTS
from cenet.train.build import build_optimizer, build_schedule
from cenet.train.checkpoint import BackgroundWriter, Staging
from cenet.train.cuda_graphs import side_stream
from cenet.train.options import RunOptions
from cenet.train.recipes import TrainingRecipe


@dataclass
class Position:
    """How far a run has come.

    Attributes:
        sums: sums over the images of the epoch so far: first the loss, last the number of images.
        epoch: number of the epoch, from 0.
        step: steps done in the epoch.
        updates: optimizer updates done in the run.
        seconds: duration of the epoch so far, also from before an interruption.
    """

    sums: Tensor
    epoch: int = 0
    step: int = 0
    updates: int = 0
    seconds: float = 0.0


class RunState:
    """Network, optimizer, schedule and position of a run in this process.

    Attributes:
        ema: averaged weights, or None.
        writer: writes checkpoints while the training continues.
    """

    ema: Any = None

    def __init__(
        self,
        recipe: TrainingRecipe,
        network: nn.Module,
        inputs: InputSpec,
        options: RunOptions,
        processes: Processes,
        *,
        images: int,
        data: str,
        sums: int,
    ) -> None:
        """Build optimizer and schedule for `network`, which is on the device of this process.

        Args:
            recipe, network, options, processes: those of the run.
            inputs: the input spec of the network.
            images: number of training images.
            data: a digest of images and labels.
            sums: length of `position.sums`.
        """
        self.recipe, self.network, self.inputs = recipe, network, inputs
        self.options, self.processes, self.digest = options, processes, data
        self.shard = Shard(images, recipe.batch_size, rank=processes.rank, world=processes.world)
        if recipe.accumulate > self.shard.steps:
            raise ValueError(
                f"accumulate={recipe.accumulate} is more than the {self.shard.steps} steps of an "
                "epoch; lower it"
            )
        self.updates_per_epoch = self.shard.steps // recipe.accumulate
        per_update = recipe.batch_size * processes.world * recipe.accumulate
        self.optimizer: Optimizer = build_optimizer(recipe, network, images_per_update=per_update)
        self.schedule: Scheduler = build_schedule(
            recipe, self.optimizer, updates_per_epoch=self.updates_per_epoch
        )
        device = processes.device
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "float16")
        self.position = Position(torch.zeros(sums, dtype=torch.float64, device=device))
        self.wrapped: Any = _distributed(network, device) if dist.is_initialized() else network
        self.writer = BackgroundWriter()
        self._staging = Staging()
        self._saved = time.monotonic()

    @property
    def evaluated(self) -> nn.Module:
        """The network that is tested and written: the averaged one if there is one."""
        if self.ema is None:
            return self.network
        averaged: nn.Module = self.ema.module
        return averaged

    def save(self) -> None:
        """Save a checkpoint of the present state; all processes must call this.

        It is written while the training continues; `writer.wait()` waits until it is on the disk.
        """
        rng_states = gathered(checkpoint.rng_state(self.processes.device), self.processes)
        sums = total(self.position.sums, self.processes)
        if not self.processes.is_first:
            return
        momenta, optimizer = checkpoint.optimizer_state(self.optimizer)
        tensors = {
            **checkpoint.with_prefix("model", checkpoint.module_state(self.network)),
            **checkpoint.with_prefix("optimizer", momenta),
            "position.sums": sums,
        }
        if self.ema is not None:
            tensors |= checkpoint.with_prefix("ema", checkpoint.module_state(self.ema.module))
        for rank, (state, _) in enumerate(rng_states):
            tensors |= checkpoint.with_prefix(f"chance.{rank}", state)
        position = {name: value for name, value in vars(self.position).items() if name != "sums"}
        metadata = {
            "recipe": self.recipe.as_dict(),
            "position": position,
            "images": self.position.step * self.recipe.batch_size * self.processes.world,
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "chance": [rest for _, rest in rng_states],
            "inputs": self.inputs.as_dict(),
            "data": self.digest,
        }
        self.writer.wait()  # it may still read the copies that `take` overwrites
        copies = self._staging.take(tensors)
        folder = self.options.out
        path = checkpoint.checkpoint_path(folder, self.position.updates)

        def write() -> None:
            checkpoint.write(path, copies(), metadata)
            checkpoint.forget_old(folder)

        self.writer.start(write)
        self._saved = time.monotonic()

    def save_is_due(self) -> bool:
        """Whether the last checkpoint is older than --checkpoint-seconds.

        Always False without the option, and in all processes but the first.
        """
        seconds = self.options.checkpoint_seconds
        return self.processes.is_first and 0 < seconds <= time.monotonic() - self._saved

    def resume(self) -> str | None:
        """Load the newest undamaged checkpoint; return a message, or None without a checkpoint.

        Raises:
            ValueError: all checkpoints are damaged, or the run is of another recipe or other data.
        """
        found = checkpoint.newest(self.options.out)
        if found is None:
            return None
        path, tensors, metadata, problems = found
        self._check_recipe(path, metadata)
        load_state_(self.network, checkpoint.strip_prefix("model", tensors))
        if self.ema is not None:
            load_state_(self.ema.module, checkpoint.strip_prefix("ema", tensors))
        checkpoint.load_optimizer_(
            self.optimizer, checkpoint.strip_prefix("optimizer", tensors), metadata["optimizer"]
        )
        self.scaler.load_state_dict(metadata["scaler"])
        position = dict(metadata["position"])
        # with another number of processes a step has another number of images
        per_step = self.recipe.batch_size * self.processes.world
        position["step"] = metadata["images"] // per_step
        sums = tensors["position.sums"].to(self.processes.device)
        if not self.processes.is_first:  # they were summed over all processes
            sums = torch.zeros_like(sums)
        self.position = Position(sums, **position)
        rank = self.processes.rank
        if rank < len(metadata["chance"]):
            states = checkpoint.strip_prefix(f"chance.{rank}", tensors)
            checkpoint.set_rng_state(self.processes.device, states, metadata["chance"][rank])
        said = [f"{problem}; using an older one" for problem in problems]
        where = f"epoch {self.position.epoch + 1}, step {self.position.step}"
        if self.position.epoch == self.recipe.epochs:
            where = f"all {self.recipe.epochs} epochs are trained"
        return "\n".join([*said, f"resuming from {path.name}: {where}"])

    def _check_recipe(self, path: Path, metadata: dict[str, Any]) -> None:
        own = self.recipe.as_dict()
        # files of earlier versions lack fields; the defaults behave as those versions did
        saved = {**self.recipe.defaults(), **metadata.get("recipe", {})}
        changed = [
            f"{name} was {saved.get(name)!r} and is {own.get(name)!r}"
            for name in sorted({*saved, *own} - {"accuracy"})  # it changes no number
            if saved.get(name) != own.get(name)
        ]
        # another recipe may read or normalize the same images otherwise
        if not changed and not self.inputs.agrees_with(metadata.get("inputs", {})):
            changed.append("the classes or the pixels of the data differ")
        elif not changed and not self._is_of_same_data(str(metadata.get("data"))):
            changed.append("the images, their labels or their annotations differ")
        if changed:
            message = f"{path} is a checkpoint of another run: {'; '.join(changed)}; "
            message += "use another --out for this one"
            if self.recipe.command == "cenet train" and (self.options.out / WEIGHTS).is_file():
                message += f" (with --weights {self.options.out} it starts from these weights)"
            raise ValueError(message)

    def _is_of_same_data(self, digest: str) -> bool:
        before, now = digest.split(), self.digest.split()  # of detection, training and test
        return len(before) == len(now) and all(map(are_same_images, before, now))


def _distributed(network: nn.Module, device: torch.device) -> nn.Module:
    """The network wrapped so that its gradients are averaged over all processes."""
    if device.type == "cpu":
        return DistributedDataParallel(network)
    with side_stream():  # so that a CUDA graph of it can be captured
        return DistributedDataParallel(network, device_ids=[device.index])
