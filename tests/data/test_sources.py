"""The same images as folders, tar shards and parquet files are the same data, bit for bit."""

import gzip
import json
import multiprocessing
import pickle
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from PIL import Image

from _sources import files_of, write_parquet, write_rows, write_shards, write_tar
from _training import TINY, assert_same_run, call, stop_at, trainer
from cenet.data import parquet
from cenet.data.datasets import (
    Encoded,
    Resident,
    different_classes,
    digest,
    image_folders,
    input_spec_of,
    load,
    load_test,
)
from cenet.data.loaders import training_loader
from cenet.data.order import Shard
from cenet.data.sources import SAMPLE, are_same_images, mark
from cenet.data.sources import sample as evenly_spaced
from cenet.extras import MissingExtraError
from cenet.signals import Interrupted

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = replace(TINY, augment="imagenet", image_size=16, dataset="imagenet")
FORMS = ("tar", "parquet")


def files_loader(data, recipe, *, batch, workers):
    return training_loader(
        recipe, data, input_spec_of(data), Shard(len(data.labels), batch),
        device=torch.device("cpu"), workers=workers,
    )  # fmt: skip


@pytest.fixture(scope="module")
def places(files_folder, tmp_path_factory):
    pytest.importorskip("pyarrow")
    root = tmp_path_factory.mktemp("places")
    return {
        "tar": write_shards(files_folder, root / "tar"),
        "parquet": write_parquet(files_folder, root / "parquet"),
    }


def picture(size=16, shade=0, form="PNG"):
    content = BytesIO()
    Image.new("RGB", (size, size), (shade, 2, 3)).save(content, form)
    return content.getvalue()


def sample(key, label=0, **options):
    return [(f"{key}.png", picture(**options)), (f"{key}.cls", str(label).encode())]


def row(label=0, **options):
    return {"image": {"bytes": picture(**options), "path": None}, "label": label}


def tar_place(root, files, name="train-0.tar"):
    """A place of which one shard is to be seen; the other part is whole."""
    write_tar(root / "train-0.tar", [*sample("a", 0), *sample("b", 1)])
    write_tar(root / "test-0.tar", [*sample("a", 0), *sample("b", 1)])
    write_tar(root / name, files)
    return root


def parquet_place(root, rows, schema=None):
    write_rows(root / "train-0.parquet", rows, schema)
    write_rows(root / "test-0.parquet", [row(0), row(1)])
    return root


# the same data


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_folders(form, workers, few_files, places):
    def batches(data):
        return list(files_loader(data, RECIPE, batch=8, workers=workers).epoch(1, 2))

    found = image_folders(places[form], 16, resident=False)
    assert found.train.classes == few_files.train.classes
    for theirs, ours in zip(few_files, found, strict=True):
        assert torch.equal(theirs.labels, ours.labels)
        assert theirs.labels.dtype == ours.labels.dtype
        count = range(len(theirs.labels))
        assert [theirs.source.read(i) for i in count] == [ours.source.read(i) for i in count]
        assert len(ours.source) == len(theirs.source)
    expected = batches(few_files.train)
    assert len(expected) > 3
    for theirs, ours in zip(expected, batches(found.train), strict=True):
        assert torch.equal(theirs[0], ours[0])
        assert torch.equal(theirs[1], ours[1])


