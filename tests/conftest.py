"""One thread per worker: the tensors are small and the workers share the cores.

Without a GPU, Triton's interpreter runs the kernels: to be asked for before triton is imported.
"""

import csv
import os
import re
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


LONG_TIER = Path(__file__).parent / "long_tier.csv"
COLLECTED = pytest.StashKey[dict[str, bool]]()  # every test by name, and whether it is slow


def long_tier():
    """Tests of the long tier: a pattern of names, why, and a fast test that sees the same fault."""
    with LONG_TIER.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config, items):
    """Mark the tests of long_tier.csv as slow."""
    patterns = [re.compile(row["tests"]) for row in long_tier()]
    names = {}
    for item in items:
        file, _, rest = item.nodeid.partition("::")
        name = f"{Path(file).name}::{rest}"  # no two files have one name
        if any(pattern.match(name) for pattern in patterns):
            item.add_marker(pytest.mark.slow)
        names[name] = item.get_closest_marker("slow") is not None
    config.stash[COLLECTED] = names


@pytest.fixture
def one_thread():
    """Runs set the number of threads; put it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def quick_weights():
    """Build large networks quickly, for tests in which any random weights will do."""
    from _weights import repeated_draws

    with repeated_draws():
        yield


@pytest.fixture(scope="module")
def files_folder(tmp_path_factory):
    """A few digits as image files."""
    from _training import write_digits

    return write_digits(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def few_files(files_folder):
    """The same, found."""
    from cenet.data.datasets import image_folders

    return image_folders(files_folder, 16, resident=False)


@pytest.fixture(scope="session")
def three_runs(tmp_path_factory):
    """The folder of three runs and their page; not to be changed."""
    from _pages import write_three_runs
    from cenet.report import write_page

    root = tmp_path_factory.mktemp("runs")
    write_page(write_three_runs(root), root / "page.html")
    return root


@pytest.fixture
def few_drawn(monkeypatch):
    """Six shapes to train on and three to test with."""
    import cenet.detection.data

    monkeypatch.setattr(cenet.detection.data, "SHAPES", (6, 3))
