"""SyncCE on the kernels: ranks whose statistics are merged between two passes of kernels."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

import _sync
from _checks import RTOL, assert_close
from _distributed import once, run
from _kernels import interpreted, kernels_on
from _sync import SPLITS
from cenet import convert_sync_ce

SINGLE = RTOL[torch.float32]
UNEQUAL, EMPTY = SPLITS[2]["unequal"], SPLITS[2]["empty"]
# layers of `_sync.LAYERS`, and images on each rank
FEW = [("bn+ce+relu", EMPTY), ("pool", UNEQUAL), ("identity", UNEQUAL)]
MANY = [
    *(("bn+ce+relu", split) for split in SPLITS[2].values() if split != EMPTY),
    *((name, UNEQUAL) for name in (
        "ce", "bn+bd", "bn+ir", "syncbn+ce", "bn without affine+ce", "pool alone", "ragged",
        "momentum None", "released",
    )),
]  # fmt: skip


def on_kernels(rank: int, name: str, split: tuple[int, ...], device: str) -> dict[str, Any]:
    """What `_sync.synchronized` does, in float32 and on the kernels where a rank has images."""
    module = convert_sync_ce(_sync.layer(name)).float().to(device)
    batches, weights, residual = _sync.batches_of(split)

    def mine(whole):
        return _sync.of_rank(rank, split, whole).float().to(device)

    kernels = kernels_on(device) if split[rank] else torch.enable_grad()
    with kernels:
        return _sync.steps(
            module, [mine(batch) for batch in batches], mine(weights),
            mine(residual) if name == "bn+ce+relu" else None,
        )  # fmt: skip


def work(rank: int, cases: list[Any], device: str) -> dict[Any, Any]:
    """Everything the two ranks do together, in one start of the processes."""
    return {case: on_kernels(rank, *case, device) for case in cases}


@cache
def together(name: str, device: str) -> list[dict[Any, Any]]:
    cases = {"few": FEW, "many": MANY, "all": [*FEW, *MANY]}[name]
    return once(f"merged-{name}-{device}", lambda: run(work, 2, cases, device, timeout=400))


def assert_equals_one_process(case, cases, device):
    name, split = case
    found = [result[case] for result in together(cases, device)]
    expected = _sync.alone(name, split)
    for key in ("y", "x.grad"):
        assert_close(key, torch.cat([one[key].cpu() for one in found]), expected[key], 2 * SINGLE)
    for parameter, value in expected["grads"].items():
        total = sum(one["grads"][parameter].cpu() for one in found)
        assert_close(f"gradient of {parameter}", total, value, 5 * SINGLE)
    for one in found:
        for buffer, value in expected["buffers"].items():
            if value.is_floating_point():
                assert_close(buffer, one["buffers"][buffer].cpu(), value, SINGLE)
            else:
                assert torch.equal(one["buffers"][buffer].cpu(), value), buffer


def named(case):
    return f"{case[0]}-{case[1]}"


@interpreted
@pytest.mark.parametrize("case", FEW, ids=named)
def test_ranks_on_kernels_equal_one_process(case):
    assert_equals_one_process(case, "few", "cpu")


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("case", MANY, ids=named)
def test_more_ranks_on_kernels_equal_one_process(case):
    assert_equals_one_process(case, "many", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*FEW, *MANY], ids=named)
def test_two_processes_on_one_gpu_equal_one_process(case):
    assert_equals_one_process(case, "all", "cuda")


@pytest.mark.gpu
def test_one_rank_over_nccl_is_the_unsynchronized_layer():
    """A single rank merges nothing: the same operator, bit for bit."""
    (equal,) = run(alone_over_nccl, 1)
    assert equal


def alone_over_nccl(rank: int) -> bool:
    group = dist.new_group([0], backend="nccl")
    x = _sync.images(4).float().cuda()
    own, other = (_sync.layer("bn+ce+relu").float().cuda() for _ in range(2))
    convert_sync_ce(own, group)
    with kernels_on("cuda"):
        return torch.equal(own(x), other(x))
