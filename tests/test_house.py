"""The walls of the house, enforced: import direction, the public façade, the docs."""

import ast
import importlib
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import COLLECTED, long_tier

import cenet

HERE = Path(__file__).parent
ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "cenet"

# a module may import from its own level's earlier names and from lower levels, never upwards
LEVELS = [
    (
        "version",
        "extras",
        "files",
        "run_folder",
        "internals",
        "cpu",
        "functional",
        "messages",
        "formatting",
    ),
    (
        *("kernels", "kernels.call", "kernels.launch", "kernels.tiles", "kernels.pooling"),
        *("kernels.moments", "kernels.norm", "kernels.decorrelation", "kernels.averages"),
        *("kernels.gate", "kernels.folded_gate", "kernels.mix", "kernels.small_maps"),
        *("kernels.coefficients", "kernels.layer", "kernels.merging", "kernels.preparation", "ops"),
    ),
    (
        "nn.ranks",
        "nn.statistics",
        "nn.norms",
        "nn.fused",
        "nn.base",
        "nn.equilibrium",
        "nn.norm_ce",
        "nn.sync",
        "nn.folded",
        "nn",
    ),
    (
        *("baselines.base", "baselines.whitening", "baselines.iter_norm"),
        *("baselines.switchable_norm", "baselines.switchable_whitening", "baselines"),
    ),
    ("evaluating",),
    (
        "dataflow",
        "surgery",
        "folding",
        "checkpoints",
        "calibration",
        "lightning",
    ),
    (
        *("models.staged", "models.factory", "models.released"),
        *("models.entrypoints", "models.lookup", "models.inserted", "models", "models.cost"),
    ),
    (
        *(
            "environment",
            "analysis.channels",
            "analysis.readers",
            "analysis.activations",
        ),
        *("analysis.recorder", "analysis.ablation", "analysis.monitor", "analysis.diagnosis"),
        *("analysis.gradcam", "analysis.verdict", "analysis.diagnose"),
        "analysis",
    ),
    ("signals", "distributed", "arguments"),
    (
        *("data.order", "data.sources", "data.tar_shards", "data.parquet"),
        *(
            "data.workers",
            "data.decoding",
            "data.datasets",
            "data.views",
            "data.resizing",
        ),
        *("data.cuda_decoding", "data.pipeline", "data.loaders", "data"),
    ),
    (
        *("train.recipes", "train.options", "train.build"),
        *("train.cuda_graphs", "train.checkpoint", "train.times", "train.nonfinite"),
        *(
            "train.evaluation",
            "train.trackers",
            "train.run_log",
            "train.progress",
            "train.weights",
            "train.state",
        ),
        *("train.loop", "train.classifier", "train.job", "train.command"),
        "train",
    ),
    ("sharing", "export"),
    (
        *("report.elements", "report.sources", "report.charts"),
        *("report.curves", "report.layers", "report.channels", "report.tables", "report.pages"),
        "report",
    ),
    (*("diagnosing", "diagnosing.images", "diagnosing.network", "diagnosing.command"),),
    (
        *("detection.freezing", "detection.networks", "detection.deploy", "detection.recipes"),
        *("detection.synthetic", "detection.boxes_svg"),
        *("detection.coco", "detection.data", "detection.loaders", "detection.evaluation"),
        *("detection.trainer", "detection.predictions", "detection.page", "detection.job"),
        *("detection.command", "detection"),
    ),
    ("demo",),
    ("cli", "__main__"),
]
NAMES = [name for level in LEVELS for name in level]
ORDER = {name: index for index, name in enumerate(NAMES)}
# packages, and files beside them, in the order in which they begin
PACKAGES = {name: index for index, name in enumerate(dict.fromkeys(n.split(".")[0] for n in NAMES))}
PUBLIC = {
    "BatchDecorrelation2d",
    "CESite",
    "ChannelEquilibrium2d",
    "InstanceReweighting2d",
    "NormCE2d",
    "ce_sites",
    "convert_sync_ce",
    "diagnose",
    "fold_ce",
    "fold_conv_norm_ce",
    "freeze_ce_",
    "functional",
    "insert_ce_",
    "load",
    "load_released_ce_",
    "param_groups",
    "remove_ce_",
    "revert_sync_ce",
    "save",
    "unfreeze_ce_",
    "update_ce_stats",
}
FILES = sorted(SOURCE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    own = {name.removeprefix("cenet.") for name in names if name.startswith("cenet.")}
    return {name for name in own if name in ORDER}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_downwards(path):
    name = module_name(path)
    if name:
        assert name in ORDER, f"{name} has no place in the house yet"
        upwards = {other for other in imported(path) if ORDER[other] >= ORDER[name]}
        assert not upwards


def test_packages_import_downwards():
    """Two packages whose files alternate in LEVELS pass the test above and need each other."""
    assert len(ORDER) == len(NAMES)
    upwards = {
        (module_name(path), other)
        for path in FILES
        if module_name(path)
        for other in imported(path)
        if PACKAGES[other.split(".")[0]] > PACKAGES[module_name(path).split(".")[0]]
    }
    assert not upwards


def test_contributing_lists_every_file_above_those_that_import_it():
    """Under "Where things are": a list out of date sends a newcomer the wrong way."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things are")[1].split("```")[1]
    lines = [line.split("  ")[0] for line in text.splitlines() if line.startswith("src/cenet/")]
    listed = [Path(name).stem for line in lines for name in line.split(", ")]
    listed = list(dict.fromkeys(listed))  # cpu.py, cpu.cpp
    assert set(listed) | {"__main__"} == set(PACKAGES)
    for path in FILES:
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        others = {name.split(".")[0] for name in imported(path)} - {own}
        if own in listed:
            below = {name for name in others if listed.index(name) > listed.index(own)}
            assert not below, f"{path} imports {below}, which CONTRIBUTING lists below it"


def test_no_file_has_the_name_of_a_public_function():
    """Importing a package `cenet.diagnose` would replace the function of that name."""
    functions = {name for name in PUBLIC if not inspect.ismodule(getattr(cenet, name))}
    assert not functions & set(PACKAGES)


def test_public_names():
    assert set(cenet.__all__) == PUBLIC
    assert all(hasattr(cenet, name) for name in PUBLIC)


def test_import_is_light_and_takes_less_than_a_second_beyond_torch():
    """A second of this process alone, whatever else the machine does."""
    heavy = ["timm", "triton", "matplotlib", "torchvision", "sklearn", "tyro", "rich"]
    code = (
        "import sys, time, torch; before = set(sys.modules); start = time.process_time(); "
        "from cenet import *; print(time.process_time() - start); "
        f"print(*(m for m in {heavy} if m in set(sys.modules) - before))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, modules = done.stdout.split("\n", 1)
    assert not modules.strip()
    assert float(seconds) < 1


def test_public_names_are_what_type_checkers_read():
    """They are imported when they are first used; readers and type checkers see these imports."""
    tree = ast.parse((ROOT / "src/cenet/__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert {alias.name for node in block.body for alias in node.names} == PUBLIC
    for node in block.body:
        home = importlib.import_module(node.module)
        for alias in node.names:
            assert getattr(cenet, alias.name) is getattr(home, alias.name)
    with pytest.raises(AttributeError, match="module 'cenet' has no attribute 'insert_ce'"):
        cenet.insert_ce  # noqa: B018
    assert cenet.ops is sys.modules["cenet.ops"]


@pytest.mark.slow
def test_commands_run_through_few_files(tmp_path):
    """How many files a reader has to open; join files of one idea before a walk gets longer."""
    run = str(tmp_path / "run")
    commands = {
        ("train", "digits_ce", "--epochs", "1", "--out", run): 40,
        ("diagnose", run, "--limit", "32", "--ablation-images", "2"): 45,
    }
    for arguments, most in commands.items():
        command = [sys.executable, str(ROOT / "benchmarks" / "walk.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        *_, walk = done.stdout.splitlines()
        assert 30 < int(walk.split(" files")[0]) <= most, done.stdout


def test_version_is_the_same_everywhere():
    assert f'version = "{cenet.__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert f"version: {cenet.__version__}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {cenet.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_paper_page_names_only_tests_that_exist():
    page = (ROOT / "docs" / "paper.md").read_text()
    files = ("test_paper", "test_theory", "test_theory_proxy")
    tests = "".join(path.read_text() for path in HERE.rglob("test_*.py") if path.stem in files)
    named = set(re.findall(r"\btest_\w+", page)) - {*files}
    assert named
    assert not {name for name in named if f"def {name}(" not in tests}


def test_diagrams_of_the_paper_page_are_those_the_script_draws(tmp_path):
    pytest.importorskip("matplotlib")
    folder = ROOT / "docs" / "figures"
    module = runpy.run_path(str(folder / "draw_blocks.py"))
    first, again = (tmp_path / name for name in ("first", "again"))
    first.mkdir()
    again.mkdir()
    module["write"](again)
    for path in module["write"](first):
        drawn = path.read_text(encoding="utf-8")
        assert drawn == (again / path.name).read_text(encoding="utf-8")
        # outlines differ between versions of matplotlib; the texts beside them do not
        kept = (folder / path.name).read_text(encoding="utf-8")
        texts = [re.findall(r"<!-- (.*?) -->", page, re.S) for page in (kept, drawn)]
        assert len(texts[0]) > 20
        assert texts[0] == texts[1]


def test_what_the_long_tier_shows_has_a_fast_witness(pytestconfig):
    names = pytestconfig.stash[COLLECTED]
    if {name.split("::")[0] for name in names} < {path.name for path in HERE.rglob("test_*.py")}:
        pytest.skip("not all tests were collected")
    for row in long_tier():
        assert any(re.match(row["tests"], name) for name in names), f"{row['tests']} is no test"
        witnesses = [name for name in names if name.startswith(row["witness"])]
        assert any(not names[name] for name in witnesses), f"{row['witness']} is no fast test"
        assert row["why"]
