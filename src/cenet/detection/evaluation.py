"""Average precision of boxes and masks as COCO defines it."""

import io
from contextlib import redirect_stdout
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from cenet.detection.coco import Record
from cenet.detection.data import Scenes
from cenet.detection.loaders import test_batches
from cenet.distributed import Processes, gathered
from cenet.evaluating import evaluating

KINDS = {"box": "bbox", "mask": "segm"}
MEASURES = ("ap", "ap50", "ap75")
MASK_THRESHOLD = 0.5
TEST_BATCH = 8


class Scores(NamedTuple):
    """Average precisions by name, and the table that COCO's evaluation prints."""

    numbers: dict[str, float]
    table: str


def evaluate(
    network: nn.Module, scenes: Scenes, processes: Processes, *, workers: int = 0
) -> Scores:
    """Average precision on all images; the processes share the work."""
    own = predict(
        network, scenes, list(range(processes.rank, len(scenes.images), processes.world)),
        device=processes.device, workers=workers,
    )  # fmt: skip
    found = [record for part in gathered(own, processes) for record in part]
    has_masks = getattr(network.get_submodule("roi_heads"), "mask_head", None) is not None
    return score(scenes.coco, found, ("box", "mask") if has_masks else ("box",))


@torch.no_grad()
def predict(
    network: nn.Module, scenes: Scenes, indices: list[int], *, device: torch.device, workers: int
) -> list[Record]:
    """Predictions of the network on these images, in the format of COCO's results."""
    categories = {label: number for number, label in scenes.labels.items()}
    found: list[Record] = []
    batches = test_batches(scenes, indices, TEST_BATCH, device=device, workers=workers)
    with evaluating(network):
        for chosen, images in batches:
            for index, output in zip(chosen, network(images), strict=True):
                found += _results(scenes.images[index]["id"], output, categories)
    return found


def _results(image: Any, output: dict[str, Tensor], categories: dict[int, int]) -> list[Record]:
    from pycocotools import mask

    boxes = output["boxes"].cpu()
    sides = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    records = [
        {"image_id": image, "category_id": categories[label], "bbox": box, "score": certainty}
        for label, box, certainty in zip(
            output["labels"].tolist(), sides, output["scores"].tolist(), strict=True
        )
    ]
    if "masks" in output:
        masks = (output["masks"][:, 0] > MASK_THRESHOLD).byte().cpu().numpy()
        for record, drawn in zip(records, masks, strict=True):
            code = mask.encode(numpy.asfortranarray(drawn))
            record["segmentation"] = {**code, "counts": code["counts"].decode()}
    return records


def score(coco: Record, found: list[Record], kinds: tuple[str, ...]) -> Scores:
    """Average precision of predictions: mean over overlaps from 0.5 to 0.95, at 0.5, and at 0.75.

    Args:
        coco: annotations in the format of COCO.
        found: predictions in the format of COCO's results: image_id, category_id, score, bbox and,
            for masks, segmentation.
        kinds: box, mask.
    """
    names = [f"{kind}_{measure}" for kind in kinds for measure in MEASURES]
    if not found:
        return Scores(dict.fromkeys(names, 0.0), "nothing was found")
    make_coco, make_evaluation = _evaluator()
    values: list[float] = []
    tables: list[str] = []
    for kind in kinds:
        chatter, table = io.StringIO(), io.StringIO()
        with redirect_stdout(chatter):
            truth = make_coco()
            truth.dataset = {"info": {}, **coco}
            truth.createIndex()
            # the evaluation changes the records
            evaluation = make_evaluation(
                truth, truth.loadRes([dict(record) for record in found]), KINDS[kind]
            )
            evaluation.evaluate()
            evaluation.accumulate()
        with redirect_stdout(table):
            evaluation.summarize()
        values += [float(value) for value in evaluation.stats[: len(MEASURES)]]
        tables.append(f"{kind}\n{table.getvalue()}")
    return Scores(dict(zip(names, values, strict=True)), "\n".join(tables))


def _evaluator() -> tuple[Any, Any]:
    """The classes of faster-coco-eval where it is installed, or those of pycocotools."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster

        return COCO, partial(COCOeval_faster, print_function=print)
    except ImportError:
        pass
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    return COCO, COCOeval
