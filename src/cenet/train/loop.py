"""The training loop: one optimizer, any number of processes, exact resumption.

What a step and a test are, a subclass says: `engine` for classifiers, `cenet.detection.engine` for
detectors.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import cenet.train.saving as saving
import cenet.train.snapshot as snapshot
from cenet.checkpoints import load_state_
from cenet.environment import environment
from cenet.train.course import Course
from cenet.train.diagnosis import NonFiniteLoss, first_non_finite
from cenet.train.inputs import Inputs
from cenet.train.interrupts import Interrupts
from cenet.train.loaders import Shard
from cenet.train.logbook import Logbook
from cenet.train.narrator import Narrator
from cenet.train.options import RunOptions
from cenet.train.processes import Processes, any_of, gathered, share_buffers_, total
from cenet.train.setup import build_optimizer, build_schedule
from cenet.train.weights import WEIGHTS, write_weights

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
Batch = tuple[Any, ...]


@dataclass
class Position:
    """How far a run is."""

    sums: Tensor  # over the images of the epoch: first the loss, last their number
    epoch: int = 0
    step: int = 0  # of the epoch
    updates: int = 0
    seconds: float = 0.0  # of the epoch, until it was interrupted


class Interrupted(Exception):
    """The run was asked to stop, and has been saved."""


class Loop(ABC):
    """A recipe at work.

    Attributes:
        ema: averaged weights, or None.
        clears: gradients become None after an update, not zero.
        slow_test: the test takes its time and can fail, so a checkpoint is written before.
    """

    ema: Any = None
    clears = True
    slow_test = False

    def __init__(
        self,
        recipe: Course,
        network: nn.Module,
        inputs: Inputs,
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
        self.logbook = Logbook(options.out)
        self.narrator = Narrator(
            shown=processes.is_first, epochs=recipe.epochs, steps=self.shard.steps
        )
        self.wrapped: Any = network
        if processes.world > 1:
            ids = [device.index] if device.type == "cuda" else None
            self.wrapped = DistributedDataParallel(network, device_ids=ids)

    # what a subclass says

    @abstractmethod
    def batches(self, epoch: int, step: int) -> Iterator[Batch]:
        """Batches from this step of an epoch."""

    @abstractmethod
    def add_gradients(self, batch: Batch) -> None:
        """Add the gradient of a batch, and what `position.sums` counts."""

    def arguments(self, batch: Batch) -> Batch:
        """What the network is called with."""
        return batch

    @abstractmethod
    def summary(self, sums: list[float]) -> dict[str, float]:
        """The row of an epoch beside its loss, from the sums of all processes."""

    def note(self, sums: list[float]) -> str:
        """What the progress bar says beside the loss."""
        return ""

    @abstractmethod
    def test(self) -> dict[str, float]:
        """What is measured after an epoch; all processes take part."""

    @abstractmethod
    def line(self, row: dict[str, Any]) -> str:
        """What a log says about an epoch beside its loss and time."""

    def watch(self) -> None:  # noqa: B027, most loops have nothing to watch
        """Start what looks at the network while it trains, in the first process."""

    # running

    def run(self) -> dict[str, Any]:
        """Train to the end, and return the last row of metrics.

        Raises:
            Interrupted: SIGTERM or SIGINT came; a checkpoint has been written.
            NonFiniteLoss: the last good checkpoint is kept.
        """
        self.options.out.mkdir(parents=True, exist_ok=True)
        if self.processes.is_first:
            facts = environment(self.processes.device, self.processes.world)
            self.logbook.begin(
                self.recipe, self.inputs, facts, after=self.position.epoch,
                updates=self.position.updates,
            )  # fmt: skip
            self.watch()
        with Interrupts() as interrupts, self.narrator:
            while self.position.epoch < self.recipe.epochs:
                self.train_epoch(interrupts)
                self.end_epoch()
        self.logbook.end()
        if self.processes.is_first:
            write_weights(self.options.out / WEIGHTS, self.evaluated, self.recipe, self.inputs)
        row: dict[str, Any] = self.logbook.rows[-1] if self.logbook.rows else {}
        return row

    def train_epoch(self, interrupts: Interrupts) -> None:
        """Train the rest of the epoch."""
        position = self.position
        self.network.train()
        started = time.perf_counter() - position.seconds
        micro = self.recipe.accumulate
        steps = self.updates_per_epoch * micro
        batches = self.batches(position.epoch, position.step)
        batch: Batch | None = None
        while position.step < steps:
            # after a restart with another number of processes, the first may have fewer
            last = min(position.step - position.step % micro + micro, steps)
            while position.step < last:
                batch = next(batches)
                position.step += 1
                self._backward(batch, last=position.step == last)
            # on a CPU looking costs nothing, on a GPU it waits for the step
            on_cpu = self.processes.device.type == "cpu"
            look = on_cpu or position.updates % self.options.log_every == 0
            if look:
                self._check(batch)
            self._update()
            if look:
                self._tell(time.perf_counter() - started)
            position.seconds = time.perf_counter() - started
            every = self.options.checkpoint_every
            interrupts.reclaim()
            if any_of(interrupts.asked is not None, self.processes):
                self.save()
                raise Interrupted
            if every and position.updates % every == 0 and position.step < steps:
                self.save()
        self._check(batch)
        # until here a GPU may have been behind
        position.seconds = time.perf_counter() - started

    def _tell(self, seconds: float) -> None:
        position = self.position
        sums = position.sums.tolist()
        images = position.step * self.recipe.batch_size * self.processes.world
        speed = images / seconds
        parts = (
            f"loss {sums[0] / sums[-1]:.4f}",
            self.note(sums),
            f"{speed:.{0 if speed >= 10 else 2}f} images/s",
        )
        self.narrator.step(position.epoch, position.step, ", ".join(filter(None, parts)))

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the recipe."""
        dtype = PRECISIONS.get(self.recipe.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.processes.device.type, dtype)

    def _backward(self, batch: Batch, *, last: bool) -> None:
        """Add the gradient of a batch; processes exchange theirs with the last of an update."""
        wait: AbstractContextManager[Any] = nullcontext()
        if self.processes.world > 1 and not last:
            wait = self.wrapped.no_sync()
        with wait:
            self.add_gradients(batch)

    def _update(self) -> None:
        self.schedule.step_update(self.position.updates)
        self.apply_gradients()
        self.position.updates += 1
        if self.ema is not None:
            self.ema.update(self.network, self.position.updates)

    def apply_gradients(self) -> None:
        """A step of the optimizer."""
        if self.recipe.clip_grad > 0:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.recipe.accumulate > 1:
            self.optimizer.zero_grad(set_to_none=self.clears)

    def _check(self, batch: Batch | None) -> None:
        """Raise NonFiniteLoss if any loss of this epoch was not finite."""
        bad = not bool(self.position.sums[0].isfinite())
        if not any_of(bad, self.processes):
            return
        where = "" if batch is None else first_non_finite(self.network, *self.arguments(batch))
        kept = saving.checkpoints(self.options.out)
        last = f"the last good checkpoint is {kept[0]}" if kept else "no checkpoint was written yet"
        raise NonFiniteLoss(
            f"the loss is not finite in epoch {self.position.epoch + 1}, update "
            f"{self.position.updates}: {where}. {last}. Lower --lr, raise --warmup-epochs or limit "
            "gradients by --clip-grad"
        )

    def end_epoch(self) -> None:
        """Test, write the row of the epoch and a checkpoint."""
        position = self.position
        sums = total(position.sums, self.processes).tolist()
        seconds = position.seconds
        if self.slow_test:
            self.save()
        share_buffers_(self.evaluated, self.processes)
        self.narrator.note("testing")
        row: dict[str, Any] = {
            "epoch": position.epoch + 1,
            "updates": position.updates,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": sums[0] / sums[-1],
            **self.summary(sums),
            **self.test(),
            "seconds": seconds,
            "images_per_second": sums[-1] / seconds,
        }
        self.narrator.note("")
        position.epoch, position.step, position.seconds = position.epoch + 1, 0, 0.0
        position.sums.zero_()
        if self.processes.is_first:
            self.logbook.add(row)
            self.narrator.say(
                f"epoch {row['epoch']} of {self.recipe.epochs}: loss {row['train_loss']:.4f}, "
                f"{self.line(row)}, {seconds:.1f} s"
            )
        self.save()

    @property
    def evaluated(self) -> nn.Module:
        """The network whose accuracy counts: the averaged one if there is one."""
        if self.ema is None:
            return self.network
        averaged: nn.Module = self.ema.module
        return averaged

    # saving

    def save(self) -> None:
        """Write a checkpoint; all processes take part."""
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
        path = saving.checkpoint_path(self.options.out, self.position.updates)
        saving.write(path, tensors, facts)
        saving.forget_old(self.options.out)

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
        saved, own = facts.get("recipe", {}), self.recipe.as_dict()
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
