"""The documentation: its code runs, its command lines parse, its links lead somewhere.

Blocks of a page run in order and share their names. Comments in the source say what is not shown:

    <!-- setup            Python that runs before the next block
    ...
    -->
    <!-- slow: WHY -->    the next block runs in the long tier only
    <!-- not run: WHY --> the next block is compiled, not run
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from functools import wraps
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

import cenet
from _training import call

ROOT = Path(__file__).parent.parent
FOLDERS = (".", "docs", "docs/api", "experiments", "benchmarks/results")
PAGES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
NOTEBOOK = ROOT / "docs" / "tutorial.ipynb"
HOOKS = ROOT / "docs" / "hooks.py"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# comments directly before a fence
SETUP = re.compile(r"<!-- setup\n(.*?)-->\n", re.DOTALL)
MARK = re.compile(r"<!-- (slow|not run): (.+?) -->\n")
LANGUAGES = {"python", "shell", "text"}
# words of the shell itself, and commands that are not ours
SHELL = {"until", "done", "["}


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    code: str
    setup: str
    mark: str  # "slow", "not run" or ""
    line: int


def blocks(path):
    text = path.read_text()
    found, end = [], 0
    for fence in FENCE.finditer(text):
        before = text[end : fence.start()]
        mark = next((m for m in MARK.finditer(before) if not before[m.end() :].strip()), None)
        setup = "".join(SETUP.findall(before))
        line = text.count("\n", 0, fence.start()) + 2
        found.append(Block(fence[1], fence[2], setup, mark[1] if mark else "", line))
        end = fence.end()
    return found


def page_id(path):
    return str(path.relative_to(ROOT))


def with_language(language):
    return [path for path in PAGES if any(b.language == language for b in blocks(path))]


def run(path, *, slow):
    names = {"__name__": "__main__"}
    try:
        for block in blocks(path):
            if block.language != "python":
                continue
            setup = compile(block.setup, f"{path}: setup", "exec")
            # as many lines above it as on the page, so that an error names the line
            code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
            if not block.mark or (slow and block.mark == "slow"):
                exec(setup, names)
                exec(code, names)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("path", with_language("python"), ids=page_id)
def test_python_of_a_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(path, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [p for p in PAGES if any(b.mark == "slow" for b in blocks(p))], ids=page_id
)
def test_slow_python_of_a_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(path, slow=True)


def test_every_block_says_what_it_is():
    for path in PAGES:
        text = path.read_text()
        for block in blocks(path):
            assert block.language in LANGUAGES, f"{path}:{block.line}"
        marks = re.findall(r"<!-- (?:slow|not run)", text)
        assert len(marks) == sum(bool(block.mark) for block in blocks(path)), path
        prose = FENCE.sub("", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
        indented = re.findall(r"\n\n(?: {4}|\t)(?![-*] |\d+\. )[^\n]*", prose)
        assert not indented, f"{path}: indented code is not run; use ``` and a language"


def commands(code):
    """Command lines of a shell block as words, without comments and variables before them."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=\S*", words[0]):
            del words[0]
        if words:
            yield words


class Parsed(Exception):
    """The arguments, which were parsed; nothing is to be run."""


def parse_and_stop(parser, arguments=None, namespace=None, *, real=ArgumentParser.parse_args):
    raise Parsed(real(parser, arguments, namespace))


def inert(command):
    """A function with the arguments of `command` that does nothing."""
    return wraps(command)(lambda *args, **kwargs: lambda: None)


def check_cenet(arguments, monkeypatch):
    """`cenet ARGUMENTS` parses."""
    for name in ("cenet.train.command.run", "cenet.detection.command.run_train"):
        monkeypatch.setattr(name, lambda job: None)
    monkeypatch.setattr("cenet.arguments._deferred", inert)
    call(monkeypatch, *arguments)


