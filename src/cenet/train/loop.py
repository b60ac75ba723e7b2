"""The training loop: one optimizer, any number of processes, exact resumption.

What a step and a test are, a subclass says: `engine` for classifiers, `cenet.detection.engine` for
detectors.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from typing_extensions import override

import cenet.train.saving as saving
from cenet.distributed import any_of, highest, share_buffers_, total
from cenet.environment import environment
from cenet.run_folder import WEIGHTS
from cenet.signals import Interrupted, SignalWatch
from cenet.train.diagnosis import NonFiniteLoss, first_non_finite
from cenet.train.logbook import Logbook
from cenet.train.narrator import Narrator
from cenet.train.setup import autocast
from cenet.train.state import RunState
from cenet.train.times import (
    FIRST_STEP,
    SAVING,
    TEST,
    TRAINING,
    Clock,
    Waits,
    in_words,
    start_in_words,
)
from cenet.train.weights import write_weights

Batch = tuple[Any, ...]
# what processes ask each other for after an update
NOTHING, CHECKPOINT, STOP = range(3)


class Loop(RunState, ABC):
    """A recipe at work.

    Attributes:
        clears: gradients become None after an update, not zero.
        slow_test: the test takes its time and can fail, so a checkpoint is written before.
        tested_on: the images that the figures called test are of, in words.
        clock: where the time of the run goes.
    """

    clears = True
    slow_test = False
    tested_on = "test images"

    @override
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock = Clock()
        self.waits = Waits(self.processes.device)
        self.logbook = Logbook(self.options.out)
        self.narrator = Narrator(
            shown=self.processes.is_first, epochs=self.recipe.epochs, steps=self.shard.steps
        )

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

    def facts(self) -> dict[str, Any]:
        """What run.json says about the surroundings beside versions and hardware."""
        return {}

    def release(self) -> None:
        """End what prepares batches ahead."""

    def prepare(self) -> None:
        """What can be made ready before the first step."""

    def watch(self) -> None:
        """Start what looks at the network while it trains, in the first process."""

    # running

    def run(self) -> dict[str, Any]:
        """Train to the end, and return the last row of metrics.

        Raises:
            Interrupted: SIGTERM or SIGINT came; a checkpoint has been written.
            NonFiniteLoss: the last good checkpoint is kept.
        """
        self.options.out.mkdir(parents=True, exist_ok=True)
        if self.position.epoch < self.recipe.epochs:
            self.prepare()
        if self.processes.is_first:
            facts = environment(self.processes.device, self.processes.world) | self.facts()
            self.logbook.begin(
                self.recipe, self.inputs, facts, after=self.position.epoch,
                updates=self.position.updates, tested_on=self.tested_on,
            )  # fmt: skip
            self.watch()
        self.clock.enter(FIRST_STEP)
        images = 0
        try:
            with SignalWatch() as interrupts, self.narrator, self.writer:
                while self.position.epoch < self.recipe.epochs:
                    before = self.position.step
                    try:
                        self.train_epoch(interrupts)
                    finally:
                        images += (self.position.step - before) * self._images_per_step
                    self.end_epoch()
            with self.clock.on(SAVING):
                self.writer.wait()
                if self.processes.is_first:
                    path = self.options.out / WEIGHTS
                    write_weights(path, self.evaluated, self.recipe, self.inputs)
        except Interrupted:
            self._tell_times(images)
            raise
        finally:
            self.release()
        self._tell_times(images)
        row: dict[str, Any] = self.logbook.rows[-1] if self.logbook.rows else {}
        return row

    def train_epoch(self, interrupts: SignalWatch) -> None:
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
                batch = self.waits.next(batches, self.clock)
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
            if self.clock.part == FIRST_STEP:
                self._tell_start()
            position.seconds = time.perf_counter() - started
            self._answer(self._asked_for(interrupts), batch, is_last=position.step == steps)
        self._check(batch)
        # until here a GPU may have been behind
        position.seconds = time.perf_counter() - started
        self.waits.settle(self.clock)

    def _asked_for(self, interrupts: SignalWatch) -> int:
        """The most that any process asks for."""
        interrupts.reclaim()
        self.writer.look()
        asked = NOTHING
        if interrupts.asked is not None:
            asked = STOP
        elif self.save_is_due():
            asked = CHECKPOINT
        return highest(asked, self.processes)

    def _answer(self, asked: int, batch: Batch | None, *, is_last: bool) -> None:
        """Save or stop, if that is asked for or it is time."""
        every = self.options.checkpoint_every
        on_time = every > 0 and self.position.updates % every == 0
        if asked == STOP:
            with self.clock.on(SAVING):
                self.save()
                self.writer.wait()
            self.waits.settle(self.clock)
            raise Interrupted
        # after the last step of an epoch comes its end, which saves
        if not is_last and (asked == CHECKPOINT or on_time):
            self._check(batch)
            with self.clock.on(SAVING):
                self.save()

    @property
    def _images_per_step(self) -> int:
        return self.recipe.batch_size * self.processes.world

    def _tell_start(self) -> None:
        """The first step of this start has been made."""
        if self.processes.device.type == "cuda":
            torch.cuda.synchronize()
        self.clock.enter(TRAINING)
        self.narrator.say(start_in_words(self.clock.spent))

    def _tell_times(self, images: int) -> None:
        """Where the time of this start went, on the screen and in run.json."""
        if self.processes.is_first and images:
            summary = self.clock.summary(images)
            self.logbook.add_times(summary)
            print(in_words(summary), flush=True)
        self.logbook.end()

    def _tell(self, seconds: float) -> None:
        position = self.position
        sums = position.sums.tolist()
        speed = position.step * self._images_per_step / seconds
        parts = (
            f"loss {sums[0] / sums[-1]:.4f}",
            self.note(sums),
            f"{speed:.{0 if speed >= 10 else 2}f} images/s",
        )
        self.narrator.step(position.epoch, position.step, ", ".join(filter(None, parts)))

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the recipe."""
        return autocast(self.recipe, self.processes.device)

    def _backward(self, batch: Batch, *, last: bool) -> None:
        """Add the gradient of a batch; processes exchange theirs with the last of an update."""
        wait: AbstractContextManager[Any] = nullcontext()
        if self.wrapped is not self.network and not last:
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
        self.writer.wait()
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
            with self.clock.on(SAVING):
                self.save()
        with self.clock.on(TEST):
            share_buffers_(self.evaluated, self.processes)
            self.narrator.note("testing")
            tested = self.test()
            self.narrator.note("")
        row: dict[str, Any] = {
            "epoch": position.epoch + 1,
            "updates": position.updates,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": sums[0] / sums[-1],
            **self.summary(sums),
            **tested,
            "seconds": seconds,
            "images_per_second": sums[-1] / seconds,
        }
        position.epoch, position.step, position.seconds = position.epoch + 1, 0, 0.0
        position.sums.zero_()
        is_last = position.epoch == self.recipe.epochs
        with self.clock.on(SAVING):
            if self.processes.is_first:
                self.logbook.add(row)
                self.narrator.say(
                    f"epoch {row['epoch']} of {self.recipe.epochs}: loss {row['train_loss']:.4f}, "
                    f"{self.line(row)}, {seconds:.1f} s"
                )
            by_time = self.options.checkpoint_seconds > 0 and not is_last
            if not by_time or any_of(self.save_is_due(), self.processes):
                self.save()
