"""The page of a detector: numbers, curves and predictions, read back and compared."""

import base64
import csv
import io
import json
import re
from dataclasses import replace
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

import cenet.detection.data as data_module
from _detection import COMMIT, TINY, as_found, detection_row, few_shapes, write_detection_run
from _pages import HOSTILE, Reader
from _training import call
from cenet.detection.boxes_svg import COLOURS, TALL, Box, draw_boxes
from cenet.detection.job import show_run
from cenet.detection.page import build_page, read_source
from cenet.detection.predictions import choose, match, predictions_section
from cenet.detection.trainer import build_detector
from cenet.report.pages import save_page
from cenet.run_folder import WEIGHTS
from cenet.train import checkpoint
from cenet.train.weights import write_weights

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def _few(monkeypatch):
    monkeypatch.setattr(data_module, "SHAPES", (1, 6))


def panels(page, figure):
    """Drawings of a figure, parsed."""
    body = page.split(f'<figure id="figure-{figure}"')[1].split("</figure>")[0]
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", body, re.DOTALL)]


def texts(drawing):
    return [text.text for text in drawing.iter(f"{SVG}text")]


def curves(drawing):
    """Groups that hold a curve; those of the legend hold a line of 24 units."""
    return [group for group in drawing.findall(f"{SVG}g") if not group[0].get("d").endswith("h24")]


def test_the_page_says_what_was_trained_and_measured(tmp_path):
    rows = write_detection_run(tmp_path / "run", epochs=3)
    page = show_run(tmp_path / "run", images=0)  # nothing but what was written down is needed
    assert page == tmp_path / "run" / "detection.html"
    text = page.read_text()
    seen = Reader(text)
    assert (
        "Mask R-CNN on ceresnet18, setting scratch, 3 epochs on shapes: box AP 0.750, mask AP 0.750"
        in seen.text
    )
    assert "After epoch 3, on all test images" in seen.text
    cells = re.findall(r"<td>(\w+)</td>" + r'<td class="number">([\d.]+)</td>' * 3, text)
    assert cells == [("boxes", "0.750", "0.800", "0.833"), ("masks", "0.750", "0.800", "0.833")]
    for said in ("commit", COMMIT, "trainable layers", "cpu x86_64"):
        assert said in seen.text
    assert "Predictions" not in seen.text
    assert "train_" not in text
    assert "The sum of all parts fell from 15.0 to 5.00" in seen.text
    assert "largest part at the end is masks, 1.67" in seen.text
    assert "AP of boxes is 0.750 after epoch 3, the highest so far" in seen.text
    files = page.with_name("detection_files")
    for name, columns in (("losses", ["train_loss"]), ("precision", ["box_ap", "box_ap50"])):
        found = list(csv.reader((files / f"{name}.csv").read_text().splitlines()))[1:]
        wanted = [[row["epoch"], *(row[column] for column in columns)] for row in rows]
        assert [[float(cell) for cell in row[: len(columns) + 1]] for row in found] == wanted
        for number in (1, 2):
            assert ElementTree.parse(files / f"{name}-{number}.svg").getroot().tag == f"{SVG}svg"


def test_axes_of_the_curves(tmp_path):
    write_detection_run(tmp_path / "run", epochs=3)
    page = show_run(tmp_path / "run", images=0).read_text()
    whole, parts = panels(page, "losses")
    assert {"loss", "epoch", "1", "3"} <= {*texts(whole)}
    names = ["classes", "boxes", "masks", "objectness", "proposals"]
    assert texts(parts)[:5] == names
    assert len(curves(parts)) == 5
    for panel in panels(page, "precision"):
        assert texts(panel)[:3] == ["AP", "AP50", "AP75"]
        # always from 0 to 1, however little was reached
        ticks = [text for text in texts(panel) if text[0].isdigit()]
        assert ticks == ["0", "0.2", "0.4", "0.6", "0.8", "1", "1", "2", "3"]  # and epochs
        across = re.findall(r"[ML]([\d.]+) ", curves(panel)[0][0].get("d"))
        assert across == ["56", "236", "416"]  # from edge to edge of the plot


