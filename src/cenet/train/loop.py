"""The training loop: one optimizer, any number of processes, exact resumption.

Subclasses define a step and a test: `cenet.train.classifier` and `cenet.detection.trainer`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from typing_extensions import override

import cenet.train.checkpoint as checkpoint
from cenet.distributed import any_of, highest, share_buffers_, total
from cenet.environment import environment
from cenet.run_folder import WEIGHTS
from cenet.signals import Interrupted, SignalWatch
from cenet.train.build import autocast
from cenet.train.nonfinite import NonFiniteLoss, first_non_finite
from cenet.train.progress import TrainingProgress
from cenet.train.run_log import RunLog
from cenet.train.state import RunState
from cenet.train.times import (
    FIRST_STEP,
    SAVING,
    TEST,
    TRAINING,
    Clock,
    Waits,
    in_words,
    show_speed,
    start_in_words,
)
from cenet.train.weights import write_weights

Batch = tuple[Any, ...]
# requests that processes exchange after an update; the largest one wins
NOTHING, CHECKPOINT, STOP = range(3)


class Loop(RunState, ABC):
    """Trains by a recipe, from any position to the end.

    Attributes:
        clears: set gradients to None after an update instead of to zero.
        slow_test: save a checkpoint before each test, because tests are slow or can fail.
        tested_on: a description of the images that the run is tested on.
        clock: measures the parts of the run's wall time.
    """

    clears = True
    slow_test = False
    tested_on = "test images"

    @override
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clock = Clock()
        self.waits = Waits(self.processes.device)
        self.run_log = RunLog(self.options.out, self.options.log_to)
        self.progress = TrainingProgress(
            shown=self.processes.is_first, epochs=self.recipe.epochs, steps=self.shard.steps
        )

    # defined by subclasses

    @abstractmethod
    def batches(self, epoch: int, step: int) -> Iterator[Batch]:
        """Batches of an epoch, from this step on."""

    @abstractmethod
    def add_gradients(self, batch: Batch) -> None:
        """Add the gradient of a batch to the parameters, and its numbers to `position.sums`."""

    def arguments(self, batch: Batch) -> Batch:
        """The arguments of the network for a batch."""
        return batch

    @abstractmethod
    def summary(self, sums: list[float]) -> dict[str, float]:
        """Columns of an epoch's row besides its loss, from the sums over all processes."""

    def note(self, sums: list[float]) -> str:
        """Text of the progress bar beside the loss."""
        return ""

    @abstractmethod
    def test(self) -> dict[str, float]:
        """Columns of an epoch's row from a test; all processes must call this."""

    @abstractmethod
    def line(self, row: dict[str, Any]) -> str:
        """Text of the log line of an epoch besides its loss and time."""

    def metadata(self) -> dict[str, Any]:
        """Entries of `environment` in run.json besides versions and hardware."""
        return {}

    def release(self) -> None:
        """Stop the processes and threads that prepare batches."""

    def prepare(self) -> None:
        """Prepare the first step, for example by compiling kernels."""

    def watch(self) -> None:
        """Attach monitors to the network; called in the first process only."""

    # running

    def run(self) -> dict[str, Any]:
        """Train to the end, and return the last row of metrics.

        Raises:
            Interrupted: SIGTERM, SIGINT or SIGHUP arrived; a checkpoint has been written.
            NonFiniteLoss: the loss is not finite; the last good checkpoint is kept.
        """
        self.options.out.mkdir(parents=True, exist_ok=True)
        if self.position.epoch < self.recipe.epochs:
            self.prepare()
        if self.processes.is_first:
            about = environment(self.processes.device, self.processes.world) | self.metadata()
            self.run_log.begin(
                self.recipe, self.inputs, about, after=self.position.epoch,
                updates=self.position.updates, tested_on=self.tested_on,
            )  # fmt: skip
            self.watch()
        self.clock.enter(FIRST_STEP)
        images = 0
        try:
            with SignalWatch() as signals, self.progress, self.writer:
                while self.position.epoch < self.recipe.epochs:
                    before = self.position.step
                    try:
                        self.train_epoch(signals)
                    finally:
                        images += (self.position.step - before) * self._images_per_step
                    self.end_epoch()
                with self.clock.on(SAVING):
                    self.writer.wait()
                    if self.processes.is_first:
                        self.write_network()
        except Interrupted:
            self._tell_times(images)
            raise
        finally:
            self.release()
        self._tell_times(images)
        row: dict[str, Any] = self.run_log.rows[-1] if self.run_log.rows else {}
        return row

    def write_network(self) -> None:
        """Write the final weights."""
        path = self.options.out / WEIGHTS
        write_weights(path, self.evaluated, self.recipe, self.inputs)

    def train_epoch(self, signals: SignalWatch) -> None:
        """Train from the present position to the end of the epoch."""
        position = self.position
        self.network.train()
        started = time.perf_counter() - position.seconds
        micro = self.recipe.accumulate
        steps = self.updates_per_epoch * micro
        batches = self.batches(position.epoch, position.step)
        batch: Batch | None = None
        while position.step < steps:
            # after a restart with another number of processes, the first update may have fewer
            last = min(position.step - position.step % micro + micro, steps)
            while position.step < last:
                batch = self.waits.next(batches, self.clock)
                position.step += 1
                self._backward(batch, last=position.step == last)
            # reading the loss is free on a CPU; on a GPU it waits for the step
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
            self._answer(self._asked_for(signals), batch, is_last=position.step == steps)
        self._check(batch)
        # `_check` has waited for the GPU
        position.seconds = time.perf_counter() - started
        self.waits.settle(self.clock)

    def _asked_for(self, signals: SignalWatch) -> int:
        """The largest request of all processes."""
        signals.reclaim()
        self.writer.look()
        asked = NOTHING
        if signals.asked is not None:
            asked = STOP
        elif self.save_is_due():
            asked = CHECKPOINT
        return highest(asked, self.processes)

    def _answer(self, asked: int, batch: Batch | None, *, is_last: bool) -> None:
        """Save or stop, if a process requested it or a checkpoint is due."""
        every = self.options.checkpoint_every
        on_time = every > 0 and self.position.updates % every == 0
        if asked == STOP:
            with self.clock.on(SAVING):
                self.save()
                self.writer.wait()
            self.waits.settle(self.clock)
            raise Interrupted
        # `end_epoch` saves after the last step
        if not is_last and (asked == CHECKPOINT or on_time):
            self._check(batch)
            with self.clock.on(SAVING):
                self.save()

    @property
    def _images_per_step(self) -> int:
        return self.recipe.batch_size * self.processes.world

    def _tell_start(self) -> None:
        """Print how long the start of the run took, up to the end of its first step."""
        if self.processes.device.type == "cuda":
            torch.cuda.synchronize()
        self.clock.enter(TRAINING)
        self.progress.say(start_in_words(self.clock.spent))

    def _tell_times(self, images: int) -> None:
        """Print the wall time since the start, and write it to run.json."""
        if self.processes.is_first and images:
            summary = self.clock.summary(images)
            self.run_log.add_times(summary)
            print(in_words(summary), flush=True)
        self.run_log.end()

    def _tell(self, seconds: float) -> None:
        position = self.position
        sums = position.sums.tolist()
        speed = position.step * self._images_per_step / seconds
        parts = (
            f"loss {sums[0] / sums[-1]:.4f}",
            self.note(sums),
            f"{show_speed(speed)} images/s",
        )
        self.progress.step(position.epoch, position.step, ", ".join(filter(None, parts)))

    def autocast(self) -> AbstractContextManager[Any]:
        """The autocast context of the recipe."""
        return autocast(self.recipe, self.processes.device)

    def _backward(self, batch: Batch, *, last: bool) -> None:
        """Add the gradient of a batch; with the last batch of an update, processes average them."""
        wait: AbstractContextManager[Any] = nullcontext()
        if self.wrapped is not self.network and not last:
            wait = self.wrapped.no_sync()
        with wait:
            self.add_gradients(batch)

    @property
    def _scheduled_update(self) -> int:
        """The number that this update has in a run of the present number of processes.

        After a restart with another number of processes, `position.updates` is another number.
        """
        in_epoch = (self.position.step - 1) // self.recipe.accumulate
        return self.position.epoch * self.updates_per_epoch + in_epoch

    def _update(self) -> None:
        self.schedule.step_update(self._scheduled_update)
        self.apply_gradients()
        self.position.updates += 1
        if self.ema is not None:
            self.ema.update(self.network, self.position.updates)

    def apply_gradients(self) -> None:
        """Clip gradients and update the parameters."""
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
        kept = checkpoint.checkpoints(self.options.out)
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
            self.progress.note("testing")
            tested = self.test()
            self.progress.note("")
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
                self.run_log.add(row)
            by_time = self.options.checkpoint_seconds > 0 and not is_last
            if not by_time or any_of(self.save_is_due(), self.processes):
                self.save()
        if self.processes.is_first:  # after saving: printing may fail
            self.progress.say(
                f"epoch {row['epoch']} of {self.recipe.epochs}: loss {row['train_loss']:.4f}, "
                f"{self.line(row)}, {seconds:.1f} s"
            )
