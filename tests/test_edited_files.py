"""JSON files that somebody edited: every value, missing or of another kind, is one line."""

import copy
import json
from dataclasses import replace
from itertools import islice

import pytest
import timm
import torch

import cenet
from _detection import write_detection_run
from _pages import write_run
from _training import TINY, call, few_digits, trainer
from cenet.analysis.diagnosis import FILE, Diagnosis
from cenet.data.datasets import InputSpec
from cenet.detection.page import read_source
from cenet.detection.recipes import DetectionRecipe
from cenet.export import _find_network, image_metadata, sample_images, write_network
from cenet.report import write_page
from cenet.run_folder import ABOUT, CONFIG, METRICS
from cenet.train import RECIPES
from cenet.train.recipes import FINETUNE, Recipe, read_run
from cenet.train.weights import build_network, find_beginning

pytestmark = pytest.mark.usefixtures("one_thread")
NAME = "test_resnet"
MISSING = object()
WRONG = (
    None, "a\nb", [None], {"a": 1}, float("nan"), -1, MISSING, True, [], 10**400, 1.5, "x", {}, 0,
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    trainer(replace(TINY, epochs=1), folder, few_digits()).run()
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = timm.create_model(NAME, num_classes=3)
    cenet.insert_ce_(model, start="identity")
    cenet.save(model, folder, image_size=64)
    return folder


def places(value, place=()):
    """The place of every value, and of two values of each list."""
    yield place
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(min(2, len(value)))
        for key in keys:
            yield from places(value[key], (*place, key))


def edited(content, place, wrong):
    """A copy of the content with another value at a place."""
    if not place:
        return None if wrong is MISSING else wrong
    content = copy.deepcopy(content)
    *way, last = place
    inside = content
    for key in way:
        inside = inside[key]
    if wrong is MISSING:
        del inside[last]
    else:
        inside[last] = wrong
    return content


def sweep(path, read, values=3, every=1, under=()):
    """Read the file with each value edited, in turn by some of `WRONG`; return what was said.

    Args:
        path: the file, which is as before at the end.
        read: reads it.
        values: how many of `WRONG` each value is replaced by.
        every: take one place in so many.
        under: the part of the content to edit.
    """
    text, said = path.read_text(), []
    content = part = json.loads(text)
    for key in under:
        part = part[key]
    try:
        for number, place in enumerate(islice(places(part, under), 0, None, every)):
            for turn in range(values):
                wrong = WRONG[(number * values + turn) % len(WRONG)]
                path.write_text(json.dumps(edited(content, place, wrong)))
                try:
                    read()
                except (ValueError, OSError) as error:
                    said.append(str(error))
                except Exception as error:
                    raise AssertionError(f"{place} = {wrong!r:.40}: {error!r}") from error
    finally:
        path.write_text(text)
    read()  # and as it was, it is read
    assert [line for line in said if len(line.splitlines()) != 1] == []
    return said


def test_run_json(run, tmp_path):
    said = sweep(run / ABOUT, lambda: read_run(run, Recipe), values=len(WRONG))
    assert all("run.json" in line or "is a run of `" in line for line in said)
    assert len(said) > 300
    assert sweep(run / ABOUT, lambda: write_page([run], tmp_path / "page.html"), 1, every=3)


def test_run_json_of_a_stock_network(saved, tmp_path):
    """CE is put where run.json says."""
    sites = json.loads((saved / CONFIG).read_text())["model_args"]["ce"]
    recipe = replace(FINETUNE, network=NAME, image_size=64)
    inputs = InputSpec(("a", "b"), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    about = {
        "command": recipe.command, "recipe": recipe.as_dict(), "inputs": inputs.as_dict(),
        "environment": {"ce": sites},
    }  # fmt: skip
    (tmp_path / ABOUT).write_text(json.dumps(about))

    def goes_on():
        begun = find_beginning(recipe, None, tmp_path)
        build_network(recipe, inputs, begun.ce)

    assert sweep(tmp_path / ABOUT, goes_on, under=("environment",))


def test_run_json_and_metrics_of_a_detector(tmp_path):
    run = tmp_path / "shapes"
    write_detection_run(run, epochs=1)
    assert sweep(run / ABOUT, lambda: read_run(run, DetectionRecipe), values=len(WRONG))
    assert sweep(run / METRICS, lambda: read_source(run), values=len(WRONG))


def test_config_json(run, saved):
    assert sweep(run / CONFIG, lambda: cenet.load(run))
    assert sweep(saved / CONFIG, lambda: cenet.load(saved))


def test_config_json_of_what_is_exported(run):
    """It says how the images are made that the exported network is checked on."""

    def export():
        network = _find_network(str(run), None)
        image_metadata(network)
        with torch.no_grad():
            network(sample_images(network.pretrained_cfg, None, 2))

    assert sweep(run / CONFIG, export, values=2)


def test_config_json_of_initial_weights(saved):
    recipe = replace(FINETUNE, network=NAME)

    def begin():
        begun = find_beginning(recipe, saved, None)
        inputs = InputSpec(("a", "b"), begun.mean, begun.std)
        build_network(replace(recipe, image_size=begun.size), inputs, begun.ce)

    said = sweep(saved / CONFIG, begin)
    assert all("config.json" in line or "use --model" in line for line in said)


@pytest.mark.parametrize("key", ["pretrained_cfg", "input_size", "mean", "std"])
@pytest.mark.parametrize("kind", ["run", "saved"])
def test_size_and_normalization_are_not_guessed(kind, key, request, tmp_path):
    """timm would take those of ImageNet."""
    folder = request.getfixturevalue(kind)
    path = folder / CONFIG
    text = path.read_text()
    config = json.loads(text)
    del (config if key == "pretrained_cfg" else config["pretrained_cfg"])[key]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json cannot be used .*pretrained_cfg lacks "):
        write_network(str(folder), None, tmp_path / "network.onnx", "onnx")
    path.write_text(text)
    assert not (tmp_path / "network.onnx").exists()


def test_metrics(tmp_path):
    run = write_run(tmp_path / "run", 0, measured=False, epochs=1)
    assert sweep(run / METRICS, lambda: write_page([run], tmp_path / "page.html"), values=2)


@pytest.mark.parametrize("wrong", [None, "high", True, [1], {}])
def test_a_result_that_is_no_number_is_left_out_of_the_card(wrong, run, tmp_path, monkeypatch):
    text = (run / METRICS).read_text()
    row = {**json.loads(text), "test_top1": wrong}
    (run / METRICS).write_text(json.dumps(row))
    out = tmp_path / "out"
    call(monkeypatch, "export", str(run), "--format", "safetensors", "--out", str(out))
    (run / METRICS).write_text(text)
    card = (out / "README.md").read_text()
    assert "| top-5 on test images |" in card
    assert "| top-1 on test images |" not in card


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_a_diagnosis(every, tmp_path):
    run = write_run(tmp_path / "run", 0, epochs=1, layers=4)
    path = run / FILE
    assert len(sweep(path, lambda: Diagnosis.read(path), values=2, every=every)) > 50


def test_a_recipe_says_which_types_it_takes():
    about = RECIPES["digits_ce"].as_dict()
    for name, wrong, words in (
        ("epochs", 1.5, "epochs=1.5 must be a whole number"),
        ("epochs", True, "epochs=True must be a whole number"),
        ("lr", "x", "lr='x' must be a number"),
        ("milestones", 3, r"milestones=3 must be a tuple \(in JSON a list\), each a whole number"),
        (
            "milestones",
            ["x"],
            r"milestones=\('x',\) must be a tuple \(in JSON a list\), each a whole number",
        ),
        ("block", 3, "block=3 must be text"),
        ("ce_position", "last", "ce_position='last' must be a whole number"),
        ("sync_ce", 1, "sync_ce=1 must be true or false"),
        ("image_size", 10**400, "image_size=1000.* must be at least 8, and finite"),
    ):
        with pytest.raises(ValueError, match=words):
            Recipe.from_dict({**about, name: wrong})
    assert Recipe.from_dict({**about, "lr": 1}).lr == 1
