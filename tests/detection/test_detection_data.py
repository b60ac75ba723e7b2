"""Folders of COCO's layout: what is read, what is told, what is refused."""

import csv
import io
import json
import os
import shutil
import signal
import zlib
from dataclasses import replace

import numpy
import pytest
import torch
from PIL import Image

from _detection import SQUARE, annotation, box, coco
from cenet.detection.data import load, scenes
from cenet.detection.evaluation import score
from cenet.detection.job import write_left_out
from cenet.detection.loaders import sample
from cenet.detection.recipes import RECIPES


def test_crowds_are_not_trained_on():
    crowd = annotation(iscrowd=1, segmentation={"size": [40, 60], "counts": [0, 2400]})
    data = scenes("one", coco(crowd, annotation(image_id=2), images=2), pixels=[])
    assert [len(objects) for objects in data.objects] == [0, 1]
    assert len(data.coco["annotations"]) == 2


def test_images_of_other_kinds(folder):
    """Sixteen bits are not clipped; what is too long or pretends to be huge is left out."""
    ramp = numpy.linspace(0, 65535, 2400).astype(numpy.uint16).reshape(40, 60)
    Image.fromarray(ramp).save(folder / "train2017" / "1.png")
    Image.new("RGB", (4000, 1)).save(folder / "train2017" / "3.png")
    given = coco(annotation(), images=4)
    given["images"][2] |= {"width": 4000, "height": 1}
    huge = bytearray((folder / "train2017" / "2.png").read_bytes())
    huge[16:24] = (30000).to_bytes(4) * 2
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4)
    (folder / "train2017" / "4.png").write_bytes(huge)
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(given))
    data = load(RECIPES["resnet50_ce"], folder).train
    assert data.faults == {
        "images more than 20 times as long as wide": ["3.png"],
        "images whose file cannot be read": ["4.png"],
    }
    assert 120 < data.read(0).float().mean() < 135


GREY = torch.full((3, 40, 60), 128, dtype=torch.uint8)


def test_a_digest_tells_data_apart():
    def digest(*annotations, pixels=(GREY, GREY), **changes):
        given = {**coco(*annotations, images=2), **changes}
        return scenes("one", given, pixels=list(pixels)).digest()

    same = digest(annotation())
    assert digest(annotation(id=7)) == same
    other = {
        digest(annotation(bbox=[10.0, 10.0, 20.0, 21.0])),
        digest(annotation(category_id=9)),
        digest(annotation(image_id=2)),
        digest(annotation(), annotation()),
        digest(annotation(), images=coco(images=1)["images"]),
        digest(annotation(segmentation=[[9.0, *SQUARE[1:]]])),
        digest(annotation(), pixels=[GREY + 1, GREY]),
    }
    assert len({same, *other}) == 8
    moved = digest(annotation(segmentation=[[9.0, *SQUARE[1:]]]))
    assert moved.split(":")[0] == same.split(":")[0]  # as checkpoints of before have it


def test_a_digest_has_the_contents_of_files(folder):
    def digests():
        return [part.digest() for part in load(RECIPES["resnet50_ce"], folder)]

    before = digests()
    path = folder / "train2017" / "2.png"
    Image.new("RGB", (60, 40), (0, 0, 9)).save(path)
    after = digests()
    assert after[1] == before[1]
    assert after[0] != before[0]
    assert after[0].split(":")[0] == before[0].split(":")[0]  # as checkpoints of before have it


@pytest.fixture
def folder(tmp_path):
    for part in ("train2017", "val2017"):
        (tmp_path / part).mkdir()
        for number in (1, 2):
            Image.new("RGB", (60, 40), (number, 0, 0)).save(tmp_path / part / f"{number}.png")
        path = tmp_path / "annotations" / f"instances_{part}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(coco(annotation(), annotation(category_id=9), images=2)))
    return tmp_path


def test_a_folder_of_coco_is_read_and_its_faults_are_told(folder):
    Image.new("RGB", (9, 9)).save(folder / "train2017" / "3.png")
    (folder / "train2017" / "4.png").write_bytes(b"no image")
    whole = io.BytesIO()
    Image.effect_noise((60, 40), 90).convert("RGB").save(whole, "JPEG")
    (folder / "train2017" / "6.png").write_bytes(whole.getvalue()[:-400])
    (folder / "train2017" / "7.png").write_bytes(whole.getvalue() + b"behind the end")
    path = folder / "annotations" / "instances_train2017.json"
    unknown = [annotation(category_id=8, id=number) for number in range(20, 25)]
    given = coco(annotation(), *unknown, annotation(image_id=4, id=30), images=7)
    given["images"] += [given["images"][0], {"id": 9}, "no record"]
    path.write_text(json.dumps(given))
    split = load(RECIPES["resnet50_ce"], folder)
    assert split.train.report().splitlines() == [
        "train2017: 3 images (2 empty), 1 objects",
        "  left out: images of another size than the annotations say: 1 (3.png)",
        "  left out: images whose file cannot be read: 2 (4.png, 6.png)",
        "  left out: images whose file is missing: 1 (5.png)",
        "  left out: images whose id was used before: 1 (1.png)",
        "  left out: images without an id, a file name or a size: 2 (the one at place 8, the one "
        "at place 9)",
        "  left out: objects of images that were left out: 1 (30)",
        "  left out: objects of unknown categories: 5 (20, 21, 22, …)",
    ]
    assert split.test.report() == "val2017: 2 images (1 empty), 2 objects"
    assert split.train.classes == ("cat", "dog")
    assert split.train.labels == {3: 1, 9: 2}
    assert split.train.read(1)[0, 0, 0] == 2


