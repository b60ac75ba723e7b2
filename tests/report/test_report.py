"""The page says what the sources say."""

import json
import re
import shutil
from dataclasses import fields, replace
from statistics import fmean
from xml.etree import ElementTree

import pytest

import cenet.report.channels as channels
from _pages import (
    HOSTILE,
    Reader,
    diagnosis,
    figures,
    metrics,
    sections,
    source,
    write_run,
)
from _training import call
from cenet.analysis.diagnosis import Diagnosis
from cenet.formatting import show
from cenet.report import write_diagnosis_page, write_page
from cenet.report.pages import build_page
from cenet.report.sources import read_sources
from cenet.train.recipes import Recipe


@pytest.fixture(scope="module")
def page(three_runs):
    return Reader((three_runs / "page.html").read_text())


def test_tables_hold_the_numbers_of_the_source(three_runs):
    found = figures(build_page(read_sources([three_runs / "ce"])))
    content = json.loads((three_runs / "ce" / "diagnosis.json").read_text())
    layers = list(enumerate(content["layers"], 1))

    def rows(*measures):
        return tuple((i, layer["name"], *(m(layer) for m in measures)) for i, layer in layers)

    def share(name):
        return lambda layer: len(layer[name]) / layer["channels"]

    assert found["dormant"].table.rows == rows(share("dormant_0.1"), share("dormant_0.025"))
    assert found["participation"].table.rows == rows(
        lambda layer: layer["participation_ratio"] / layer["channels"],
        lambda layer: layer["participation_ratio"],
    )
    assert found["inhibited"].table.rows == rows(lambda layer: layer["inhibited_ratio"])
    assert found["correlation"].table.rows == rows(lambda layer: layer["correlation"])
    assert found["lambda"].table.rows == rows(lambda layer: layer["lambda"])
    assert found["gamma"].table.rows == rows(lambda layer: layer["gamma"]["abs_below_1e-2"])
    assert found["spectrum"].table.rows == tuple(
        (i, layer["name"], *w.values(), w["max"] / w["min"])
        for i, layer in layers
        for w in [layer["spectrum"]]
    )
    first = content["matrices"][0]
    assert [row[4] for row in found["matrices"].numbers.rows][:24] == first["values"][0]
    shown = [content["layers"][i]["name"] for i in (0, 4, 8, 12)]
    assert [row[1] for row in found["maps"].table.rows] == shown


def test_tables_of_channels_hold_the_numbers_of_the_source(three_runs):
    found = figures(build_page(read_sources([three_runs / "ce"])))
    content = json.loads((three_runs / "ce" / "diagnosis.json").read_text())
    layers = content["layers"]
    total = sum(layer["channels"] for layer in layers)
    shares = dict(found["activity"].table.rows)
    for limit in (0.1, 0.025):
        assert shares[limit] == sum(len(layer[f"dormant_{limit}"]) for layer in layers) / total
    for key in ("activity", "contribution"):
        assert found[key].numbers.rows == tuple(
            ("ce", layer["name"], channel, value)
            for layer in layers
            for channel, value in enumerate(layer[key] or ())
        )
    assert (
        "For 1 layer the weights that read the channels are unknown."
        in found["contribution"].caption
    )
    curve = content["ablation"]
    points = zip(curve["ratios"], curve["top1"], curve["least_important_first"], strict=True)
    assert found["ablation"].table.rows == tuple(
        ("ce", 5, ratio, fmean(draws), min(draws), max(draws), least)
        for ratio, draws, least in points
    )
    one = content["importance"]
    assert [row[3:] for row in found["importance"].numbers.rows] == [
        *zip(one["divergence"], one["standard_error"], strict=True)
    ]
    assert found["importance"].table.rows[0][3:5] == (0.41, max(one["divergence"]))


def test_training_tables_are_those_of_metrics(three_runs):
    found = figures(build_page(read_sources([three_runs / "plain", three_runs / "ce"])))
    plain, ce = metrics(0, ce=False), metrics(1)
    for key, column in (("loss", "loss"), ("accuracy", "top1")):
        assert found[key].table.rows == tuple(
            (a["epoch"], *(row[f"{part}_{column}"] for row in (a, b) for part in ("train", "test")))
            for a, b in zip(plain, ce, strict=True)
        )


