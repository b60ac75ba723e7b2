"""The engine does what a recipe says, against a loop written by hand."""

import copy
import math
from dataclasses import replace

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cenet.train.loop as loop_module
from _training import (
    PLAIN,
    TINY,
    VARIATIONS,
    assert_same_run,
    few_digits,
    metrics,
    stop_at,
    trainer,
)
from cenet.data.order import epoch_order, seed_of
from cenet.distributed import Processes
from cenet.models import create_model
from cenet.nn import ce_layers
from cenet.run_folder import WEIGHTS, read_metrics
from cenet.signals import Interrupted
from cenet.train import RECIPES, checkpoint
from cenet.train.classifier import Trainer
from cenet.train.job import Job, evaluate_run, train
from cenet.train.options import Options

pytestmark = pytest.mark.usefixtures("one_thread")

BY_HAND = {
    **{name: fields for name, fields in VARIATIONS.items() if name != "accumulation"},
    "accumulation": {"accumulate": 2, "momentum": 0.5},
    "ema": {"ema": 0.7, "decay_norms": False},
    "smoothing": {"label_smoothing": 0.2, "lr_batch": 32, "schedule": "poly", "power": 2.0},
    "mixup": {"mixup": 0.4, "seed": 1},
}


def targets_by_hand(recipe, labels):
    """Class probabilities: smoothed."""
    hot = nn.functional.one_hot(labels, 10).float()
    return hot * (1 - recipe.label_smoothing) + recipe.label_smoothing / 10


def rate_by_hand(recipe, update, per_epoch):
    peak = recipe.lr * recipe.batch_size * recipe.accumulate / recipe.lr_batch
    done = update / (recipe.epochs * per_epoch)
    warmup = round(recipe.warmup_epochs * per_epoch)
    if update < warmup:
        return peak * update / warmup
    return (
        peak
        * {
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "poly": (1 - done) ** recipe.power,
            "step": recipe.gamma ** sum(update >= m * per_epoch for m in recipe.milestones),
        }[recipe.schedule]
    )


def by_hand(recipe, data):
    """The weights and the rows of metrics of a recipe, written out."""
    pixels = data.train.images.double()
    mean, std = pixels.mean(), pixels.std(correction=0)
    x, test_x = (((part.images - mean) / std).float() for part in data)
    checkpoint.seed_everything(seed_of("weights", recipe.seed))
    network = create_model("vgg6", "ce", num_classes=10, in_chans=1)
    checkpoint.seed_everything(seed_of("chance", recipe.seed, 0))
    groups = {True: [], False: []}
    for name, parameter in network.named_parameters():
        free = name.endswith("mix_logit") or (parameter.dim() < 2 and not recipe.decay_norms)
        groups[free].append(parameter)
    sgd = torch.optim.SGD(
        [{"params": groups[False], "weight_decay": recipe.weight_decay}, {"params": groups[True]}],
        momentum=recipe.momentum,
    )
    dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(recipe.precision)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    average, rows, updates = None, [], 0
    per_epoch = len(x) // recipe.batch_size // recipe.accumulate
    for epoch in range(recipe.epochs):
        network.train()
        order = epoch_order(len(x), recipe.seed, epoch)
        loss_sum = correct = seen = 0
        for update in range(per_epoch):
            first = update * recipe.accumulate
            for step in range(first, first + recipe.accumulate):
                chosen = order[step * recipe.batch_size : (step + 1) * recipe.batch_size]
                images, wanted = x[chosen], targets_by_hand(recipe, data.train.labels[chosen])
                if recipe.mixup:
                    numpy.random.rand()  # noqa: NPY002, timm's chance of not mixing
                    share = numpy.random.beta(recipe.mixup, recipe.mixup)  # noqa: NPY002
                    images = share * images + (1 - share) * images.flip(0)
                    wanted = share * wanted + (1 - share) * wanted.flip(0)
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    logits = network(images)
                loss = -(wanted * logits.float().log_softmax(1)).sum(1).mean()
                scaler.scale(loss / recipe.accumulate).backward()
                loss_sum += loss.item() * len(chosen)
                correct += (logits.argmax(1) == data.train.labels[chosen]).sum().item()
                seen += len(chosen)
            for group in sgd.param_groups:
                group["lr"] = rate_by_hand(recipe, updates, per_epoch)
            if recipe.clip_grad:
                scaler.unscale_(sgd)
                nn.utils.clip_grad_norm_(network.parameters(), recipe.clip_grad)
            scaler.step(sgd)
            scaler.update()
            sgd.zero_grad()
            updates += 1
            if average is None:
                average = copy.deepcopy(network)
            states = (module.state_dict().values() for module in (average, network))
            for own, new in zip(*states, strict=True):
                decay = recipe.ema if own.is_floating_point() else 0
                own.copy_(decay * own + (1 - decay) * new)
        average.eval()
        with torch.no_grad(), torch.autocast("cpu", dtype or torch.bfloat16, enabled=bool(dtype)):
            logits = average(test_x).float()
        own = logits.gather(1, data.test.labels[:, None])
        before, after = (logits > own).sum(1), (logits < own).sum(1)
        # half precision has equal logits: any of the classes that share a place may have it
        assert recipe.precision != "float32" or (before + after == 9).all()
        hits = {k: [(place < k).double().mean().item() for place in (9 - after, before)]
                for k in (1, 5)}  # fmt: skip
        rows.append({
            "epoch": epoch + 1,
            "updates": updates,
            "lr": sgd.param_groups[0]["lr"],
            "train_loss": loss_sum / seen,
            "train_top1": correct / seen,
            **{f"lambda/{name.removesuffix('.ce.mix_logit')}": 1 / (1 + math.exp(-value.item()))
               for name, value in network.state_dict().items() if "mix_logit" in name},
            "test_loss": nn.functional.cross_entropy(logits, data.test.labels).item(),
            **{f"test_top{k}": bounds for k, bounds in hits.items()},
        })  # fmt: skip
    return average.state_dict(), rows


