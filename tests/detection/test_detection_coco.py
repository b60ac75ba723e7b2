"""Annotations are checked before training: what is bad is left out and named."""

import copy
import math

import numpy
import pytest
import torch

from _detection import SQUARE, annotation, coco
from cenet.detection.coco import _run_lengths, clean
from cenet.detection.data import outline_mask

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
    "objects with an invalid area or iscrowd": annotation(area="large"),
    "objects that are not JSON objects": ["no", "record"],
}


BOX = "objects whose box is not four numbers"


LINE = "objects whose polygons have no area in the image"


AREA = "objects with an invalid area or iscrowd"


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
        {"segmentation": [[10.0, 10.0, 10.0, 30.0, 30.0, 30.0, 30.0, 10.0]]},  # the other way round
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


def test_an_object_that_says_nothing_of_crowds_is_none():
    given = annotation()
    del given["iscrowd"], given["area"]
    found, faults = clean(coco(given), lambda record: None)
    assert not faults
    assert found["annotations"][0]["iscrowd"] == 0
    assert found["annotations"][0]["area"] == 400.0


def test_classes_are_in_the_order_of_their_ids():
    given = coco(annotation())
    found, _ = clean({**given, "categories": given["categories"][::-1]}, lambda record: None)
    assert [(each["id"], each["name"]) for each in found["categories"]] == [(3, "cat"), (9, "dog")]


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