@pytest.fixture(scope="module")
def run_over_folders(few_files, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "folders"
    trainer(RECIPE, out, few_files).run()
    return out


@pytest.mark.parametrize(("form", "workers"), [("tar", 0), ("tar", 2), ("parquet", 2)])
def test_an_interrupted_run_equals_an_uninterrupted_one_over_folders(
    form, workers, run_over_folders, places, tmp_path
):
    def over(place):
        return trainer(RECIPE, tmp_path, load(RECIPE, place), workers=workers)

    first = over(places[form])
    stop_at(first, 2)
    with pytest.raises(Interrupted):
        first.run()
    moved = shutil.copytree(places[form], tmp_path / "moved")
    second = over(moved)
    assert "resuming from step-" in second.resume()
    second.run()
    assert_same_run(run_over_folders, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_run_and_its_evaluation_by_command(form, places, tmp_path, monkeypatch, capsys):
    changes = "--dataset imagenet --augment imagenet --image-size 16 --batch-size 16 --epochs 1"
    data = ("--data", str(places[form]))
    call(monkeypatch, "train", "digits_ce", *changes.split(), *data, "--out", f"{tmp_path}/run")
    trained = capsys.readouterr().out
    for pattern in ("test-*", "classes.txt"):
        for path in places[form].glob(pattern):
            shutil.copy(path, tmp_path)
    call(monkeypatch, "eval", f"{tmp_path}/run", "--data", str(tmp_path))
    # the same figures in the same words
    line = re.search(r"epoch 1: (test top-1 [\d.]+ %, top-5 [\d.]+ %, loss [\d.]+);", trained)[1]
    assert capsys.readouterr().out == f"{line}\n"


@pytest.mark.parametrize("form", FORMS)
def test_images_of_the_size_are_held_in_memory(form, tmp_path):
    recipe = replace(RECIPE, augment="crop_flip")
    if form == "tar":
        tar_place(tmp_path, [*sample("a", 1, shade=7), *sample("b", 0, shade=9)])
    else:
        parquet_place(tmp_path, [row(1, shade=7), row(0, shade=9)])
    found = load(recipe, tmp_path)
    assert isinstance(found.train, Resident)
    assert found.train.images.shape == (2, 3, 16, 16)
    assert found.train.images[:, :, 3, 3].tolist() == [[7, 2, 3], [9, 2, 3]]
    assert found.train.labels.tolist() == [1, 0]
    assert found.train.classes == ("0", "1")
    assert isinstance(load(RECIPE, tmp_path).train, Encoded)
    next(tmp_path.glob("train-0*")).unlink()
    assert torch.equal(load_test(recipe, tmp_path).images, found.test.images)


# order and names


@pytest.mark.parametrize("form", FORMS)
def test_order_and_names_are_those_of_the_files(form, places, monkeypatch):
    def found():
        return image_folders(places[form], 16, resident=False)

    split = found()
    names = list(split.train.source.names())
    assert len(set(names)) == len(names) == len(split.train.source)
    assert [name.partition("/")[0] for name in names] == sorted(
        name.partition("/")[0] for name in names
    )
    if form == "tar":
        assert names[9:11] == ["train-0001.tar/00009.png", "train-0001.tar/00010.png"]
        assert split.train.source.where(10) == f"{places[form]}/train-0001.tar: 00010.png"
    else:
        assert names[24:26] == ["train-0000.parquet/24/24.png", "train-0025.parquet/0/25.png"]
        assert split.train.source.where(31) == f"{places[form]}/train-0025.parquet: row 6"
    real = Path.glob
    digests = set()
    for backwards in (False, True):
        monkeypatch.setattr(
            Path, "glob",
            lambda self, pattern, b=backwards: iter(sorted(real(self, pattern), reverse=b)),
        )  # fmt: skip
        digests.add(digest(found()))
    assert digests == {digest(split)}


def test_renamed_samples_are_other_data(tmp_path):
    files = [*sample("a", 0), *sample("b", 1)]
    before = digest(image_folders(tar_place(tmp_path, files), 16, resident=False))
    files = [*sample("a", 0), *sample("c", 1)]
    assert digest(image_folders(tar_place(tmp_path, files), 16, resident=False)) != before


def test_samples_with_other_labels_are_other_data(tmp_path):
    digests = []
    for labels in ((0, 1), (1, 0)):
        files = [*sample("a", labels[0]), *sample("b", labels[1])]
        digests.append(digest(image_folders(tar_place(tmp_path, files), 16, resident=False)))
    names = [one.split(":")[0] for one in digests]  # and labels
    assert names[0] != names[1]


@pytest.mark.parametrize("form", FORMS)
def test_threads_and_other_processes_read_the_same(form, few_files, places, monkeypatch):
    monkeypatch.setattr(parquet, "KEPT", 3000)  # a few row groups
    source = image_folders(places[form], 16, resident=False).train.source
    sources = [source, pickle.loads(pickle.dumps(source))]
    expected = few_files.train.source
    numbers = torch.randperm(len(source)).repeat(5).tolist()
    with ThreadPoolExecutor(8) as threads:
        for one in sources:
            for i, content in zip(numbers, threads.map(one.read, numbers), strict=True):
                assert content == expected.read(i)


def test_a_lock_that_is_held_in_a_fork_stops_nobody(places):
    source = image_folders(places["parquet"], 16, resident=False).train.source
    source.read(0)
    (kept,) = source.kept.values()
    with kept.lock, kept.slots[0].lock:
        child = multiprocessing.get_context("fork").Process(target=source.read, args=(0,))
        child.start()
        child.join(20)
        child.kill()
    assert child.exitcode == 0


def test_row_groups_are_read_once_while_they_are_kept(places, monkeypatch):
    source = image_folders(places["parquet"], 16, resident=False).train.source
    read = []
    real = parquet._column
    monkeypatch.setattr(
        parquet, "_column", lambda group, name: read.append(group) or real(group, name)
    )
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(source.read, [*range(len(source))] * 2))
    assert sorted(read) == source.groups
    size = max(group.size for group in source.groups)
    monkeypatch.setattr(parquet, "KEPT", 2 * size)
    source = pickle.loads(pickle.dumps(source))
    read.clear()
    for i in (0, 4, 8, 4, 0, 4):  # of three row groups
        source.read(i)
    assert [group.number for group in read] == [0, 1, 2, 0]
    (kept,) = source.kept.values()
    assert len(kept.slots) == 2


# formats as others write them


def assert_same_data(found, expected):
    for theirs, ours in zip(expected, found, strict=True):
        assert theirs.classes == ours.classes
        assert torch.equal(theirs.labels, ours.labels)
        for i in range(len(theirs.labels)):
            assert theirs.source.read(i) == ours.source.read(i)


@pytest.mark.parametrize("pattern", ["train/%04d.tar", "train-%02d.tar", "digits-train-%04d.tar"])
def test_shards_of_webdataset(pattern, files_folder, few_files, tmp_path):
    webdataset = pytest.importorskip("webdataset")
    folder = "x" * 150  # longer than a plain header holds
    for part in ("train", "test"):
        path = tmp_path / pattern.replace("train", part)
        path.parent.mkdir(exist_ok=True)
        with webdataset.ShardWriter(str(path), maxcount=20, verbose=0) as writer:
            for i, (content, label) in enumerate(files_of(files_folder, part)[0]):
                about = (
                    {"cls": label, "json": {"label": 99}} if i % 2 else {"json": {"label": label}}
                )
                other = {"note.txt": "x", "seg.png": b"", "png": content}
                writer.write({"__key__": f"{folder}/{i}", **other, **about})
    assert_same_data(image_folders(tmp_path, 16, resident=False), few_files)


@pytest.mark.parametrize("pattern", ["train-0{}.parquet", "data/train-0000{}-of-00002.parquet"])
@pytest.mark.parametrize("kind", ["names", "text", "numbers"])
def test_parquet_of_datasets(pattern, kind, files_folder, few_files, tmp_path):
    datasets = pytest.importorskip("datasets")
    for part in ("train", "test"):
        files, classes = files_of(files_folder, part)
        label = {
            "names": datasets.ClassLabel(names=classes),
            "text": datasets.Value("string"),
            "numbers": datasets.Value("int32"),
        }[kind]
        columns = {
            "id": range(len(files)) if kind == "names" else [str(i) for i in range(len(files))],
            "img": [{"bytes": content, "path": None} for content, _ in files],
            "label": [str(number) if kind == "text" else number for _, number in files],
        }
        features = {"id": datasets.Value("int64" if kind == "names" else "string")}
        features |= {"img": datasets.Image(), "label": label}
        for i in range(2):
            half = slice(0, 30) if i == 0 else slice(30, None)
            path = tmp_path / pattern.format(i).replace("train", part)
            path.parent.mkdir(exist_ok=True)
            chosen = {name: list(values[half]) for name, values in columns.items()}
            if chosen["id"]:
                found = datasets.Dataset.from_dict(chosen, datasets.Features(features))
                found.to_parquet(path, batch_size=7)
    assert_same_data(image_folders(tmp_path, 16, resident=False), few_files)


def test_few_images_may_have_changed_and_none_may_be_missing():
    marks = [mark(bytes([number])) for number in range(SAMPLE)]

    def digest(changed=0, names="names", left_out=0):
        own = [mark(b"other")] * changed + marks[changed:]
        return f"{names}:{''.join(own[left_out:])}"

    assert are_same_images(digest(), digest())
    assert are_same_images(digest(), digest(changed=SAMPLE // 8))
    assert not are_same_images(digest(), digest(changed=SAMPLE // 8 + 1))
    assert not are_same_images(digest(), digest(names="others"))
    assert not are_same_images(digest(), digest(left_out=1))
    assert not are_same_images(digest(), digest().removesuffix(marks[-1]))
    # a small set of training images beside many test images, all of them others
    small, others = "".join(marks[:30]), mark(b"other") * 30
    assert not are_same_images(
        f"names:{small}:{''.join(marks)}", f"names:{others}:{''.join(marks)}"
    )
    assert are_same_images(f"names:{small}:{small}", f"names:{small}:{small}")
    # as earlier versions joined them
    assert are_same_images(f"names:{small}{small}", f"names:{small}:{small}")
    assert not are_same_images(f"names:{small}{small}", f"names:{small}:{others}")
    # of earlier versions, which compared fewer images or none
    assert are_same_images(digest(left_out=1), digest())
    assert not are_same_images(digest(left_out=1), digest(names="others"))
    assert are_same_images("names", digest())
    assert not are_same_images("others", digest())
    assert are_same_images("pixels", "pixels")
    for count in (0, 1, SAMPLE - 1, SAMPLE):  # few images are all compared
        assert evenly_spaced(count) == list(range(count))
    for count in (SAMPLE + 1, 3 * SAMPLE - 1, 10**6):
        places = evenly_spaced(count)
        assert len(set(places)) == SAMPLE
        assert 0 == min(places) <= max(places) < count
        steps = [after - before for before, after in pairwise([*places, count])]
        assert max(steps) - min(steps) <= 1


def test_every_image_of_a_small_set_is_compared(tmp_path):
    """Every second one turned black is other data, and so is each third of them."""
    for part in ("train", "test"):
        for number in range(80):
            path = tmp_path / part / str(number % 2) / f"{number:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(shade=number + 1))
    before = digest(image_folders(tmp_path, 16, resident=False))
    paths = sorted((tmp_path / "train").rglob("*.png"))
    for places in (range(0, 80, 2), range(1, 80, 2), range(2, 80, 3)):
        contents = [path.read_bytes() for path in paths]
        for place in places:
            paths[place].write_bytes(picture())
        now = digest(image_folders(tmp_path, 16, resident=False))
        assert not are_same_images(before, now)
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
    assert digest(image_folders(tmp_path, 16, resident=False)) == before


def test_names_in_the_parquet_file_go_before_those_beside_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = {"image": datasets.Image(), "fine": datasets.ClassLabel(names=["cat", "dog"])}
    for part in ("train", "test"):
        columns = {"image": [{"bytes": picture(), "path": None}] * 2, "fine": [1, 1]}
        found = datasets.Dataset.from_dict(columns, datasets.Features(features))
        found.to_parquet(tmp_path / f"{part}-0.parquet")
    (tmp_path / "classes.txt").write_text("one\ntwo\nthree\n")
    assert image_folders(tmp_path, 16, resident=False).train.classes == ("cat", "dog")


def test_plain_bytes_and_names_beside_them(tmp_path):
    rows = [{"image": picture(), "number": i % 2} for i in range(3)]
    for part in ("train", "test"):
        write_rows(tmp_path / "data" / f"{part}-0.parquet", rows)
    (tmp_path / "classnames.txt").write_text("one\ntwo\nthree\n")
    found = image_folders(tmp_path, 16, resident=False).train
    assert found.classes == ("one", "two", "three")
    assert found.source.read(2) == picture()
    assert next(found.source.names()) == "train-0.parquet/0/"


def test_folders_of_classes_go_before_tar_files_beside_them(files_folder, few_files, tmp_path):
    place = shutil.copytree(files_folder, tmp_path / "place")
    write_tar(place / "train" / "0.tar", [])
    assert_same_data(image_folders(place, 16, resident=False), few_files)
    (place / "test").rename(place / "validation")
    assert_same_data(image_folders(place, 16, resident=False), few_files)


# what is wrong with them


def refused(place, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(replace(RECIPE, augment="crop_flip"), place)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"train-0.tar has no images; take it out"),
        ([("a.png", picture())], r"train-0.tar: a.png has no label: neither a.cls nor a.json is"),
        ([("a.cls", b"1")], r"train-0.tar: a.cls has no image beside it that ends with \['bmp', "),
        (sample("a", "cat"), r"train-0.tar: a.cls holds no class number: b'cat'"),
        ([("a.png", b""), ("a.json", b"{}")], r"a.json holds no class number: b'{}'"),
        ([("a.png", b""), ("a.json", b"[")], r"a.json holds no class number: b'\['"),
        (
            [("a.png", b""), ("a.json", json.dumps({"label": "cat"}).encode())],
            r"train-0.tar: a.json has the label 'cat', which is no class number",
        ),
        ([*sample("a"), *sample("a")], r"has a.png and a.png for one sample; keep one"),
        ([*sample("a"), ("a.jpg", b"")], r"has a.png and a.jpg for one sample; keep one"),
        (
            [*sample("a"), *sample("b", -1)],
            r"train-0.tar: b.png has class number -1, and the first class is 0; images without",
        ),
        (
            [*sample("a", 1), *sample("b", 2)],
            r"b.png has class number 2, but no image beside it has 0; .*all of them in classes.txt",
        ),
        (sample("a", 10**30), r"a.png has class number 10{30}, but no image beside it has 0"),
        (
            [*sample("a", 0), *sample("b", 1), *sample("c", 2)],
            r"has different classes: (train|test) has 2, which (train|test) has not",
        ),
        (
            [*sample("a"), ("b.png", b"no image"), ("b.cls", b"1")],
            r"1 of 2 images cannot be used: .*train-0.tar: b.png is not an image that can be read",
        ),
        (
            [*sample("a"), *sample("b", 1, size=20)],
            r"1 of 2 images cannot be used: .*train-0.tar: b.png is 20×20, not 16×16",
        ),
    ],
)
def test_what_is_wrong_with_shards(files, message, tmp_path):
    refused(tar_place(tmp_path, files), message)


def test_what_is_wrong_with_one_shard_of_several(tmp_path):
    refused(tar_place(tmp_path, [], "train-1.tar"), "train-1.tar has no images")


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9, "header", "end"])
def test_truncated_shards(share, tmp_path):
    path = tmp_path / "train-0.tar"
    files = [(f"{i}.{kind}", b"1" * 700) for i in range(4) for kind in ("png", "cls")]
    tar_place(tmp_path, files)
    ends = 8 * (512 + 1024)
    cut = {"header": ends - 1536 + 100, "end": ends}.get(share) or round(share * ends)
    path.write_bytes(path.read_bytes()[:cut])
    refused(tmp_path, "train-0.tar is damaged: it has no end, as after a copy that broke off")


def test_a_damaged_header_is_no_end(tmp_path):
    path = tar_place(tmp_path, [*sample("a"), *sample("b", 1)]) / "train-0.tar"
    content = bytearray(path.read_bytes())
    content[content.index(b"b.png")] = 0xFF
    path.write_bytes(content)
    refused(tmp_path, "train-0.tar is damaged")


def test_a_shard_that_becomes_shorter(tmp_path):
    path = tar_place(tmp_path, [*sample("a"), *sample("b", 1)]) / "train-0.tar"
    data = image_folders(tmp_path, 16, resident=False).train
    path.write_bytes(path.read_bytes()[:600])
    loader = files_loader(data, replace(RECIPE, augment="none"), batch=2, workers=1)
    with pytest.raises(ValueError, match=r"^\S*train-0.tar: ..png cannot be read: the tar file be"):
        list(loader.epoch(0))


def test_compressed_shards(tmp_path):
    path = tar_place(tmp_path, [*sample("a"), *sample("b", 1)]) / "train-0.tar"
    packed = gzip.compress(path.read_bytes())
    path.write_bytes(packed)
    refused(tmp_path, "train-0.tar is no tar file, or a compressed one, which must be decompressed")
    path.unlink()
    (tmp_path / "train-0.tar.gz").write_bytes(packed)
    refused(tmp_path, r"train-0.tar.gz is compressed, .*; decompress all of them into .* \.tar")


@pytest.mark.parametrize("place", ["https://host/train-0.tar", "s3://b/c", "pipe:cat x", "hf://x"])
def test_remote_places(place):
    refused(Path(place), f"--data {place[:4]}.* is not on this machine; .* download the files")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"one\n", r"b.png has class number 1, but 1 classes have names, 0 to 0"),
        (b"one\n\ntwo\n", r"line 2 of .*classes.txt is empty"),
        (b"one\ntwo\none\n", r"lines 1 and 3 of .*classes.txt are both 'one'; classes need diff"),
        (b"\xff\xfe", r"classes.txt is not text in UTF-8"),
    ],
)
def test_what_is_wrong_with_names(text, message, tmp_path):
    (tmp_path / "classes.txt").write_bytes(text)
    refused(tar_place(tmp_path, [*sample("a"), *sample("b", 1)]), message)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"label": 1}], r"has no column of images among \['label'\]; name it 'image'"),
        ([{"image": b""}], r"has no column of labels among \['image'\]; name it 'label' \(class n"),
        ([{"image": b"", "a": 1, "b": 2}], r"several columns of labels among \['a', 'b'\]; name"),
        ([{"x": b"", "y": b"", "label": 1}], r"several columns of images among \['x', 'y'\]; name"),
        ([row(0), row(None)], r"train-0.parquet: row 1 has no value in the column 'label'"),
        ([row(0), row(-1)], r"train-0.parquet: row 1 has class number -1, and the first"),
        ([row(0), row(5)], r"row 1 has class number 5, but no image beside it has 1"),
        (
            [row("a"), row("b")],
            r"train has a, b, which test has not; test has 0, 1, which train has not$",
        ),
        (
            [row(0), {"image": {"bytes": b"no image", "path": "x"}, "label": 1}],
            r"1 of 2 images cannot be used: .*train-0.parquet: row 1 is not an image",
        ),
        (
            [row(0), {"image": {"bytes": None, "path": "x.png"}, "label": 1}],
            r"train-0.parquet: row 1 cannot be read: the row has no bytes of an image",
        ),
    ],
)
def test_what_is_wrong_with_parquet(rows, message, tmp_path):
    pytest.importorskip("pyarrow")
    refused(parquet_place(tmp_path, rows), message)


