"""`pip install cenet` brings torch alone: what works with it, and what everything else says."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from cenet.__main__ import EXTRAS
from cenet.extras import MODULES, PACKAGES, MissingExtraError, require

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "cenet"
LINE = re.compile(r"[a-z0-9, -]+ (is|are) not installed; pip install 'cenet\[[a-z,]+\]'")
QUIET = {"PYTHONWARNINGS": "ignore"}  # torch warns where numpy is not installed
# everything else imports with torch alone
OPTIONAL = (
    "arguments",
    "cli",
    "demo",
    "lightning",
    "models",
    "data",
    "train",
    "diagnosing",
    "report",
    "detection",
)
# what a user of the core does with a network of his own
CORE = """
import torch
from torch import nn
import cenet

torch.manual_seed(0)
x = torch.randn(4, 3, 12, 12, requires_grad=True)
layer = cenet.NormCE2d(nn.BatchNorm2d(3), cenet.ChannelEquilibrium2d(3), nn.ReLU())
layer(x).square().sum().backward()
assert x.grad.abs().sum() > 0

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu(x + self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))))

network = nn.Sequential(nn.Conv2d(3, 8, 3), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
assert cenet.insert_ce_(network) == ["1.bn2"]
network(x).sum().backward()
assert cenet.update_ce_stats(network, [x.detach()]) == 1
network.eval()
error = (cenet.fold_ce(network)(x) - network(x)).abs().max()
assert error < 1e-5, error
cenet.diagnose(network, [x.detach()])
assert cenet.remove_ce_(network) == ["1.bn2"]
print("core works")
"""
# keeps the interpreter from finding modules, as if they were not installed
WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Filtered:
    @staticmethod
    def find_spec(name, path=None, target=None):
        hidden = name.partition(".")[0] in {hidden}
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Filtered if finder is PathFinder else finder for finder in sys.meta_path]
"""


def distributions_of_torch():
    """Torch and what it depends on, by name."""
    found, waiting = {}, ["torch"]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # of another system
            continue
        needed = found[name].requires or []
        waiting += [re.split(r"[^\w.-]", text)[0] for text in needed if "extra ==" not in text]
    return found


@pytest.fixture(scope="module")
def torch_alone():
    """Runs Python code where neither numpy nor any extra can be imported."""
    kept = {*distributions_of_torch(), "cenet"}
    hidden = {
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if not kept & {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    }
    assert {"timm", "tyro", "numpy", "PIL"} <= hidden
    assert not hidden & {"torch", "cenet", "typing_extensions"}
    prelude = WITHOUT.replace("{hidden}", repr(hidden))

    def run(code):
        command = [sys.executable, "-c", prelude + code]
        environment = {**os.environ, **QUIET, "PYTHONPATH": str(SOURCE.parent)}
        environment.pop("TRITON_INTERPRET", None)  # the interpreter needs numpy
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    return run


def test_the_core_works_with_torch_alone(torch_alone):
    result = torch_alone(CORE)
    assert result.stdout == "core works\n", result.stderr


def test_a_module_imports_or_names_its_extra_and_so_does_a_command(torch_alone):
    names = [
        ".".join(("cenet", *path.relative_to(SOURCE).with_suffix("").parts))
        for path in sorted(SOURCE.rglob("*.py"))
    ]
    code = f"""
import importlib, json
found = dict()
for name in {[name.removesuffix(".__init__") for name in names]}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        found[name.removeprefix("cenet.")] = str(error)
print(json.dumps(found))
from cenet.__main__ import main
said = dict()
for command in {["", "--help", *EXTRAS]}:
    sys.argv = ["cenet", *([command] if command else [])]
    try:
        main()
    except SystemExit as error:
        said[command] = error.code
print(json.dumps(said))
"""
    result = torch_alone(code)
    assert result.returncode == 0, result.stderr
    found, said = map(json.loads, result.stdout.splitlines()[-2:])
    optional = [
        name.removeprefix("cenet.").removesuffix(".__init__")
        for name in names
        if any(f"{name}.".startswith(f"cenet.{prefix}.") for prefix in OPTIONAL)
    ]
    assert sorted(found) == sorted(optional)
    for name, message in found.items():
        assert LINE.fullmatch(message), f"{name}: {message}"
    assert set(said) == {"", "--help", *EXTRAS}
    for command, message in said.items():
        assert LINE.fullmatch(message), f"{command}: {message}"
        extras = EXTRAS.get(command, ("cli",))
        assert message.endswith(f"pip install 'cenet[{','.join(extras)}]'")


def test_a_process_ends_with_that_line_and_code_1(torch_alone):
    start = "import runpy; sys.argv = ['cenet', 'train', 'digits_ce']; "
    result = torch_alone(start + "runpy.run_module('cenet', run_name='__main__')")
    assert result.returncode == 1
    assert result.stdout == ""
    assert LINE.fullmatch(result.stderr.strip())


def test_every_command_says_what_it_needs(monkeypatch):
    from cenet import cli

    given = {}
    monkeypatch.setattr(cli, "run_command", lambda commands, **_: given.update(commands))
    monkeypatch.setattr(sys, "argv", ["cenet"])
    cli.main()
    assert set(given) == set(EXTRAS)


def test_an_extra_inside_a_command_is_one_line_too(monkeypatch):
    from cenet import cli

    def demo():
        require("gradcam")

    monkeypatch.setitem(sys.modules, "pytorch_grad_cam", None)
    monkeypatch.setattr(cli, "_main", demo)
    with pytest.raises(SystemExit, match=r"^grad-cam is not installed; pip install 'cenet\[gradca"):
        cli.main()


def test_only_extras_with_something_missing_are_named(monkeypatch):
    require(*PACKAGES.keys() - {"lightning"})
    for name in ("PIL", "onnx"):
        monkeypatch.setitem(sys.modules, name, None)
    message = r"^onnx, pillow are not installed; pip install 'cenet\[export,train\]'$"
    with pytest.raises(MissingExtraError, match=message):
        require("cli", "export", "train")


def declared(extra, project):
    """Names of the packages of an extra, those of the extras in it too."""
    found = set()
    for text in project["optional-dependencies"][extra]:
        name, _, rest = text.partition("[")
        if name == "cenet":
            inner = rest.removesuffix("]").split(",")
            found |= set().union(*(declared(one, project) for one in inner))
        else:
            found.add(re.split(r"[<>=]", text)[0])
    return found


def test_extras_bring_what_is_asked_for():
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split(r"[<>=]", text)[0] for text in project["dependencies"]] == ["torch"]
    for extra, packages in PACKAGES.items():
        assert set(packages) <= declared(extra, project), extra
    everything = set().union(*(declared(extra, project) for extra in PACKAGES))
    assert everything <= declared("all", project) <= declared("dev", project)


def test_every_package_that_is_imported_comes_from_an_extra():
    """Or with torch, which brings triton and typing_extensions."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.partition(".")[0])
    known = {MODULES.get(name, name) for packages in PACKAGES.values() for name in packages}
    with_torch = {"torch", "triton", "typing_extensions", "markupsafe"}
    instead = {"faster_coco_eval"}  # of pycocotools, where it is installed
    services = {"wandb", "mlflow"}  # --log-to names the one that is not installed
    allowed = known | with_torch | instead | services
    assert found - set(sys.stdlib_module_names) - {"cenet"} <= allowed


@pytest.mark.slow
def test_wheel_beside_torch_alone(tmp_path):
    """The built wheel in a virtual environment that has torch, what torch needs, and no more."""
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(ZipFile(wheel).namelist())
    assert "cenet/report/page.html.jinja" in names
    assert not any("theory" in name or "timing" in name for name in names)
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for distribution in distributions_of_torch().values():
        for part in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            link = packages / part
            if not link.exists():
                link.symlink_to(distribution.locate_file(part))
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*install, wheel], check=True)
    environment = {**os.environ, **QUIET}
    environment.pop("PYTHONPATH", None)

    def run(*command):
        return subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path
        )

    missing = run(python, "-c", "import numpy")
    assert "No module named 'numpy'" in missing.stderr
    result = run(python, "-c", CORE)
    assert result.stdout == "core works\n", result.stderr
    version = importlib.metadata.version("cenet")
    assert run(python.with_name("cenet"), "--version").stdout == f"cenet {version}\n"
    for command in EXTRAS:
        result = run(python.with_name("cenet"), command)
        assert result.returncode == 1
        assert result.stdout == ""
        assert LINE.fullmatch(result.stderr.strip()), result.stderr
