"""One thread per worker: the tensors are small and the workers share the cores.

Without a GPU, Triton's interpreter runs the kernels: to be asked for before triton is imported.
"""

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def one_thread():
    """Runs set the number of threads; put it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def files_folder(tmp_path_factory):
    """A few digits as image files."""
    from _training import write_digits

    return write_digits(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def few_files(files_folder):
    """The same, found."""
    from cenet.train.data import image_folders

    return image_folders(files_folder, 16, resident=False)


@pytest.fixture
def few_drawn(monkeypatch):
    """Six shapes to train on and three to test with."""
    import cenet.detection.data

    monkeypatch.setattr(cenet.detection.data, "SHAPES", (6, 3))