def test_names_that_leave_the_folder_are_refused_and_counted(folder):
    path = folder / "annotations" / "instances_train2017.json"
    (folder / "train2017" / "more").mkdir()
    inside = folder / "train2017" / "more" / "a..b.png"
    (folder / "train2017" / "2.png").rename(inside)
    given = coco(annotation(), images=5)
    names = ["1.png", "more/a..b.png", "../val2017/1.png", "more/../../val2017/1.png"]
    names.append(str(folder / "val2017" / "2.png"))
    for image, name in zip(given["images"], names, strict=True):
        image["file_name"] = name
    path.write_text(json.dumps(given))
    split = load(RECIPES["resnet50_ce"], folder)
    assert split.train.report().splitlines() == [
        "train2017: 2 images (1 empty), 1 objects",
        "  left out: images whose file is outside of the folder of images: 3 "
        f"(../val2017/1.png, more/../../val2017/1.png, {names[4]})",
    ]


def test_links_are_followed_as_among_the_images_of_classifiers(folder, tmp_path):
    """Whoever can put a link there can put a copy there; a name in a file is another matter."""
    inside = folder / "train2017" / "1.png"
    outside = tmp_path / "elsewhere.png"
    inside.rename(outside)
    inside.symlink_to(outside)
    split = load(RECIPES["resnet50_ce"], folder)
    assert split.train.images[0]["file_name"] == "1.png"
    assert split.train.faults == {}
    os.mkfifo(pipe := tmp_path / "pipe")
    (folder / "train2017" / "2.png").unlink()
    (folder / "train2017" / "2.png").symlink_to(pipe)
    split = load(RECIPES["resnet50_ce"], folder)
    assert split.train.faults == {"images whose file is missing": ["2.png"]}


def test_a_pipe_is_no_image(folder):
    """It would be waited for."""
    signal.alarm(60)
    given = coco(annotation(), images=3)
    given["images"][2]["file_name"] = "pipe.png"
    os.mkfifo(folder / "train2017" / "pipe.png")
    (folder / "annotations" / "instances_train2017.json").write_text(json.dumps(given))
    split = load(RECIPES["resnet50_ce"], folder)
    assert "images whose file is missing: 1 (pipe.png)" in split.train.report()
    signal.alarm(0)


def test_names_that_no_file_can_have_are_missing_files(folder):
    path = folder / "annotations" / "instances_train2017.json"
    given = coco(annotation(), images=4)
    given["images"][1]["file_name"] = "\ud800.png"
    given["images"][2]["file_name"] = "x" * 5000
    path.write_text(json.dumps(given))
    split = load(RECIPES["resnet50_ce"], folder)
    _, *faults = split.train.report().splitlines()
    assert sum("images whose file" in line for line in faults) == 2
    assert "\\ud800.png" in split.train.report().encode().decode()


def test_a_mask_of_whole_numbers_written_as_fractions_is_tested_too(folder):
    for part in ("train2017", "val2017"):
        path = folder / "annotations" / f"instances_{part}.json"
        mask = {"size": [40.0, 60.0], "counts": [400, 2000]}
        path.write_text(json.dumps(coco(annotation(segmentation=mask), images=2)))
    split = load(RECIPES["resnet50_ce"], folder)
    (only,) = split.test.coco["annotations"]
    assert all(type(side) is int for side in only["segmentation"]["size"])


def test_one_file_of_annotations_is_for_both(folder):
    (folder / "val2017").rename(folder / "images")
    (folder / "annotations" / "instances_val2017.json").rename(folder / "instances.json")
    split = load(RECIPES["resnet50_ce"], folder)
    assert split.train is split.test


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "annotations" / "instances_val2017.json").unlink(), "must have annot"),
        (lambda f: (f / "val2017").rename(f / "val"), "its folder of images .*val2017 is not"),
        (
            lambda f: (f / "annotations" / "instances_val2017.json").write_text("{"),
            "instances_val2017.json cannot be read",
        ),
        (
            lambda f: (f / "annotations" / "instances_val2017.json").write_text("{}"),
            "instances_val2017.json: these are not COCO annotations: there is no list",
        ),
        (
            lambda f: (f / "annotations" / "instances_val2017.json").write_text(
                json.dumps(coco(annotation(category_id=5), images=1))
            ),
            "(?s)there is nothing to detect: .*objects of unknown categories: 1",
        ),
        (
            lambda f: (f / "annotations" / "instances_val2017.json").write_text(
                json.dumps({**coco(annotation()), "categories": [{"id": 3, "name": "cow"}]})
            ),
            r"different categories: train has cat, dog, which test has not; test has cow",
        ),
    ],
)
def test_a_bad_folder_is_one_clear_error(spoil, message, folder):
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load(RECIPES["resnet50_ce"], folder)


