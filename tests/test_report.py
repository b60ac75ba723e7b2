"""The page says what the sources say."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from xml.etree import ElementTree

import pytest

import cenet.report.channels as channels
from _pages import HOSTILE, Reader, figures, sections
from _runs import diagnosis, metrics, write_run, write_three_runs
from cenet.analysis.diagnosis import Diagnosis
from cenet.report import write_diagnosis_page, write_page
from cenet.report.sources import from_diagnosis, read_sources
from cenet.report.words import show
from cenet.report.writing import build_page


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three runs, and their page."""
    root = tmp_path_factory.mktemp("runs")
    write_page(write_three_runs(root), root / "page.html")
    return root


@pytest.fixture(scope="module")
def page(folder):
    return Reader((folder / "page.html").read_text())


def test_tables_hold_the_numbers_of_the_source(folder):
    found = figures(build_page(read_sources([folder / "ce"])))
    source = json.loads((folder / "ce" / "diagnosis.json").read_text())
    layers = list(enumerate(source["layers"], 1))

    def rows(*names):
        return tuple((i, layer["name"], *(layer[name] for name in names)) for i, layer in layers)

    assert found["inhibited"].table.rows == rows("inhibited_ratio")
    assert found["correlation"].table.rows == rows("correlation")
    assert found["lambda"].table.rows == rows("lambda")
    assert found["gamma"].table.rows == tuple(
        (i, layer["name"], layer["gamma"]["abs_below_1e-2"]) for i, layer in layers
    )
    assert found["spectrum"].table.rows == tuple(
        (i, layer["name"], *w.values(), w["max"] / w["min"])
        for i, layer in layers
        for w in [layer["spectrum"]]
    )
    asleep = sum(len(layer["asleep"]) for _, layer in layers)
    total = sum(layer["channels"] for _, layer in layers)
    assert dict(found["strength"].table.rows)[0.01] == asleep / total
    assert found["strength"].numbers.rows == tuple(
        ("ce", layer["name"], c, v) for _, layer in layers for c, v in enumerate(layer["mean_abs"])
    )
    curve = source["ablation"]
    assert found["ablation"].table.rows == tuple(
        ("ce", 5, ratio, fmean(values), min(values), max(values))
        for ratio, values in zip(curve["ratios"], curve["top1"], strict=True)
    )
    first = source["matrices"][0]
    assert [row[4] for row in found["matrices"].numbers.rows][:24] == first["values"][0]
    drops = source["importance"]["drop"]
    assert [row[3] for row in found["importance"].numbers.rows] == drops
    assert found["importance"].table.rows[0][3:5] == (0.41, max(drops))
    shown = [source["layers"][i]["name"] for i in (0, 4, 8, 12)]
    assert [row[1] for row in found["maps"].table.rows] == shown


def test_training_tables_are_those_of_metrics(folder):
    found = figures(build_page(read_sources([folder / "plain", folder / "ce"])))
    plain, ce = metrics(0, ce=False), metrics(1)
    for key, column in (("loss", "loss"), ("accuracy", "top1")):
        assert found[key].table.rows == tuple(
            (a["epoch"], *(row[f"{part}_{column}"] for row in (a, b) for part in ("train", "test")))
            for a, b in zip(plain, ce, strict=True)
        )


def test_the_page_shows_the_tables(folder, page):
    built = figures(build_page(read_sources([folder / n for n in ("plain", "ce", "ce_again")])))
    assert set(page.tables) == {f"figure-{key}" for key in built}
    for key, figure in built.items():
        head, *rows = page.tables[f"figure-{key}"]
        assert head == [column.name for column in figure.table.columns]
        kinds = [column.kind for column in figure.table.columns]
        assert rows == [
            [show(cell, kind) for cell, kind in zip(row, kinds, strict=True)]
            for row in figure.table.rows
        ]


