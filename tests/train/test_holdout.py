"""Held-out training images: which they are, and that a run tests itself on nothing else."""

import json
import pickle
import shutil
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from hashlib import md5
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from _sources import write_parquet, write_shards
from _training import PLAIN, assert_same_run, call, metrics, stop_at, trainer
from cenet.data.datasets import Encoded, Resident, digest, digits, held_out, image_folders, load
from cenet.diagnosing.command import run as diagnose
from cenet.report import write_page
from cenet.signals import Interrupted
from cenet.train import RECIPES, checkpoint
from cenet.train.job import Job, evaluate_run, train
from cenet.train.options import Options
from cenet.train.recipes import Recipe, read_run
from cenet.train.weights import load_run

pytestmark = pytest.mark.usefixtures("one_thread")

HELD = replace(PLAIN, holdout=0.2)
FILES = replace(HELD, augment="imagenet", image_size=16, dataset="imagenet")
FORMS = ("folder", "tar", "parquet")
FIGURES = ("test_loss", "test_top1", "test_top5")
# of runs of earlier versions
NEW_FIELDS = ("holdout", "label_corruption_to")


@pytest.fixture(scope="module")
def places(files_folder, tmp_path_factory):
    """The same images in all forms."""
    pytest.importorskip("pyarrow")
    root = tmp_path_factory.mktemp("places")
    return {
        "folder": files_folder,
        "tar": write_shards(files_folder, root / "tar"),
        "parquet": write_parquet(files_folder, root / "parquet"),
    }


def contents(data):
    """Images and labels, to be compared."""
    if isinstance(data, Resident):
        images = [image.numpy().tobytes() for image in data.images]
    else:
        images = [data.source.read(i) for i in range(len(data.source))]
    return list(zip(images, data.labels.tolist(), strict=True))


