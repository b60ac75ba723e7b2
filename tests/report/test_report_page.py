"""The page as a file: safe, self-contained, readable; bad sources are refused."""

import csv
import json
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _pages import HOSTILE, Reader, diagnosis, figures, write_run
from cenet.analysis.diagnosis import Diagnosis
from cenet.cli import report
from cenet.formatting import abbreviate, brief, compare, short, show
from cenet.report import write_diagnosis_page, write_page
from cenet.report.charts import DARK, LIGHT, RAMP, Axis, around, ramp
from cenet.report.pages import build_page
from cenet.report.sources import read_sources


@pytest.fixture(scope="module")
def page(three_runs):
    return Reader((three_runs / "page.html").read_text())


def test_damaged_channels_are_refused(tmp_path):
    run = write_run(tmp_path / "run", 0, measured=False, watched=True)
    good = (run / "channels.csv").read_text()
    for content in (
        f"{good}1000,a,high,0.5,0.5,0.5,\n",
        f"{good}1000,a\nx,",
        good.replace("step", "at"),
    ):
        (run / "channels.csv").write_text(content)
        with pytest.raises(ValueError, match=r"channels\.csv, line \d+, is not of `cenet train"):
            write_page([run], tmp_path / "page.html")


def test_figures_are_files_too(three_runs):
    built = build_page(read_sources([three_runs / n for n in ("plain", "ce", "ce_again")]))
    files = three_runs / "page_files"
    names = set()
    for key, figure in figures(built).items():
        panels = len(figure.panels)
        drawn = [f"{key}.svg"] if panels == 1 else [f"{key}-{i + 1}.svg" for i in range(panels)]
        drawn += [f"{key}-scale.svg"] if figure.maps else []
        names |= {f"{key}.csv", *drawn}
        for name in drawn:
            root = ElementTree.parse(files / name).getroot()
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert "var(" not in (files / name).read_text()  # editors know no variables
        with (files / f"{key}.csv").open(newline="") as file:
            rows = list(csv.reader(file))
        table = figure.numbers or figure.table
        assert rows[0] == [column.name for column in table.columns]
        assert rows[1:] == [["" if c is None else str(c) for c in row] for row in table.rows]
    assert {path.name for path in files.iterdir()} == names


def test_a_page_is_replaced_or_left_alone(three_runs, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("before")
    with pytest.raises(ValueError, match="does not exist"):
        write_page([three_runs / "ce", tmp_path / "nowhere"], page)
    assert page.read_text() == "before"
    write_page([three_runs / "ce"], page)
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "page_files"]


def test_three_runs_of_fifty_layers_are_less_than_five_megabytes(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"run{seed}", seed, layers=49, epochs=160)
    sources = [tmp_path / f"run{seed}" for seed in range(3)]
    assert write_page(sources, tmp_path / "page.html").stat().st_size < 5e6


