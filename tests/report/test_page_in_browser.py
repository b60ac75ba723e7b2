"""The pages in a real browser: drawn, quiet, offline, and usable without a mouse."""

from itertools import pairwise

import pytest

from _browser import Browser, find_chromium
from _detection import TINY, as_found, few_shapes, write_detection_run
from _pages import diagnosis, write_run
from cenet.analysis.diagnosis import Diagnosis
from cenet.detection.page import build_page, read_source
from cenet.detection.predictions import predictions_section
from cenet.report import write_diagnosis_page, write_page
from cenet.report.pages import save_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium here: apt install chromium"),
]
# outer boxes of what matches, with what is inside closed <details> left out
BOXES = """[...document.querySelectorAll(%r)].filter(e => e.checkVisibility())
  .map(e => e.getBoundingClientRect()).map(b => [b.x, b.y, b.width, b.height])"""
CUT_OFF = """[...document.querySelectorAll("svg.drawing text")].filter(t => {
  const own = t.getBoundingClientRect(), all = t.ownerSVGElement.getBoundingClientRect();
  return own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1
    || own.bottom > all.bottom + 1; }).map(t => t.textContent)"""
# pairs of texts of one drawing that cover each other by more than a pixel
OVERLAPPING = """[...document.querySelectorAll("svg.drawing")].flatMap(d => {
  const texts = [...d.querySelectorAll("text:not(.tag)")].filter(t => t.checkVisibility());
  const boxes = texts.map(t => t.getBoundingClientRect());
  return boxes.flatMap((a, i) => boxes.slice(i + 1).map((b, j) => [a, b, i, i + 1 + j]))
    .filter(([a, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)
    .map(([a, b, i, j]) => [d.closest("figure").id, texts[i].textContent, texts[j].textContent]);
})"""
TITLES = "[...document.querySelectorAll('#figure-maps .panel p')].map(p => p.textContent)"
FOCUSED = "document.activeElement.matches(%r)"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One run, and five, with a name that is hard to place and more columns than a phone shows."""
    root = tmp_path_factory.mktemp("pages")
    long = "a_run_with_<b>a&very</b>_long_name_" + "x" * 80
    write_run(root / "plain", 0, ce=False, layers=49, watched=True)
    write_run(root / "ce", 1, layers=49, watched=True)
    write_run(root / long, 2, layers=13)
    write_run(root / "fourth", 3, layers=4)
    write_run(root / "fifth", 4, layers=4)
    sources = [root / name for name in ("plain", "ce", long, "fourth", "fifth")]
    return {
        "one": write_page([root / "ce"], root / "one.html"),
        "two": write_page(sources[:2], root / "two.html"),
        "five": write_page(sources, root / "five.html"),
        "diagnosis": write_diagnosis_page(root / "plain", root / "diagnosis.html"),
    }


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.mark.parametrize("name", ["one", "five"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_quiet_and_asks_for_nothing(browser, pages, name, dark):
    browser.open(pages[name], dark=dark)
    assert browser.problems == []
    assert browser.requests[0] == pages[name].resolve().as_uri()
    assert all(url.startswith("data:") for url in browser.requests[1:])


@pytest.mark.parametrize("width", [1200, 360])
@pytest.mark.parametrize("name", ["one", "five"])
def test_all_figures_are_drawn(browser, pages, name, width):
    browser.open(pages[name], width=width)
    figures = browser.value(BOXES % "figure")
    drawings = browser.value(BOXES % ".panel svg.drawing")
    assert len(figures) >= 15
    assert len(drawings) >= len(figures) - 8 * 5
    for x, _, wide, high in figures + drawings:
        assert wide > 100
        assert high > 80
        assert x >= 0
        assert x + wide <= width
    curves = browser.value(BOXES % ".drawing g .curve")
    assert all(max(wide, high) > 1 for _, _, wide, high in curves)
    loaded = "[...document.images].every(i => i.complete && i.naturalWidth > 0)"
    assert browser.value(loaded)


@pytest.mark.parametrize("width", [1300, 420, 360])
@pytest.mark.parametrize("name", ["one", "two", "five"])
def test_texts_of_a_drawing_are_whole_and_apart(browser, pages, name, width):
    browser.open(pages[name], width=width)
    assert browser.value(CUT_OFF) == []
    assert browser.value(OVERLAPPING) == []


@pytest.mark.parametrize("width", [1300, 420])
@pytest.mark.parametrize("figure", ["matrices", "maps"])
def test_panels_of_two_runs_are_not_interleaved(browser, pages, figure, width):
    browser.open(pages["two"], width=width)
    heads = [[y, y + high] for _, y, _, high in browser.value(BOXES % f"#figure-{figure} h4")]
    places = []
    for head, run in zip(heads, ("plain", "ce"), strict=True):
        drawn = browser.value(BOXES % f"#figure-{figure} .panel svg[aria-label*=' of {run}: ']")
        assert len(drawn) >= 3
        places += [head, [min(y for _, y, *_ in drawn), max(y + h for _, y, _, h in drawn)]]
    assert all(before[1] <= after[0] for before, after in pairwise(places))
    assert len(browser.value(BOXES % f"#figure-{figure} .scale svg")) == 1


@pytest.mark.parametrize("name", ["two", "diagnosis"])
def test_the_top_of_the_page_fits_a_phone(browser, pages, name):
    browser.open(pages[name], width=420, height=900)
    assert browser.value("document.documentElement.scrollWidth") <= 420
    top = "'.verdict, .verdict *, .facts th, .facts td, .tiles div, .runs li'"
    cut = f"[...document.querySelectorAll({top})].filter(e => e.checkVisibility())"
    cut += ".filter(e => e.getBoundingClientRect().right > 420 - 14).map(e => e.textContent)"
    assert browser.value(cut) == []
    wide = "[...document.querySelectorAll('.facts, pre')].map(e => e.scrollWidth - e.clientWidth)"
    assert set(browser.value(wide)) == {0}
    scrolled = "[...document.querySelectorAll('section:first-of-type > .scroll')]"
    assert all(
        extra <= 0 for extra in browser.value(f"{scrolled}.map(e => e.scrollWidth - e.clientWidth)")
    )


@pytest.mark.parametrize("name", ["one", "five"])
@pytest.mark.parametrize("opened", [False, True], ids=["closed", "opened"])
def test_a_narrow_screen_does_not_scroll_sideways(browser, pages, name, opened):
    browser.open(pages[name], width=360, height=740)
    if opened:
        browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.value("document.documentElement.scrollWidth") <= 360
    # wide tables scroll in their own boxes
    wide = "[...document.querySelectorAll('.scroll')].some(b => b.scrollWidth > b.clientWidth)"
    assert browser.value(wide)


@pytest.mark.parametrize("width", [1200, 360])
def test_the_scale_of_a_map_has_room_for_small_numbers(browser, tmp_path, width):
    found = diagnosis(0, layers=4)
    for layer in found["layers"]:
        layer["magnitude"] = [[1.87e-4 * v / 9 for v in row] for row in layer["magnitude"]]
    found["layers"][0]["magnitude"] = [[3.61e-7 + 1e-5 * i for i in range(8)]] * 8
    page = write_diagnosis_page(Diagnosis.from_dict(found), tmp_path / "page.html")
    browser.open(page, width=width)
    assert any("7.04e-5" in title for title in browser.value(TITLES))
    boxes = browser.value(BOXES % "#figure-maps .panel p")
    drawn = browser.value(BOXES % "#figure-maps .panel svg")
    for (x, y, wide, high), (left, top, *_) in zip(boxes, drawn, strict=True):
        assert x >= left - 1
        assert y + high <= top
        assert x + wide <= width


@pytest.mark.parametrize("name", ["one", "five"])
def test_the_layers_fit_a_desk(browser, pages, name):
    browser.open(pages[name], width=1200)
    browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    over = "[...document.querySelectorAll('.layers .scroll')].map(b => b.scrollWidth-b.clientWidth)"
    assert set(browser.value(over)) == {0}


def test_the_keyboard_reaches_the_theme_and_the_numbers(browser, pages):
    browser.open(pages["five"])
    browser.press("Tab")
    assert browser.value(FOCUSED % "#theme")
    outline = "getComputedStyle(document.activeElement).outlineWidth"
    assert browser.value(outline) == "3px"
    for _ in range(30):
        browser.press("Tab")
        if browser.value(FOCUSED % "#figure-loss summary"):
            break
    assert browser.value(FOCUSED % "#figure-loss summary")
    assert browser.value(outline) == "3px"
    table = BOXES % "#figure-loss table"
    assert browser.value(table) == []
    browser.press("Enter")
    assert len(browser.value(table)) == 1
    browser.press("Tab")
    assert browser.value(FOCUSED % "#figure-loss .scroll")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_theme_follows_the_system_until_the_button_is_pressed(browser, pages, dark):
    browser.open(pages["five"], dark=dark)
    ground = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.querySelector('.drawing .name')).fill"
    run = "getComputedStyle(document.querySelector('.drawing .run1')).color"
    pressed = "document.getElementById('theme').getAttribute('aria-pressed')"
    light, night = "rgb(253, 253, 252)", "rgb(18, 22, 27)"
    assert browser.value(ground) == (night if dark else light)
    assert browser.value(pressed) == str(dark).lower()
    before = browser.value(ink), browser.value(run)
    browser.press("Tab")
    browser.press("Enter")
    assert browser.value(ground) == (light if dark else night)
    assert browser.value(pressed) == str(not dark).lower()
    after = browser.value(ink), browser.value(run)
    assert before[0] != after[0]
    assert before[1] != after[1]
    browser.press("Enter")
    assert browser.value(ground) == (night if dark else light)


# the page of a detector


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    """Three epochs, and images with everything, something and nothing found on them."""
    run = tmp_path_factory.mktemp("detector") / "run"
    write_detection_run(run, epochs=3)
    scenes = few_shapes(1, 8).test
    scenes = scenes._replace(
        classes=("<b>ELLIPSE</b>", "a very long name of a class", "MwM 三角形")
    )
    found = [as_found(one) for objects in scenes.objects[::2] for one in objects[:2]]
    section = predictions_section(scenes, list(range(8)), found, masks=True, weights="w")
    page = build_page(read_source(run), TINY, section, "step-000000013.safetensors")
    return save_page(page, run / "detection.html")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_of_a_detector(browser, detector, width, dark):
    browser.open(detector, width=width, dark=dark)
    assert browser.problems == []
    assert browser.requests[0] == detector.resolve().as_uri()
    assert all(url.startswith("data:") for url in browser.requests[1:])
    drawings = browser.value(BOXES % "svg.drawing")
    assert len(drawings) == 4 + 2 * 8
    for x, _, wide, high in drawings:
        assert wide > 250
        assert high > 70
        assert x >= 0
        assert x + wide <= width
    curves = browser.value(BOXES % ".drawing g .curve")
    assert all(max(wide, high) > 1 for _, _, wide, high in curves)
    assert browser.value(CUT_OFF) == []
    browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [1200, 390])
def test_names_of_objects_fit_their_backing_and_are_large_enough(browser, detector, width):
    browser.open(detector, width=width)
    tags = """[...document.querySelectorAll(".drawing .tag")].map(t => {
      const own = t.getBoundingClientRect(), back = t.previousSibling.getBoundingClientRect();
      return [back.left - own.left, own.right - back.right, own.height]; })"""
    found = browser.value(tags)
    assert len(found) > 16
    for left, right, height in found:
        assert left <= 0
        assert right <= 0
        assert height > 11
    pictures = browser.value(BOXES % ".drawing image")
    assert len(pictures) == 16
    assert all(wide > 150 and high > 70 for _, _, wide, high in pictures)
