"""The runs that the figures and tables need, and the commands that train them."""

from dataclasses import replace

import pytest
from experiments.catalogue import RESULTS
from experiments.lasting import parse as parse_tasks
from experiments.runs import LOOK_EVERY, DetectorRun, LastingRun, Run, runs
from experiments.scheduling import Settings

from _experiments import EVERY
from cenet.detection.command import parse as parse_detector
from cenet.train.command import parse

PARSED = set()  # runs that several results need are parsed for the first of them


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
@pytest.mark.parametrize("on_gpu", [False, True])
def test_commands_ask_for_the_runs_of_the_paper(result, on_gpu, monkeypatch, tmp_path):
    """At the configuration users run; parsing stops before training."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    data = dict.fromkeys(("imagenet", "tinyimagenet", "cifar10", "coco", "coco128"), tmp_path)
    settings = Settings(data=data, runs=tmp_path, options=("--workers", "7"))
    for run in result.needs if on_gpu else result.needs[:1]:  # others differ as they do on a GPU
        if (run, on_gpu) in PARSED:
            continue
        PARSED.add((run, on_gpu))
        command = settings.training(run)
        if isinstance(run, LastingRun):
            course, job = parse_tasks(command)
            assert course == run.made
            assert (job.data, job.out) == (data.get(run.dataset), tmp_path / run.name)
            continue
        if isinstance(run, DetectorRun):
            job = parse_detector(command[2:])
            assert job.checkpoint == tmp_path / run.begins_with.name / "weights.safetensors"
            assert job.options.evaluate_every == job.recipe.epochs
        else:
            job = parse(command[1:])
            assert job.options.cuda_graphs == (on_gpu and not run.watched)
            assert job.options.monitor_every == (LOOK_EVERY if run.watched else 0)
            first = run.begins_with
            assert job.weights == (first and tmp_path / first.name / "weights.safetensors")
        precision = "bfloat16" if on_gpu else "float32"
        assert job.recipe == replace(run.made, precision=precision)
        assert job.recipe.seed == run.seed
        assert (job.options.out, job.options.resume) == (tmp_path / run.name, "auto")
        assert (job.options.workers, job.options.channels_last) == (7, on_gpu)
        assert job.data == tmp_path


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
def test_smoke_runs_are_rows_of_their_own(result):
    for run in result.needs:
        small = run.smoke()
        assert small.dataset in ("digits", "shapes")
        if isinstance(run, LastingRun):
            assert (small.made.block, small.made.norm) == (run.made.block, run.made.norm)
            assert small.epochs == 2
            continue
        assert small.epochs == 1
        if not isinstance(run, DetectorRun):
            for field in ("block", "norm", "act", "label_corruption", "holdout", "ce_start"):
                assert getattr(small.made, field) == getattr(run.made, field)
            assert small.watched == run.watched
            assert (small.begins_with is None) == (run.begins_with is None)


def test_names_tell_runs_apart():
    assert len({run.name for run in EVERY}) == len(EVERY)
    assert len({run.smoke().name for run in EVERY}) > len(EVERY) / 3
    assert runs("vgg16_ce", weight_decay=5e-4) == runs("vgg16_ce")  # its own
    (changed,) = runs("vgg16_ce", weight_decay=2e-3)
    assert changed.name == "vgg16_ce-weight_decay=0.002-seed0"


def test_fewer_epochs_move_what_happens_in_between():
    found = Run("vgg16_ce", changes=(("epochs", 16),)).made
    assert (found.epochs, found.milestones, found.warmup_epochs) == (16, (6, 12), 4.0)