def test_headline_compares_the_runs(folder):
    built = build_page(read_sources([folder / n for n in ("plain", "ce", "ce_again")]))
    facts = {fact.name: fact for fact in built.facts}
    source = json.loads((folder / "ce" / "diagnosis.json").read_text())
    assert facts["top-1"].values == ("87.80\u202f%", "89.60\u202f%", "–")
    assert facts["top-1"].best == {1}
    assert facts["top-5"].best == frozenset()  # all the same
    assert facts["inhibited, first six layers"].best == {1}
    expected = f"{100 * source['first_six']:.2f}\u202f%"
    assert facts["inhibited, first six layers"].values[1] == expected
    expected = fmean(layer["correlation"] for layer in source["layers"])
    assert facts["mean correlation"].values[1] == f"{expected:.3g}"
    asleep = sum(len(layer["asleep"]) for layer in source["layers"])
    share = asleep / sum(layer["channels"] for layer in source["layers"])
    assert facts["inhibited, all layers"].values[1] == f"{100 * share:.2f}\u202f%"
    assert facts["mean λ"].values[0] == "–"
    assert facts["layers with CE"].values == ("0", "13", "–")
    assert facts["Gini of importance"].best == frozenset()  # 0 is also where nothing is lost
    curve = source["ablation"]
    means = [fmean(values) for values in curve["top1"]]
    area = sum(0.1 * (a + b) / 2 for a, b in pairwise(means)) / 0.9
    assert facts["ablation area"].values[1] == f"{100 * area:.2f}\u202f%"
    last = metrics(2, epochs=20)[-1]["test_top1"]
    assert facts["test top-1"].values[2] == f"{100 * last:.2f}\u202f%"


def test_captions_say_what_the_numbers_say(folder):
    found = figures(build_page(read_sources([folder / "plain", folder / "ce"])))
    source = json.loads((folder / "plain" / "diagnosis.json").read_text())
    worst = max(source["layers"], key=lambda layer: layer["inhibited_ratio"])
    expected = f"plain: most in {worst['name']}, {100 * worst['inhibited_ratio']:.1f}\u202f%"
    assert expected in found["inhibited"].caption
    assert "plain 0.630, ce 0.410" in found["importance"].caption
    # λ is known of one run only, and the caption says of which
    assert re.search(r"layers with CE: ce 0\.\d+\.", found["lambda"].caption)
    assert "mean and range of 5 draws" in found["ablation"].caption
    alone = figures(build_page(read_sources([folder / "ce"])))
    assert "1 when one matters alone: 0.410." in alone["importance"].caption


def test_lower_is_better_for_loss_and_correlation(folder):
    built = build_page(read_sources([folder / "plain", folder / "ce"]))
    losses = [min(row["test_loss"] for row in metrics(seed)) for seed in (0, 1)]
    plain, ce = (f"{loss:.3f}".rstrip("0") for loss in losses)
    said = figures(built)["loss"].caption.split("lowest of all epochs:")[1]
    assert plain in said
    assert ce in said
    (fact,) = (fact for fact in built.facts if fact.name == "mean correlation")
    assert [fact.values[run] for run in fact.best] == [min(fact.values, key=float)]


def test_maps_at_one_place_share_a_scale(monkeypatch, folder):
    scales = []
    monkeypatch.setattr(
        channels, "heat_map", lambda label, values, low, high: scales.append((low, high)) or ""
    )
    sources = read_sources([folder / "plain", folder / "ce"])
    assert channels.map_figure(sources) is not None
    maps = [[layer["magnitude"] for layer in channels._spread_out(source)] for source in sources]
    assert scales[: len(maps[0])] == scales[len(maps[0]) :]
    for place, (low, high) in enumerate(scales[: len(maps[0])]):
        values = [v for one in maps for row in one[place] for v in row]
        assert (low, high) == (min(values), max(values))


def test_the_spectrum_tells_how_much_is_decorrelated_not_how_high_it_is():
    found = diagnosis(0, layers=4)
    for layer in found["layers"]:
        layer["spectrum"] = {"min": 2.87, "median": 2.87, "max": 2.87}  # of white input
    figure = figures(build_page([from_diagnosis(found)]))["spectrum"]
    assert "equal eigenvalues only rescale" in figure.caption
    assert figure.caption.endswith("mean over layers: 1.00.")
    drawn = figure.panels[0].svg
    assert "unchanged" not in figure.caption + drawn
    assert 'class="rule"' not in drawn


def test_an_accuracy_is_said_once():
    rows = ({"epoch": 1, "test_top1": 0.896},)
    source = replace(from_diagnosis(diagnosis(0, layers=4)), metrics=rows)
    names = [fact.name for fact in build_page([source]).facts]
    assert "top-1" in names
    assert "test top-1" not in names


def test_the_axis_of_strength_reaches_the_median_and_its_label_is_free():
    found = diagnosis(0, layers=4)
    for layer in found["layers"]:
        layer["mean_abs"] = [1e-7 * (1 + i) for i in range(layer["channels"])]
    figure = figures(build_page([from_diagnosis(found)]))["strength"]
    assert figure.table.rows[0][1] < 0.5
    root = ElementTree.fromstring(figure.panels[0].svg)
    texts = {text.text: float(text.get("y")) for text in root.iter() if text.tag.endswith("text")}
    rule = next(e.get("d") for e in root.iter() if e.get("class") == "rule")
    assert texts["inhibited below 0.01"] < float(re.match(r"M\S+ ([\d.]+)v", rule)[1])


