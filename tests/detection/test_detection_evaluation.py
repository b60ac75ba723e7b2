"""Average precision is COCO's: by hand, by both libraries, over ranks."""

import pytest
import torch
from torch import nn

from _detection import annotation, box, coco, few_shapes
from _distributed import run
from cenet.detection.coco import clean
from cenet.detection.evaluation import _results, evaluate, predict, score
from cenet.detection.loaders import sample
from cenet.distributed import Processes

CPU = torch.device("cpu")
COUNTS = (7, 3, 1)


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


class Oracle(nn.Module):
    """Knows the truth of every image, and tells it with noise."""

    def __init__(self, data):
        super().__init__()
        self.data = data
        self.roi_heads = nn.Module()
        self.roi_heads.mask_head = nn.Identity()

    def forward(self, images):
        return [self.found(image) for image in images]

    def found(self, image):
        known = [(p / 255).equal(image) for p in self.data.pixels]
        index = known.index(True)
        _, target = sample(self.data, index, image.shape[1:], flip=False, masks=True)
        random = torch.Generator().manual_seed(index)
        boxes = target["boxes"]
        return {
            "boxes": boxes + 2 * torch.randn(boxes.shape, generator=random),
            "labels": target["labels"],
            "scores": torch.rand(len(boxes), generator=random),
            "masks": target["masks"][:, None].float().roll(3, -1),
        }


def parts():
    """Different numbers of images; the last leaves a second rank without any."""
    return [few_shapes(2, count).test for count in COUNTS]


def scores(rank, world):
    return [evaluate(Oracle(part), part, Processes(rank, world, CPU)) for part in parts()]


def test_ranks_evaluate_every_image_once():
    expected = []
    for part in parts():
        indices = list(range(len(part.images)))
        found = predict(Oracle(part), part, indices, device=CPU, workers=0)
        expected.append(score(part.coco, found, ("box", "mask")))
    assert all(0.1 < expected[0].numbers[f"{kind}_ap"] < 0.95 for kind in ("box", "mask"))
    assert [scores(0, 1), *run(scores, 2, 2)] == [expected] * 3