def test_parquet_files_that_are_empty_damaged_or_different(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    schema = pyarrow.schema({"image": pyarrow.binary(), "label": pyarrow.int64()})
    refused(parquet_place(tmp_path, [], schema), "train-0.parquet has no rows; take it out")
    parquet_place(tmp_path, [row(0), row(1)])
    path = tmp_path / "train-0.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:200])
    refused(tmp_path, "train-0.parquet is not a parquet file that can be read: .*; copy it again$")
    content = bytearray(whole)
    content[4:40] = bytes(36)
    path.write_bytes(content)
    refused(tmp_path, "train-0.parquet: row 0 cannot be read: its row group is damaged: ")
    refused(tmp_path, "; copy the file again")
    path.write_bytes(whole)
    write_rows(tmp_path / "train-1.parquet", [{"image": picture(), "label": 1}])
    refused(tmp_path, "train-1.parquet has other columns or classes than .*train-0.parquet")


def test_classes_in_another_order(tmp_path):
    datasets = pytest.importorskip("datasets")
    for part, names in (("train", ["a", "b"]), ("test", ["b", "a"])):
        features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=names)}
        columns = {"image": [{"bytes": picture(), "path": None}], "label": [0]}
        found = datasets.Dataset.from_dict(columns, datasets.Features(features))
        found.to_parquet(tmp_path / f"{part}-0.parquet")
    refused(tmp_path, "has different classes: their order differs")


def test_without_pyarrow(tmp_path, monkeypatch):
    for part in ("train", "test"):
        (tmp_path / f"{part}-0.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    message = r"^pyarrow is not installed; pip install 'cenet\[data\]'$"
    with pytest.raises(MissingExtraError, match=message):
        load(RECIPE, tmp_path)


def test_half_of_a_place(tmp_path):
    write_tar(tmp_path / "train-0.tar", sample("a"))
    refused(tmp_path, r"must have the folders train and test \(or val\), or train-\*.tar and test-")
    (tmp_path / "test").mkdir()
    refused(tmp_path, r"test has no folders of classes, and no .tar or .parquet files")


def test_classes_that_differ_are_told_by_side():
    many = [f"c{number:02d}" for number in range(13)]
    assert different_classes("one", many, "other", ["c00"]) == (
        "one has c01, c02, c03, c04, c05, c06, c07, c08, c09, c10 and 2 more, which other has not"
    )
    assert different_classes("a", "xy", "b", "yz") == (
        "a has x, which b has not; b has z, which a has not"
    )
    assert different_classes("a", "xy", "b", "yx") == "their order differs"