def expected_places(labels, share):
    """Image by image: taken while its class has not yet given enough."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2020)).tolist()
    wanted = {c: max(1, round(share * labels.count(c))) for c in set(labels)}
    given, places = defaultdict(int), []
    for place in order:
        if given[labels[place]] < wanted[labels[place]]:
            given[labels[place]] += 1
            places.append(place)
    return sorted(places)


# the choice


@pytest.mark.parametrize("share", [0.001, 0.1, 0.25, 0.5, 0.9])
def test_each_class_gives_its_share(share):
    """Also classes of very different sizes, and one without images."""
    sizes = {0: 2, 1: 7, 2: 25, 4: 400}
    labels = torch.cat([torch.full((size,), c) for c, size in sizes.items()])
    labels = labels[torch.randperm(len(labels))]
    if share == 0.9:
        labels = labels[labels > 1]
    held = held_out(labels, share, "abcde")
    assert held.nonzero().flatten().tolist() == expected_places(labels.tolist(), share)
    for c in labels.unique().tolist():
        n = int((labels == c).sum())
        assert 1 <= held[labels == c].sum() == max(1, round(share * n)) < n


def test_larger_shares_hold_out_the_same_images_and_more():
    labels = torch.arange(500) % 7
    small, large = (held_out(labels, share, range(7)) for share in (0.1, 0.3))
    assert (large & small).sum() == small.sum() < large.sum()


def test_the_choice_stays_what_it_is():
    """Figures of held-out images can be compared over versions."""
    held = held_out(torch.arange(24) % 3, 0.25, "abc")
    assert held.nonzero().flatten().tolist() == [4, 8, 13, 14, 18, 21]


def test_images_are_not_taken_from_the_beginning_of_a_class():
    held = held_out(torch.zeros(4000, dtype=torch.long), 0.5, "a")
    assert held[:2000].sum() == pytest.approx(1000, abs=80)  # five deviations


@pytest.mark.parametrize(
    ("count", "share", "said"), [(4, 0.95, "all 4 training"), (1, 0.1, "all 1 training")]
)
def test_a_class_that_would_be_left_empty(count, share, said):
    labels = torch.tensor([0] * 100 + [1] * count)
    with pytest.raises(
        ValueError, match=rf"^holdout={share} would hold out {said} .*'b' .*; lower"
    ):
        held_out(labels, share, "ab")


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
def test_shares_that_are_none(share):
    with pytest.raises(ValueError, match=rf"^holdout={share} must be at least 0 and less than 1$"):
        replace(PLAIN, holdout=share)


# the data


def check_division(whole, found, share):
    """Nothing twice, nothing lost, and the expected places."""
    held = expected_places(whole.labels.tolist(), share)
    everything = contents(whole)
    assert contents(found.test) == [everything[i] for i in held]
    assert contents(found.train) == [everything[i] for i in range(len(everything)) if i not in held]
    assert found.train.classes == found.test.classes == whole.classes
    assert set(found.test.labels.tolist()) == set(whole.labels.tolist())


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_divided_alike(form, places, few_files):
    found = load(FILES, places[form])
    assert isinstance(found.test, Encoded)
    check_division(few_files.train, found, 0.2)
    whole = list(image_folders(places[form], 16, resident=False).train.source.names())
    trained, held = (list(part.source.names()) for part in found)
    assert sorted([*trained, *held]) == sorted(whole)
    assert not {*trained} & {*held}
    assert len(held) == len(found.test.source) == len(found.test.labels)
    places_of = [part.source.where(i) for part in found for i in range(len(part.source))]
    assert len({*places_of}) == len(whole)


def test_digits_are_divided():
    check_division(digits().train, load(HELD, None), 0.2)


def test_the_choice_is_the_same_for_all_seeds_and_recipes(places):
    changes = {"seed": 5, "network": "vgg16", "lr": 0.5, "label_corruption": 0.5}
    for recipe, folder in ((HELD, None), (FILES, places["tar"])):
        found = [load(made, folder) for made in (recipe, replace(recipe, **changes))]
        assert contents(found[0].test) == contents(found[1].test)
        assert [i for i, _ in contents(found[0].train)] == [i for i, _ in contents(found[1].train)]


@pytest.mark.parametrize("to", ["other", "any"])
def test_labels_of_held_out_images_are_never_corrupted(to):
    clean = load(HELD, None)
    found = load(replace(HELD, label_corruption=0.5, label_corruption_to=to), None)
    assert torch.equal(found.test.labels, clean.test.labels)
    wrong = int((found.train.labels != clean.train.labels).sum())
    if to == "other":
        assert wrong == round(0.5 * len(clean.train.labels))
    assert wrong > 0.4 * len(clean.train.labels)


def write_cifar10(root, monkeypatch):
    """Files as torchvision stores them, of few images, with checksums that it finds right."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    random = numpy.random.default_rng(0)

    def written(name, content):
        (folder / name).write_bytes(pickle.dumps(content))
        return [name, md5((folder / name).read_bytes()).hexdigest()]

    def batch(name):
        images = random.integers(256, size=(20, 3072), dtype=numpy.uint8)
        return written(name, {"data": images, "labels": [i % 10 for i in range(20)]})

    monkeypatch.setattr(CIFAR10, "train_list", [batch(f"data_batch_{i}") for i in range(1, 6)])
    monkeypatch.setattr(CIFAR10, "test_list", [batch("test_batch")])
    names = written("batches.meta", {"label_names": [f"class {i}" for i in range(10)]})
    meta = {"filename": names[0], "md5": names[1], "key": "label_names"}
    monkeypatch.setattr(CIFAR10, "meta", meta)
    return root


def test_cifar10_is_divided_without_its_test_images(tmp_path, monkeypatch):
    root = write_cifar10(tmp_path, monkeypatch)
    recipe = replace(RECIPES["vgg16_ce"], holdout=0.2)
    whole = load(replace(recipe, holdout=0.0), root)
    assert [len(part.labels) for part in whole] == [100, 20]
    assert whole.train.images.shape == (100, 3, 32, 32)
    (root / "cifar-10-batches-py" / "test_batch").unlink()
    check_division(whole.train, load(recipe, root), 0.2)
    with pytest.raises(ValueError, match="damaged or incomplete"):
        load(replace(recipe, holdout=0.0), root)
    (root / "cifar-10-batches-py" / "data_batch_3").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged or incomplete"):
        load(recipe, root)


def test_a_folder_without_training_images(tmp_path):
    with pytest.raises(ValueError, match=r"must have the folder train, or train-\*.tar, or train-"):
        load(FILES, tmp_path)


# runs


def damage_test_images(root):
    for path in (*root.glob("test-*"), *(root / "test").glob("*/*")):
        path.write_bytes(b"no image, no tar file, no parquet file")