def test_the_page_needs_nothing_from_outside(three_runs, page):
    text = (three_runs / "page.html").read_text()
    for _, name, value in page.attributes:
        if name in ("src", "href", "srcset", "action", "xlink:href"):
            assert value.startswith(("data:", "#")), value
    assert set(re.findall(r"https?://[^\s\"']*", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_hostile_names_are_text(tmp_path):
    run = write_run(tmp_path / HOSTILE.replace("/", "|"), 0, layers=4, epochs=2)
    found = diagnosis(0, layers=4, name=HOSTILE)
    for layer in found["layers"]:
        layer["name"] += HOSTILE
        layer["norm"] = HOSTILE
    for part in (found["ablation"], found["importance"], *found["matrices"]):
        part["layer"] = HOSTILE
    found["data"]["skipped"] = [{"path": HOSTILE, "reason": HOSTILE}]
    found["gradcam"][0].update(label=HOSTILE, predicted=HOSTILE)
    found["sites"] = [f"free {HOSTILE}"]
    said = {"headline": HOSTILE, "reasons": [HOSTILE], "next_step": HOSTILE, "command": HOSTILE}
    found["verdict"] |= said
    (run / "diagnosis.json").write_text(json.dumps(found))
    about = json.loads((run / "run.json").read_text())
    about["environment"][HOSTILE] = HOSTILE
    about["recipe"]["network"] = HOSTILE
    (run / "run.json").write_text(json.dumps(about))
    write_run(tmp_path / "other", 1, layers=4, epochs=2)
    alone = Reader(write_diagnosis_page(run, tmp_path / "page.html").read_text())
    assert len(alone.scripts) == 1
    # twice the title and the name, the verdict, four layers with CE, a site
    assert alone.text.split("At a glance")[0].count(HOSTILE) == 3 + 3 + 4 + 1
    text = write_page([run, tmp_path / "other"], tmp_path / "page.html").read_text()
    page = Reader(text)
    assert len(page.scripts) == 1
    assert not [attribute for attribute in page.attributes if attribute[1].startswith("on")]
    assert {tag for tag in page.tags if tag in ("iframe", "object", "embed", "form")} == set()
    for tag, name, value in page.attributes:
        assert (tag, name) != ("img", "src") or value.startswith("data:image/png;base64,")
    assert page.text.count(HOSTILE) > 10
    for path in (tmp_path / "page_files").glob("*.svg"):
        tags = {element.tag.split("}")[1] for element in ElementTree.parse(path).iter()}
        assert tags <= {"svg", "style", "g", "path", "text", "title", "image"}


def test_characters_that_do_not_print_are_replaced(tmp_path):
    found = diagnosis(0, layers=4, name="a\x00b\ud800c\u202ed")
    found["verdict"]["reasons"] = ["e\x00f"]
    page = write_diagnosis_page(Diagnosis.from_dict(found), tmp_path / "page.html").read_text()
    assert "e\ufffdf" in page
    assert "a\ufffdb\ufffdc\ufffdd" in page
    run = write_run(tmp_path / "odd\udcff\n", 0, layers=4)
    assert "odd\ufffd\ufffd" in write_page([run], tmp_path / "page.html").read_text()


def test_a_spreadsheet_runs_nothing(tmp_path):
    run = write_run(tmp_path / "=cmd()", 0, layers=4)
    write_page([run], tmp_path / "page.html")
    assert "\n'=cmd()," in (tmp_path / "page_files" / "ablation.csv").read_text()


def test_bad_sources_are_named(tmp_path):
    run = write_run(tmp_path / "run", 0, measured=False, epochs=2)
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = [
        ([], "no run was given"),
        ([tmp_path / "nowhere"], "nowhere does not exist; give a folder of"),
        ([empty], "empty holds neither run.json of `cenet train` nor diagnosis.json"),
        ([run, run], "run was given twice"),
        ([tmp_path / str(i) for i in range(9)], "9 runs are too many for a page; give at most 8"),
        ([run / "run.json"], "is not a diagnosis"),
    ]
    for paths, message in cases:
        with pytest.raises(ValueError, match=message):
            write_page(paths, tmp_path / "page.html")
    for name in ("page.json", "page", "empty"):
        with pytest.raises(ValueError, match=r"must be a file that ends in \.html"):
            write_page([run], tmp_path / name)


def test_damaged_runs_are_refused(tmp_path):
    run = write_run(tmp_path / "run", 0, measured=False, epochs=2)
    for content, message in (
        ("", "has no row yet"),
        ('{"epo\n{"epoch": 1}\n', r"metrics\.jsonl cannot be read: line 1: "),
        ('{"epoch": 1}\n[]\n', "line 2 is not the row of an epoch"),
        ('{"epoch": 1, "test_loss": "low"}\n', "test_loss is 'low', not a number"),
    ):
        (run / "metrics.jsonl").write_text(content)
        with pytest.raises(ValueError, match=message):
            write_page([run], tmp_path / "page.html")
    for content, message in (
        ("{", "run.json cannot be read"),
        ('{"recipe": ' + "[" * 600 + "]" * 600 + "}", "run.json cannot be read"),
        ("[" * 100_000, "run.json cannot be read"),
        ("[]", "it holds no object"),
        ('{"recipe": {}}', "environment is missing"),
    ):
        (run / "run.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            write_page([run], tmp_path / "page.html")
    (run / "run.json").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        write_page([run], tmp_path / "page.html")


def test_the_command_says_what_went_wrong_in_one_line(tmp_path, capsys):
    run = write_run(tmp_path / "run", 0, measured=False, epochs=2)
    report((run,), tmp_path / "page.html")
    wrote, about = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {tmp_path / 'page.html'}"
    assert about.startswith(f"{run} has no diagnosis")
    with pytest.raises(SystemExit, match="does not exist"):
        report((tmp_path / "nowhere",), tmp_path / "page.html")


def test_headings_captions_and_labels(page):
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(page.headings))
    drawings = page.tags.count("svg")
    labelled = [a for a in page.attributes if a[:2] == ("svg", "aria-label") and a[2]]
    hidden = [a for a in page.attributes if a[:2] == ("svg", "aria-hidden")]
    assert len(labelled) + len(hidden) == drawings
    assert page.tags.count("figcaption") == page.tags.count("figure")
    images = page.tags.count("img")
    assert len([a for a in page.attributes if a[:2] == ("img", "alt") and a[2]]) == images


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_read(theme):
    for ground in ("paper", "card", "wash"):
        for name in ("ink", "soft", *(f"run{i}" for i in range(8))):
            pair = sorted((luminance(theme[name]), luminance(theme[ground])))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (name, ground)


def test_colours_of_maps_grow_lighter():
    shades = [luminance("#{:02x}{:02x}{:02x}".format(*ramp(i / 50))) for i in range(51)]
    assert shades == sorted(shades)
    assert (ramp(-1), ramp(2)) == (RAMP[0], RAMP[-1])


def test_words():
    assert show(0.12345, "percent") == "12.35\u202f%"
    assert show(0.12345, "percent", brief=True) == "12.3\u202f%"
    assert show(14728266) == "14\u202f728\u202f266"
    assert show(0.41, brief=True) == "0.410"
    assert show(100.0, brief=True) == "100"
    assert show(None) == "–"
    assert compare({"b": 2.0, "a": 1.0, "c": None}) == "b 2.00, a 1.00"  # as given
    assert compare({"a": 1.0}) == "1.00"
    many = {str(i): float(i) for i in (3, 0, 5, 1, 2, 4)}
    assert compare(many) == "from 0.00 (0) to 5.00 (5)"
    assert [brief(v) for v in (0.0, 2.03, 1.87e-4, 2e-7)] == ["0", "2.03", "1.87e-4", "2e-7"]
    assert short("x" * 40, 11) == "xxxxx…xxxxx"


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), st.booleans())
def test_an_axis_has_room_for_its_values_and_a_few_round_numbers(values, zero):
    axis = around("x", values, zero=zero)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low - slack <= min(values) <= max(values) <= axis.high + slack
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 7
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in ticks)
    assert len({axis.text(tick) for tick in ticks}) == len(ticks)
    assert not zero or axis.low <= 0 <= axis.high