def test_the_page_shows_the_tables(three_runs, page):
    built = figures(build_page(read_sources([three_runs / n for n in ("plain", "ce", "ce_again")])))
    assert set(page.tables) == {f"figure-{key}" for key in built}
    for key, figure in built.items():
        head, *rows = page.tables[f"figure-{key}"]
        assert head == [column.name for column in figure.table.columns]
        kinds = [column.kind for column in figure.table.columns]
        assert rows == [
            [show(cell, kind) for cell, kind in zip(row, kinds, strict=True)]
            for row in figure.table.rows
        ]


def test_headline_compares_the_runs(three_runs):
    built = build_page(read_sources([three_runs / n for n in ("plain", "ce", "ce_again")]))
    facts = {fact.name: fact for fact in built.facts}
    content = json.loads((three_runs / "ce" / "diagnosis.json").read_text())
    layers = content["layers"]
    total = sum(layer["channels"] for layer in layers)
    assert facts["top-1"].values == ("87.80\u202f%", "89.60\u202f%", "–")
    for name, key in (
        ("dormant channels", "dormant_0.1"),
        ("dormant, strictly", "dormant_0.025"),
        ("fire in < 1\u202f% of images", "fires_below_1_percent"),
        ("prunable", "prunable"),
        ("duplicates", "duplicates"),
        ("saturated", "saturated"),
    ):
        share = sum(len(layer[key]) for layer in layers) / total
        assert facts[name].values[1:] == (f"{100 * share:.2f}\u202f%", "–")
    share = fmean(layer["participation_ratio"] / layer["channels"] for layer in layers)
    assert facts["effective dimensions / channels"].values[1] == f"{100 * share:.2f}\u202f%"
    expected = fmean(layer["correlation"] for layer in layers)
    assert facts["mean correlation"].values[1] == f"{expected:.3g}"
    assert facts["mean λ"].values[0] == "–"
    assert facts["layers with CE"].values == ("0", "13", "–")
    assert facts["checkpoint"].values == ("weights", "weights", "–")
    last = metrics(2, epochs=20)[-1]["test_top1"]
    assert facts["test top-1"].values[2] == f"{100 * last:.2f}\u202f%"
    # the figure that depends on the scale comes last, under its own name
    assert built.facts[-1].name == "inhibited, first six layers (the paper's figure)"
    assert built.facts[-1].values[1] == f"{100 * content['first_six']:.2f}\u202f%"


def test_captions_say_what_the_numbers_say(three_runs):
    found = figures(build_page(read_sources([three_runs / "plain", three_runs / "ce"])))
    content = json.loads((three_runs / "plain" / "diagnosis.json").read_text())
    for key, measure in (
        ("dormant", lambda layer: len(layer["dormant_0.1"]) / layer["channels"]),
        ("inhibited", lambda layer: layer["inhibited_ratio"]),
    ):
        worst = max(content["layers"], key=measure)
        expected = f"plain: most in {worst['name']}, {100 * measure(worst):.1f}\u202f%"
        assert expected in found[key].caption
    assert "For 2 channels that limit is within two standard errors" in found["dormant"].caption
    assert "depends on the scale of the layer" in found["inhibited"].caption
    assert "plain 0.630, ce 0.410" in found["importance"].caption
    # λ is known of one run only, and the caption says of which
    assert re.search(r"layers with CE: ce 0\.\d+\.", found["lambda"].caption)
    alone = figures(build_page(read_sources([three_runs / "ce"])))
    assert "1 if a single one matters: 0.410." in alone["importance"].caption


def test_the_paper_s_figure_is_the_last_of_its_section(three_runs):
    built = build_page(read_sources([three_runs / "ce"]))
    (section,) = (section for section in built.sections if section.key == "channels")
    assert [section.figures[i].key for i in (0, -1)] == ["dormant", "inhibited"]
    assert "inhibited" not in "".join(f.caption + f.title for f in section.figures[:-1])


