"""A layer saved by the authors' released code, loaded into ours, against that code's outputs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, load, save

from _checks import assert_close, version_1
from cenet import ChannelEquilibrium2d, insert_ce_, load_released_ce_
from cenet.checkpoints import RELEASED_KEYS, is_state
from cenet.export import load_weights_

# produced by running the released layer in float64: 48 channels, groups of 16, five training steps
RECORDED = load_file(Path(__file__).parent / "fixtures" / "released_ce_c48_g16.safetensors")


def state():
    return {k.removeprefix("state."): v for k, v in RECORDED.items() if k.startswith("state.")}


def loaded(dtype):
    layer = ChannelEquilibrium2d(48, dtype=dtype)
    load_released_ce_(layer, state())
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_evaluation_matches_the_released_layer(dtype):
    layer = loaded(dtype).eval()
    assert_close("y", layer(RECORDED["eval.x"].to(dtype)), RECORDED["eval.y"], 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_matches_the_released_layer(dtype):
    layer = loaded(dtype)
    x = RECORDED["train.x"].to(dtype, copy=True).requires_grad_()
    y = layer(x)
    y.backward(RECORDED["train.gy"].to(dtype))
    assert_close("y", y, RECORDED["train.y"], 1e-4)
    assert_close("x.grad", x.grad, RECORDED["train.gx"], 1e-4)
    own = dict(layer.named_parameters())
    for key, name in RELEASED_KEYS.items():
        if f"train.grad.{key}" in RECORDED:
            expected = RECORDED[f"train.grad.{key}"].reshape(own[name].shape)
            assert_close(key, own[name].grad, expected, 1e-4)


def test_without_the_released_variant_the_training_output_differs():
    layer = loaded(torch.float64)
    layer.ir.released = False
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("y", layer(RECORDED["train.x"]), RECORDED["train.y"], 1e-4)


def test_first_batch_after_loading_does_not_overwrite():
    layer = loaded(torch.float64)
    before = layer.bd.running_inv_sqrt.clone()
    layer(RECORDED["train.x"])
    fresh = ChannelEquilibrium2d(48, dtype=torch.float64)
    fresh(RECORDED["train.x"])
    expected = before + 0.1 * (fresh.bd.running_inv_sqrt - before)
    assert_close("W", layer.bd.running_inv_sqrt, expected, 1e-12)
    assert layer.ir.num_batches_tracked == layer.bd.num_batches_tracked == 11


def test_the_variant_is_part_of_the_state():
    layer = loaded(torch.float64)
    twin = ChannelEquilibrium2d(48, dtype=torch.float64)
    assert twin.state_dict().keys() == layer.state_dict().keys()
    assert is_state(layer.state_dict())
    twin.load_state_dict(layer.state_dict())
    assert twin.ir.released
    assert torch.equal(twin(RECORDED["train.x"]), layer(RECORDED["train.x"]))
    twin.load_state_dict(ChannelEquilibrium2d(48).state_dict())
    assert not twin.ir.released
    incomplete = layer.state_dict()
    assert incomplete._metadata["ir"]["version"] == 2
    del incomplete["ir._extra_state"]
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"ir._extra_state"):
        twin.load_state_dict(incomplete)


@pytest.mark.parametrize("way", ["load_state_dict", "pth", "safetensors"])
@pytest.mark.parametrize("released", [False, True])
def test_states_written_before_version_2_load(tmp_path, released, way):
    network = nn.Sequential(nn.BatchNorm2d(48), loaded(torch.float64)).eval()
    network[1].ir.released = released
    old = version_1(network.state_dict())
    assert ("1.ir.released" in old) == released
    twin = nn.Sequential(nn.BatchNorm2d(48), ChannelEquilibrium2d(48, dtype=torch.float64)).eval()
    twin[1].ir.released = not released
    if way == "load_state_dict":
        assert old._metadata["1.ir"]["version"] == 1
        twin.load_state_dict(old)
    elif way == "pth":
        torch.save(old, tmp_path / "old.pth")
        load_weights_(twin, tmp_path / "old.pth")
    else:
        save_file(dict(old), tmp_path / "old.safetensors")
        load_weights_(twin, tmp_path / "old.safetensors")
    assert twin[1].ir.released == released
    x = RECORDED["eval.x"].float()
    assert torch.equal(twin(x), network(x))


@pytest.mark.parametrize("layout", [dict, version_1], ids=["version 2", "version 1"])
def test_a_state_loads_where_meta_is_the_default_device(layout):
    layer = loaded(torch.float32)
    layer.ir.released = layout is dict
    with torch.device("meta"):
        twin = ChannelEquilibrium2d(48)
        twin.load_state_dict(layout(layer.state_dict()), assign=True)
    assert twin.ir.released == layer.ir.released
    x = RECORDED["eval.x"].float()
    assert torch.equal(twin.eval()(x), layer.eval()(x))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_checkpoints_written_before_version_2_load(tmp_path):
    layer, twin = loaded(torch.float32), ChannelEquilibrium2d(48)
    layer.ir.released = False
    save(version_1(layer.state_dict()), checkpoint_id=tmp_path)
    state = twin.state_dict()
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load(state, checkpoint_id=tmp_path, planner=planner)
    twin.load_state_dict(state)
    x = RECORDED["eval.x"].float()
    assert torch.equal(twin.eval()(x), layer.eval()(x))


def test_a_state_without_ce_lacks_all_of_it():
    network = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU())
    plain = network.state_dict()
    insert_ce_(network)
    missing, unexpected = network.load_state_dict(plain, strict=False)
    assert not unexpected
    assert "1.ce.ir._extra_state" in missing
    assert all(key.startswith("1.ce.") for key in missing)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_weight": None}, "missing key x_weight"),
        ({"x_weight": 0.5}, "x_weight is 0.5, not a tensor"),
        ({"extra": torch.zeros(1)}, "unknown key extra"),
        ({"AR.fc.0.weight": torch.zeros(12, 40)}, r"AR.fc.0.weight is \(12, 40\), the layer has"),
        ({"running_wm": torch.full((3, 16, 16), torch.nan)}, "running_wm is not finite"),
        ({"AR.running_scale": torch.zeros(1)}, "AR.running_scale=0.0 must be positive"),
    ],
    ids=str,
)
def test_a_foreign_state_is_refused_whole(change, message):
    bad = {k: v for k, v in {**state(), **change}.items() if v is not None}
    layer = ChannelEquilibrium2d(48)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_released_ce_(layer, bad)
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())
    assert not layer.ir.released


def test_wrong_group_size_is_named():
    with pytest.raises(ValueError, match=r"groups of 8: running_wm is \(3, 16, 16\)"):
        load_released_ce_(ChannelEquilibrium2d(48, group_size=8), state())


def test_a_state_that_is_none_is_named():
    with pytest.raises(ValueError, match=r"state is 0\.5, not a state dict; read it with"):
        load_released_ce_(ChannelEquilibrium2d(48), 0.5)