def test_whole_and_logarithmic_axes():
    assert Axis("epoch", 1, 30, whole=True).ticks(8) == [1, 5, 10, 15, 20, 25, 30]
    assert Axis("epoch", 1, 2, whole=True).ticks() == [1, 2]
    log = Axis("x", 1e-4, 10, log=True)
    assert [log.text(tick) for tick in log.ticks()] == ["1e-4", "0.001", "0.01", "0.1", "1", "10"]
    assert log.place(0) == 0
    assert log.place(0.01) == pytest.approx(0.4)


def test_numbers_beyond_drawing_are_refused(tmp_path):
    found = Diagnosis.from_dict(diagnosis(0, layers=4))
    found = replace(found, threshold=1e308)  # no reader has seen it
    with pytest.raises(ValueError, match=r"threshold must be finite, at most 1e\+100"):
        write_diagnosis_page(found, tmp_path / "page.html")
    run = write_run(tmp_path / "run", 0, measured=False, epochs=1)
    rows = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'"test_loss": [^,]*', '"test_loss": 1e200', rows))
    with pytest.raises(ValueError, match=r"epoch 1 .* test_loss is too large to be drawn"):
        write_page([run], tmp_path / "page.html")


def test_names_of_layers_are_abbreviated_from_the_left():
    assert abbreviate("layer1.0.relu", 14) == "layer1.0.relu"
    assert abbreviate("backbone.layer1.0.relu", 16) == "b.layer1.0.relu"
    assert abbreviate("backbone.layer1.0.relu", 14) == "b.l1.0.relu"
    assert abbreviate("x" * 30 + "1234567890123456", 14) == "x12345…0123456"