def test_ablation_draws_both_orders_and_says_once_what_they_mean(three_runs, tmp_path):
    sources = read_sources([three_runs / "plain", three_runs / "ce"])
    figure = figures(build_page(sources))["ablation"]
    assert [panel.name for panel in figure.panels] == ["plain", "ce"]
    for run, (panel, one) in enumerate(zip(figure.panels, sources, strict=True)):
        root = ElementTree.fromstring(panel.svg)
        names = [text.text for text in root.iter() if text.get("class") == "name"]
        assert names == ["random order", "least important first"]
        said = [title.text for title in root.iter() if title.tag.endswith("title")]
        last = one.diagnosis.ablation.least_important_first[-1]
        assert said[-1] == f"least important first: {show(last, 'percent')}"
        assert {g.get("class") for g in root.iter() if g.tag.endswith("}g")} == {f"run{run}"}
    assert "mean and range of 5 draws" in figure.caption
    curves = [one.diagnosis.ablation for one in sources]
    points = [p for c in curves for p in (*c.least_important_first, *sum(c.top1, ()))]
    error = max((p * (1 - p) / 512) ** 0.5 for p in points)
    assert (
        f"on 512 images: the binomial standard error of a point is at most {100 * error:.1f}"
        in (figure.caption)
    )
    text = Reader(write_page([three_runs / "ce"], tmp_path / "page.html").read_text()).text
    assert text.count("does not rely on particular channels") == 1
    assert text.count("redundant or inactive") == 1


def test_the_band_of_importance_is_two_standard_errors_wide(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        channels, "line_chart", lambda label, series, *_: drawn.extend(series) or ""
    )
    found = diagnosis(0, layers=4)
    found["importance"].update(divergence=[0.1, 0.5, 0.3], standard_error=[0.1, 0.02, None])
    assert channels.importance_figure([source(found)]) is not None
    (series,) = drawn
    assert series.y == [0.5, 0.3, 0.1]
    assert series.low == [0.46, None, 0.0]
    assert series.high == pytest.approx([0.54, None, 0.3])


def test_removal_is_said_in_a_sentence(three_runs):
    built = build_page(read_sources([three_runs / "ce"]))
    (section,) = (section for section in built.sections if section.key == "ablation")
    assert section.words == (
        "Removing all 37 prunable channels at once changes top-1 from 90.00\u202f% to 89.85\u202f% "
        "(standard error of the difference 0.20\u202f%, on 2\u202f000 images)."
    )
    found = diagnosis(0, layers=4)
    found.update(removal=None, ablation=None, importance=None)
    assert "ablation" not in sections(source(found))


def test_the_verdict_stands_at_the_top(tmp_path):
    found = diagnosis(0, layers=8, ce=False)
    found["layers"][2]["has_ce"] = True
    text = write_diagnosis_page(Diagnosis.from_dict(found), tmp_path / "page.html").read_text()
    page = Reader(text)
    verdict = found["verdict"]
    assert text.count("cenet diagnose</p>") == 1
    assert "cenet report" not in text
    for words in (
        verdict["headline"],
        *verdict["reasons"],
        verdict["next_step"],
        verdict["command"],
    ):
        assert page.text.index(words) < page.text.index("At a glance")
    box = text[text.index('class="verdict"') : text.index("<nav")]
    assert f"<code>{verdict['command']}</code></pre>" in box
    taken, free = box.split("insert_ce_ would put CE")
    assert re.findall(r"<code>(features.*?)</code>", taken) == ["features.8.relu"]
    sites = [site for site in found["sites"] if site != found["layers"][2]["norm"]]
    assert re.findall(r"<code>(.*?)</code>", free) == sites


def test_each_of_several_runs_has_its_verdict_in_a_line(three_runs):
    page = Reader((three_runs / "page.html").read_text())
    top = page.text[: page.text.index("At a glance")]
    assert ("section", "class", "verdict") not in page.attributes
    assert [top.count(words) for words in ("Try CE.", "Nothing to do: few")] == [1, 1]
    assert "cenet train vgg16_ce" not in top


