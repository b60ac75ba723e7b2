"""The tour of CONTRIBUTING, "One training step on CUDA, file by file", against the files called."""

import re
import runpy
import sys
from pathlib import Path

import torch
from torch import nn

from _kernels import interpreted, kernels_on
from cenet import ChannelEquilibrium2d, NormCE2d

ROOT = Path(__file__).parent.parent.parent


@interpreted
def test_the_tour_names_the_files_of_a_training_step():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (tour,) = re.findall(r"\n## One training step on CUDA.*?(?=\n## )", text, re.DOTALL)
    steps = re.findall(r"^(\d+)\. `([\w/]+\.py)`", tour, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert f"these {len(steps)} files" in tour
    layer = NormCE2d(nn.BatchNorm2d(64), ChannelEquilibrium2d(64), nn.ReLU())
    x = torch.randn(4, 64, 5, 6, requires_grad=True)
    walk = runpy.run_path(str(ROOT / "benchmarks" / "walk.py"))["Walk"]()
    before = sys.getprofile()
    with kernels_on("cpu"):
        sys.setprofile(walk)
        try:
            layer(x).sum().backward()
        finally:
            sys.setprofile(before)
    assert set(walk.functions) == {file for _, file in steps}