def check_script(path, arguments, monkeypatch):
    """`python path ARGUMENTS` parses; argparse exits if it does not."""
    monkeypatch.setattr(ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr("sys.argv", [str(path), *arguments])
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(Parsed) as stopped:
        runpy.run_path(str(path), run_name="__main__")
    return stopped.value.args[0]


def check_command(words, monkeypatch):
    if "-m" in words:  # behind python, torchrun or srun
        place = words.index("-m") + 1
        module, arguments = words[place], words[place + 1 :]
        if module == "cenet":
            return check_cenet(arguments, monkeypatch)
        path = ROOT / module.replace(".", "/")
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
        found = check_script(path, arguments, monkeypatch)
        if module == "experiments":
            from experiments.catalogue import RESULTS

            assert {*getattr(found, "names", ())} <= {*RESULTS}
        return None
    match words:
        case ["cenet", *arguments]:
            check_cenet(arguments, monkeypatch)
        case ["python", "-c", code, *_]:
            compile(code, "python -c", "exec")
        case ["python", script, *arguments]:
            check_script(ROOT / script, arguments, monkeypatch)
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text(), target
        case ["pip", "install", *what]:
            project = (ROOT / "pyproject.toml").read_text()
            for extra in re.findall(r"\[([\w,]+)\]", " ".join(what)):
                for name in extra.split(","):
                    assert f"\n{name} = [" in project, name
        case _:
            assert words[0] in SHELL, words


@pytest.mark.parametrize("path", with_language("shell"), ids=page_id)
def test_commands_of_a_page_parse(path, monkeypatch):
    for block in blocks(path):
        if block.language == "shell":
            for words in commands(block.code):
                with monkeypatch.context() as patch:
                    check_command(words, patch)


def test_a_wrong_command_is_noticed(monkeypatch):
    for line in (
        "cenet train digits_ce --learning-rate 3",
        "cenet eval",
        "torchrun -m cenet train digits_ce --epochs many",
        "python -m experiments list --evry-run",
        "python benchmarks/bench_networks.py resnet50 --turns 3",
    ):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            check_command(shlex.split(line), patch)
    lines = ("make nothing", "pip install 'cenet[nothing]'", "cnet train")
    for line in (*lines, "python -m experiments list fig1z"):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            check_command(shlex.split(line), patch)


def anchors(path):
    """Anchors of a page, made of its headlines as GitHub and the site do."""
    text = FENCE.sub("", path.read_text())
    headlines = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in headlines]
    return {*slugs}


@pytest.mark.parametrize("path", PAGES, ids=page_id)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", path.read_text())):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def test_every_public_name_is_documented():
    """In the table of calls, and on the pages that the reference is generated from."""
    calls = (ROOT / "docs" / "overview.md").read_text()
    reference = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    for name in {*cenet.__all__} - {"functional", "CESite"}:
        assert name in calls, f"docs/overview.md does not mention {name}"
    for name in {*cenet.__all__} - {"functional"}:
        assert f"::: cenet.{name}\n" in reference, f"docs/api does not have {name}"


def test_readme_is_short_and_shows_the_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    above_the_fold = "\n".join(text.splitlines()[:40])
    assert re.search(r"!\[[^]]+\]\(docs/figures/\S+\.png\)", above_the_fold)


def test_the_notebook_has_outputs_of_its_own_code():
    """Committed as it was run: in order, without an error, and nothing changed afterwards."""
    nbformat = pytest.importorskip("nbformat")
    cells = nbformat.read(NOTEBOOK, 4).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    text = "".join(output.get("text", "") for output in outputs)
    for line in ("top-1 on 450 test images", "largest change of a logit", "top-1 of the ONNX file"):
        assert line in text
    targets = re.findall(r"\]\((\S+?)\)", "".join(c.source for c in cells if c not in code))
    assert targets
    for target in targets:
        assert (NOTEBOOK.parent / target).is_file(), target


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(NOTEBOOK, 4)
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": tmp_path}}
    ).execute()
    text = "".join(o.get("text", "") for c in notebook.cells for o in c.get("outputs", ()))
    accuracies = [float(share) for share in re.findall(r"top-1[^:]*: ([\d.]+)%", text)]
    assert len(accuracies) == 4
    assert min(accuracies) > 97


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "insert_ce_" in (tmp_path / "api" / "cenet.html").read_text()
    assert (tmp_path / "figures" / "report.png").is_file()


def test_the_workflow_runs_commands_that_exist():
    text = (ROOT / ".github" / "workflows" / "build.yml").read_text()
    commands = re.findall(r"- run: (.+)", text)
    assert ".ci/run" in commands
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    targets = {command.split()[1] for command in commands if command.startswith("make ")}
    assert targets == {"test-all", "docs"}
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}:" in makefile for target in targets)
    assert "secrets." not in text


def test_no_verb_installs_anything_outside_venv():
    """What is missing is named, in quotes; whoever runs `make` installs it, or does not."""
    asks = re.compile(r"\b(sudo|apt|apt-get|dnf|brew|playwright)\b|--with-deps")
    for path in (ROOT / "Makefile", ROOT / ".ci" / "run"):
        for line in path.read_text().splitlines():
            assert not asks.search(re.sub(r'"[^"]*"', "", line)), line


def test_pages_of_the_site_are_in_its_navigation():
    """mkdocs warns about the same; this needs no mkdocs."""
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    shown = {*re.findall(r"(\S+\.(?:md|ipynb))$", navigation, re.MULTILINE)}
    outside = {*re.findall(r'^    "(\S+)": "\S+",$', HOOKS.read_text(), re.MULTILINE)}
    docs = ROOT / "docs"
    pages = {
        path.relative_to(docs).as_posix()
        for path in docs.rglob("*")
        if path.suffix in (".md", ".ipynb")
    }
    assert shown == pages | outside
