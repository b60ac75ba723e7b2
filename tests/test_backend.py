"""Which backend runs: the kernels, plain PyTorch, or an error that says why not."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from _fused import block, gradients, images
from cenet import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    cpu,
    ops,
)

gpu = pytest.mark.gpu


@pytest.mark.parametrize("make", [block, ChannelEquilibrium2d, BatchDecorrelation2d])
def test_asking_for_the_kernels_on_the_cpu_names_reason_and_fix(make):
    wanted = r'"triton" was asked for, but the kernels run on CUDA tensors, not on cpu; .*"auto"'
    with ops.backend("triton"), pytest.raises(RuntimeError, match=wanted):
        make(24)(images())


def test_an_unknown_backend_is_named():
    wanted = "'cuda' must be one of auto, triton, torch"
    with pytest.raises(ValueError, match=wanted), ops.backend("cuda"):
        pass


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_the_cpu_takes_the_plain_path(name, monkeypatch):
    monkeypatch.setattr(cpu, "enabled", name == "auto")
    expected = gradients(block(), images())
    monkeypatch.undo()
    monkeypatch.setattr(ops, "norm_ce", None)  # would raise
    with ops.backend(name):
        assert all(torch.equal(a, expected[k]) for k, a in gradients(block(), images()).items())


def test_the_choice_ends_with_its_context():
    with ops.backend("torch"):
        with pytest.raises(KeyError), ops.backend("triton"):
            raise KeyError
        block()(images())


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("triton", 'RuntimeError: backend "triton" was asked for'),
        ("gpu", "ValueError: CENET_BACKEND='gpu' must be one of auto, triton, torch"),
        ("torch", "fine"),
        ("auto", "fine"),
    ],
)
def test_environment_variable(name, outcome):
    code = (
        "import torch, cenet; cenet.ChannelEquilibrium2d(16)(torch.randn(2, 16, 2, 2)); "
        "print('fine')"
    )
    environment = {**os.environ, "CENET_BACKEND": name}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert outcome in result.stdout + result.stderr


@gpu
def test_what_the_kernels_cannot_do_is_named_and_left_to_the_plain_path():
    for x, module, reason in (
        (images(device="cuda").double(), block().double(), "not in torch.float64"),
        (images(device="cuda", c=80), block(80, group_size=80), "group_size=80 is more than 64"),
        (images(device="cuda"), block().double(), "a parameter is not in"),
    ):
        module = module.cuda().eval()
        assert module(x).shape == x.shape
        with ops.backend("triton"), pytest.raises(RuntimeError, match=reason):
            module(x)