def test_boxes_alone_are_enough_for_boxes(folder):
    bare = {
        key: value for key, value in annotation().items() if key not in ("segmentation", "area")
    }
    for path in (folder / "annotations").iterdir():
        path.write_text(json.dumps(coco(bare)))
    with pytest.raises(ValueError, match=r"objects without a mask: 1 \(0\)"):
        load(RECIPES["resnet50_ce"], folder)
    split = load(replace(RECIPES["resnet50_ce"], detector="faster_rcnn"), folder)
    assert split.train.objects[0][0]["area"] == 400
    _, target = sample(split.train, 0, (40, 60), flip=False, masks=False)
    assert target["boxes"].tolist() == [[10, 10, 30, 30]]
    found = [box(10, 10, 20, 20, 0.9)]
    assert score(split.test.coco, found, ("box",)).numbers["box_ap"] == pytest.approx(1)


@pytest.mark.parametrize("ids", [{3: "dog", 9: "cat"}, {3: "cat", 10: "dog"}])
def test_categories_with_other_ids(ids, folder):
    path = folder / "annotations" / "instances_val2017.json"
    other = [{"id": number, "name": name} for number, name in ids.items()]
    path.write_text(json.dumps({**coco(annotation()), "categories": other}))
    with pytest.raises(ValueError, match="different categories: their ids"):
        load(RECIPES["resnet50_ce"], folder)


def test_the_newest_of_several_years_is_read(folder):
    alone = [part.digest() for part in load(RECIPES["resnet50_ce"], folder)]
    for part in ("train", "val"):
        shutil.copytree(folder / f"{part}2017", folder / f"{part}2014")
        old = folder / "annotations" / f"instances_{part}2014.json"
        old.write_text(json.dumps(coco(annotation(), annotation(), annotation())))
    both = load(RECIPES["resnet50_ce"], folder)
    assert [part.name for part in both] == ["train2017", "val2017"]
    assert [part.digest() for part in both] == alone


def test_what_was_left_out_is_listed(tmp_path):
    good = scenes("val", coco(annotation()), pixels=[])
    bad = scenes("train", coco(annotation(), annotation(id=5, category_id=4)), pixels=[])
    write_left_out(tmp_path / "none.csv", {"val": good})
    assert not (tmp_path / "none.csv").exists()
    write_left_out(tmp_path / "some.csv", {"train": bad, "val": good})
    rows = list(csv.reader((tmp_path / "some.csv").read_text().splitlines()))
    assert rows == [["part", "fault", "which"], ["train", "objects of unknown categories", "5"]]


def test_data_that_is_not_there():
    with pytest.raises(ValueError, match="coco is not built in; say where it is with --data"):
        load(RECIPES["resnet50_ce"], None)
    with pytest.raises(ValueError, match="shapes are drawn"):
        load(RECIPES["shapes"], "somewhere")


def test_held_out_images_are_tested_and_not_trained_on(tmp_path):
    """Every third image has no object, and one annotation has a fault."""
    (tmp_path / "images").mkdir()
    for number in range(1, 13):
        Image.new("RGB", (60, 40), (number, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    objects = [annotation(image_id=number, id=number) for number in range(1, 13) if number % 3]
    given = coco(*objects, annotation(category_id=7), images=12)
    (tmp_path / "instances.json").write_text(json.dumps(given))
    whole = load(RECIPES["coco128_ce"], tmp_path)
    assert (len(whole.train.images), len(whole.test.images)) == (9, 3)

    def names(share):
        split = load(replace(RECIPES["coco128_ce"], holdout=share, seed=7), tmp_path)
        found = [[image["file_name"] for image in part.images] for part in split]
        assert sorted(found[0] + found[1]) == sorted(f"{number}.png" for number in range(1, 13))
        for part in split:
            for place, image in enumerate(part.images):
                number = int(image["file_name"].removesuffix(".png"))
                assert part.read(place)[0, 0, 0] == number
                assert bool(part.objects[place]) == bool(number % 3)
                assert {one["image_id"] for one in part.objects[place]} <= {image["id"]}
            kept = {image["id"] for image in part.images}
            assert {one["image_id"] for one in part.coco["annotations"]} <= kept
            assert part.classes == ("cat", "dog")
        assert sum(len(part.coco["annotations"]) for part in split) == len(objects)
        assert [len(part.faults) for part in split] == [1, 0]
        return {*found[1]}

    assert names(0.25) == {image["file_name"] for image in whole.test.images}
    assert names(0.25) < names(0.5)
    with pytest.raises(
        ValueError, match=r"holdout=0.01 of 12 images leaves no object: images, held"
    ):
        load(replace(RECIPES["coco128_ce"], holdout=0.01), tmp_path)
