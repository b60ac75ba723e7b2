"""Pages of the site that are outside of docs/, and files that pages link to.

Sources keep links that work in the repository; here they become links between pages of the site.
"""

import re
from os.path import relpath
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# page of the site: file of the repository
OUTSIDE = {
    "index.md": "README.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "experiments/README.md": "experiments/README.md",
    "benchmarks/results/README.md": "benchmarks/results/README.md",
}
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `OUTSIDE`, and every file that a page links to."""
    for uri, path in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for page in [file for file in files if file.src_uri.endswith(".md")]:
        text = FENCE.sub("", page.content_string)
        for _, target, _, _ in LINK.findall(text):
            path = _path(page.src_uri, target)
            if path is not None and files.get_file_from_path(_uri(path)) is None:
                files.append(File.generated(config, _uri(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""

    def site_link(link: re.Match[str]) -> str:
        start, target, anchor, end = link.groups()
        path = _path(page.file.src_uri, target)
        if path is None:
            return link.group()
        folder = PurePosixPath(page.file.src_uri).parent
        return f"{start}{relpath(_uri(path), folder)}{anchor or ''}{end}"

    parts = FENCE.split(markdown)
    fences = [*FENCE.findall(markdown), ""]
    return "".join(
        LINK.sub(site_link, part) + fence for part, fence in zip(parts, fences, strict=True)
    )


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of notebooks to pages into links of the site; mkdocs does so in Markdown only."""
    if page.file.src_uri.endswith(".ipynb"):
        return re.sub(r'href="([\w/]+)\.md(?=["#])', r'href="\1.html', html)
    return html


def _path(uri: str, target: str) -> Path | None:
    """The file of the repository that a page links to; None for other links."""
    if "://" in target or target.startswith("mailto:"):
        return None
    page = ROOT / OUTSIDE.get(uri, f"docs/{uri}")
    path = (page.parent / target).resolve()
    return path if path.is_file() else None


def _uri(path: Path) -> str:
    """Where a file of the repository is on the site."""
    name = path.relative_to(ROOT).as_posix()
    for uri, outside in OUTSIDE.items():
        if name == outside:
            return uri
    return name.removeprefix("docs/")
