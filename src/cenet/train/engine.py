"""The training loop: one optimizer, any number of processes, exact resumption."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import cenet.train.saving as saving
import cenet.train.snapshot as snapshot
from cenet.train.data import Files, Split
from cenet.train.diagnosis import NonFiniteLoss, first_non_finite
from cenet.train.evaluation import evaluate
from cenet.train.graphs import Graphed, problem
from cenet.train.inputs import inputs_of
from cenet.train.interrupts import Interrupts
from cenet.train.loaders import Shard, seed_of, training_loader
from cenet.train.logbook import Logbook, environment, progress_bar, say
from cenet.train.options import Options
from cenet.train.processes import Processes, any_of, gathered, share_buffers_, total
from cenet.train.recipes import Recipe
from cenet.train.setup import (
    build_loss,
    build_mixup,
    build_network,
    build_optimizer,
    build_schedule,
    check_size,
    synchronized,
)
from cenet.train.weights import WEIGHTS, write_weights

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Position:
    """How far a run is."""

    epoch: int = 0
    step: int = 0  # of the epoch
    updates: int = 0
    seconds: float = 0.0  # of the epoch, until it was interrupted
    # loss, right answers and images of the epoch
    sums: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))


class Interrupted(Exception):
    """The run was asked to stop, and has been saved."""


class Trainer:
    """A recipe at work."""

    def __init__(self, recipe: Recipe, data: Split, options: Options, processes: Processes) -> None:
        """Build everything, on the device of this process."""
        self.recipe, self.data, self.options, self.processes = recipe, data, options, processes
        device = processes.device
        if options.cuda_graphs and (found := problem(device, processes.world, recipe.precision)):
            raise ValueError(found)
        snapshot.seed_everything(seed_of("weights", recipe.seed))
        self.inputs = inputs_of(data.train)
        network = build_network(recipe, self.inputs)
        check_size(network, recipe, self.inputs)
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        self.network = network.to(device).to(memory_format=layout)
        if recipe.sync_ce:
            self.network = synchronized(self.network, device)
        per_step = recipe.batch_size * processes.world
        self.shard = Shard(
            len(data.train.labels), recipe.batch_size, rank=processes.rank, world=processes.world
        )
        if recipe.accumulate > self.shard.steps:
            raise ValueError(
                f"accumulate={recipe.accumulate} is more than the {self.shard.steps} steps of an "
                "epoch; lower it"
            )
        self.updates_per_epoch = self.shard.steps // recipe.accumulate
        self.optimizer = build_optimizer(
            recipe, self.network, images_per_update=per_step * recipe.accumulate
        )
        self.schedule = build_schedule(
            recipe, self.optimizer, updates_per_epoch=self.updates_per_epoch
        )
        self.loss = build_loss(recipe).to(device)
        self.mixup = build_mixup(recipe, len(self.inputs.classes))
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "float16")
        self.ema: Any = ModelEmaV3(self.network, recipe.ema) if recipe.ema > 0 else None
        self.loader = training_loader(
            recipe, data.train, self.inputs, self.shard, device=device,
            channels_last=options.channels_last, workers=options.workers,
        )  # fmt: skip
        self.position = Position(sums=torch.zeros(3, dtype=torch.float64, device=device))
        self.logbook = Logbook(options.out)
        snapshot.seed_everything(seed_of("chance", recipe.seed, processes.rank))
        self._forward = self._parallel()
        self._add_gradients: Callable[..., None] = self._gradients
        self._apply_gradients: Callable[[], None] = self._step
        if options.cuda_graphs:
            self._add_gradients, self._apply_gradients = (
                Graphed(self._gradients),
                Graphed(self._step),
            )
            # a graph reads them anew each time
            self._rates = [torch.zeros((), device=device) for _ in self.optimizer.param_groups]

    def _parallel(self) -> Callable[[Tensor], Tensor]:
        """The network as it is called in training."""
        module: Any = self.network
        if self.processes.world > 1:
            device = self.processes.device
            ids = [device.index] if device.type == "cuda" else None
            module = DistributedDataParallel(module, device_ids=ids)
        self._wrapped = module
        if self.options.compile:
            module = torch.compile(module)
        run: Callable[[Tensor], Tensor] = module
        return run

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
            self.logbook.begin(self.recipe, self.inputs, facts, after=self.position.epoch)
        with (
            Interrupts() as interrupts,
            progress_bar(shown=self.processes.is_first) as progress,
        ):
            task = progress.add_task(
                "training",
                total=self.recipe.epochs * self.shard.steps,
                completed=self.position.epoch * self.shard.steps + self.position.step,
                epoch=self.position.epoch + 1, loss=float("nan"), top1=0.0, speed=0.0,
            )  # fmt: skip

            def tell(**values: Any) -> None:
                progress.update(task, **values)

            while self.position.epoch < self.recipe.epochs:
                self.train_epoch(interrupts, tell)
                self.end_epoch()
        self.logbook.end()
        if self.processes.is_first:
            write_weights(self.options.out / WEIGHTS, self.evaluated, self.recipe, self.inputs)
        row: dict[str, Any] = self.logbook.rows[-1] if self.logbook.rows else {}
        return row

    def train_epoch(self, interrupts: Interrupts, tell: Callable[..., None]) -> None:
        """Train the rest of the epoch."""
        position, recipe = self.position, self.recipe
        self.network.train()
        started = time.perf_counter() - position.seconds
        micro = recipe.accumulate
        steps = self.updates_per_epoch * micro
        batches = self.loader.epoch(position.epoch, position.step)
        images: Tensor | None = None
        while position.step < steps:
            # after a restart with another number of processes, the first may have fewer
            last = min(position.step - position.step % micro + micro, steps)
            while position.step < last:
                images, labels = next(batches)
                position.step += 1
                self._backward(images, labels, last=position.step == last)
            # on a CPU looking costs nothing, on a GPU it waits for the step
            on_cpu = self.processes.device.type == "cpu"
            look = on_cpu or position.updates % self.options.log_every == 0
            if look:
                self._check(images)
            self._update()
            if look:
                self._tell(tell, time.perf_counter() - started)
            position.seconds = time.perf_counter() - started
            every = self.options.checkpoint_every
            if any_of(interrupts.asked is not None, self.processes):
                self.save()
                raise Interrupted
            if every and position.updates % every == 0 and position.step < steps:
                self.save()
        self._check(images)
        # until here a GPU may have been behind
        position.seconds = time.perf_counter() - started

    def _tell(self, tell: Callable[..., None], seconds: float) -> None:
        position = self.position
        loss, correct, seen = position.sums.tolist()
        images = position.step * self.recipe.batch_size * self.processes.world
        tell(
            completed=position.epoch * self.shard.steps + position.step,
            epoch=position.epoch + 1,
            loss=loss / seen,
            top1=correct / seen,
            speed=images / seconds,
        )

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = PRECISIONS.get(self.recipe.precision)
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.processes.device.type, dtype)

    def _backward(self, images: Tensor, labels: Tensor, *, last: bool) -> None:
        """Add the gradient of a batch; processes exchange theirs with the last of an update."""
        hard = labels
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
        wait: AbstractContextManager[Any] = nullcontext()
        if self.processes.world > 1 and not last:
            wait = self._wrapped.no_sync()
        with wait:
            self._add_gradients(images, labels, hard)

    def _gradients(self, images: Tensor, labels: Tensor, hard: Tensor) -> None:
        if self.recipe.accumulate == 1:
            self.optimizer.zero_grad()
        with self._autocast():
            logits = self._forward(images)
            loss = self.loss(logits, labels)
        self.scaler.scale(loss / self.recipe.accumulate).backward()
        with torch.no_grad():
            count = len(hard)
            correct = (logits.detach().argmax(1) == hard).sum()
            batch = torch.stack([loss.detach().double() * count, correct.double()])
            self.position.sums[:2] += batch
            self.position.sums[2] += count

    def _update(self) -> None:
        self.schedule.step_update(self.position.updates)
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if self.options.cuda_graphs:
            for group, tensor in zip(groups, self._rates, strict=True):
                group["lr"] = tensor.fill_(group["lr"])
        self._apply_gradients()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        self.position.updates += 1
        if self.ema is not None:
            self.ema.update(self.network, self.position.updates)

    def _step(self) -> None:
        if self.recipe.clip_grad > 0:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip_grad)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.recipe.accumulate > 1:  # a graph adds to gradients that stay where they are
            self.optimizer.zero_grad(set_to_none=not self.options.cuda_graphs)

    def _check(self, images: Tensor | None) -> None:
        """Raise NonFiniteLoss if any loss of this epoch was not finite."""
        bad = not bool(self.position.sums[0].isfinite())
        if not any_of(bad, self.processes):
            return
        where = "" if images is None else first_non_finite(self.network, images)
        kept = saving.checkpoints(self.options.out)
        last = f"the last good checkpoint is {kept[0]}" if kept else "no checkpoint was written yet"
        raise NonFiniteLoss(
            f"the loss is not finite in epoch {self.position.epoch + 1}, update "
            f"{self.position.updates}: {where}. {last}. Lower --lr or raise --warmup-epochs"
        )

    def end_epoch(self) -> None:
        """Test, write the row of the epoch and a checkpoint."""
        position = self.position
        loss, correct, seen = total(position.sums, self.processes).tolist()
        seconds = position.seconds
        if isinstance(self.data.test, Files):  # which takes its time, and can fail
            self.save()
        share_buffers_(self.evaluated, self.processes)
        test = evaluate(
            self.evaluated, self.data.test, self.inputs, self.recipe, self.processes,
            channels_last=self.options.channels_last, workers=self.options.workers,
        )  # fmt: skip
        row = {
            "epoch": position.epoch + 1,
            "updates": position.updates,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": loss / seen,
            "train_top1": correct / seen,
            **test,
            "seconds": seconds,
            "images_per_second": seen / seconds,
        }
        position.epoch, position.step, position.seconds = position.epoch + 1, 0, 0.0
        position.sums.zero_()
        if self.processes.is_first:
            self.logbook.add(row)
            say(row, self.recipe.epochs)
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
        snapshot.load_module_(self.network, snapshot.under("model", tensors))
        if self.ema is not None:
            snapshot.load_module_(self.ema.module, snapshot.under("ema", tensors))
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
        self.position = Position(**position, sums=sums)
        rank = self.processes.rank
        if rank < len(facts["chance"]):
            states = snapshot.under(f"chance.{rank}", tensors)
            snapshot.set_chance(self.processes.device, states, facts["chance"][rank])
        said = [f"{problem}; using an older one" for problem in problems]
        where = f"epoch {self.position.epoch + 1}, step {self.position.step}"
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
        if changed:
            raise ValueError(
                f"{path} is a checkpoint of another run: {'; '.join(changed)}; "
                "use another --out for this one"
            )
