"""Annotations are checked before training, images and targets stay together, AP is COCO's."""

import copy
import io
import json
import math
import zlib
from dataclasses import replace

import numpy
import pytest
import torch
from PIL import Image

from _detection import TINY, few_shapes
from cenet.detection.annotations import _run_lengths, clean
from cenet.detection.data import load, outline_mask, scenes
from cenet.detection.evaluation import _results, score
from cenet.detection.loaders import sample, scaled_size, training_batches
from cenet.detection.recipes import RECIPES, DetectionRecipe, find_recipe
from cenet.detection.shapes import draw_shapes
from cenet.train.loaders import Shard

CPU = torch.device("cpu")
SQUARE = [10.0, 10.0, 30.0, 10.0, 30.0, 30.0, 10.0, 30.0]


def annotation(**changes):
    return {
        "id": 0, "image_id": 1, "category_id": 3, "bbox": [10.0, 10.0, 20.0, 20.0],
        "segmentation": [SQUARE], "area": 400.0, "iscrowd": 0, **changes,
    }  # fmt: skip


def coco(*annotations, images=1):
    return {
        "images": [
            {"id": number + 1, "file_name": f"{number + 1}.png", "width": 60, "height": 40}
            for number in range(images)
        ],
        "annotations": list(annotations),
        "categories": [{"id": 3, "name": "cat"}, {"id": 9, "name": "dog"}],
    }


# annotations