def test_constant_channels_are_explained_where_there_are_any():
    found = diagnosis(0, layers=4)
    assert "Grey" not in figures(build_page([from_diagnosis(found)]))["matrices"].caption
    values = found["matrices"][0]["values"]
    values[3] = [None] * 24
    for row in values:
        row[3] = None
    assert "Grey lines" in figures(build_page([from_diagnosis(found)]))["matrices"].caption


def test_pictures_too_small_to_see_are_left_out():
    found = diagnosis(0, layers=4)
    found["layers"][0]["magnitude"] = [[1.0, 2.0, 3.0]] * 3
    found["data"]["size"] = [8, 8]
    built = build_page([from_diagnosis(found)])
    assert found["layers"][0]["name"] not in [row[1] for row in figures(built)["maps"].table.rows]
    assert len(figures(built)["maps"].panels) == 3
    assert "gradcam" not in [section.key for section in built.sections]


def test_random_weights_are_said_first(tmp_path):
    found = diagnosis(0, layers=4)
    found["model"]["checkpoint"] = None
    source = from_diagnosis(found)
    note = "The weights are random: no checkpoint was given."
    assert build_page([source]).notes == (note,)
    text = Reader(write_diagnosis_page(found, tmp_path / "page.html").read_text()).text
    assert text.index(note) < text.index("At a glance")
    trained = replace(from_diagnosis(diagnosis(1, layers=4)), name="trained")
    both = build_page([source, trained])
    assert both.notes == (f"{source.name}: {note}",)
    facts = {fact.name: fact for fact in both.facts}
    assert facts["checkpoint"].values == ("random", "weights.safetensors")
    # a run has weights of its own
    assert build_page([replace(source, recipe={"network": "vgg16"})]).notes == ()
    # from Python a network may come trained
    found["data"]["folder"] = None
    (note,) = build_page([from_diagnosis(found)]).notes
    assert note.startswith("No checkpoint was given: unless")


def test_title_and_lead_are_text_under_the_title(folder, tmp_path):
    out = tmp_path / "page.html"
    page = Reader(
        write_page([folder / "ce"], out, title=HOSTILE, lead=["First.", HOSTILE]).read_text()
    )
    assert len(page.scripts) == 1
    assert page.text.count(HOSTILE) == 3  # of the window, of the page, and the paragraph
    assert page.text.index("First.") < page.text.index("At a glance")


def test_a_diagnosis_need_not_be_written_first(tmp_path):
    whole = Diagnosis.from_dict(diagnosis(0, layers=4))
    write_diagnosis_page(whole, tmp_path / "one.html")
    other = Diagnosis.from_dict(diagnosis(1, layers=4))
    write_page([whole, other], tmp_path / "two.html")
    assert [s.name for s in read_sources([whole, other])] == ["cevgg16", "cevgg16 (2)"]
    assert (tmp_path / "one_files" / "lambda.csv").is_file()


def test_what_channels_did_while_it_trained(tmp_path):
    write_run(tmp_path / "plain", 0, ce=False, layers=4, watched=True)
    write_run(tmp_path / "ce", 1, layers=4, watched=True)
    write_run(tmp_path / "other", 2, layers=4)
    built = build_page(read_sources([tmp_path / name for name in ("plain", "ce", "other")]))
    assert [section.key for section in built.sections][:2] == ["training", "watched"]
    found = figures(built)
    steps = range(0, 1000, 100)
    table = found["watched-inhibited"].table
    assert [column.name for column in table.columns] == ["update", "plain", "ce"]
    assert [row[0] for row in table.rows] == list(steps)
    assert table.rows[5][1:] == pytest.approx((0.13, 0.03))
    # a layer without a correlation is no part of the mean
    assert found["watched-correlation"].table.rows[5][1:] == pytest.approx((0.4, 0.4))
    assert ("plain", 500, "b", None) in found["watched-correlation"].numbers.rows
    first, last = "At the first look: plain 0.500, ce 0.500", "at the last: plain 0.320, ce 0.320."
    assert f"{first}; {last}" in found["watched-correlation"].caption
    alone = build_page(read_sources([tmp_path / "other"]))
    assert "watched" not in [section.key for section in alone.sections]