def test_random_weights_are_said_once(tmp_path):
    found = diagnosis(0, layers=4)
    found["model"].update(checkpoint=None, untrained=True)
    said = "The weights are random: train the network first."
    verdict = {"kind": "untrained", "headline": said, "reasons": []}
    found["verdict"] = {**verdict, "next_step": None, "command": None}
    page = write_diagnosis_page(Diagnosis.from_dict(found), tmp_path / "page.html")
    text = Reader(page.read_text()).text
    assert text.count("weights are random") == 1
    assert text.index(said) < text.index("At a glance")
    assert len(re.findall(r"andom(?! order|: mean)", text)) == 1
    assert "gradcam" not in sections(source(found))  # they would be noise
    facts = {fact.name: fact for fact in build_page([source(found)]).facts}
    assert facts["checkpoint"].values == ("–",)


def test_zero_in_every_layer_is_said_and_not_drawn(tmp_path):
    found = diagnosis(0, layers=4)
    for layer in found["layers"]:
        layer.update({"dormant_0.1": [], "dormant_0.025": [], "inhibited_ratio": 0.0})
        layer["gamma"]["abs_below_1e-2"] = 0.0
    drawn = figures(build_page([source(found)]))
    for key in ("dormant", "inhibited", "gamma"):
        assert drawn[key].panels == ()
        assert "none in any layer." in drawn[key].caption
        assert len(drawn[key].table.rows) == 4
    assert drawn["correlation"].panels
    other = replace(source(diagnosis(1, layers=4, ce=False)), name="other")
    both = figures(build_page([source(found), other]))["dormant"]
    assert both.panels
    assert "cevgg16: none in any layer; other: most in" in both.caption
    write_diagnosis_page(Diagnosis.from_dict(found), tmp_path / "page.html")


def axis_names(svg):
    """The names at the axis of x: as written, and in full."""
    texts = (e for e in ElementTree.fromstring(svg).iter() if e.get("class") == "layer")
    return {text.text: text[0].text for text in texts}


def test_layer_axes_carry_names(tmp_path):
    found = diagnosis(0, layers=13)
    written = axis_names(figures(build_page([source(found)]))["dormant"].panels[0].svg)
    assert written == {
        layer["name"].removesuffix(".relu"): layer["name"] for layer in found["layers"]
    }
    many = diagnosis(0, layers=49)
    for index, layer in enumerate(many["layers"]):
        layer["name"] = f"stages.{index}.a_long_word.{index}.act{index % 2}"
    written = axis_names(figures(build_page([source(many)]))["spectrum"].panels[0].svg)
    assert 10 <= len(written) <= 20
    assert written["s.3.a.3.act1"] == many["layers"][3]["name"]
    few = diagnosis(0, layers=4)
    for index, layer in enumerate(few["layers"]):
        layer["name"] = str(index)
    drawn = figures(build_page([source(few)]))["dormant"].panels[0].svg
    assert list(axis_names(drawn)) == ["0", "1", "2", "3"]
    assert "rotate" not in drawn  # they have room
    # a place has a name if the runs agree on it
    other = diagnosis(1, layers=4)
    other["layers"][1]["name"] = "another.relu"
    pair = [source(diagnosis(0, layers=4)), replace(source(other), name="other")]
    written = axis_names(figures(build_page(pair))["dormant"].panels[0].svg)
    assert list(written)[1] == "2"
    assert written["f.8.relu"] == "features.8.relu"


def test_layers_are_counted_in_a_table(three_runs):
    built = build_page(read_sources([three_runs / "plain"]))
    (section,) = (section for section in built.sections if section.key == "layers")
    (table,) = section.tables
    content = json.loads((three_runs / "plain" / "diagnosis.json").read_text())
    names = [column.name for column in table.columns]
    for name, key in (
        ("dormant", "dormant_0.1"), ("rare", "fires_below_1_percent"), ("prunable", "prunable"),
        ("saturated", "saturated"), ("duplicates", "duplicates"), ("inhibited", "inhibited"),
    ):  # fmt: skip
        cells = [row[names.index(name)] for row in table.rows]
        assert cells == [len(layer[key]) for layer in content["layers"]]
    assert {row[names.index("CE")] for row in table.rows} == {"site"}


