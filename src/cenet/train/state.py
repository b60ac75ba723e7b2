"""The state of a run: what it is made of, saved beside the training, and brought back."""

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

import cenet.train.saving as saving
import cenet.train.snapshot as snapshot
from cenet.checkpoints import load_state_
from cenet.data.input_spec import InputSpec
from cenet.data.order import Shard
from cenet.distributed import Processes, gathered, total
from cenet.train.background import Background
from cenet.train.course import Course
from cenet.train.graphs import side_stream
from cenet.train.options import RunOptions
from cenet.train.setup import build_optimizer, build_schedule
from cenet.train.staging import Staging


@dataclass
class Position:
    """How far a run is."""

    sums: Tensor  # over the images of the epoch: first the loss, last their number
    epoch: int = 0
    step: int = 0  # of the epoch
    updates: int = 0
    seconds: float = 0.0  # of the epoch, until it was interrupted


class RunState:
    """Network, optimizer, schedule and position of a run in this process.

    Attributes:
        ema: averaged weights, or None.
        writer: writes checkpoints while the training goes on.
    """

    ema: Any = None

    def __init__(
        self,
        recipe: Course,
        network: nn.Module,
        inputs: InputSpec,
        options: RunOptions,
        processes: Processes,
        *,
        images: int,
        data: str,
        sums: int,
    ) -> None:
        """Build what trains `network`, which is on the device, on so many images.

        Args:
            recipe, network, options, processes: as their names say.
            inputs: what the network takes.
            images: of an epoch.
            data: a digest of the images, and of what is known about them.
            sums: numbers that a step adds to `position.sums`.
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
        self.writer = Background()
        self._staging = Staging()
        self._saved = time.monotonic()

    @property
    def evaluated(self) -> nn.Module:
        """The network whose accuracy counts: the averaged one if there is one."""
        if self.ema is None:
            return self.network
        averaged: nn.Module = self.ema.module
        return averaged

    def save(self) -> None:
        """Take a checkpoint of this moment; all processes take part.

        It is written while the training goes on. `writer.wait()` waits until it is on the disk.
        """
        own = snapshot.chance(self.processes.device)
        chances = gathered(own, self.processes)
        sums = total(self.position.sums, self.processes)
        if not self.processes.is_first:
            return
        momenta, optimizer = snapshot.optimizer_state(self.optimizer)
        tensors = {
            **snapshot.named("model", snapshot.module_state(self.network)),
            **snapshot.named("optimizer", momenta),
            "position.sums": sums,
        }
        if self.ema is not None:
            tensors |= snapshot.named("ema", snapshot.module_state(self.ema.module))
        for rank, (state, _) in enumerate(chances):
            tensors |= snapshot.named(f"chance.{rank}", state)
        position = {name: value for name, value in vars(self.position).items() if name != "sums"}
        facts = {
            "recipe": self.recipe.as_dict(),
            "position": position,
            "images": self.position.step * self.recipe.batch_size * self.processes.world,
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "chance": [facts for _, facts in chances],
            "inputs": self.inputs.as_dict(),
            "data": self.digest,
        }
        self.writer.wait()  # the room for copies is still in use
        copies = self._staging.take(tensors)
        folder = self.options.out
        path = saving.checkpoint_path(folder, self.position.updates)

        def write() -> None:
            saving.write(path, copies(), facts)
            saving.forget_old(folder)

        self.writer.start(write)
        self._saved = time.monotonic()

    def save_is_due(self) -> bool:
        """Whether the last checkpoint is older than --checkpoint-seconds; the first process says.

        Without the option, none is ever due.
        """
        seconds = self.options.checkpoint_seconds
        return self.processes.is_first and 0 < seconds <= time.monotonic() - self._saved

    def resume(self) -> str | None:
        """Go on from the newest whole checkpoint, and say from which; None if there is none.

        Raises:
            ValueError: no checkpoint is whole, or it is of another recipe or other data.
        """
        found = saving.newest(self.options.out)
        if found is None:
            return None
        path, tensors, facts, problems = found
        self._check_recipe(path, facts)
        load_state_(self.network, snapshot.under("model", tensors))
        if self.ema is not None:
            load_state_(self.ema.module, snapshot.under("ema", tensors))
        snapshot.load_optimizer_(
            self.optimizer, snapshot.under("optimizer", tensors), facts["optimizer"]
        )
        self.scaler.load_state_dict(facts["scaler"])
        position = dict(facts["position"])
        # with another number of processes a step has another number of images
        per_step = self.recipe.batch_size * self.processes.world
        position["step"] = facts["images"] // per_step
        sums = tensors["position.sums"].to(self.processes.device)
        if not self.processes.is_first:  # they are those of all processes
            sums = torch.zeros_like(sums)
        self.position = Position(sums, **position)
        rank = self.processes.rank
        if rank < len(facts["chance"]):
            states = snapshot.under(f"chance.{rank}", tensors)
            snapshot.set_chance(self.processes.device, states, facts["chance"][rank])
        said = [f"{problem}; using an older one" for problem in problems]
        where = f"epoch {self.position.epoch + 1}, step {self.position.step}"
        if self.position.epoch == self.recipe.epochs:
            where = f"all {self.recipe.epochs} epochs are trained"
        return "\n".join([*said, f"resuming from {path.name}: {where}"])

    def _check_recipe(self, path: Path, facts: dict[str, Any]) -> None:
        own = self.recipe.as_dict()
        # a field that an earlier version did not have yet was what it is by default
        saved = {**self.recipe.defaults(), **facts.get("recipe", {})}
        changed = [
            f"{name} was {saved.get(name)!r} and is {own.get(name)!r}"
            for name in sorted({*saved, *own} - {"accuracy"})  # which moves no number
            if saved.get(name) != own.get(name)
        ]
        if facts.get("inputs") != self.inputs.as_dict():
            changed.append("the classes or the pixels of the data differ")
        elif facts.get("data") != self.digest:
            changed.append("images or what is known about them differ")
        if changed:
            raise ValueError(
                f"{path} is a checkpoint of another run: {'; '.join(changed)}; "
                "use another --out for this one"
            )


def _distributed(network: nn.Module, device: torch.device) -> nn.Module:
    """The network with gradients that are the mean over processes."""
    if device.type == "cpu":
        return DistributedDataParallel(network)
    with side_stream():  # where a graph of it can be captured
        return DistributedDataParallel(network, device_ids=[device.index])
