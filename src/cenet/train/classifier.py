"""The training loop of classifiers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from typing_extensions import override

from cenet import ops
from cenet.analysis.monitor import Monitor
from cenet.data.datasets import Encoded, InputSpec, Split, digest, input_spec_of
from cenet.data.loaders import training_loader
from cenet.data.order import seed_of
from cenet.distributed import Processes
from cenet.formatting import percent
from cenet.nn import ce_layers
from cenet.nn.equilibrium import mixing_ratios
from cenet.run_folder import CONFIG, LAMBDA
from cenet.surgery import ce_settings
from cenet.train.build import (
    autocast,
    build_loss,
    build_mixup,
    check_size,
    synchronized,
)
from cenet.train.checkpoint import seed_everything
from cenet.train.cuda_graphs import (
    EAGER_CALLS,
    EAGER_CALLS_DISTRIBUTED,
    GraphedFunction,
    capture_problem,
)
from cenet.train.evaluation import Tester
from cenet.train.loop import Batch, Loop
from cenet.train.options import Options
from cenet.train.recipes import Recipe
from cenet.train.weights import (
    Beginning,
    InitialWeights,
    build_network,
    load_initial_weights_,
    load_pretrained_,
    write_config,
)

Step = Callable[[nn.Module], None]


class Trainer(Loop):
    """Trains and tests a classifier by a recipe."""

    recipe: Recipe
    options: Options

    def __init__(
        self,
        recipe: Recipe,
        data: Split,
        options: Options,
        processes: Processes,
        weights: Path | None = None,
        *,
        pretrained: bool = False,
        beginning: Beginning | None = None,
    ) -> None:
        """Build everything, on the device of this process.

        Args:
            recipe: what to train and how.
            data: training and test images.
            options: how the recipe runs.
            processes: rank, number and device of the processes.
            weights: weights to start from; see `load_initial_weights_`.
            pretrained: start from the weights of timm or torchvision.
            beginning: images and CE of a stock network; by default normalized by the statistics of
                the training images, and CE at the default sites.
        """
        device = processes.device
        if options.cuda_graphs and (found := capture_problem(recipe, device, processes.world)):
            raise ValueError(found)
        with ThreadPoolExecutor(1) as beside:
            digested = beside.submit(digest, data)
            inputs = input_spec_of(data.train, device)
            ce = None
            if beginning is not None:
                _, mean, std, source, ce = beginning
                inputs = inputs._replace(mean=mean, std=std, normalization=source)
            seed_everything(seed_of("weights", recipe.seed))
            network = build_network(recipe, inputs, ce)
            network, self.initial = _started(network, recipe, inputs, device, weights, pretrained)
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
        seed_everything(seed_of("chance", recipe.seed, processes.rank))
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
            # a graph needs gradients that keep their addresses
            self.clears = False
            alone = self.wrapped is self.network
            calls = EAGER_CALLS if alone else EAGER_CALLS_DISTRIBUTED
            self._add_gradients = GraphedFunction(self._gradients, calls)
            self._apply_gradients = GraphedFunction(super().apply_gradients, calls)
            # a graph reads learning rates from these tensors
            self._rates = [torch.zeros((), device=device) for _ in self.optimizer.param_groups]

    @override
    def prepare(self) -> None:
        steps = rehearsals(
            self.recipe, self.inputs, self.processes.device,
            channels_last=self.options.channels_last, tested=self._tester.counts(),
        )  # fmt: skip
        prepare_kernels(self.network, steps, self.processes)

    @override
    def watch(self) -> None:
        every = self.options.monitor_every * self.recipe.accumulate
        if every:
            watched: Any = self._forward
            monitor = Monitor(
                watched, every=every,
                to=lambda _, values: self.run_log.add_channels(self.position.updates, values),
            )  # fmt: skip
            monitor.step = self.position.updates * self.recipe.accumulate

    @override
    def metadata(self) -> dict[str, Any]:
        initial = None if self.initial is None else self.initial._asdict()
        about = {"decoding": self.loader.decoding, "initial": initial}
        return about | ({"ce": ce_settings(self.network)} if self.recipe.stock else {})

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
        mixing = mixing_ratios(self.network)
        columns = {f"{LAMBDA}{name.removesuffix('.ce')}": mix for name, mix in mixing.items()}
        return {"train_top1": sums[1] / sums[2], **columns}

    @override
    def note(self, sums: list[float]) -> str:
        return f"top-1 {percent(sums[1] / sums[2], '.2f')}"

    @override
    def test(self) -> dict[str, Any]:
        return self._tester()

    @override
    def write_network(self) -> None:
        # the weights last: they mark the end of the run
        write_config(self.options.out / CONFIG, self.evaluated)
        super().write_network()

    @override
    def line(self, row: dict[str, Any]) -> str:
        images = "held-out" if self.recipe.holdout > 0 else "test"
        top1 = percent(row["test_top1"], ".2f")
        return f"{images} loss {row['test_loss']:.4f}, top-1 {top1}"


def _started(
    network: nn.Module,
    recipe: Recipe,
    inputs: InputSpec,
    device: torch.device,
    weights: Path | None,
    pretrained: bool,
) -> tuple[nn.Module, InitialWeights | None]:
    """The network at the start of a run, and the weights it started from unless they are random."""
    check_size(network, recipe, inputs)
    initial = None
    if weights is not None:
        initial = load_initial_weights_(network, weights, len(inputs.classes))
    elif pretrained:
        initial = load_pretrained_(network, recipe.network, len(inputs.classes))
    network = network.to(device)
    return synchronized(network, device) if recipe.sync_ce else network, initial


def prepare_kernels(network: nn.Module, steps: Iterator[Step], processes: Processes) -> None:
    """Compile the kernels that these steps launch, if the network runs on kernels at all."""
    if processes.device.type == "cuda" and ops.HAS_TRITON and dict(ce_layers(network)):
        from cenet.kernels.preparation import prepare  # imports triton

        prepare(network, *steps, shown=processes.is_first)


def rehearsals(
    recipe: Recipe,
    inputs: InputSpec,
    device: torch.device,
    *,
    channels_last: bool,
    tested: set[int],
) -> Iterator[Step]:
    """A training step, and a test step for each batch size in `tested`, on images of zeros."""
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def logits(network: nn.Module, count: int) -> Tensor:
        shape = (count, inputs.channels, recipe.image_size, recipe.image_size)
        images = torch.empty(shape, device=device, memory_format=layout).zero_()
        with autocast(recipe, device):
            found: Tensor = network(images)
        return found

    def train(network: nn.Module) -> None:
        loss: Any = logits(network.train(), recipe.batch_size).float().square().mean()
        loss.backward()

    def test(network: nn.Module, count: int) -> None:
        with torch.no_grad():
            logits(network.eval(), count)

    yield train
    for count in tested:
        yield partial(test, count=count)