def test_a_run_of_one_epoch_is_points(tmp_path):
    write_detection_run(tmp_path / "run", epochs=1)
    page = show_run(tmp_path / "run", images=0).read_text()
    for panel in panels(page, "precision"):
        marks = [group[1].get("transform") for group in curves(panel)]
        assert len(marks) == 3
        assert all(mark.startswith("translate(236 ") for mark in marks)  # in the middle
    assert "The sum of all parts is 15.0" in page


def test_epochs_that_were_not_tested(tmp_path):
    write_detection_run(tmp_path / "run", epochs=5, test_every=2)
    page = show_run(tmp_path / "run", images=0).read_text()
    assert "After epoch 4, on all" in page
    line = curves(panels(page, "precision")[0])[0][0].get("d")
    assert re.fullmatch(r"M\S+ \S+L\S+ \S+", line), "epochs 2 and 4, joined"
    write_detection_run(tmp_path / "none", epochs=2, test_every=3)
    page = show_run(tmp_path / "none", images=0).read_text()
    assert "on shapes: no epoch was tested yet" in page
    assert "figure-precision" not in page


def test_a_curve_that_went_wrong_is_described_as_such(tmp_path):
    write_detection_run(tmp_path / "run", epochs=2, recipe=replace(TINY, detector="faster_rcnn"))
    rows = [detection_row(1), detection_row(2)]
    rows[1] |= {"train_loss": 20.0, "box_ap": 0.25}
    for row in rows:
        row |= {name: None for name in row if "mask" in name}
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "run" / "metrics.jsonl").write_text(lines)
    page = show_run(tmp_path / "run", images=0).read_text()
    assert "Faster R-CNN on" in page
    assert "rose from 15.0 to 20.0" in page
    assert "AP of boxes is 0.250 after epoch 2; it was highest after epoch 1, 0.500" in page
    assert len(panels(page, "precision")) == 1
    assert "masks" not in "".join(texts(panels(page, "losses")[1]))


# predictions


