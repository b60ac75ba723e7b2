"""Draw the picture of README: parts of a page that `cenet report` wrote, as Chromium displays them.

    cenet demo --seeds 1 --out demo
    mv demo/BN-seed0 "demo/batch norm" && mv demo/BN+CE-seed0 "demo/with CE"
    cenet report "demo/batch norm" "demo/with CE" --out demo/page.html
    python docs/figures/draw_report.py demo/page.html           # writes report.png

It needs Chromium. Colours are reduced to a palette, so that the file is small.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))
from _browser import Browser

# the page as displayed beside its figures, and the figures: width of the window, what is shown
LEFT = 768, ["header", "nav", "section:has(> #headline)"]
RIGHT = 768, ["#figure-activity", "#figure-participation", "#figure-matrices"]
MARGIN = 16


def photograph(browser: Browser, page: Path, width: int, selectors: list[str]) -> Image.Image:
    """The smallest part of the page that has all of these elements, at a width of the window.

    Figures that are not among them are hidden.
    """
    browser.open(page, width=width)
    browser.value(
        "document.querySelectorAll('figure').forEach("
        f"f => {{ if (!{selectors}.includes('#' + f.id)) f.style.display = 'none' }}), 0"
    )
    boxes = [
        browser.value(
            f"(() => {{ const b = document.querySelector({selector!r}).getBoundingClientRect();"
            " return [b.left, b.top, b.right, b.bottom].map(Math.round) })()"
        )
        for selector in selectors
    ]
    left, top, right, bottom = zip(*boxes, strict=True)
    with tempfile.TemporaryDirectory() as folder:
        browser.screenshot(Path(folder) / "page.png")
        with Image.open(Path(folder) / "page.png") as whole:
            return whole.crop((min(left), min(top), max(right), max(bottom))).convert("RGB")


def draw(page: Path) -> Image.Image:
    """Both parts beside each other."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(folder)
        try:
            parts = [photograph(browser, page, *part) for part in (LEFT, RIGHT)]
        finally:
            browser.close()
    width = sum(part.width for part in parts) + 3 * MARGIN
    height = max(part.height for part in parts) + 2 * MARGIN
    sheet = Image.new("RGB", (width, height), parts[0].getpixel((0, 0)))
    x = MARGIN
    for part in parts:
        sheet.paste(part, (x, MARGIN))
        x += part.width + MARGIN
    return sheet.quantize(256, Image.Quantize.MAXCOVERAGE)


def main() -> None:
    """Write report.png."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("page", type=Path, help="page of cenet report about two runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("report.png"))
    given = parser.parse_args()
    draw(given.page).save(given.out, optimize=True)


if __name__ == "__main__":
    main()
