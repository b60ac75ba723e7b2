"""Learning that lasts: one network learns task after task, each with labels drawn anew.

    python -m experiments.lasting --block ce --data CIFAR10 --tasks 25 --out runs/lasting-ce
    python -m experiments.lasting --block plain --network vgg6 --tasks 10      # digits, on a CPU

The images stay the same; in each task every image gets a random label from all classes, and the
network continues from its weights, statistics and momenta. There is nothing to generalize. The
result is how much of a task is learned in its epochs (accuracy on the training images during the
last epoch), and the state of the channels. A network that loses the ability to learn reaches a
lower accuracy in later tasks than in the first.

OUT/tasks.csv has a row for each task. A run takes minutes; an interrupted one begins anew.
"""

import argparse
import csv
import json
import sys
import time
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from cenet.analysis import Monitor
from cenet.data.datasets import Resident, digits, image_folders, input_spec_of
from cenet.data.order import seed_of
from cenet.distributed import start
from cenet.environment import environment
from cenet.files import replace_file
from cenet.formatting import percent
from cenet.models import create_model
from cenet.nn import param_groups
from cenet.train import RECIPES
from cenet.train.cuda_graphs import GraphedFunction

LOOKED_AT = 512  # images, by the measures of channels
TASKS, ABOUT = "tasks.csv", "lasting.json"
SMALL = 32  # pixels


@dataclass(frozen=True)
class Course:
    """How a network goes through the tasks.

    Attributes:
        network, block, norm: as of a recipe.
        tasks: how many.
        epochs: of a task.
        images: that are learned, the first of a random order that is always the same.
        batch: images of a step.
        lr, momentum, weight_decay: of SGD; the rate never changes.
        seed: of weights, labels and order.
    """

    network: str = "vgg16"
    block: str = "ce"
    norm: str = "bn"
    tasks: int = 25
    epochs: int = 14
    images: int = 10_000
    batch: int = 128
    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 0.0
    seed: int = 0


class Learner:
    """A network among its tasks."""

    def __init__(self, course: Course, data: Resident, device: torch.device) -> None:
        """At the beginning of the first."""
        self.course = course
        inputs = input_spec_of(data)
        order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(0))
        kept = data.images[order[: course.images]].to(device)
        mean, std = (value[:, None, None] for value in inputs.statistics(device))
        self.images = ((kept.float() - mean) / std).contiguous(memory_format=torch.channels_last)
        self.classes, self.device = len(inputs.classes), device
        if len(self.images) < course.batch:
            raise SystemExit(f"--batch {course.batch} is more than the {len(self.images)} images")
        torch.manual_seed(seed_of("weights", course.seed))
        made: Any = create_model(
            course.network, None if course.block == "plain" else course.block, norm=course.norm,
            num_classes=self.classes, in_chans=self.images.shape[1],
        )  # fmt: skip
        self.network: nn.Module = made.to(device).to(memory_format=torch.channels_last)
        groups = param_groups(self.network, course.weight_decay)
        self.optimizer = torch.optim.SGD(groups, course.lr, course.momentum)
        if device.type == "cpu" and self.images.shape[-1] < SMALL:
            torch.set_num_threads(1)  # several would spend their time waiting for each other
        self.sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, right answers
        self.step: Any = GraphedFunction(self._step) if device.type == "cuda" else self._step

    def learn(self, task: int) -> dict[str, float]:
        """Learn a task; what is known about its last epoch, and about the channels after it."""
        chance = torch.Generator().manual_seed(seed_of("labels", self.course.seed, task))
        labels = torch.randint(self.classes, (len(self.images),), generator=chance).to(self.device)
        self.network.train()
        steps = len(self.images) // self.course.batch
        for _ in range(self.course.epochs):
            self.sums.zero_()
            order = torch.randperm(len(self.images), generator=chance).to(self.device)
            for places in order[: steps * self.course.batch].split(self.course.batch):
                self.step(self.images[places], labels[places])
        loss, right = (self.sums / (steps * self.course.batch)).tolist()
        return {"task": task, "loss": loss, "accuracy": right, **self._channels()}

    def _step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self.network(images)
        loss = cross_entropy(logits.float(), labels)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            right = (logits.argmax(1) == labels).sum()
            self.sums += torch.stack([loss.detach().double() * len(labels), right.double()])

    @torch.no_grad()
    def _channels(self) -> dict[str, float]:
        """Means over layers, of a copy, so that nothing moves."""
        copy, found = deepcopy(self.network).train(), {}
        monitor = Monitor(copy, every=1, to=lambda _, values: found.update(values))
        copy(self.images[:LOOKED_AT])
        monitor.close()
        return {
            name: fmean(layer[name] for layer in found.values())
            for name in ("dormant_ratio", "participation_share", "inhibited_ratio")
        }


def learn_all(course: Course, data: Resident, device: torch.device, out: Path) -> list[Any]:
    """Go through the tasks; rows are written as they come."""
    out.mkdir(parents=True, exist_ok=True)
    learner, rows = Learner(course, data, device), []
    started = time.perf_counter()
    with (out / TASKS).open("w", newline="") as file:
        writer: Any = None
        for task in range(1, course.tasks + 1):
            row = learner.learn(task)
            if not torch.isfinite(torch.tensor(row["loss"])):
                raise SystemExit(f"the loss of task {task} is {row['loss']}; lower --lr")
            rows.append(row | {"seconds": time.perf_counter() - started})
            if writer is None:
                writer = csv.DictWriter(file, list(rows[-1]), lineterminator="\n")
                writer.writeheader()
            writer.writerow(rows[-1])
            file.flush()
            print(f"task {task}: accuracy {percent(row['accuracy'], '.2f')}, dormant "
                  f"{percent(row['dormant_ratio'], '.2f')}", flush=True)  # fmt: skip
    about = {"course": asdict(course), "environment": environment(device, 1)}
    # written last: if the file is there, all rows are
    replace_file(out / ABOUT, json.dumps(about, indent=1, default=str).encode())
    return rows


def parse(arguments: list[str]) -> tuple[Course, argparse.Namespace]:
    """The command line; errors end the program."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.lasting", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    base = Course()
    choices = {"network": ("vgg16", "vgg6"), "block": ("plain", "se", "bd", "ir", "ce"),
               "norm": ("bn", "gn", "in", "ln")}  # fmt: skip
    for name, value in asdict(base).items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, choices=choices.get(name))
    parser.add_argument("--data", type=Path, help="CIFAR-10 as image folders; default: digits")
    parser.add_argument("--out", type=Path, default=Path("runs/lasting"))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    found = parser.parse_args(arguments)
    values = {name: getattr(found, name) for name in asdict(base)}
    for name in ("tasks", "epochs", "images", "batch"):
        if values[name] < 1:
            parser.error(f"--{name} {values[name]} must be at least 1")
    return Course(**values), found


def main() -> None:
    """What the command line asks for."""
    course, found = parse(sys.argv[1:])
    if found.data is None:
        data = digits().train
    else:
        split = image_folders(found.data, RECIPES["vgg16_ce"].image_size, resident=True)
        if not isinstance(split.train, Resident):
            sys.exit(f"--data {found.data} must hold images of 32×32")
        data = split.train
    learn_all(course, data, start(found.device).device, found.out)


if __name__ == "__main__":
    main()
