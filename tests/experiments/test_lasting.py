"""Learning over many tasks: what a task is, and that the network goes on from where it was."""

import csv
import json
from copy import deepcopy

import pytest
import torch
from experiments.lasting import Course, Learner, learn_all, parse
from torch.nn.functional import cross_entropy

from cenet.data.datasets import digits

COURSE = Course(network="vgg6", tasks=2, epochs=2, images=128, batch=64, lr=0.05, weight_decay=1e-3)


@pytest.fixture
def recorded():
    """A learner, the network it began with, and the steps that it was asked to take."""
    learner = Learner(COURSE, digits().train, torch.device("cpu"))
    first, steps, real = deepcopy(learner.network), [], learner.step

    def step(images, labels):
        steps.append((images.clone(), labels.clone()))
        real(images, labels)

    learner.step = step
    return learner, first, steps


def labels_of(steps):
    found = {}
    for images, labels in steps:
        for image, label in zip(images, labels.tolist(), strict=True):
            found.setdefault(image.numpy().tobytes(), set()).add(label)
    return found


def test_labels_belong_to_a_task_and_are_drawn_anew_for_the_next(recorded):
    learner, _, steps = recorded
    one, two = (learner.learn(task) and labels_of(steps[4 * task - 4 :]) for task in (1, 2))
    assert one.keys() == two.keys()
    assert len(one) == COURSE.images
    assert {len(labels) for labels in (*one.values(), *two.values())} == {1}  # in every epoch
    same = sum(one[image] == two[image] for image in one)
    assert 0 < same < 35  # of 128 about 13 by chance, standard deviation 3.4
    counts = torch.bincount(torch.tensor([label for (label,) in one.values()]), minlength=10)
    assert counts.max() < 30  # all classes: about 13 each
    assert len({steps[0][0].numpy().tobytes(), steps[2][0].numpy().tobytes()}) == 2  # the order


def test_the_network_goes_on_with_weights_and_momenta(recorded):
    """Against plain SGD over the recorded steps, in one go."""
    learner, network, steps = recorded
    rows = [learner.learn(task) for task in (1, 2)]
    mixes = [value for name, value in network.named_parameters() if name.endswith("mix_logit")]
    others = [value for value in network.parameters() if not any(value is m for m in mixes)]
    assert len(mixes) == 6  # λ is never decayed
    optimizer = torch.optim.SGD(
        [{"params": mixes, "weight_decay": 0}, {"params": others, "weight_decay": 1e-3}],
        COURSE.lr, momentum=0.9,
    )  # fmt: skip
    network.train()
    right, losses = [], []
    for images, labels in steps:
        logits = network(images)
        loss = cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append((logits.argmax(1) == labels).float().mean().item())
        losses.append(loss.item())
    expected = [(sum(values[2:4]) / 2, sum(values[6:8]) / 2) for values in (right, losses)]
    assert [row["accuracy"] for row in rows] == pytest.approx(expected[0])
    assert [row["loss"] for row in rows] == pytest.approx(expected[1], rel=1e-5)
    for name, value in network.state_dict().items():
        assert torch.allclose(learner.network.state_dict()[name], value, rtol=1e-4, atol=1e-6), name


def test_a_run_leaves_a_row_for_each_task(tmp_path):
    rows = learn_all(COURSE, digits().train, torch.device("cpu"), tmp_path)
    with (tmp_path / "tasks.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["task"] for row in found] == ["1", "2"]
    assert [float(row["accuracy"]) for row in found] == [row["accuracy"] for row in rows]
    assert all(0 <= float(row["dormant_ratio"]) <= 1 for row in found)
    assert json.loads((tmp_path / "lasting.json").read_text())["course"]["images"] == 128


def test_wrong_arguments(capsys):
    for arguments, message in (
        (["--tasks", "0"], "--tasks 0 must be at least 1"),
        (["--block", "cee"], "invalid choice: 'cee'"),
    ):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert message in capsys.readouterr().err
