"""The training loop of detectors."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from cenet.data.datasets import InputSpec
from cenet.data.order import seed_of
from cenet.detection.data import SceneSplit
from cenet.detection.evaluation import KINDS, MEASURES, evaluate
from cenet.detection.loaders import training_batches
from cenet.detection.networks import detector
from cenet.detection.recipes import DetectionRecipe
from cenet.distributed import Processes
from cenet.train.checkpoint import seed_everything
from cenet.train.loop import Batch, Loop
from cenet.train.options import RunOptions

# names of the losses of torchvision's detectors
LOSSES = ("loss_classifier", "loss_box_reg", "loss_objectness", "loss_rpn_box_reg")
MASK_LOSS = "loss_mask"


@dataclass(frozen=True)
class DetectionOptions(RunOptions):
    """Options for training a detector.

    Attributes:
        evaluate_every: epochs between tests; the last epoch is always tested.
    """

    evaluate_every: int = 1

    def __post_init__(self) -> None:
        """Raise ValueError for numbers out of range."""
        super().__post_init__()
        if self.evaluate_every < 1:
            raise ValueError(f"evaluate_every={self.evaluate_every} must be at least 1")


def build_detector(
    recipe: DetectionRecipe, inputs: InputSpec, checkpoint: Path | None = None
) -> nn.Module:
    """The network of a recipe, for the classes of this input spec."""
    network: nn.Module = detector(
        recipe.detector,
        recipe.backbone,
        len(inputs.classes) + 1,
        setting=recipe.setting,
        trainable_layers=recipe.trainable_layers,
        checkpoint=checkpoint,
        small=recipe.small,
        backbone_args={"channels": recipe.channels},
        min_size=recipe.min_sizes[-1],
        max_size=recipe.max_size,
        image_mean=[value / 255 for value in inputs.mean],
        image_std=[value / 255 for value in inputs.std],
        # the loader resizes training images
        _skip_resize=True,
    )
    return network


class DetectionTrainer(Loop):
    """Trains and tests a detector by a recipe."""

    recipe: DetectionRecipe
    options: DetectionOptions
    slow_test = True

    def __init__(
        self,
        recipe: DetectionRecipe,
        data: SceneSplit,
        options: DetectionOptions,
        processes: Processes,
        checkpoint: Path | None = None,
    ) -> None:
        """Build everything, on the device of this process."""
        self.data = data
        self.parts = (*LOSSES, MASK_LOSS) if recipe.detector == "mask_rcnn" else LOSSES
        seed_everything(seed_of("weights", recipe.seed))
        inputs = data.inputs()
        layout = torch.channels_last if options.channels_last else torch.contiguous_format
        network = build_detector(recipe, inputs, checkpoint).to(processes.device)
        super().__init__(
            recipe, network.to(memory_format=layout), inputs, options, processes,
            images=len(data.train.images), data=f"{data.train.digest()} {data.test.digest()}",
            sums=len(self.parts) + 2,
        )  # fmt: skip
        if recipe.holdout > 0:
            count = len(data.test.images)
            self.tested_on = f"{count} training images held out by holdout={recipe.holdout:g}"
        seed_everything(seed_of("chance", recipe.seed, processes.rank))

    @override
    def batches(self, epoch: int, step: int) -> Iterator[Batch]:
        return training_batches(
            self.data.train, self.recipe, self.shard, epoch=epoch, start=step,
            device=self.processes.device, workers=self.options.workers,
        )  # fmt: skip

    @override
    def add_gradients(self, batch: Batch) -> None:
        images, targets = batch
        if self.recipe.accumulate == 1:
            self.optimizer.zero_grad()
        losses: dict[str, Tensor]
        with self.autocast():
            losses = self.wrapped(images, targets)
            parts = torch.stack([losses[name] for name in self.parts])
            loss = parts.sum()
        scaled: Any = self.scaler.scale(loss / self.recipe.accumulate)
        scaled.backward()
        with torch.no_grad():
            values = torch.cat([loss.detach()[None], parts.detach()]).double()
            self.position.sums[:-1] += values * len(images)
            self.position.sums[-1] += len(images)

    @override
    def summary(self, sums: list[float]) -> dict[str, float]:
        return {
            name.replace("loss", "train", 1): value / sums[-1]
            for name, value in zip(self.parts, sums[1:-1], strict=True)
        }

    @override
    def test(self) -> dict[str, Any]:
        epoch = self.position.epoch + 1
        if epoch % self.options.evaluate_every and epoch < self.recipe.epochs:
            kinds = list(KINDS)[: 2 if MASK_LOSS in self.parts else 1]
            return {f"{kind}_{measure}": None for kind in kinds for measure in MEASURES}
        workers = self.options.workers
        return dict(evaluate(self.network, self.data.test, self.processes, workers=workers).numbers)

    @override
    def line(self, row: dict[str, Any]) -> str:
        found = [
            f"{kind} AP {row[f'{kind}_ap']:.3f} (AP50 {row[f'{kind}_ap50']:.3f})"
            for kind in KINDS
            if row.get(f"{kind}_ap") is not None
        ]
        return ", ".join(found) or "not tested"