def test_a_run_has_one_colour_throughout(folder):
    text = (folder / "page.html").read_text()
    # in every legend a name follows the mark of its run
    marks = re.findall(
        r'<g class="run(\d)">(?:(?!</g>).)*</g><text[^>]*class="name">([^<]*)<', text
    )
    assert set(marks) == {("0", "plain"), ("1", "ce"), ("2", "ce_again")}
    # and in the drawings of what plain does not have, ce is still the second
    for key in ("lambda", "spectrum"):
        drawing = text[text.index(f'id="figure-{key}"') :].split("</svg>")[0]
        assert 'class="run1"' in drawing
        assert 'class="run0"' not in drawing


def test_differences_of_recipes_come_first(folder):
    built = build_page(read_sources([folder / "plain", folder / "ce"]))
    (table,) = next(s for s in built.sections if s.key == "recipe").tables
    assert [row[0] for row in table.rows[:2]] == ["seed", "block"]
    assert table.rows[1] == ("block", "plain", "ce")
    assert table.marked == {0, 1}
    assert len(table.rows) == 29


def test_networks_with_other_layers_keep_their_own_names(tmp_path):
    write_run(tmp_path / "deep", 0, layers=9)
    write_run(tmp_path / "flat", 1, layers=4)
    table = figures(build_page(read_sources([tmp_path / "deep", tmp_path / "flat"])))["inhibited"]
    names = [column.name for column in table.table.columns]
    assert names == ["deep, #", "deep, layer", "deep", "flat, #", "flat, layer", "flat"]
    assert table.table.rows[8][3:] == (None, None, None)
    assert table.table.rows[8][1] == "features.26.relu"


def test_runs_with_one_name_are_told_apart_by_their_folders(tmp_path):
    for parent in ("a", "b"):
        write_run(tmp_path / parent / "run", 0, epochs=2, measured=False)
    found = read_sources([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert [source.name for source in found] == ["a/run", "b/run"]


def test_a_diagnosis_file_is_called_like_its_folder(tmp_path):
    write_run(tmp_path / "ce", 0, layers=4)
    (found,) = read_sources([tmp_path / "ce" / "diagnosis.json"])
    assert (found.name, found.recipe, found.metrics) == ("ce", None, ())


def test_sections_without_numbers_are_left_out(tmp_path):
    write_run(tmp_path / "run", 0, measured=False)
    assert sections(read_sources([tmp_path / "run"])[0]) == ["training", "recipe", "environment"]
    whole = diagnosis(0, layers=4)
    everything = ["channels", "ablation", "equilibrium", "maps", "gradcam", "layers", "skipped"]
    assert sections(from_diagnosis(whole)) == [*everything, "environment"]
    for part in ("accuracy", "first_six", "ablation", "importance", "environment"):
        whole[part] = None
    for part in ("matrices", "gradcam"):
        whole[part] = []
    whole["data"]["skipped"] = []
    for layer in whole["layers"]:
        layer.update({"lambda": None, "spectrum": None, "magnitude": [[3.0]], "correlation": None})
    assert sections(from_diagnosis(whole)) == ["channels", "layers"]
    whole["layers"] = []
    assert sections(from_diagnosis(whole)) == []


def test_the_least_diagnosis_makes_a_page(tmp_path):
    layer = {"name": "relu", "channels": 2, "mean_abs": [None, 0.0], "asleep": [1]}
    least = {"format": "cenet.diagnosis", "version": 1, "model": {"name": "m"}, "threshold": 0.01}
    least["layers"] = [{**layer, "inhibited_ratio": 0.5}]
    text = Reader(write_diagnosis_page(least, tmp_path / "p.html").read_text()).text
    assert not re.search(r"\b(None|nan|inf)\b", text)


def test_numbers_that_are_not_known_leave_gaps(tmp_path):
    found = diagnosis(0, layers=4)
    found["layers"][1]["mean_abs"][0] = None
    found["layers"][1]["correlation"] = float("nan")
    found["matrices"][0]["values"][1][2] = None
    found["layers"][0]["magnitude"][0][0] = None
    found["ablation"]["top1"][3] = [None] * 5
    page = write_diagnosis_page(found, tmp_path / "page.html")
    assert not re.search(r"\b(None|nan|inf)\b", Reader(page.read_text()).text)
    rows = figures(build_page([from_diagnosis(found)]))["correlation"].table.rows
    assert [row[0] for row in rows] == [1, 3, 4]