FAULTS = {
    "objects of unknown images": annotation(image_id=7),
    "objects of unknown categories": annotation(category_id=4),
    "objects with an empty box": annotation(bbox=[10.0, 10.0, 0.0, 20.0]),
    "objects whose box is outside of the image": annotation(bbox=[70.0, 5.0, 10.0, 10.0]),
    "objects whose polygons have no area in the image": annotation(segmentation=[[1.0, 1, 5, 5]]),
    "objects without a mask": annotation(segmentation=[]),
    "objects whose mask has another size than their image": annotation(
        segmentation={"counts": [0, 9], "size": [3, 3]}, iscrowd=1
    ),
    "objects whose run lengths do not fill their mask": annotation(
        segmentation={"counts": [0, 9], "size": [40, 60]}, iscrowd=1
    ),
    "objects whose area or iscrowd is no such number": annotation(area="large"),
    "objects that are no records": ["no", "record"],
}
BOX = "objects whose box is not four numbers"
LINE = "objects whose polygons have no area in the image"
AREA = "objects whose area or iscrowd is no such number"
RUNS = "objects whose run lengths do not fill their mask"
MORE = {
    "negative": ("objects with an empty box", {"bbox": [30.0, 30.0, -10.0, -10.0]}),
    "NaN": (BOX, {"bbox": [math.nan, 1.0, 2.0, 2.0]}),
    "text": (BOX, {"bbox": ["1", "1", "9", "9"]}),
    "two corners": (BOX, {"bbox": [1.0, 1.0]}),
    "five": (BOX, {"bbox": [1.0, 1.0, 9.0, 9.0, 9.0]}),
    "no box": (BOX, {"bbox": None}),
    "odd": (LINE, {"segmentation": [[*SQUARE, 1.0]]}),
    "a line": (LINE, {"segmentation": [[1.0, 1, 5, 5, 9, 9]]}),
    "polygon of text": (LINE, {"segmentation": ["abcdef"]}),
    "a list as image": ("objects of unknown images", {"image_id": [1]}),
    "a list as category": ("objects of unknown categories", {"category_id": [3]}),
    "huge": (BOX, {"bbox": [10**400, 1, 9, 9]}),
    "far polygon": (LINE, {"segmentation": [[0, 0, 1e9, 0, 1e9, 1e9]]}),
    "polygon beside": (LINE, {"segmentation": [[70.0, 1, 80, 1, 80, 9]]}),
    "text as mask": ("objects whose mask has another size than their image", {"segmentation": "x"}),
    "crowd": (AREA, {"iscrowd": 7}),
    "negative area": (AREA, {"area": -1.0}),
    "endless area": (AREA, {"area": math.inf}),
    "no counts": (RUNS, {"segmentation": {"size": [40, 60]}}),
    "empty counts": (RUNS, {"segmentation": {"size": [40, 60], "counts": []}}),
    "negative counts": (RUNS, {"segmentation": {"size": [40, 60], "counts": [2401, -1]}}),
    "a code cut off": (RUNS, {"segmentation": {"size": [40, 60], "counts": "`2"}}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_annotations_are_counted_and_left_out(fault):
    given = coco(annotation(), FAULTS[fault], FAULTS[fault], annotation())
    before = copy.deepcopy(given)
    found, faults = clean(given, lambda record: None)
    assert {name: len(which) for name, which in faults.items()} == {fault: 2}
    assert [record["id"] for record in found["annotations"]] == [1, 2]
    assert given == before


@pytest.mark.parametrize("name", MORE)
def test_other_ways_to_be_bad(name):
    fault, changes = MORE[name]
    found, faults = clean(coco(annotation(**changes)), lambda record: None)
    assert faults == {fault: ["0"]}
    assert not found["annotations"]


def test_what_is_good_of_an_annotation_stays():
    spare = annotation(segmentation=[SQUARE, [1.0, 1.0, 2.0, 2.0]], bbox=[-5.0, 10.0, 20.0, 99.0])
    found, faults = clean(coco(spare), lambda record: None)
    assert faults == {"polygons without an area, of objects with others": ["0"]}
    assert found["annotations"][0]["segmentation"] == [SQUARE]
    assert found["annotations"][0]["bbox"] == [0.0, 10.0, 15.0, 30.0]  # inside the image


@pytest.mark.parametrize(
    "changes",
    [
        {"segmentation": [SQUARE[::-1]]},
        {"segmentation": [SQUARE[6:] + SQUARE[:6]]},
        {"bbox": [10, 10, 0.5, 0.5]},
        {"segmentation": {"size": [40, 60], "counts": [100, 300, 2000]}},
        {"segmentation": {"size": [40, 60], "counts": [0, 2400]}, "iscrowd": 1},
    ],
)
def test_unusual_annotations_are_kept(changes):
    found, faults = clean(coco(annotation(**changes)), lambda record: None)
    assert not faults
    (record,) = found["annotations"]
    assert record["iscrowd"] == changes.get("iscrowd", 0)
    assert outline_mask(record["segmentation"], 40, 60, (1.0, 1.0)).sum() > 0


def test_compressed_run_lengths_are_read():
    """Against pycocotools' own compression, over random masks."""
    from pycocotools import mask

    random = torch.Generator().manual_seed(0)
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        drawn = (torch.rand(40, 60, generator=random) < share).byte().numpy()
        code = mask.encode(numpy.asfortranarray(drawn))["counts"].decode()
        runs = _run_lengths(code)
        assert sum(runs) == 2400
        assert sum(runs[1::2]) == drawn.sum()
        found, _ = clean(
            coco(annotation(segmentation={"size": [40, 60], "counts": code})), lambda record: None
        )
        assert len(found["annotations"]) == 1


def test_images_may_have_any_ids_and_sizes_as_floats():
    given = coco(annotation(image_id="first"), annotation(image_id=2**60), images=2)
    given["images"][0] |= {"id": "first", "width": 60.0}
    given["images"][1]["id"] = 2**60
    found, faults = clean(given, lambda record: None)
    assert not faults
    assert [record["id"] for record in found["images"]] == [1, 2]
    assert type(found["images"][0]["width"]) is int
    assert [record["image_id"] for record in found["annotations"]] == [1, 2]


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


def test_a_digest_tells_data_apart():
    def digest(*annotations, **changes):
        return scenes("one", {**coco(*annotations, images=2), **changes}, pixels=[]).digest()

    same = digest(annotation())
    assert digest(annotation(id=7)) == same
    other = {
        digest(annotation(bbox=[10.0, 10.0, 20.0, 21.0])),
        digest(annotation(category_id=9)),
        digest(annotation(image_id=2)),
        digest(annotation(), annotation()),
        digest(annotation(), images=coco(images=1)["images"]),
    }
    assert len({same, *other}) == 6


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
            "instances_val2017.json: these are not annotations as COCO has them",
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
            r"different categories: cat, cow, dog",
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"categories": [{"id": "3", "name": "cat"}]}, "a category needs a whole number as id"),
        ({"categories": [{"id": 3, "name": "cat"}, {"id": 3, "name": "dog"}]}, "id 3: cat, dog"),
        ({"annotations": {}}, "no list 'annotations'"),
    ],
)
def test_bad_parts_are_one_clear_error(changes, message):
    with pytest.raises(ValueError, match=message):
        clean({**coco(annotation()), **changes}, lambda record: None)


def test_categories_in_another_order(folder):
    path = folder / "annotations" / "instances_val2017.json"
    swapped = [{"id": 3, "name": "dog"}, {"id": 9, "name": "cat"}]
    path.write_text(json.dumps({**coco(annotation()), "categories": swapped}))
    with pytest.raises(ValueError, match="different categories: their ids"):
        load(RECIPES["resnet50_ce"], folder)


def test_data_that_is_not_there():
    with pytest.raises(ValueError, match="coco is not embedded; say where it is with --data"):
        load(RECIPES["resnet50_ce"], None)
    with pytest.raises(ValueError, match="shapes are drawn"):
        load(RECIPES["shapes"], "somewhere")


# images and targets