def test_panels_of_a_run_stand_together(three_runs):
    built = figures(build_page(read_sources([three_runs / "plain", three_runs / "ce"])))
    for key in ("matrices", "maps"):
        assert [run for run, _ in built[key].groups] == [0, 1]
        assert [len(panels) for _, panels in built[key].groups] == [len(built[key].panels) // 2] * 2
        assert built[key].scale.count("<image") == 1  # one bar for all
        assert all(panel.svg.count("<image") == 1 for panel in built[key].panels)


def test_each_map_has_its_own_scale_from_zero(monkeypatch, three_runs):
    scales = []
    monkeypatch.setattr(
        channels, "heat_map", lambda label, values, low, high: scales.append((low, high)) or ""
    )
    sources = read_sources([three_runs / "plain", three_runs / "ce"])
    figure = channels.map_figure(sources)
    maps = [layer.magnitude for one in sources for layer in channels._spread_out(one)]
    assert scales == [(0.0, max(value for row in rows for value in row)) for rows in maps]
    assert [panel.name.rpartition(" ")[2] for panel in figure.panels] == [
        f"{high:.3g}" for _, high in scales
    ]
    assert "own scale, from 0 to its largest value" in figure.caption


def test_the_spectrum_tells_how_much_is_decorrelated_not_how_high_it_is():
    found = diagnosis(0, layers=4)
    for layer in found["layers"]:
        layer["spectrum"] = {"min": 2.87, "median": 2.87, "max": 2.87}  # of white input
    figure = figures(build_page([source(found)]))["spectrum"]
    assert "equal eigenvalues only rescale" in figure.caption
    assert figure.caption.endswith("mean over layers: 1.00.")
    drawn = figure.panels[0].svg
    assert "unchanged" not in figure.caption + drawn
    assert 'class="rule"' not in drawn


def test_an_accuracy_is_said_once():
    rows = ({"epoch": 1, "test_top1": 0.896},)
    trained = replace(source(diagnosis(0, layers=4)), metrics=rows)
    names = [fact.name for fact in build_page([trained]).facts]
    assert "top-1" in names
    assert "test top-1" not in names


def test_the_limits_of_activity_are_drawn_and_their_names_are_free(three_runs):
    figure = figures(build_page(read_sources([three_runs / "plain", three_runs / "ce"])))[
        "activity"
    ]
    root = ElementTree.fromstring(figure.panels[0].svg)
    texts = {text.text: text for text in root.iter() if text.tag.endswith("text")}
    rules = [e.get("d") for e in root.iter() if e.get("class") == "rule"]
    assert len(rules) == 2
    title = float(texts["channels up to"].get("y"))
    for rule, name in zip(rules, ("strictly 0.025", "dormant 0.1"), strict=True):
        across, top = re.match(r"M(\S+) ([\d.]+)v", rule).groups()
        assert texts[name].get("x") == across
        assert title + 12 < float(texts[name].get("y")) < float(top)


def test_constant_channels_are_explained_where_there_are_any():
    found = diagnosis(0, layers=4)
    assert "Grey" not in figures(build_page([source(found)]))["matrices"].caption
    values = found["matrices"][0]["values"]
    values[3] = [None] * 24
    for row in values:
        row[3] = None
    assert "Grey lines" in figures(build_page([source(found)]))["matrices"].caption


def test_pictures_too_small_to_see_are_left_out():
    found = diagnosis(0, layers=4)
    found["layers"][0]["magnitude"] = [[1.0, 2.0, 3.0]] * 3
    found["data"]["size"] = [8, 8]
    built = build_page([source(found)])
    assert found["layers"][0]["name"] not in [row[1] for row in figures(built)["maps"].table.rows]
    assert len(figures(built)["maps"].panels) == 3
    assert "gradcam" not in [section.key for section in built.sections]


def test_title_and_lead_are_text_under_the_title(three_runs, tmp_path):
    out = tmp_path / "page.html"
    page = Reader(
        write_page([three_runs / "ce"], out, title=HOSTILE, lead=["First.", HOSTILE]).read_text()
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
    table = found["watched-dormant"].table
    assert [column.name for column in table.columns] == ["update", "plain", "ce"]
    assert [row[0] for row in table.rows] == list(steps)
    assert table.rows[5][1:] == pytest.approx((0.13, 0.03))
    assert found["watched-participation"].table.rows[5][1:] == pytest.approx((0.325, 0.325))
    # a layer without a correlation is no part of the mean
    assert found["watched-correlation"].table.rows[5][1:] == pytest.approx((0.4, 0.4))
    assert ("plain", 500, "b", None) in found["watched-correlation"].numbers.rows
    first, last = "First measurement: plain 0.500, ce 0.500", "last: plain 0.320, ce 0.320."
    assert f"{first}; {last}" in found["watched-correlation"].caption
    assert "watched-inhibited" not in found
    alone = build_page(read_sources([tmp_path / "other"]))
    assert "watched" not in [section.key for section in alone.sections]


def test_channels_csv_of_before_has_no_value_for_new_columns(tmp_path):
    run = write_run(tmp_path / "run", 0, measured=False, watched=True)
    lines = ["step,layer,inhibited_ratio,correlation,lambda", "0,a,0.1,0.5,", "100,a,0.2,0.4,"]
    (run / "channels.csv").write_text("\n".join(lines) + "\n")
    found = figures(build_page(read_sources([run])))
    assert found["watched-correlation"].table.rows == ((0, 0.5), (100, 0.4))
    assert not {"watched-dormant", "watched-participation"} & set(found)


def test_a_run_has_one_colour_throughout(three_runs):
    text = (three_runs / "page.html").read_text()
    # in every legend a name follows the mark of its run
    marks = re.findall(
        r'<g class="run(\d)">(?:(?!</g>).)*</g><text[^>]*class="name">([^<]*)<', text
    )
    orders = {(run, order) for run in "01" for order in ("random order", "least important first")}
    assert set(marks) == {("0", "plain"), ("1", "ce"), ("2", "ce_again"), *orders}
    # and in the drawings of what plain does not have, ce is still the second
    for key in ("lambda", "spectrum"):
        drawing = text[text.index(f'id="figure-{key}"') :].split("</svg>")[0]
        assert 'class="run1"' in drawing
        assert 'class="run0"' not in drawing


def test_differences_of_recipes_come_first(three_runs):
    built = build_page(read_sources([three_runs / "plain", three_runs / "ce"]))
    (table,) = next(s for s in built.sections if s.key == "recipe").tables
    assert [row[0] for row in table.rows[:2]] == ["seed", "block"]
    assert table.rows[1] == ("block", "plain", "ce")
    assert table.marked == {0, 1}
    assert {row[0] for row in table.rows} == {f.name.replace("_", " ") for f in fields(Recipe)}
    assert len(table.rows) == len(fields(Recipe))


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


def test_a_run_without_a_diagnosis_says_so(three_runs, tmp_path, monkeypatch, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(three_runs / "plain", bare)
    (bare / "diagnosis.json").unlink()
    out = tmp_path / "page.html"
    call(monkeypatch, "report", str(bare), str(three_runs / "ce"), "--out", str(out))
    wrote, said = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {out}"
    assert said == (
        f"{bare} has no diagnosis, so the page shows nothing about its channels; "
        f"`cenet diagnose {bare} --data FOLDER` measures them (a run on digits needs no --data)"
    )
    text = Reader(out.read_text()).text
    assert "bare has no diagnosis, so the page shows nothing about its channels" in text
    assert "ce has no diagnosis" not in text


def test_sections_without_numbers_are_left_out(tmp_path):
    write_run(tmp_path / "run", 0, measured=False)
    assert sections(read_sources([tmp_path / "run"])[0]) == ["training", "recipe", "environment"]
    whole = diagnosis(0, layers=4)
    everything = ["channels", "ablation", "equilibrium", "maps", "gradcam", "layers", "skipped"]
    assert sections(source(whole)) == [*everything, "environment"]
    for part in ("accuracy", "first_six", "ablation", "importance", "removal"):
        whole[part] = None
    whole["environment"] = {}
    for part in ("matrices", "gradcam"):
        whole[part] = []
    whole["data"]["skipped"] = []
    for layer in whole["layers"]:
        layer.update({"lambda": None, "spectrum": None, "magnitude": [[3.0]], "correlation": None})
    assert sections(source(whole)) == ["channels", "layers"]
    whole["layers"] = []
    assert sections(source(whole)) == []


def test_the_least_diagnosis_makes_a_page(tmp_path):
    least = diagnosis(0, layers=4)
    for part in ("accuracy", "first_six", "ablation", "importance", "removal"):
        least[part] = None
    for part in ("matrices", "sites", "gradcam"):
        least[part] = []
    least["layers"] = least["layers"][1:2]
    least["layers"][0].update(
        {
            **dict.fromkeys(("norm", "contribution", "participation_ratio", "correlation")),
            **dict.fromkeys(("gamma", "beta", "lambda", "spectrum")),
            **{key: [0.0, 0.0] for key in ("mean_abs", "activity", "firing")},
            **{key: [0, 1] for key in ("dormant_0.1", "dormant_0.025", "prunable", "inhibited")},
            "fires_below_1_percent": [0, 1],
            "channels": 2,
            "magnitude": [],
        }
    )
    page = write_diagnosis_page(Diagnosis.from_dict(least), tmp_path / "p.html")
    text = Reader(page.read_text()).text
    assert not re.search(r"\b(None|nan|inf)\b", text)
    assert "100.00\u202f%" in text


def test_numbers_that_are_not_known_leave_gaps(tmp_path):
    found = diagnosis(0, layers=4)
    found["layers"][1]["correlation"] = None
    found["layers"][0]["magnitude"][0][0] = None
    found["matrices"][0]["values"][1][2] = None
    found["importance"]["standard_error"][3] = None
    page = write_diagnosis_page(Diagnosis.from_dict(found), tmp_path / "page.html")
    assert not re.search(r"\b(None|nan|inf)\b", Reader(page.read_text()).text)
    rows = figures(build_page([source(found)]))["correlation"].table.rows
    assert [row[0] for row in rows] == [1, 3, 4]


def test_a_class_without_a_name_is_called_class():
    found = diagnosis(0, layers=4)
    found["gradcam"][0].update(label=None, predicted="639", target="639")
    found["gradcam"][1].update(label="7", predicted="7", target="7")
    found["gradcam"][2].update(label="7", predicted="639", target="7")
    found["gradcam"][3].update(label="7", predicted="639", target="639")  # of version 2
    found["data"]["classes"] = None

    def words():
        built = build_page([source(found)])
        (section,) = (section for section in built.sections if section.key == "gradcam")
        return [picture.words for picture in section.pictures]

    assert words() == [
        "predicted class 639", "class 7, recognised",
        "class 7, predicted class 639; evidence for class 7",
        "class 7, predicted class 639; evidence for class 639",
    ]  # fmt: skip
    found["data"]["classes"] = ["7", "639"]
    assert words()[:3] == [
        "predicted 639", "7, recognised", "7, predicted 639; evidence for 7",
    ]  # fmt: skip


def test_narrow_figures_stand_in_pairs():
    built = build_page([source(diagnosis(0, layers=4))])
    (section,) = (section for section in built.sections if section.key == "channels")
    assert section.unpaired == {"inhibited"}  # a wide figure is between it and the others
    kept = tuple(figure for figure in section.figures if figure.key != "gamma")
    assert replace(section, figures=kept).unpaired == {"contribution", "inhibited"}
