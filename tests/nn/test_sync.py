"""SyncCE: several gloo processes do what one process does with all their images."""

import copy
import os
import pickle
import signal
import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import _sync
from _checks import RTOL, assert_close, relative_error
from _distributed import SERVER, joined, once, run
from _sync import BLOCKS, LAYERS, MUTATIONS, SPLITS, images, layer
from cenet import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
    NormCE2d,
    convert_sync_ce,
    ops,
    revert_sync_ce,
    update_ce_stats,
)
from cenet.messages import Layout
from cenet.nn import ce_layers
from cenet.nn.ranks import SyncGroup
from cenet.nn.statistics import merge
from cenet.nn.sync import sync_bytes

EXACT = RTOL[torch.float64]
# three processes on two cores take their time
EACH_SIZE = [2, pytest.param(3, marks=pytest.mark.slow)]


def work(rank: int, ranks: int) -> dict[str, Any]:
    """Everything the ranks do together, in one start of the processes."""
    results: dict[str, Any] = {}
    for name in LAYERS:
        for split in SPLITS[ranks].values():
            results["split", name, split] = _sync.synchronized(rank, name, split)
    for name in BLOCKS:
        results["mixed", name] = _sync.mixed(rank, ranks, name)
    results["ddp"] = _sync.ddp(rank, SPLITS[ranks]["unequal"])
    if ranks == 3:
        results["subgroup"] = subgroup(rank)
        return results
    for mutation in MUTATIONS:
        with _sync.mutated(mutation):
            results["mutation", mutation] = _sync.mixed(rank, ranks, "pool")
    results["counts"] = {name: _sync.counted(rank, name) for name in LAYERS}
    results["small"] = small(rank)
    results["edge"] = edges(rank)
    return results


def subgroup(rank: int) -> Any:
    """Two of three ranks."""
    group = dist.new_group([0, 1])
    if rank == 2:
        return _sync.error_of(lambda: convert_sync_ce(layer("ce"), group))
    module = convert_sync_ce(layer("ce"), group)
    copied = copy.deepcopy(module)
    y = copied(images(4).split(2)[rank]).detach()
    return {"y": y, "pickle": _sync.error_of(lambda: pickle.dumps(module))}


def small(rank: int) -> dict[str, Any]:
    """One pixel per rank, one pixel on one rank only, and nothing anywhere."""
    results = {}
    for name, n in (("one each", 1), ("one in all", 1 - rank), ("none", 0)):
        module = convert_sync_ce(layer("bn+bd"))
        x = images(2, 1, 1)[rank : rank + n].requires_grad_()
        y = module(x)
        y.sum().backward()
        grads = {key: p.grad for key, p in module.named_parameters()}
        results[name] = {"y": y.detach(), "grads": grads, "buffers": dict(module.named_buffers())}
    results["one pixel"] = _sync.error_of(lambda: convert_sync_ce(layer("ce"))(images(2, 1, 1)))
    return results