def test_images_are_spread_over_those_with_objects():
    scenes = few_shapes(1, 60).test
    full = [index for index, objects in enumerate(scenes.objects) if objects]
    assert len(full) < 60
    assert choose(scenes, 1) == [full[len(full) // 2]]
    places = [0, *(full.index(index) for index in choose(scenes, 4)), len(full)]
    gaps = [after - before for before, after in pairwise(places)]
    assert gaps == pytest.approx([len(full) / n for n in (8, 4, 4, 4, 8)], abs=1)
    assert choose(scenes, len(full)) == full
    assert len(choose(scenes, len(full) + 1)) == len(full) + 1
    assert choose(scenes, 99) == list(range(60))
    assert choose(scenes, 0) == []


def test_a_prediction_belongs_to_one_object_of_its_class():
    def thing(category, *box, **rest):
        return {"category_id": category, "bbox": [*map(float, box)], **rest}

    objects = [thing(1, 0, 0, 10, 10), thing(1, 20, 0, 10, 10), thing(2, 50, 50, 10, 10)]
    again = thing(1, 0, 0, 10, 9, score=0.6)
    sure = thing(1, 0, 0, 10, 8, score=0.9)
    little = thing(1, 20, 0, 10, 4.9, score=0.9)  # overlaps by 0.49
    other = thing(1, 50, 50, 10, 10, score=0.8)
    pairs = match(objects, [again, sure, little, other])
    assert [pair.truth for pair in pairs[:3]] == objects
    assert pairs[0].found is sure
    assert pairs[0].overlap == pytest.approx(0.8)
    assert [pair.found for pair in pairs[1:3]] == [None, None]
    assert [pair.found for pair in pairs[3:]] == [little, other, again]
    assert match([], []) == []


def several(scenes):
    """Indices of the images with most objects."""
    return sorted(range(len(scenes.images)), key=lambda index: -len(scenes.objects[index]))


def test_predictions_stand_beside_the_truth():
    scenes = few_shapes(1, 12).test
    index = several(scenes)[0]
    objects = scenes.objects[index]
    far = as_found(objects[0], 0.7, bbox=[0.0, 0.0, 4.0, 4.0])
    found = [as_found(objects[1], 0.93), far, as_found(objects[0], 0.49)]
    section = predictions_section(scenes, [index], found, masks=True, weights="w")
    (figure,) = section.figures
    total = len(objects)
    assert figure.caption == f"1 of {total} objects found, 1 prediction without an object."
    assert figure.caption in section.words
    assert "1 of 12 test images, evenly spread over the" in section.words
    assert figure.title == scenes.images[index]["file_name"]
    words = [row[1] for row in figure.table.rows]
    assert words.count("found") == 1
    assert words.count("missed") == total - 1
    assert words.count("without an object") == 1
    truth, seen = (ElementTree.fromstring(panel.svg) for panel in figure.panels)
    names = [scenes.classes[scenes.labels[each["category_id"]] - 1] for each in objects]
    assert texts(truth) == names
    assert texts(seen) == [f"{names[1]} 0.93", f"{names[0]} 0.70"]
    # colours: each object its own, what was found that of its object
    fills = [tag.get("fill") for tag in truth.iter(f"{SVG}rect") if tag.get("rx")]
    assert fills == list(COLOURS[:total])
    own = [tag.get("fill") for tag in seen.iter(f"{SVG}rect") if tag.get("rx")]
    assert own == [COLOURS[1], COLOURS[total]]
    # the box is where the object is, on the scale of the drawing
    width = scenes.images[index]["width"]
    unit = 640 / max(width, scenes.images[index]["height"])
    shift = (float(truth.get("viewBox").split()[2]) - unit * width) / 2
    boxes = [tag for tag in truth.iter(f"{SVG}rect") if tag.get("stroke") == COLOURS[1]]
    assert float(boxes[0].get("x")) == pytest.approx(shift + unit * objects[1]["bbox"][0], abs=1)


def test_masks_are_painted_where_they_are():
    scenes = few_shapes(1, 12).test
    index = several(scenes)[0]
    one = scenes.objects[index][0]
    unit = 640 / max(scenes.images[index]["width"], scenes.images[index]["height"])
    left, top, width, height = (unit * value for value in one["bbox"])
    # of an ellipse, a rectangle or a triangle that points upwards
    inside = (round(left + width / 2), round(top + 0.7 * height))
    outside = (round(left + width / 2), round(top - 12 if top > 12 else top + height + 12))
    colours = {}
    alone = scenes._replace(objects=[[one]] * len(scenes.images))
    for masks in (False, True):
        section = predictions_section(alone, [index], [], masks=masks, weights="w")
        uri = re.search(r'base64,([^"]+)', section.figures[0].panels[0].svg)[1]
        image = Image.open(io.BytesIO(base64.b64decode(uri)))
        colours[masks] = [torch.tensor(image.getpixel(at)) for at in (inside, outside)]
    paint = torch.tensor([*bytes.fromhex(COLOURS[0][1:])])
    mixed = 0.7 * colours[False][0] + 0.3 * paint
    assert (colours[True][0] - mixed).abs().max() < 12  # as far as JPEG keeps it
    assert (colours[False][0] - mixed).abs().max() > 12
    assert (colours[True][1] - colours[False][1]).abs().max() < 12


def test_where_nothing_was_found_the_page_says_so():
    scenes = few_shapes(1, 60).test
    empty = next(index for index, objects in enumerate(scenes.objects) if not objects)
    section = predictions_section(scenes, [empty], [], masks=False, weights="w")
    truth, seen = (ElementTree.fromstring(panel.svg) for panel in section.figures[0].panels)
    assert texts(truth) == ["no object here"]
    assert texts(seen) == ["nothing found above 0.5"]
    assert section.figures[0].caption == "No object."


@pytest.mark.parametrize("size", [(7, 640), (640, 3), (640, 480)], ids=str)
def test_names_stay_in_the_drawing_and_cover_no_other(size):
    boxes = [Box((0.0, 0.0, size[0] / 2, size[1] / 2), "a name", n) for n in range(3)]
    boxes.append(Box((size[0] - 4.0, size[1] - 2.0, 4.0, 2.0), "another name", 3))
    drawing = ElementTree.fromstring(draw_boxes("label", "data:,", size, boxes))
    wide, high = map(float, drawing.get("viewBox").split()[2:])
    assert 0.29 < high / wide <= 1
    tags = [tag for tag in drawing.iter(f"{SVG}rect") if tag.get("rx")]
    places = [[float(tag.get(name)) for name in ("x", "y", "width")] for tag in tags]
    for x, y, width in places:
        assert x >= 0
        assert x + width <= wide
        assert y >= 0
        assert y + TALL <= high
    if size == (640, 480):
        for (x, y, width), (left, top, other) in combinations(places, 2):
            assert abs(y - top) >= TALL or x + width <= left or left + other <= x


def test_names_are_text(tmp_path):
    write_detection_run(tmp_path / "a <b>run", epochs=2)
    scenes = few_shapes(1, 4).test
    index = several(scenes)[0]
    hostile = scenes._replace(
        classes=(HOSTILE, "<b>\x07", "&amp;"),
        images=[{**record, "file_name": HOSTILE} for record in scenes.images],
    )
    found = [as_found(record) for record in scenes.objects[index]]
    section = predictions_section(hostile, [index], found, masks=True, weights="w")
    source = read_source(tmp_path / "a <b>run")
    page = save_page(build_page(source, TINY, section, WEIGHTS), tmp_path / "page.html")
    seen = Reader(page.read_text())
    assert len(seen.scripts) == 1
    assert {"b", "alert"}.isdisjoint(seen.tags)
    assert {name for _, name, _ in seen.attributes if name.startswith("on")} == set()
    assert HOSTILE in seen.text
    assert "a <b>run" in seen.text
    for path in tmp_path.glob("page_files/*.svg"):
        ElementTree.parse(path)


# the command


def network(recipe):
    return build_detector(recipe, few_shapes(1, 1).inputs())


@pytest.mark.usefixtures("_few")
def test_show_draws_what_the_weights_find(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    write_detection_run(run, epochs=2)
    write_weights(run / WEIGHTS, network(TINY), TINY, few_shapes(1, 1).inputs())
    call(monkeypatch, "detect", "show", str(run), "--device", "cpu", "--images", "3")
    assert "wrote" in capsys.readouterr().out
    page = (run / "detection.html").read_text()
    assert page.count("data:image/jpeg;base64,") == 6
    assert "The weights are those of weights.safetensors" in page
    assert 'role="note"' not in page
    assert not re.search(r'(src|href)="(?!data:|#)', page), "it needs nothing else"
    assert (run / "detection_files" / "image-3-2.svg").is_file()


@pytest.mark.usefixtures("_few")
@pytest.mark.parametrize(
    ("updates", "note"),
    [(8, None), (11, "3 updates after the end of epoch 2"), (7, "1 update before the end of")],
)
def test_weights_that_were_not_measured_are_noted(tmp_path, updates, note):
    run = tmp_path / "run"
    write_detection_run(run, epochs=2)
    tensors = checkpoint.with_prefix("model", checkpoint.module_state(network(TINY)))
    checkpoint.write(checkpoint.checkpoint_path(run, updates), tensors, {})
    page = show_run(run, device="cpu", images=1).read_text()
    assert ("The predictions are those of" in page) is (note is not None)
    if note is not None:
        assert f"step-{updates:09d}.safetensors, {note}" in page


def test_what_cannot_be_shown_is_one_clear_error(tmp_path, monkeypatch):
    run = tmp_path / "run"
    write_detection_run(run, epochs=1)
    with pytest.raises(SystemExit, match="images=-1 must be at least 0"):
        call(monkeypatch, "detect", "show", str(run), "--images", "-1")
    good = (run / "metrics.jsonl").read_text()
    for content, message in (
        ("", "has no epoch yet"),
        (good.replace('"box_ap": 0.5', '"box_ap": "high"'), r"epoch 1 is not a row of `cenet det"),
        (good + "[]\n", r"line 2 is not the row of an epoch"),
        ("{\n" + good, "cannot be read: line 1: "),
    ):
        (run / "metrics.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message):
            show_run(run)
    assert not (run / "detection.html").exists()
