"""Small runs that the tests of the engine share."""

import os
import signal
import sys
from dataclasses import replace

import torch
from PIL import Image

from cenet.__main__ import main
from cenet.data.datasets import Split, digits
from cenet.distributed import Processes
from cenet.run_folder import WEIGHTS, read_metrics
from cenet.signals import SIGNALS
from cenet.train import RECIPES, checkpoint
from cenet.train.classifier import Trainer
from cenet.train.options import Options
from cenet.train.run_log import TIMES

ALONE = Processes(0, 1, torch.device("cpu"))


TINY = replace(RECIPES["digits_ce"], epochs=2, batch_size=16, warmup_epochs=0.5, accuracy=None)
# a quarter of the time, for tests in which the network does not matter
PLAIN = replace(TINY, block="plain")


def few_digits(train=96, test=64):
    split = digits()
    return Split(
        split.train._replace(images=split.train.images[:train], labels=split.train.labels[:train]),
        split.test._replace(images=split.test.images[:test], labels=split.test.labels[:test]),
    )


def trainer(recipe, out, data, **options):
    return Trainer(recipe, data, Options(out, **options), ALONE)


def metrics(out):
    rows = read_metrics(out / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def assert_same_run(one, other):
    assert metrics(one) == metrics(other)
    first, second = (checkpoint.newest(out) for out in (one, other))
    assert first[0].name == second[0].name
    assert first[1].keys() == second[1].keys()
    for name, value in first[1].items():
        assert torch.equal(value, second[1][name]), name
    assert (one / WEIGHTS).read_bytes() == (other / WEIGHTS).read_bytes()


def stop_at(engine, update, number=signal.SIGTERM):
    """Have the run interrupted after so many updates."""
    real = engine._update

    def counted():
        real()
        if engine.position.updates == update:
            os.kill(os.getpid(), number)

    engine._update = counted


def call(monkeypatch, *arguments):
    """The command, in this process, which is not about to end as after a signal."""
    monkeypatch.setattr(sys, "argv", ["cenet", *arguments])
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        main()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_digits(root):
    """train/CLASS/*.png and test/CLASS/*.png; both parts have all classes."""
    split = few_digits(48, 16)
    for part, data in (("train", split.train), ("test", split.test)):
        for i, (image, label) in enumerate(zip(data.images, data.labels, strict=True)):
            path = root / part / str(int(label)) / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image[0].numpy()).resize((20, 18)).save(path)
    for label in range(10):
        for part in ("train", "test"):
            path = root / part / str(label) / "x.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (20, 18), label * 20).save(path)
    return root


VARIATIONS = {
    "plain": {},
    "ema, mixup, clipping": {"ema": 0.9, "mixup": 0.2, "clip_grad": 1.0, "label_smoothing": 0.1},
    "accumulation": {"accumulate": 2, "augment": "crop_flip"},
    "bfloat16": {"precision": "bfloat16", "schedule": "step", "milestones": (1,)},
    # the scale of the loss is too large at first, and falls
    "float16": {"precision": "float16", "clip_grad": 0.5},
}