def edges(rank: int) -> dict[str, Any]:
    """What else a synchronized layer is asked to do on two ranks."""
    results: dict[str, Any] = {}
    x, weights = images(4).split(2)[rank], images(4, seed=100).split(2)[rank]
    results["second"] = _sync.second_derivative(convert_sync_ce(layer("bn+ce")), x, weights)
    for reentrant in (True, False):
        module = convert_sync_ce(layer("bn+ce"))
        results["checkpoint", reentrant] = _sync.checkpointed(
            module, x, weights, reentrant=reentrant
        )
    module = convert_sync_ce(layer("bn+ce")).float()
    plain = copy.deepcopy(module)(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        results["autocast"] = torch.equal(module(x.float()), plain)
    # rank 0 alone: it would wait for rank 1, which has gone on
    if rank == 0:
        module.eval()(x.float())
        reverted = revert_sync_ce(module.train())
        reverted(x.float())
    hooked = convert_sync_ce(layer("bn+ce"))
    hooked.norm.register_forward_hook(lambda *_: None)
    results["hook"] = _sync.error_of(lambda: hooked(x))
    with ops.backend("triton"):
        results["triton"] = _sync.error_of(lambda: convert_sync_ce(layer("ce"))(x.float()))
    module = convert_sync_ce(layer("bn+ce"))
    update_ce_stats(module, [x, x + 1])
    results["update"] = dict(module.named_buffers())
    # a norm that is synchronized with other ranks than CE runs by itself, which gloo cannot
    own = [dist.new_group([other]) for other in range(2)][rank]
    module = convert_sync_ce(layer("syncbn+ce"))
    module.norm.process_group = own
    results["other group"] = _sync.error_of(lambda: module(x))
    return results


@cache
def together(ranks: int) -> list[dict[str, Any]]:
    return once(f"work-{ranks}", lambda: run(work, ranks, ranks))


def over_ranks(results: list[dict[str, Any]]) -> dict[str, Any]:
    """What one process would have had: outputs side by side, gradients summed."""
    first, *others = results
    for other in others:
        for name, buffer in first["buffers"].items():
            assert torch.equal(other["buffers"][name], buffer), f"{name} differs between ranks"
    names = first["grads"]
    grads = {n: [r["grads"][n] for r in results if r["grads"][n] is not None] for n in names}
    return {
        "y": torch.cat([result["y"] for result in results]),
        "x.grad": torch.cat([result["x.grad"] for result in results]),
        "grads": {name: torch.stack(parts).sum(0) for name, parts in grads.items()},
        "buffers": first["buffers"],
    }


def assert_same(actual: dict[str, Any], expected: dict[str, Any], rtol: float = EXACT) -> None:
    for name in ("y", "x.grad"):
        assert_close(name, actual[name], expected[name], rtol)
    for kind in ("grads", "buffers"):
        assert actual[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            assert_close(name, actual[kind][name].double(), value.double(), rtol)


@pytest.mark.parametrize("ranks", EACH_SIZE)
@pytest.mark.parametrize("name", LAYERS)
def test_ranks_equal_one_process(ranks, name):
    for split in SPLITS[ranks].values():
        results = [result["split", name, split] for result in together(ranks)]
        assert_same(over_ranks(results), _sync.alone(name, split))


def largest_error(results: list[dict[str, Any]], expected: dict[str, Any]) -> float:
    errors = [
        relative_error(result[own], value)
        for own, all_ranks in (("y", "ys"), ("x.grad", "x.grads"))
        for result, value in zip(results, expected[all_ranks], strict=True)
    ]
    for name, value in expected["grads"].items():
        errors.append(relative_error(sum(result["grads"][name] for result in results), value))
    return max(errors)


@pytest.mark.parametrize("ranks", EACH_SIZE)
@pytest.mark.parametrize("name", BLOCKS)
def test_images_of_different_sizes_equal_the_list_of_images(ranks, name):
    expected, statistics = _sync.mixed_reference(ranks, name)
    results = [result["mixed", name] for result in together(ranks)]
    assert largest_error(results, expected) <= EXACT
    start = dict(layer(name).named_buffers())
    for result in results:
        buffers = result["buffers"]
        mean = 0.1 * statistics.mean
        var = 0.9 * start["norm.running_var"] + 0.1 * statistics.unbiased_var
        assert_close("running_mean", buffers["norm.running_mean"], mean, EXACT)
        assert_close("running_var", buffers["norm.running_var"], var, EXACT)
        assert_close("inv_std", buffers["ce.ir.running_inv_std"], statistics.inv_std, EXACT)
        for own, value in zip(buffers["ce.bd.running_inv_sqrt"], statistics.inv_sqrt, strict=True):
            assert_close("inv_sqrt", own[: len(value), : len(value)], value, EXACT)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_comparison_notices(mutation):
    expected, _ = _sync.mixed_reference(2, "pool")
    results = [result["mutation", mutation] for result in together(2)]
    assert largest_error(results, expected) > 1e-4


@pytest.mark.parametrize("ranks", EACH_SIZE)
def test_five_steps_of_ddp_equal_five_steps_of_one_process(ranks):
    model = _sync.network()
    _sync.train(model, sum(SPLITS[ranks]["unequal"]), lambda whole: whole, scale=1)
    for result in together(ranks):
        for name, value in model.state_dict().items():
            assert_close(name, result["ddp"][name].double(), value.double(), 1e-9)


@pytest.mark.parametrize("name", LAYERS)
def test_one_collective_each_way_and_none_in_evaluation(name):
    for result in together(2):
        counts = result["counts"][name]
        assert counts["forward"] == ["all_gather_into_tensor"]
        assert counts["backward"] == ["reduce_scatter_tensor"]
        assert counts["evaluation"] == []


def test_one_pixel_per_rank_is_enough_for_decorrelation():
    results = [result["small"]["one each"] for result in together(2)]
    block = layer("bn+bd")
    expected = block(images(2, 1, 1)).detach()
    assert_close("y", torch.cat([result["y"] for result in results]), expected, EXACT)
    for name, buffer in block.named_buffers():
        assert_close(name, results[0]["buffers"][name].double(), buffer.double(), EXACT)


def test_one_value_in_all_is_not_counted_by_the_norm():
    before = dict(layer("bn+bd").norm.named_buffers())
    for result in together(2):
        result = result["small"]["one in all"]
        assert all(buffer.isfinite().all() for buffer in result["buffers"].values())
        assert all(torch.equal(result["buffers"][f"norm.{n}"], b) for n, b in before.items())
        assert result["y"].isfinite().all()


def test_without_images_anywhere_nothing_changes():
    before = dict(layer("bn+bd").named_buffers())
    for result in together(2):
        result = result["small"]["none"]
        assert result["y"].shape == (0, 24, 1, 1)
        assert all(torch.equal(result["buffers"][name], before[name]) for name in before)
        assert all(grad.eq(0).all() for grad in result["grads"].values())


def test_one_pixel_is_still_refused_by_reweighting():
    for result in together(2):
        assert "instance variance" in result["small"]["one pixel"]


def test_second_derivatives():
    x, weights = images(4), images(4, seed=100)
    expected = _sync.second_derivative(layer("bn+ce"), x, weights)
    actual = torch.cat([result["edge"]["second"] for result in together(2)])
    assert_close("second derivative", actual, expected, 1e-9)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    x, weights = images(4), images(4, seed=100)
    block = layer("bn+ce")
    expected = _sync.steps(block, [x], weights)
    results = [result["edge"]["checkpoint", reentrant] for result in together(2)]
    assert_close("x.grad", torch.cat([grad for grad, _ in results]), expected["x.grad"], EXACT)
    for _, buffers in results:
        for name, value in expected["buffers"].items():
            assert_close(name, buffers[name].double(), value.double(), EXACT)


def test_autocast_changes_nothing():
    assert all(result["edge"]["autocast"] for result in together(2))


def test_recalibration_is_over_all_ranks():
    block = layer("bn+ce")
    update_ce_stats(block, [images(4), images(4) + 1])
    for result in together(2):
        for name, value in block.named_buffers():
            assert_close(name, result["edge"]["update"][name].double(), value.double(), EXACT)


def test_errors_on_ranks_say_what_to_do():
    for result in together(2):
        assert "remove the hooks" in result["edge"]["hook"]
        assert "the kernels run on CUDA tensors, not on cpu" in result["edge"]["triton"]
        assert "SyncBatchNorm expected input tensor to be on GPU" in result["edge"]["other group"]


@pytest.mark.slow
def test_a_group_of_some_ranks():
    first, second, outside = (result["subgroup"] for result in together(3))
    expected = layer("ce")(images(4)).detach()
    assert_close("y", torch.cat([first["y"], second["y"]]), expected, EXACT)
    assert "revert_sync_ce" in first["pickle"]
    assert outside.startswith("TypeError: process_group=")


@pytest.mark.parametrize(
    "name",
    ["bd", *(pytest.param(n, marks=pytest.mark.slow) for n in ("bn+ce", "syncbn+pool", "ir"))],
)
def test_compiles_to_one_graph(name):
    for result in run(_sync.compiled, 2, name):
        eager, compiled = result["eager"], result["compiled"]
        assert_same({"grads": {}, **compiled}, {"grads": {}, **eager})


def die_or_wait(rank: int, folder: str) -> None:
    """Rank 1 is killed between two steps."""
    with joined(rank, 2, folder, timedelta(minutes=30)):
        module = convert_sync_ce(layer("bn+ce"))
        module(images(2)).sum().backward()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        error = _sync.error_of(lambda: module(images(2)))
        Path(folder, "error").write_text(error)


def test_a_killed_rank_ends_the_others_with_an_error():
    with tempfile.TemporaryDirectory() as folder:
        processes = [SERVER.Process(target=die_or_wait, args=(r, folder)) for r in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert not any(process.is_alive() for process in processes)
        # long before the group would give up
        assert "Error" in Path(folder, "error").read_text().split(":")[0]


def places(model):
    """Keys of the state dict, and where the tensors are; extra state is made anew each time."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return list(model.state_dict()), {name: value.data_ptr() for name, value in tensors.items()}


def test_conversion_keeps_parameters_and_keys():
    model = nn.Sequential(nn.Conv2d(3, 24, 3), layer("bn+ce"), layer("ce"), layer("gn+ce"))
    before = places(model)
    model[2].freeze()
    assert convert_sync_ce(model) is model
    assert "24, frozen, synchronized" in repr(model)
    assert repr(model).count("synchronized") == 3
    assert before == places(model)
    assert revert_sync_ce(model) is model
    assert "synchronized" not in repr(model)
    assert model[2].frozen
    assert before == places(model)


@pytest.mark.parametrize("ce_first", [True, False])
def test_torch_may_convert_the_norms_before_or_after(ce_first):
    model = nn.Sequential(layer("bn+ce"), nn.BatchNorm2d(24))
    edits = [convert_sync_ce, nn.SyncBatchNorm.convert_sync_batchnorm]
    for edit in edits if ce_first else reversed(edits):
        model = edit(model)
    assert type(model[0].norm) is type(model[1]) is nn.SyncBatchNorm
    assert model[0].ce.sync is not None
    revert_sync_ce(model)
    assert type(model[0].norm) is nn.SyncBatchNorm


@pytest.mark.parametrize("name", LAYERS)
def test_a_single_process_is_the_unsynchronized_layer(name):
    plain, module = layer(name), convert_sync_ce(layer(name))
    x, weights = images(3), images(3, seed=1)
    expected = _sync.steps(plain, [x], weights)
    actual = _sync.steps(module, [x], weights)
    assert torch.equal(actual["y"], expected["y"])
    assert torch.equal(actual["x.grad"], expected["x.grad"])
    assert torch.equal(module(x[:0]), x[:0])


def test_copies_and_pickles_stay_synchronized():
    module = convert_sync_ce(layer("bn+ce"))
    assert copy.deepcopy(module).ce.sync is module.ce.sync
    assert pickle.loads(pickle.dumps(module)).ce.sync.process_group is None


def test_nothing_to_convert_is_an_error():
    with pytest.raises(ValueError, match="insert_ce_ puts them in"):
        convert_sync_ce(nn.Sequential(nn.BatchNorm2d(4)))
    with pytest.raises(ValueError, match="convert_sync_ce makes them"):
        revert_sync_ce(layer("ce"))
    with pytest.raises(TypeError, match="expected a module, got str"):
        convert_sync_ce("resnet50")
    with pytest.raises(TypeError, match="process_group='gloo' is not a process group"):
        convert_sync_ce(layer("ce"), "gloo")
    assert SyncGroup().ranks() is None


@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        # three counts; mean; one triangle per group; variances of images
        (ChannelEquilibrium2d(64), 3 + 64 + 4 * 136 + 64),
        (BatchDecorrelation2d(64), 3 + 64 + 4 * 136),
        (InstanceReweighting2d(64), 3 + 64),
        # without pooling the norm's mean and variance are in the covariance
        (NormCE2d(nn.BatchNorm2d(64), ChannelEquilibrium2d(64)), 3 + 64 + 4 * 136 + 64),
        (NormCE2d(nn.BatchNorm2d(64), ChannelEquilibrium2d(64, pool=2)), 3 + 4 * 64 + 4 * 136),
        (NormCE2d(nn.BatchNorm2d(64), InstanceReweighting2d(64)), 3 + 3 * 64),
        (NormCE2d(nn.GroupNorm(2, 64), InstanceReweighting2d(64)), 3 + 64),
        (ChannelEquilibrium2d(58), 3 + 58 + 4 * 136 + 58),
    ],
    ids=lambda value: "" if isinstance(value, int) else type(value).__name__,
)
def test_bytes_of_a_message(module, numbers):
    assert sync_bytes(nn.Sequential(module, nn.Conv2d(3, 3, 1))) == 4 * numbers


def test_the_table_of_the_documentation_is_computed():
    import timm

    import cenet.models  # noqa: F401

    page = Path(__file__).parents[2] / "docs" / "scaling.md"
    rows = [
        row.split("|")[1:-1] for row in page.read_text().splitlines() if row.startswith("| `ce")
    ]
    assert len(rows) == 6
    for name, layers, numbers, megabytes, *traffic in rows:
        with torch.device("meta"):
            model = timm.create_model(name.strip(" `"))
        b, gradients = sync_bytes(model), 4 * sum(p.numel() for p in model.parameters())
        assert int(layers) == len(list(ce_layers(model)))
        assert int(numbers) == b
        assert float(megabytes) == pytest.approx(gradients / 1e6, abs=0.05)
        for ranks, cell in zip((8, 64, 1024), traffic, strict=True):
            own, other = map(float, cell.split("/"))
            assert own == pytest.approx(2 * (ranks - 1) * b / 1e6, abs=0.05)
            assert other == pytest.approx(2 * (ranks - 1) / ranks * gradients / 1e6, abs=0.05)


def test_bytes_leave_out_frozen_layers():
    module = nn.Sequential(ChannelEquilibrium2d(64), ChannelEquilibrium2d(64))
    both = sync_bytes(module)
    module[0].freeze()
    assert sync_bytes(module) == both // 2


def test_the_mean_of_all_ranks_does_not_depend_on_the_center_of_one():
    """It enters running statistics, which must stay equal bit for bit."""
    layout = Layout(24, 16, pool=1, norm=True, instance=True)
    generator = torch.Generator().manual_seed(0)
    messages = torch.rand(3, layout.size(), generator=generator)
    centers = 1e3 * torch.rand(2, 24, generator=generator)
    alone, *others = (merge(messages, layout, c) for c in (None, *centers))
    for center, found in zip(centers, others, strict=True):
        assert torch.equal(found.mean, alone.mean)
        assert torch.equal(found.centered_mean, alone.mean - center)