@pytest.mark.parametrize("form", [*FORMS, "in memory"])
def test_test_images_are_not_read(form, places, tmp_path):
    root, recipe = tmp_path / "data", replace(FILES, epochs=1)
    if form == "in memory":
        recipe = replace(recipe, augment="crop_flip")
        for path in places["folder"].glob("*/*/*"):
            target = root / path.relative_to(places["folder"])
            target.parent.mkdir(parents=True, exist_ok=True)
            Image.open(path).resize((16, 16)).save(target)
    else:
        shutil.copytree(places[form], root)
    whole = load(recipe, root)
    assert isinstance(whole.train, Resident) == (form == "in memory")
    damage_test_images(root)
    assert digest(load(recipe, root)) == digest(whole)
    row = train(Job(recipe, Options(tmp_path / "run", workers=0), root, device="cpu"))
    assert 0 <= row["test_top1"] <= 1
    with pytest.raises(ValueError, match="test"):
        train(Job(replace(recipe, holdout=0.0), Options(tmp_path / "no"), root, device="cpu"))


def figures(network, data, inputs):
    """Loss and accuracies of images as they are: without augmentation, in their order."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (inputs.mean, inputs.std))
    with torch.no_grad():
        logits = network((data.images.float() - mean) / std)
    loss = torch.nn.functional.cross_entropy(logits, data.labels).item()
    ranks = logits.argsort(1, descending=True) == data.labels[:, None]
    return [loss, ranks[:, 0].float().mean().item(), ranks[:, :5].any(1).float().mean().item()]


def check_figures(out, data):
    found = [metrics(out)[-1][name] for name in FIGURES]
    expected = figures(load_run(out), data, read_run(out, Recipe)[1])
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_run_says_what_it_is_tested_on(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    changes = "--holdout 0.1 --augment crop_flip --epochs 1 --label-corruption 0.3 --device cpu"
    call(monkeypatch, "train", "digits_ce", *changes.split(), "--out", str(out))
    said = capsys.readouterr()
    assert "epoch 1: held-out top-1 " in said.out
    assert "of training images held out by --holdout 0.1; " in said.out
    assert "held-out loss " in said.out + said.err
    assert "test top-1" not in said.out + said.err
    assert "test loss" not in said.out + said.err
    about = json.loads((out / "run.json").read_text())
    held = load(replace(HELD, holdout=0.1), None).test
    assert about["tested_on"] == f"{len(held.labels)} training images held out by holdout=0.1"
    check_figures(out, held)
    # other commands measure on test images, and say so
    call(monkeypatch, "eval", str(out), "--device", "cpu")
    said = capsys.readouterr().out
    assert "these results are for the test images; " in said
    assert "images held out by holdout=0.1\n" in said
    expected = figures(load_run(out), digits().test, read_run(out, Recipe)[1])
    assert f", loss {expected[0]:.4f}\n" in said
    found = diagnose(str(out), None, tmp_path / "diagnosis", ablation_images=0)
    assert found.accuracy.top1 == pytest.approx(expected[1])
    said = " ".join(capsys.readouterr().out.split())
    assert "All figures are for the test images; the run tested itself on training images" in said
    page = write_page([out], tmp_path / "page.html").read_text()
    assert "tested on held-out training images" in page


def test_a_run_without_held_out_images_says_so(tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    call(monkeypatch, "train", "digits_ce", "--epochs", "1", "--device", "cpu", "--out", str(out))
    call(monkeypatch, "eval", str(out), "--device", "cpu")
    diagnose(str(out), None, tmp_path / "diagnosis", ablation_images=0)
    said = capsys.readouterr()
    assert "epoch 1: test top-1 " in said.out
    assert not any(word in said.out + said.err for word in ("held out", "held-out"))
    assert json.loads((out / "run.json").read_text())["tested_on"] == "test images"
    assert "held-out" not in write_page([out], tmp_path / "page.html").read_text()


def test_held_out_files_are_prepared_like_test_images(places, tmp_path, capsys):
    """The figures are those of the same files as the test images of another folder."""
    out, other = tmp_path / "run", tmp_path / "other"
    row = train(Job(FILES, Options(out, workers=2), places["folder"], device="cpu"))
    held = load(FILES, places["folder"]).test.source
    paths = [Path(held.where(i)) for i in range(len(held))]
    for path in paths:
        target = other / "test" / path.parent.name / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    assert evaluate_run(out, other, device="cpu") == {name: row[name] for name in FIGURES}
    measured = evaluate_run(out, places["folder"], device="cpu")
    assert measured["test_loss"] != row["test_loss"]
    # statistics are estimated from the images that were trained on
    without = shutil.copytree(places["folder"], tmp_path / "without")
    for path in paths:
        (without / path.relative_to(places["folder"])).write_bytes(b"no image")
    assert evaluate_run(out, without, device="cpu", recalibrate=3) != measured
    diagnose(str(out), places["folder"], tmp_path / "diagnosis", ablation_images=0)
    said = "".join(capsys.readouterr().out.split())
    assert f"Allfiguresarefortheimagesin{places['folder'] / 'test'};therun" in said


def interrupted(recipe, out, data, **options):
    first = trainer(recipe, out, data, **options)
    stop_at(first, 2)
    with pytest.raises(Interrupted):
        first.run()


@pytest.mark.parametrize("form", [None, "parquet"])
def test_an_interrupted_run_goes_on_and_no_other(form, places, tmp_path):
    recipe = HELD if form is None else FILES
    recipe = replace(recipe, batch_size=256 if form is None else 8, label_corruption=0.5)
    folder = None if form is None else places[form]
    options = {"workers": 0 if form is None else 2}
    trainer(recipe, tmp_path / "whole", load(recipe, folder), **options).run()
    interrupted(recipe, tmp_path / "cut", load(recipe, folder), **options)
    for name, value in (("holdout", 0.3), ("holdout", 0.0), ("label_corruption_to", "any")):
        other = replace(recipe, **{name: value})
        before = getattr(recipe, name)
        with pytest.raises(
            ValueError, match=f"another run: .*{name} was {before!r} and is {value!r}"
        ):
            trainer(other, tmp_path / "cut", load(other, folder)).resume()
    second = trainer(recipe, tmp_path / "cut", load(recipe, folder), **options)
    assert "resuming from step-" in second.resume()
    second.run()
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_runs_of_earlier_versions_are_read_and_resumed(tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "cut"
    recipe = replace(PLAIN, label_corruption=0.2, batch_size=256)
    trainer(recipe, whole, load(recipe, None)).run()
    interrupted(recipe, out, load(recipe, None))
    about = json.loads((out / "run.json").read_text())
    path, tensors, facts, _ = checkpoint.newest(out)
    for recorded in (about["recipe"], facts["recipe"]):
        for name in NEW_FIELDS:
            del recorded[name]
    del about["tested_on"]
    (out / "run.json").write_text(json.dumps(about))
    checkpoint.write(path, tensors, facts)
    assert read_run(out, Recipe)[0] == recipe
    assert evaluate_run(out, device="cpu")["test_loss"] > 0
    other = replace(recipe, holdout=0.1)
    with pytest.raises(ValueError, match=r"holdout was 0\.0 and is 0\.1"):
        trainer(other, out, load(other, None)).resume()
    again = trainer(recipe, out, load(recipe, None))
    assert again.resume()
    again.run()
    assert_same_run(whole, out)
    assert json.loads((out / "run.json").read_text())["tested_on"] == "test images"


def test_bad_shares_are_one_line(tmp_path, monkeypatch, capsys):
    out = ("--out", str(tmp_path / "run"), "--device", "cpu")
    for share, message in (
        ("1.0", "holdout=1.0 must be at least 0 and less than 1"),
        ("-0.1", "holdout=-0.1 must be at least 0 and less than 1"),
        ("0.999", "holdout=0.999 would hold out all "),
    ):
        with pytest.raises(SystemExit) as caught:
            call(monkeypatch, "train", "digits_ce", "--holdout", share, *out)
        said = f"{caught.value.code} {capsys.readouterr().err}"
        assert message in " ".join(said.replace("│", " ").split())


@pytest.mark.slow
def test_processes_share_the_held_out_images(tmp_path):
    """Two processes report what one measures with their weights."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "-m", "cenet", "train", "digits_ce", "--epochs", "1"]
    command += ["--holdout", "0.15", "--device", "cpu", "--out", str(out)]
    subprocess.run(command, check=True, timeout=200)
    check_figures(out, load(replace(HELD, holdout=0.15), None).test)