@pytest.mark.parametrize("name", BY_HAND)
def test_a_run_is_what_its_recipe_says(name, tmp_path):
    """Schedule, accumulation, clipping, smoothing, mixup, averaging and metrics, against a loop
    that has none of the engine's code."""
    recipe = replace(TINY, **BY_HAND[name])
    data = few_digits()
    weights, rows = by_hand(recipe, data)
    trainer(recipe, tmp_path, data).run()
    for found, expected in zip(metrics(tmp_path), rows, strict=True):
        for column in ("test_top1", "test_top5"):
            fewest, most = expected.pop(column)
            assert fewest <= found.pop(column) <= most
        assert found == pytest.approx(expected, rel=1e-4)
    final = load_file(tmp_path / WEIGHTS)
    assert final.keys() == weights.keys()
    for key, value in final.items():
        torch.testing.assert_close(value, weights[key], rtol=1e-3, atol=1e-5, msg=key)
    found = evaluate_run(tmp_path, device="cpu")
    (tmp_path / WEIGHTS).unlink()
    assert evaluate_run(tmp_path, device="cpu") == found  # of the checkpoint


def test_seconds_are_those_of_training_over_all_parts_of_an_epoch(tmp_path, monkeypatch):
    """By a clock on which an update takes a second, and a test an hour."""
    now = [0.0]
    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: now[0])
    tested = Trainer.test

    def slow_test(engine):
        now[0] += 3600
        return tested(engine)

    monkeypatch.setattr(Trainer, "test", slow_test)

    def slow(engine):
        real = engine._update

        def update():
            now[0] += 1
            real()

        engine._update = update
        return engine

    first = slow(trainer(PLAIN, tmp_path, few_digits()))
    stop_at(first, 8)
    with pytest.raises(Interrupted):
        first.run()
    now[0] += 1e6  # until somebody resumes it
    second = slow(trainer(PLAIN, tmp_path, few_digits()))
    second.resume()
    second.run()
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["seconds"] for row in rows] == [6, 6]
    assert [row["images_per_second"] for row in rows] == [16, 16]


def test_a_recipe_can_ask_for_synchronized_layers(tmp_path):
    for asked in (False, True):
        engine = trainer(replace(TINY, sync_ce=asked), tmp_path, few_digits())
        assert {layer.sync is not None for _, layer in ce_layers(engine.network)} == {asked}


@pytest.mark.parametrize("block", ["plain", pytest.param("ce", marks=pytest.mark.slow)])
def test_a_compiled_network_is_trained_and_tested(block, tmp_path, monkeypatch):
    """What compiles is left out: that all is called through it."""
    real, calls = torch.compile, []

    def compiled(module):
        calls.append(0)
        place = len(calls) - 1

        def backend(graph, inputs):
            def run(*values):
                calls[place] += 1
                return graph(*values)

            return run

        return real(module, backend=backend)

    monkeypatch.setattr(torch, "compile", compiled)
    recipe = replace(TINY, epochs=1, block=block)
    trainer(recipe, tmp_path / "compiled", few_digits(), compile=True).run()
    monkeypatch.undo()
    assert calls == [6, 1]  # steps, and the one batch of the test
    trainer(recipe, tmp_path / "eager", few_digits()).run()
    for one, other in zip(metrics(tmp_path / "eager"), metrics(tmp_path / "compiled"), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.slow
def test_digits_reach_the_accuracy_of_their_recipe_and_are_deterministic(tmp_path):
    recipe = RECIPES["digits_ce"]
    rows = [train(Job(recipe, Options(tmp_path / name), device="cpu")) for name in "ab"]
    assert rows[0]["test_top1"] >= recipe.accuracy
    assert_same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("accumulate", "options"),
    [
        (1, {"cuda_graphs": True}),
        (2, {"cuda_graphs": True}),
        (1, {"compile": True}),
        (1, {"compile": True, "cuda_graphs": True}),
    ],
)
def test_options_of_a_gpu_train_as_eager_steps_do(accumulate, options, tmp_path):
    """Each network as itself, with the other one in the same process."""
    device = Processes(0, 1, torch.device("cuda", 0))
    for block in ("plain", "ce"):
        recipe = replace(TINY, block=block, accumulate=accumulate, clip_grad=1.0, epochs=3)
        rows = {}
        for name, chosen in (("eager", {}), ("other", options)):
            where = Options(tmp_path / f"{block}_{name}", channels_last=True, **chosen)
            trainer = Trainer(recipe, few_digits(), where, device)
            trainer.run()
            rows[name] = trainer.run_log.rows
        for eager, other in zip(rows["eager"], rows["other"], strict=True):
            assert eager["lr"] == other["lr"]
            for name in ("train_loss", "test_loss"):
                assert other[name] == pytest.approx(eager[name], rel=1e-2)