def test_shapes_are_what_their_annotations_say():
    pixels, truth = draw_shapes(30, 0)
    again, _ = draw_shapes(30, 0)
    assert all(torch.equal(a, b) for a, b in zip(pixels, again, strict=True))
    assert {record["category_id"] for record in truth["annotations"]} == {1, 2, 3}
    found, faults = clean(truth, lambda record: None)
    assert not faults
    for record in found["annotations"]:
        image = pixels[record["image_id"] - 1].float()
        mask = outline_mask(record["segmentation"], *image.shape[1:], (1.0, 1.0)).bool()
        assert abs(mask.sum() - record["area"]) < 0.12 * record["area"] + 8
        # one colour and noise of a standard deviation of 12; the outline may be half a pixel off
        spread = (image[:, mask] - image[:, mask].median(1, keepdim=True).values).abs().median()
        assert spread < 14


def test_boxes_and_masks_follow_the_image():
    """A white square on black, stretched and mirrored: the target is where the white is."""
    image = torch.zeros(3, 40, 60, dtype=torch.uint8)
    image[:, 10:30, 10:30] = 255
    data = scenes("one", coco(annotation()), pixels=[image])
    for size in ((40, 60), (80, 120), (60, 60)):
        for flip in (False, True):
            pixels, target = sample(data, 0, size, flip=flip, masks=True)
            assert pixels.shape == (3, *size)
            white = pixels[0] > 0.5
            assert torch.equal(target["masks"][0].bool(), white)
            rows, columns = white.any(1).nonzero(), white.any(0).nonzero()
            box = torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).flatten()
            assert torch.equal(target["boxes"][0], box.float())
            assert target["labels"].tolist() == [1]


def test_run_length_codes_are_masks_too():
    # columns first: 3 off, 2 on, 1 off of a 3×2 image
    code = {"counts": [3, 2, 1], "size": [3, 2]}
    expected = torch.tensor([[0, 1], [0, 1], [0, 0]], dtype=torch.uint8)
    assert torch.equal(outline_mask(code, 3, 2, (1.0, 1.0)), expected)
    assert outline_mask(code, 6, 4, (2.0, 2.0)).sum() == 8


def test_sizes():
    assert scaled_size(480, 640, 800, 1333) == (800, 1066)
    assert scaled_size(300, 900, 800, 1333) == (444, 1333)


def test_batches_depend_on_seed_epoch_and_image_alone():
    data = few_shapes().train
    shared = {"epoch": 1, "device": CPU, "workers": 0}
    whole = list(training_batches(data, TINY, Shard(12, 4), start=0, **shared))
    rest = list(training_batches(data, TINY, Shard(12, 4), start=1, **shared))
    halves = [
        list(training_batches(data, TINY, Shard(12, 2, rank=rank, world=2), start=0, **shared))
        for rank in (0, 1)
    ]
    for (images, targets), (others, other_targets) in zip(whole[1:], rest, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(images, others, strict=True))
        assert all(
            torch.equal(a[name], b[name])
            for a, b in zip(targets, other_targets, strict=True)
            for name in a
        )
    for step, (images, _) in enumerate(whole):
        split = halves[0][step][0] + halves[1][step][0]
        assert all(torch.equal(a, b) for a, b in zip(images, split, strict=True))
    # both lengths of the shorter side come, and an image without objects
    assert {min(image.shape[1:]) for images, _ in whole for image in images} == {48, 64}
    assert any(len(target["boxes"]) == 0 for _, targets in whole for target in targets)


# average precision, by hand


def box(left, top, width, height, score, image=1, category=3):
    corners = [left, top, left + width, top, left + width, top + height, left, top + height]
    return {
        "image_id": image, "category_id": category, "bbox": [left, top, width, height],
        "score": score, "segmentation": [[float(value) for value in corners]],
    }  # fmt: skip


def truth(*boxes, crowds=()):
    records = [annotation(**{k: v for k, v in each.items() if k != "score"}) for each in boxes]
    for record, crowd in zip(records, crowds, strict=False):
        record["iscrowd"] = crowd
    for record in records:
        record["area"] = record["bbox"][2] * record["bbox"][3]
    found, faults = clean(
        {**coco(*records, images=3), "images": [
            {"id": n, "file_name": "", "width": 200, "height": 200} for n in (1, 2, 3)]},
        lambda record: None,
    )  # fmt: skip
    assert not faults
    return found


def average_precision(given, found):
    return score(given, found, ("box",)).numbers


