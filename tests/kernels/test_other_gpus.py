"""Kernels fit into the shared memory of GPUs that are not here; for these they are compiled."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from _kernels import interpreted
from cenet import ops
from cenet.kernels import tiles
from cenet.kernels.mix import FORWARD_TILES

# compute capability and shared memory: T4; RTX 40; V100; H200
TURING, ADA, VOLTA = (75, 64 * 2**10), (89, 99 * 2**10), (70, 96 * 2**10)
HOPPER = (90, 227 * 2**10)


def test_tiles_are_narrower_where_memory_is_short(monkeypatch):
    x = torch.zeros(8, 64, 112, 112, dtype=torch.float16).contiguous(
        memory_format=torch.channels_last
    )
    cuts = []
    for _, room in (TURING, ADA, VOLTA):
        monkeypatch.setattr(tiles, "room_for", lambda x, room=room: room)
        cuts.append(tiles.walk_over(x, 16, FORWARD_TILES).channels)
    assert cuts == [32, 64, 64]


@pytest.mark.parametrize(
    ("group_size", "room", "fits"),
    [(33, 99, False), (32, 64, True), (64, 144, True), (64, 163, True)],
)
def test_large_groups_are_left_to_pytorch_where_memory_is_short(
    group_size, room, fits, monkeypatch
):
    monkeypatch.setattr(ops, "shared_memory", lambda device: room * 2**10)
    device = torch.device("cuda:0")
    x = SimpleNamespace(is_cuda=True, dtype=torch.float32, device=device, numel=lambda: 1)
    reason = ops._why_not(x, [], group_size, synchronized=False)
    expected = "group_size=33 is more than 32 on a GPU with 99 KB of shared memory"
    assert reason == (None if fits else expected)


ELSEWHERE = """
import sys
from types import SimpleNamespace
import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

capability, room = map(int, sys.argv[1:])
driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", capability, 32),
))
torch.cuda.current_device = lambda: 0

from _kernels import kernels_on
from cenet import ChannelEquilibrium2d, NormCE2d, ops
from cenet.kernels import tiles
from cenet.kernels.launch import collecting, compile_kernel

tiles.room_for = lambda x: room

def train(shape, dtype, layout, group_size, pool):
    x = torch.zeros(shape, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
    ce = ChannelEquilibrium2d(shape[1], group_size=group_size, pool=pool)
    y = NormCE2d(nn.BatchNorm2d(shape[1]), ce, nn.ReLU())(x)
    y.backward(torch.zeros_like(y))

with kernels_on("cpu"), collecting() as found:
    for dtype in (torch.float32, torch.float16):
        for layout in (torch.contiguous_format, torch.channels_last):
            train((8, 64, 112, 112), dtype, layout, 16, 1)
            train((8, 64, 32, 32), dtype, layout, 16, 2)
            train((8, 64, 28, 28), dtype, layout, ops.LARGEST_IN_LESS, 1)
            train((16, 1024, 7, 7), dtype, layout, 16, 1)
            train((16, 64, 2, 2), dtype, layout, ops.LARGEST_IN_LESS, 1)
for key, one in found.items():
    compiled = compile_kernel(key, one)
    metadata, code = compiled.metadata, compiled.asm["ptx"]
    first = min(place for place in map(code.find, (" ld.global", " st.global")) if place >= 0)
    waits = 0 <= code.find("griddepcontrol.wait") < first
    print(one.kernel.__name__, metadata.target.arch, metadata.shared, metadata.launch_pdl, waits)
"""


@interpreted
@pytest.mark.parametrize("gpu", [TURING, ADA, HOPPER], ids=["T4", "RTX 40", "H200"])
def test_kernels_fit_and_overlap_where_they_can(gpu, tmp_path):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, *map(str, gpu)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert len({name for name, *_ in kernels}) > 15
    overlap = str(gpu is HOPPER)
    for name, compiled_for, shared, *found in kernels:
        assert (int(compiled_for), int(shared) <= gpu[1]) == (gpu[0], True), (name, shared)
        # it may start before the kernel whose results it reads has ended, and waits for that first
        assert found == [overlap, overlap], name
