"""SyncCE on the kernels: collectives between their launches, beside ranks in plain PyTorch."""

import copy
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

import _sync
import cenet.nn.base as base
from _checks import RTOL, assert_close
from _distributed import once, run
from _kernels import each_device, interpreted, kernels_on, poisoned
from _sync import LAYERS, SPLITS
from cenet import convert_sync_ce, ops
from cenet.analysis.activations import ActivationObserver
from cenet.kernels import merging
from cenet.kernels.launch import collecting
from cenet.nn.ranks import Ranks, SyncGroup

SINGLE = RTOL[torch.float32]
UNEQUAL, EMPTY = SPLITS[2]["unequal"], SPLITS[2]["empty"]
# layers of `_sync.LAYERS`, and images on each rank
CASES = [
    *(("bn+ce+relu", split) for split in SPLITS[2].values()),
    *((name, UNEQUAL) for name in LAYERS if name not in ("bn+ce+relu", "released")),
]
RANKS = Ranks(2, "both in this process")


class TwoRanks:
    """A rank on the kernels and one in plain PyTorch and float64, both in this process.

    The collectives are replaced by what the other rank says.
    """

    def __init__(
        self,
        name: str,
        batches: list[Tensor],
        weights: list[Tensor],
        device: str,
        dtype: torch.dtype = torch.float32,
        layout: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.device, self.weights = device, weights
        self.plain, self.kernels = (_sync.layer(name) for _ in range(2))
        self.kernels = self.kernels.float().to(device)
        for module in (self.plain, self.kernels):
            module.ce.sync = SimpleNamespace(ranks=lambda: RANKS)
        x = batches[0].to(device, dtype).contiguous(memory_format=layout)
        self.on_kernels = x.requires_grad_()
        self.in_plain = batches[1].clone().requires_grad_()
        self.gathers = 0

    def run(self) -> dict[str, Any]:
        self.message = torch.zeros(self.plain.ce.layout(norm=True).size(), dtype=torch.float64)
        state = {name: buffer.clone() for name, buffer in self.plain.named_buffers()}
        self._plain_forward()  # for its message; what the first rank says is not known yet
        self.plain.load_state_dict(state, strict=False)
        with pytest.MonkeyPatch.context() as patch, kernels_on(self.device), poisoned():
            patch.setattr(merging, "all_gather", self._gather)
            patch.setattr(merging, "sum_of_own_part", self._sum_of_own_part)
            y = self.kernels(self.on_kernels)
            other = self._plain_forward()
            loss = (other * self.weights[1]).sum()
            (self.returned,) = torch.autograd.grad(loss, self.message, retain_graph=True)
            (y * self.weights[0].to(y)).sum().backward()
        (loss + (self.split * self.told).sum()).backward()
        grads = [{n: p.grad for n, p in m.named_parameters()} for m in (self.kernels, self.plain)]
        return {
            "ys": [y.detach(), other.detach()],
            "x.grads": [self.on_kernels.grad, self.in_plain.grad],
            "grads": {name: grads[0][name].cpu() + grads[1][name] for name in grads[0]},
        }

    def _plain_forward(self) -> Tensor:
        def gather(told: Tensor, ranks: Ranks) -> Tensor:
            self.told = told
            return torch.stack([self.message, told])

        with pytest.MonkeyPatch.context() as patch, ops.backend("torch"):
            patch.setattr(base, "gather", gather)
            return self.plain(self.in_plain)

    def _gather(self, message: Tensor, ranks: int, group_name: str) -> Tensor:
        self.gathers += 1
        self.message = message.detach().cpu().double().requires_grad_()
        return torch.cat([message, self.told.detach().to(message)])

    def _sum_of_own_part(self, split: Tensor, ranks: int, group_name: str) -> Tensor:
        own, self.split = split.detach().cpu().double().chunk(2)
        return (own + self.returned).to(split)

    def expected_split(self) -> Tensor:
        """Gradient of the first rank's loss for the message of the other, in plain PyTorch."""
        told = self.told.detach().requires_grad_()
        with pytest.MonkeyPatch.context() as patch, ops.backend("torch"):
            patch.setattr(base, "gather", lambda own, ranks: torch.stack([own, told]))
            y = self.plain(self.on_kernels.detach().cpu().double())
        (y * self.weights[0]).sum().backward()
        assert told.grad is not None
        return told.grad


def mixed(sizes) -> list[list[Tensor]]:
    """Batches of both ranks, and weights of their losses."""
    return [
        [
            _sync.images(*size, seed=seed + rank) * (rank + 1) + rank
            for rank, size in enumerate(sizes)
        ]
        for seed in (0, 100)
    ]


def statistics_of_rank(module: nn.Module, x: Tensor) -> Tensor:
    """A message by its definition: counts, means, covariances of groups, variances of images."""
    bd, x = module.ce.bd, x.detach()
    signed = x * module.norm.weight.detach().sign()[:, None, None]
    pooled = nn.functional.max_pool2d(signed, bd.pool, ceil_mode=True)
    pooled = pooled * module.norm.weight.detach().sign()[:, None, None]
    rows, windows = (t.transpose(0, 1).flatten(1) for t in (x, pooled))
    parts = [torch.tensor([len(x), rows.shape[1], windows.shape[1]]), windows.mean(1)]
    for group in windows.split(bd.group_size):
        cov = torch.zeros(bd.group_size, bd.group_size, dtype=x.dtype)
        cov[: len(group), : len(group)] = torch.cov(group, correction=0)
        parts.append(cov[tuple(torch.triu_indices(*cov.shape))])
    if bd.pool > 1:
        parts += [rows.mean(1), rows.var(1, correction=0)]
    parts.append(x.var((2, 3), correction=0).mean(0))
    return torch.cat([part.double() for part in parts])


# images of the rank on the kernels, and of the other
SIZES = {
    "bn+ce": ((3, 5, 7), (2, 4, 6)),
    "pool": ((3, 5, 7), (2, 4, 6)),
    "ragged": ((3, 2, 3), (2, 4, 6)),  # a small map
}


@each_device
@pytest.mark.parametrize("name", SIZES)
def test_a_rank_on_kernels_beside_one_in_plain_pytorch(name, device):
    batches, weights = mixed(SIZES[name])
    ranks = TwoRanks(name, batches, weights, device)
    found = ranks.run()
    # the launches before each collective by themselves
    message = statistics_of_rank(ranks.plain, batches[0])
    assert_close("message", ranks.message, message, SINGLE)
    assert_close("gradient of the message", ranks.split, ranks.expected_split(), SINGLE)
    expected, statistics = _sync.list_reference(name, batches, weights)
    for key in ("ys", "x.grads"):
        for rank, (one, value) in enumerate(zip(found[key], expected[key], strict=True)):
            assert_close(f"{key} of rank {rank}", one.cpu(), value, SINGLE)
    for parameter, value in expected["grads"].items():
        assert_close(f"gradient of {parameter}", found["grads"][parameter], value, SINGLE)
    buffers = {name: buffer.cpu() for name, buffer in ranks.kernels.named_buffers()}
    var = 0.9 + 0.1 * statistics.unbiased_var
    assert_close("running_mean", buffers["norm.running_mean"], 0.1 * statistics.mean, SINGLE)
    assert_close("running_var", buffers["norm.running_var"], var, SINGLE)
    assert_close("inv_std", buffers["ce.ir.running_inv_std"], statistics.inv_std, SINGLE)
    for own, value in zip(buffers["ce.bd.running_inv_sqrt"], statistics.inv_sqrt, strict=True):
        assert_close("inv_sqrt", own[: len(value), : len(value)], value, SINGLE)


def on_kernels(rank: int, name: str, split: tuple[int, ...], device: str) -> dict[str, Any]:
    """What `_sync.synchronized` does, in float32 on the kernels, on a rank without images too."""
    module = convert_sync_ce(_sync.layer(name)).float().to(device)
    batches, weights, residual = _sync.batches_of(split)

    def mine(whole):
        return _sync.of_rank(rank, split, whole).float().to(device)

    with kernels_on(device):
        return _sync.steps(
            module, [mine(batch) for batch in batches], mine(weights),
            mine(residual) if name == "bn+ce+relu" else None,
        )  # fmt: skip


def work(rank: int, cases: list[Any], device: str) -> dict[Any, Any]:
    """Everything the two ranks do together, in one start of the processes."""
    return {case: on_kernels(rank, *case, device) for case in cases}


@cache
def together(device: str) -> list[dict[Any, Any]]:
    return once(f"merged-{device}", lambda: run(work, 2, CASES, device, timeout=600))


def assert_equals_one_process(case, device):
    name, split = case
    found = [result[case] for result in together(device)]
    expected = _sync.alone(name, split)
    for key in ("y", "x.grad"):
        assert_close(key, torch.cat([one[key].cpu() for one in found]), expected[key], 2 * SINGLE)
    for parameter, value in expected["grads"].items():
        total = sum(one["grads"][parameter].cpu() for one in found)
        assert_close(f"gradient of {parameter}", total, value, 5 * SINGLE)
    first, second = (one["buffers"] for one in found)
    for buffer, value in expected["buffers"].items():
        assert torch.equal(first[buffer], second[buffer]), f"{buffer} differs between ranks"
        if value.is_floating_point():
            assert_close(buffer, first[buffer].cpu(), value, SINGLE)
        else:
            assert torch.equal(first[buffer].cpu(), value), buffer


def named(case):
    return f"{case[0]}-{case[1]}"


@interpreted
@pytest.mark.parametrize("case", CASES, ids=named)
def test_two_processes_on_kernels_equal_one_process(case):
    assert_equals_one_process(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=named)
def test_two_processes_on_one_gpu_equal_one_process(case):
    assert_equals_one_process(case, "cuda")


@each_device
def test_a_rank_in_half_precision(device):
    batches, weights = ([t.bfloat16().double() for t in both] for both in mixed(SIZES["bn+ce"]))
    ranks = TwoRanks("bn+ce", batches, weights, device, torch.bfloat16, torch.channels_last)
    found = ranks.run()
    expected, _ = _sync.list_reference("bn+ce", batches, weights)
    for key in ("ys", "x.grads"):
        (one, _), (value, _) = found[key], expected[key]
        assert one.dtype == torch.bfloat16
        assert one.is_contiguous(memory_format=torch.channels_last)
        assert_close(key, one.cpu(), value, RTOL[torch.bfloat16])
    for parameter, value in expected["grads"].items():
        gradient = found["grads"][parameter]
        assert_close(f"gradient of {parameter}", gradient, value, RTOL[torch.bfloat16])


@each_device
def test_an_offset_does_not_cancel(device):
    """Means are 1000 times as large as deviations, and travel in float32."""
    batches, weights = mixed(SIZES["bn+ce"])
    batches = [(batch + 1e3).float().double() for batch in batches]
    found = TwoRanks("bn+ce", batches, weights, device).run()
    expected, _ = _sync.list_reference("bn+ce", batches, weights)
    for key in ("ys", "x.grads"):
        for one, value in zip(found[key], expected[key], strict=True):
            assert_close(key, one.cpu(), value, 2e-4)


def one_rank_over_nccl(rank: int) -> list[list[Tensor]]:
    """Not synchronized, over a group of one rank, and through the collectives of that group."""
    group = dist.new_group([0], backend="nccl")
    told = SimpleNamespace(ranks=lambda: Ranks(1, group.group_name))
    x = _sync.images(4).float().cuda()
    results = []
    for sync in (None, SyncGroup(group), told):
        block = _sync.layer("bn+ce+relu").float().cuda()
        block.ce.sync = sync
        leaf = x.clone().requires_grad_()
        with kernels_on("cuda"):
            y = block(leaf)
            (y * x).sum().backward()
        grads = [parameter.grad for parameter in block.parameters()]
        results.append([y.detach(), leaf.grad, *grads, *(b.double() for b in block.buffers())])
    return results


@pytest.mark.gpu
def test_one_rank_over_nccl():
    for alone, silent, merged in zip(*run(one_rank_over_nccl, 1)[0], strict=True):
        assert torch.equal(silent, alone)  # a group of one communicates nothing
        assert_close("over NCCL", merged, alone, SINGLE)


class Seen(ActivationObserver):
    """Keeps what goes into an activation."""

    def before(self, site, x):
        self.x = x.clone()


def edges(rank: int, device: str) -> dict[str, Any]:
    """What else two ranks do; each entry holds what they find and what they should."""
    results: dict[str, Any] = {}
    x = _sync.images(3 + rank, seed=rank).float().to(device)
    block = convert_sync_ce(_sync.layer("bn+ce").float()).to(device)
    block.act = nn.ReLU()

    def outcome(module: nn.Module, run: Any = None) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = (module if run is None else run)(leaf)
        (y * x).sum().backward()
        grads = [parameter.grad for parameter in module.parameters()]
        return [y.detach(), leaf.grad, *grads, *(b.double() for b in module.buffers())]

    def copied() -> nn.Module:
        return copy.deepcopy(block)

    with kernels_on(device):
        expected = outcome(copied())
        results["repeated"] = outcome(copied()), expected
        module = copied()
        results["checkpoint"] = (
            outcome(module, partial(checkpoint, module, use_reentrant=False)), expected,
        )  # fmt: skip
        module = copied()
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        results["compiled"] = outcome(module, compiled), expected
        module = copied()
        with torch.no_grad():
            results["without gradients"] = [module(x)], expected[:1]
        # rank 0 alone observes its network
        module = copied()
        seen = Seen(module)
        with seen if rank == 0 else nullcontext():
            results["observed"] = outcome(module), expected
        if rank == 0:
            results["observed before"] = [seen.x.relu()], expected[:1]
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(copied()(leaf).sum(), leaf, create_graph=True)
        results["second derivative"] = _sync.error_of(lambda: gradient.sum().backward())
        # while launches are collected, ranks need not meet
        if rank == 0:
            with collecting() as wanted:
                outcome(copied())
            results["collected"] = len(wanted)
    # one rank on the kernels, one in plain PyTorch
    with kernels_on(device) if rank == 0 else ops.backend("torch"):
        results["beside plain PyTorch"] = outcome(copied()), expected
    with ops.backend("torch"):
        results["plain PyTorch"] = outcome(copied()), expected
    return results


def assert_edges(device):
    for rank, found in enumerate(run(edges, 2, device, timeout=400)):
        assert "no second derivative" in found.pop("second derivative")
        if rank == 0:
            assert found.pop("collected") >= 12
        for name, (own, expected) in found.items():
            same = name in ("repeated", "checkpoint", "compiled", "without gradients")
            for one, value in zip(own, expected, strict=True):
                if same:
                    assert torch.equal(one, value), name
                assert_close(name, one, value, 3 * SINGLE)


@interpreted
def test_checkpoints_compiled_networks_and_observers():
    assert_edges("cpu")


@pytest.mark.gpu
def test_checkpoints_compiled_networks_and_observers_on_one_gpu():
    assert_edges("cuda")