def test_average_precision_by_hand():
    """Right, wrong, right: precision 1 up to half of the objects, 2/3 up to all of them, read at
    101 recalls."""
    given = truth(box(0, 0, 100, 100, 0), box(0, 0, 100, 100, 0, image=2))
    found = [box(0, 0, 100, 100, 0.9), box(100, 100, 50, 50, 0.8),
             box(0, 0, 100, 100, 0.7, image=2)]  # fmt: skip
    expected = (51 * 1 + 50 * 2 / 3) / 101
    assert average_precision(given, found) == pytest.approx(
        {"box_ap": expected, "box_ap50": expected, "box_ap75": expected}, abs=1e-9
    )


def test_overlap_decides_which_thresholds_count():
    given = truth(box(0, 0, 100, 100, 0))
    # 78 of 100: right at 0.50, 0.55, …, 0.75, wrong at the other four
    found = average_precision(given, [box(0, 0, 100, 78, 0.9)])
    assert found == pytest.approx({"box_ap": 0.6, "box_ap50": 1.0, "box_ap75": 1.0})
    assert average_precision(given, [box(0, 0, 100, 48, 0.9)])["box_ap50"] == 0
    assert average_precision(given, [box(0, 0, 100, 100, 0.9, category=9)])["box_ap50"] == 0
    assert average_precision(given, []) == {"box_ap": 0.0, "box_ap50": 0.0, "box_ap75": 0.0}


def test_crowds_are_forgiven_and_second_finds_are_not():
    given = truth(box(0, 0, 50, 50, 0), box(100, 100, 90, 90, 0), crowds=(0, 1))
    one = box(0, 0, 50, 50, 0.5)
    assert average_precision(given, [one, box(100, 100, 90, 90, 0.9)])["box_ap"] == pytest.approx(1)
    # found twice, the better guess being the worse box: precision 1/2 at recall 1
    twice = average_precision(given, [one, box(0, 0, 50, 20, 0.9)])
    assert twice["box_ap50"] == pytest.approx(0.5)


def test_masks_are_judged_by_their_pixels():
    given = truth(box(20, 30, 100, 100, 0))
    masks = torch.zeros(1, 1, 200, 200)
    masks[:, :, 30:108, 20:120] = 0.6
    output = {"boxes": torch.tensor([[20.0, 30, 120, 130]]), "labels": torch.tensor([1]),
              "scores": torch.tensor([0.9]), "masks": masks}  # fmt: skip
    found = _results(1, output, {1: 3})
    numbers = score(given, found, ("box", "mask"))
    assert numbers.numbers == pytest.approx(
        {"box_ap": 1, "box_ap50": 1, "box_ap75": 1, "mask_ap": 0.6, "mask_ap50": 1, "mask_ap75": 1}
    )
    assert "Average Precision  (AP) @[ IoU=0.50:0.95" in numbers.table


def test_both_evaluations_agree(monkeypatch):
    pytest.importorskip("faster_coco_eval")
    import sys

    data = few_shapes(40, 4).train
    random = torch.Generator().manual_seed(0)
    found = []
    for record in data.coco["annotations"]:
        noise = 6 * torch.randn(4, generator=random)
        left, top, width, height = (torch.tensor(record["bbox"]) + noise).clamp_min(1).tolist()
        guess = box(left, top, width, height, float(torch.rand((), generator=random)))
        category = 1 + int(torch.randint(3, (), generator=random))
        found.append({**guess, "image_id": record["image_id"], "category_id": category})
    fast = score(data.coco, found, ("box", "mask")).numbers
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    slow = score(data.coco, found, ("box", "mask")).numbers
    assert 0.05 < slow["box_ap50"] < 0.95
    assert fast == pytest.approx(slow, abs=1e-9)


# recipes


def test_recipes_are_the_papers():
    for name in ("plain", "ce", "syncce"):
        recipe = RECIPES[f"resnet50_{name}"]
        assert (recipe.epochs, recipe.lr, recipe.lr_batch, recipe.batch_size) == (24, 0.02, 16, 2)
        assert (recipe.milestones, recipe.gamma, recipe.momentum) == ((16, 22), 0.1, 0.9)
        assert (recipe.weight_decay, recipe.min_sizes, recipe.max_size) == (1e-4, (800,), 1333)
        assert (recipe.trainable_layers, recipe.flip) == (3, True)
        assert recipe.setting == ("synchronized" if name == "syncce" else "frozen")
        assert recipe.backbone == ("resnet50" if name == "plain" else "ceresnet50")
    for recipe in RECIPES.values():
        assert DetectionRecipe.from_dict(json.loads(json.dumps(recipe.as_dict()))) == recipe
    with pytest.raises(ValueError, match=r"'shape' is not a detection recipe \(did you mean shap"):
        find_recipe("shape")
    with pytest.raises(ValueError, match=r"min_sizes=\(2000,\) must be lengths from 32 to max_s"):
        DetectionRecipe(min_sizes=(2000,))
    with pytest.raises(ValueError, match=r"setting='sync' must be one of frozen, synchronized"):
        DetectionRecipe(setting="sync")
