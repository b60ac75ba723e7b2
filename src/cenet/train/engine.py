"""The training loop of classifiers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from typing_extensions import override

import cenet.train.snapshot as snapshot
from cenet.analysis.monitor import Monitor
from cenet.data.datasets import Encoded, Split, digest
from cenet.data.input_spec import InputSpec, input_spec_of
from cenet.data.loaders import training_loader
from cenet.data.order import seed_of
from cenet.distributed import Processes
from cenet.train.evaluation import Tester
from cenet.train.graphs import EAGER_CALLS, EAGER_CALLS_DISTRIBUTED, Graphed, problem
from cenet.train.initial import Initial, load_initial_
from cenet.train.loop import Batch, Loop
from cenet.train.options import Options
from cenet.train.preparation import prepare_kernels, rehearsals
from cenet.train.recipes import Recipe
from cenet.train.setup import (
    build_loss,
    build_mixup,
    build_network,
    check_size,
    synchronized,
)


class Trainer(Loop):
    """A recipe at work."""

    recipe: Recipe
    options: Options

    def __init__(
        self,
        recipe: Recipe,
        data: Split,
        options: Options,
        processes: Processes,
        weights: Path | None = None,
    ) -> None:
        """Build everything, on the device of this process.

        Args:
            recipe: what to train and how.
            data: images.
            options: where and how it runs.
            processes: this one among its fellows.
            weights: to begin with; see `load_initial_`.
        """
        device = processes.device
        if options.cuda_graphs and (found := problem(recipe, device, processes.world)):
            raise ValueError(found)
        with ThreadPoolExecutor(1) as beside:
            digested = beside.submit(digest, data)
            inputs = input_spec_of(data.train, device)
            network, self.initial = _network(recipe, inputs, device, weights)
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        super().__init__(
            recipe, network.to(memory_format=layout), inputs, options, processes,
            images=len(data.train.labels), data=digested.result(), sums=3,
        )  # fmt: skip
        self.slow_test = isinstance(data.test, Encoded)
        if recipe.holdout > 0:
            count = len(data.test.labels)
            self.tested_on = f"{count} training images held out by holdout={recipe.holdout:g}"
        self.loss = build_loss(recipe).to(device)
        self.mixup = build_mixup(recipe, len(inputs.classes))
        if recipe.ema > 0:
            self.ema = ModelEmaV3(network, recipe.ema)
        self.loader = training_loader(
            recipe, data.train, inputs, self.shard, device=device,
            channels_last=options.channels_last, workers=options.workers,
            steps=self.updates_per_epoch * recipe.accumulate, decode=options.decode,
        )  # fmt: skip
        snapshot.seed_everything(seed_of("chance", recipe.seed, processes.rank))
        self._forward: Callable[[Tensor], Tensor] = self.wrapped
        if options.compile:
            self._forward = torch.compile(self.wrapped)
        evaluated = self.evaluated
        self._tester = Tester(
            evaluated, data.test, inputs, recipe, processes,
            forward=torch.compile(evaluated) if options.compile else None,
            graphed=options.cuda_graphs, channels_last=options.channels_last,
            workers=options.workers, decode=self.loader.decoding or options.decode,
        )  # fmt: skip
        self._add_gradients: Callable[..., None] = self._gradients
        self._apply_gradients: Callable[[], None] = super().apply_gradients
        if options.cuda_graphs:
            # a graph adds to gradients that stay where they are
            self.clears = False
            alone = self.wrapped is self.network
            calls = EAGER_CALLS if alone else EAGER_CALLS_DISTRIBUTED
            self._add_gradients = Graphed(self._gradients, calls)
            self._apply_gradients = Graphed(super().apply_gradients, calls)
            # a graph reads them anew each time
            self._rates = [torch.zeros((), device=device) for _ in self.optimizer.param_groups]

    def prepare(self) -> None:
        """See `Loop`: the kernels of CE."""
        steps = rehearsals(
            self.recipe, self.inputs, self.processes.device,
            channels_last=self.options.channels_last, tested=self._tester.counts(),
        )  # fmt: skip
        prepare_kernels(self.network, steps, self.processes)

    def watch(self) -> None:
        """See `Loop`: channels, now and then."""
        every = self.options.monitor_every * self.recipe.accumulate
        if every:
            watched: Any = self._forward
            monitor = Monitor(
                watched, every=every,
                to=lambda _, values: self.logbook.add_channels(self.position.updates, values),
            )  # fmt: skip
            monitor.step = self.position.updates * self.recipe.accumulate

    @override
    def facts(self) -> dict[str, Any]:
        initial = None if self.initial is None else self.initial._asdict()
        return {"decoding": self.loader.decoding, "initial": initial}

    @override
    def release(self) -> None:
        self.loader.end()

    @override
    def batches(self, epoch: int, step: int) -> Iterator[Batch]:
        return self.loader.epoch(epoch, step)

    @override
    def arguments(self, batch: Batch) -> Batch:
        return batch[:1]

    @override
    def add_gradients(self, batch: Batch) -> None:
        images, hard = batch
        labels = hard
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
        self._add_gradients(images, labels, hard)

    def _gradients(self, images: Tensor, labels: Tensor, hard: Tensor) -> None:
        if self.recipe.accumulate == 1:
            self.optimizer.zero_grad()
        with self.autocast():
            logits = self._forward(images)
            loss = self.loss(logits, labels)
        self.scaler.scale(loss / self.recipe.accumulate).backward()
        with torch.no_grad():
            count = len(hard)
            correct = (logits.detach().argmax(1) == hard).sum()
            batch = torch.stack([loss.detach().double() * count, correct.double()])
            self.position.sums[:2] += batch
            self.position.sums[2] += count

    @override
    def apply_gradients(self) -> None:
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        if self.options.cuda_graphs:
            for group, tensor in zip(groups, self._rates, strict=True):
                group["lr"] = tensor.fill_(group["lr"])
        self._apply_gradients()
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    @override
    def summary(self, sums: list[float]) -> dict[str, float]:
        return {"train_top1": sums[1] / sums[2]}

    @override
    def note(self, sums: list[float]) -> str:
        return f"top-1 {sums[1] / sums[2]:.2%}"

    @override
    def test(self) -> dict[str, Any]:
        return self._tester()

    @override
    def line(self, row: dict[str, Any]) -> str:
        images = "held-out" if self.recipe.holdout > 0 else "test"
        return f"{images} loss {row['test_loss']:.4f}, top-1 {row['test_top1']:.2%}"


def _network(
    recipe: Recipe, inputs: InputSpec, device: torch.device, weights: Path | None
) -> tuple[nn.Module, Initial | None]:
    """The network at the beginning of a run, and what it begins with if not at random."""
    snapshot.seed_everything(seed_of("weights", recipe.seed))
    network = build_network(recipe, inputs)
    check_size(network, recipe, inputs)
    initial = None
    if weights is not None:
        initial = load_initial_(network, weights, len(inputs.classes))
    network = network.to(device)
    return synchronized(network, device) if recipe.sync_ce else network, initial
