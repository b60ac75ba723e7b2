"""The boring half of every layer: construction, state, modes, copies, and what it refuses."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from _checks import assert_close, relative_error
from cenet import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
    NormCE2d,
    freeze_ce_,
    unfreeze_ce_,
    update_ce_stats,
)
from cenet.baselines import IterNorm2d, SwitchableNorm2d, SwitchableWhitening2d

LAYERS = {
    "ce": ChannelEquilibrium2d,
    "bd": BatchDecorrelation2d,
    "ir": InstanceReweighting2d,
    "bn+ce": lambda c, **kw: NormCE2d(nn.BatchNorm2d(c, **kw), ChannelEquilibrium2d(c, **kw)),
    "bn+bd+relu": lambda c, **kw: NormCE2d(
        nn.BatchNorm2d(c, **kw), BatchDecorrelation2d(c, **kw), nn.ReLU()
    ),
    "gn+ce": lambda c, **kw: NormCE2d(nn.GroupNorm(2, c, **kw), ChannelEquilibrium2d(c, **kw)),
}
each_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def images(n=4, c=24, h=5, w=6, seed=0, **kwargs):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, c, h, w, generator=generator).add(0.3).to(**kwargs)


def buffers(layer):
    return {name: value.clone() for name, value in layer.named_buffers()}


def trained(make, steps=3):
    torch.manual_seed(0)
    layer = make(24)
    for seed in range(steps):
        layer(images(seed=seed))
    return layer


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@each_layer
def test_repr_names_channels_and_groups(make):
    text = repr(make(58))
    assert "58" in text
    assert "groups=3x16+10" in text or make is InstanceReweighting2d


def test_repr_shows_what_differs_from_the_paper():
    assert "pool=2" in repr(ChannelEquilibrium2d(64, pool=2))
    frozen = ChannelEquilibrium2d(64)
    frozen.freeze()
    assert "frozen" in repr(frozen)


@each_layer
def test_copies_and_pickles_behave_alike(make):
    layer = trained(make)
    x = images(seed=9)
    stream = io.BytesIO()
    torch.save(layer, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert torch.equal(twin.eval()(x), copy.deepcopy(layer).eval()(x))
        assert torch.equal(twin.train()(x), copy.deepcopy(layer)(x))


@each_layer
def test_state_dict_round_trip(make):
    layer = trained(make)
    fresh = make(24)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh.eval()(images()), layer.eval()(images()))
    assert all(value.is_contiguous() for value in layer.state_dict().values())


@each_layer
def test_every_buffer_owns_its_storage(make):
    for buffer in make(24).buffers():
        assert buffer.untyped_storage().nbytes() >= buffer.numel() * buffer.element_size()


@each_layer
def test_device_and_dtype_arguments(make):
    layer = make(24, device="meta", dtype=torch.float64)
    tensors = [*layer.parameters(), *layer.buffers()]
    assert all(tensor.is_meta for tensor in tensors)
    assert {t.dtype for t in tensors if t.is_floating_point()} == {torch.float64}
    assert layer(images(device="meta", dtype=torch.float64)).shape == (4, 24, 5, 6)


def test_meta_layer_materializes_through_reset_parameters():
    torch.manual_seed(0)
    layer = ChannelEquilibrium2d(24, device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    torch.manual_seed(0)
    assert same(dict(layer.state_dict()), dict(ChannelEquilibrium2d(24).state_dict()))


@each_layer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_layer_converted_to_another_dtype_still_runs(make, dtype):
    layer = trained(make)
    x = images(seed=5)
    expected = copy.deepcopy(layer)(x)
    converted = layer.to(dtype)
    y = converted(x.to(dtype))
    assert y.dtype == dtype
    assert relative_error(y, expected) < {torch.float64: 1e-5}.get(dtype, 2e-2)
    assert converted.eval()(x.to(dtype)).isfinite().all()


@each_layer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_stay_float32_under_autocast_and_half_input(make, dtype):
    layer = make(24)
    twin = copy.deepcopy(layer)
    x = images(dtype=dtype)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    twin(x.float())
    assert {b.dtype for b in layer.buffers() if b.is_floating_point()} == {torch.float32}
    if "GroupNorm" not in repr(layer):
        assert y.dtype == dtype
        for name, value in buffers(twin).items():
            assert_close(name, buffers(layer)[name].double(), value.double(), 1e-6)


@each_layer
def test_channels_last_is_kept(make):
    x = images(c=32, h=6, w=6).contiguous(memory_format=torch.channels_last)
    for c, layer in ((32, make(32)), (32, make(32).eval())):
        y = layer(x)
        assert y.is_contiguous(memory_format=torch.channels_last), c
        assert not y.is_contiguous()


@each_layer
def test_evaluation_before_any_training_step(make):
    layer = make(24).eval()
    before = buffers(layer)
    y = layer(images())
    assert y.isfinite().all()
    assert y.abs().max() < 20
    assert same(before, buffers(layer))


@each_layer
def test_evaluation_is_per_sample_in_any_order(make):
    layer = trained(make).eval()
    x = images(n=7, seed=3)
    together = layer(x)
    singles = torch.cat([layer(sample[None]) for sample in x])
    assert_close("singletons", singles, together, 1e-6)
    order = torch.tensor([3, 1, 6, 0, 5, 2, 4])
    assert_close("shuffled", layer(x[order]), together[order], 1e-6)


@each_layer
@pytest.mark.parametrize("training", [True, False])
def test_empty_batch_passes_through_and_touches_no_buffer(make, training):
    layer = trained(make).train(training)
    before = buffers(layer)
    x = images(n=0).requires_grad_()
    y = layer(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert same(before, buffers(layer))


@pytest.mark.parametrize("name", ["ce", "ir", "bn+ce", "gn+ce"])
def test_one_pixel_is_refused_in_training_and_accepted_in_evaluation(name):
    layer = LAYERS[name](24)
    if name != "gn+ce":
        with pytest.raises(ValueError, match="more than 1 spatial value per channel"):
            layer(images(h=1, w=1))
    assert layer.eval()(images(h=1, w=1)).isfinite().all()
    layer.train()
    freeze_ce_(layer)
    assert layer(images(h=1, w=1)).isfinite().all()


def test_decorrelation_alone_accepts_one_pixel_but_not_one_value():
    layer = BatchDecorrelation2d(24)
    assert layer(images(h=1, w=1)).isfinite().all()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(images(n=1, h=1, w=1))
    pooled = BatchDecorrelation2d(24, pool=2)
    with pytest.raises(ValueError, match="after 2×2 pooling"):
        pooled(images(n=1, h=2, w=2))
    frozen = NormCE2d(nn.BatchNorm2d(24), BatchDecorrelation2d(24))
    freeze_ce_(frozen)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        frozen(images(n=1, h=1, w=1))


@each_layer
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_non_finite_batch_never_enters_a_buffer(make, bad):
    layer = trained(make)
    if bad == 1e30 and "GroupNorm" in repr(layer):
        pytest.skip("group norm makes it finite")
    before = buffers(layer)
    x = images()
    x[1, 2, 0, 0] = bad
    layer(x)
    assert same(before, buffers(layer))
    layer(images(seed=8))
    after = buffers(layer)
    assert not same(before, after)
    assert all(value.isfinite().all() for value in after.values())


@each_layer
def test_a_first_batch_that_is_not_finite_leaves_the_initial_values(make):
    layer = trained(make, steps=0)
    before = buffers(layer)
    layer(images() * torch.nan)
    assert same(before, buffers(layer))


@pytest.mark.parametrize("name", ["ce", "bd", "ir"])
@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0, None])
def test_running_average_has_no_trace_of_its_start(name, momentum):
    layer = LAYERS[name](24, momentum=momentum)
    fresh = copy.deepcopy(layer)
    expected = None
    for seed in range(12):
        x = images(seed=seed)
        layer(x)
        fresh.reset_running_stats()
        fresh(x)  # after one batch, the average is that batch
        batch = {n: v.double() for n, v in buffers(fresh).items() if v.is_floating_point()}
        weight = max(momentum or 0.0, 1 / (seed + 1))
        expected = (
            batch
            if expected is None
            else {n: v + weight * (batch[n] - v) for n, v in expected.items()}
        )
    for n, v in expected.items():
        assert_close(n, buffers(layer)[n], v, 1e-5)
    assert all(b == 12 for n, b in layer.named_buffers() if n.endswith("num_batches_tracked"))


@each_layer
def test_buffers_are_updated_in_place(make):
    layer = make(24)
    addresses = {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}
    for seed in range(3):
        layer(images(seed=seed))
    layer.eval()(images())
    assert addresses == {name: buffer.data_ptr() for name, buffer in layer.named_buffers()}


@pytest.mark.parametrize("momentum", [0.1, 0.3, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("track", [True, False])
def test_batch_norm_inside_keeps_its_own_statistics(momentum, affine, track):
    options = {"momentum": momentum, "affine": affine, "track_running_stats": track, "eps": 1e-3}
    norm = nn.BatchNorm2d(24, **options)
    alone = copy.deepcopy(norm)
    wrapped = NormCE2d(norm, ChannelEquilibrium2d(24))
    ce = copy.deepcopy(wrapped.ce)
    for seed in range(4):
        x = images(seed=seed)
        assert_close("y", wrapped(x), ce(alone(x)), 1e-5)
        for name, value in buffers(alone).items():
            assert_close(name, buffers(norm)[name].double(), value.double(), 1e-6)
    wrapped.eval()
    assert_close("y", wrapped(images(seed=9)), ce.eval()(alone.eval()(images(seed=9))), 1e-5)


@pytest.mark.parametrize("norm_training", [True, False])
@pytest.mark.parametrize("ce_training", [True, False])
@pytest.mark.parametrize("name", ["bn+ce", "bn+bd+relu"])
def test_norm_and_ce_may_be_in_different_modes(norm_training, ce_training, name):
    wrapped = trained(LAYERS[name])
    wrapped.act = None
    norm, ce = copy.deepcopy(wrapped.norm), copy.deepcopy(wrapped.ce)
    for module in (norm, wrapped.norm):
        module.train(norm_training)
    for module in (ce, wrapped.ce):
        module.train(ce_training)
    x = images(seed=7)
    assert_close("y", wrapped(x), ce(norm(x)), 1e-5)
    for name, value in {**buffers(norm), **buffers(ce)}.items():
        own = {**buffers(wrapped.norm), **buffers(wrapped.ce)}[name]
        assert_close(name, own.double(), value.double(), 1e-6)


def test_frozen_batch_norm_and_hooked_norm_inside():
    from torchvision.ops import FrozenBatchNorm2d

    frozen = FrozenBatchNorm2d(24)
    frozen.weight.uniform_(0.5, 1.5)
    frozen.running_mean.normal_()
    wrapped = NormCE2d(frozen, ChannelEquilibrium2d(24))
    twin = copy.deepcopy(wrapped)
    assert_close("y", wrapped(images()), twin.ce(twin.norm(images())), 1e-5)
    hooked = LAYERS["bn+ce"](24)
    seen = []
    hooked.norm.register_forward_pre_hook(lambda *_: seen.append("norm"))
    hooked(images())
    hooked.ce.register_forward_hook(lambda *_: seen.append("ce"))
    hooked(images())
    assert seen == ["norm", "norm", "ce"]


@each_layer
def test_freeze_survives_train_and_copies(make):
    layer = trained(make)
    ce = layer.ce if isinstance(layer, NormCE2d) else layer
    freeze_ce_(layer)
    frozen = buffers(ce)
    layer.train()
    for twin in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        twin.train()(images(seed=5))
        own = twin.ce if isinstance(twin, NormCE2d) else twin
        assert same(frozen, buffers(own))
        assert not any(parameter.requires_grad for parameter in own.parameters())
    unfreeze_ce_(layer)
    layer.train()(images(seed=5))
    assert not same(frozen, buffers(ce))
    assert all(parameter.requires_grad for parameter in ce.parameters())


def test_unfreeze_leaves_what_was_frozen_before():
    layer = ChannelEquilibrium2d(24)
    layer.mix_logit.requires_grad_(False)
    layer.freeze()
    layer.freeze()
    layer.unfreeze()
    trainable = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert trainable == {"ir.fc1.weight", "ir.norm.weight", "ir.norm.bias", "ir.fc2.weight"}


def test_frozen_layer_in_training_uses_its_running_statistics():
    layer = trained(ChannelEquilibrium2d)
    expected = copy.deepcopy(layer).eval()(images(seed=4))
    layer.freeze()
    assert torch.equal(layer.train()(images(seed=4)), expected)


@each_layer
def test_two_forwards_then_one_backward(make):
    layer = make(24)
    x, z = images(seed=1).requires_grad_(), images(seed=2).requires_grad_()
    (layer(x).square().mean() + layer(z).square().mean()).backward()
    layer.eval()
    y = layer(x)
    layer.train()(z)  # changes the buffers the evaluation above read
    y.square().mean().backward()
    assert x.grad.isfinite().all()


@each_layer
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_updates_statistics_once(make, reentrant):
    layer, twin = make(24), make(24)
    twin.load_state_dict(layer.state_dict())
    x = images().requires_grad_()
    z = images().requires_grad_()
    checkpoint(layer, x, use_reentrant=reentrant).square().mean().backward()
    twin(z).square().mean().backward()
    assert same(buffers(layer), buffers(twin))
    assert_close("gradient", x.grad, z.grad.double(), 1e-6)


@each_layer
def test_reset_gives_a_fresh_layer(make):
    layer = trained(make)
    ce = layer.ce if isinstance(layer, NormCE2d) else layer
    fresh = type(ce)(24)
    ce.reset_running_stats()
    assert same(buffers(ce), buffers(fresh))


def test_identity_start_is_the_norm_until_alpha_moves():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(24)
    nn.init.normal_(norm.weight)
    alone = copy.deepcopy(norm)
    for make in (ChannelEquilibrium2d, BatchDecorrelation2d, InstanceReweighting2d):
        block = NormCE2d(copy.deepcopy(norm), make(24), nn.ReLU(), start="identity")
        x = images()
        expected = copy.deepcopy(alone)(x).relu()
        assert_close("identity", block(x), expected, 1e-6)
        block(x).sum().backward()
        assert all(parameter.grad is not None for parameter in block.parameters())
        assert block.ce.blend.grad.abs() > 0
        paper = NormCE2d(copy.deepcopy(norm), make(24), nn.ReLU())  # it has no α
        state = block.ce.state_dict()
        paper.ce.load_state_dict({name: state[name] for name in state if name != "blend"})
        with torch.no_grad():
            block.ce.blend.fill_(0.3)
            halfway = block(x)
            block.ce.blend.fill_(1.0)
            assert_close("α = 1", block(x), paper(x), 1e-6)
        assert relative_error(halfway, expected) > 1e-3


def test_lambda_starts_at_one_half():
    assert ChannelEquilibrium2d(16).mix == 0.5


def test_update_ce_stats_is_the_plain_average_in_evaluation_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 24, 3), LAYERS["bn+ce"](24), nn.Dropout(0.9))
    for seed in range(5):
        model(images(c=3, seed=seed))
    norm_before = buffers(model[1].norm)
    modes = [module.training for module in model.modules()]
    batches = [images(c=3, seed=100 + seed) for seed in range(6)]
    assert update_ce_stats(model, [(x, None) for x in batches]) == 6
    assert modes == [module.training for module in model.modules()]
    assert same(norm_before, buffers(model[1].norm))
    assert model[1].ce.bd.momentum == 0.1

    block = copy.deepcopy(model[1])
    block.norm.eval()
    totals = []
    for x in batches:
        block.ce.reset_running_stats()
        block(model[0](x))
        totals.append(buffers(block.ce))
    for name in ("bd.running_inv_sqrt", "ir.running_inv_std"):
        mean = torch.stack([total[name].double() for total in totals]).mean(0)
        assert_close(name, buffers(model[1].ce)[name], mean, 1e-5)


def test_update_ce_stats_loses_nothing_when_it_fails():
    model = nn.Sequential(LAYERS["bn+ce"](24))
    model(images())
    before = buffers(model)

    def broken():
        yield images(seed=1)
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        update_ce_stats(model, broken())
    assert same(before, buffers(model))
    with pytest.raises(ValueError, match="no batch"):
        update_ce_stats(model, [])
    assert same(before, buffers(model))
    assert update_ce_stats(model, (images(seed=s) for s in range(9)), num_batches=2) == 2
    with pytest.raises(ValueError, match="num_batches=0"):
        update_ce_stats(model, [images()], num_batches=0)
    freeze_ce_(model)
    with pytest.raises(ValueError, match="only frozen CE layers; unfreeze_ce_ them"):
        update_ce_stats(model, [images()])
    with pytest.raises(ValueError, match="has no CE layer"):
        update_ce_stats(nn.Sequential(), [images()])
    unfreeze_ce_(model)
    with pytest.raises(TypeError, match="wrap a single batch in a list"):
        update_ce_stats(model, images())
    with pytest.raises(
        TypeError, match="tensors, or tuples and lists that start with one, got dict"
    ):
        update_ce_stats(model, [{"image": images()}])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": 0.0}, "eps=0.0 must be positive"),
        ({"eps": -1e-5}, "eps=-1e-05 must be positive"),
        ({"momentum": 0.0}, "momentum=0.0 must be in"),
        ({"momentum": 1.5}, "momentum=1.5 must be in"),
        ({"momentum": 10**400}, "momentum=1000.* must be in"),
        ({"newton_steps": 0}, "newton_steps=0 must be an integer in 1..9"),
        ({"newton_steps": 10}, "newton_steps=10 must be"),
        ({"newton_steps": 2.5}, "newton_steps=2.5 must be"),
        ({"group_size": 0}, "group_size=0 must be"),
        ({"group_size": -4}, "group_size=-4 must be"),
        ({"pool": 0}, "pool=0 must be"),
        ({"rd_ratio": 0.0}, "rd_ratio=0.0 must be in"),
        ({"rd_ratio": 1.5}, "rd_ratio=1.5 must be in"),
        ({"num_features": 0}, "num_features=0 must be"),
        ({"num_features": 3.5}, "num_features=3.5 must be"),
        ({"num_features": True}, "num_features=True must be"),
        ({"group_size": True}, "group_size=True must be"),
        ({"newton_steps": True}, "newton_steps=True must be"),
        ({"eps": float("inf")}, "eps=inf must be positive"),
        ({"eps": "small"}, "eps='small' must be positive"),
        ({"eps": None}, "eps=None must be positive"),
        ({"momentum": "fast"}, "momentum='fast' must be in"),
        ({"rd_ratio": None}, "rd_ratio=None must be in"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ChannelEquilibrium2d(**{"num_features": 16, **arguments})


@pytest.mark.parametrize(
    "layer",
    [
        *(BatchDecorrelation2d, InstanceReweighting2d, ChannelEquilibrium2d),
        *(IterNorm2d, SwitchableNorm2d, SwitchableWhitening2d),
    ],
)
def test_only_the_channels_are_positional(layer):
    """torch's norms have eps second: here it would be the momentum of one layer and not another."""
    with pytest.raises(TypeError, match="positional argument"):
        layer(64, 1e-5)


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="momentunm"):
        ChannelEquilibrium2d(64, momentunm=0.5)


@each_layer
def test_bad_inputs_are_named(make):
    layer = make(24)
    with pytest.raises(TypeError, match="expected a tensor, got list"):
        layer([1.0])
    with pytest.raises(ValueError, match=r"4-D input .* got 3-D of shape \(24, 5, 6\)"):
        layer(images()[0])
    with pytest.raises(ValueError, match="expected 24 channels, got 12"):
        layer(images()[:, :12])
    with pytest.raises(TypeError, match=r"floating-point input, got torch.int64"):
        layer(images().long())
    with pytest.raises(TypeError, match=r"floating-point input, got torch.complex64"):
        layer(images().to(torch.complex64))


def test_norm_ce_refuses_parts_that_do_not_fit():
    ce = ChannelEquilibrium2d(16)
    with pytest.raises(TypeError, match="is not a norm over"):
        NormCE2d(nn.BatchNorm1d(16), ce)
    with pytest.raises(TypeError, match="is not a norm over"):
        NormCE2d(nn.LayerNorm(16), ce)
    with pytest.raises(TypeError, match="is not a CE layer"):
        NormCE2d(nn.BatchNorm2d(16), nn.Identity())
    with pytest.raises(TypeError, match="is not a module"):
        NormCE2d(nn.BatchNorm2d(16), ce, torch.relu)
    with pytest.raises(ValueError, match="norm has 32 channels but ce has 16"):
        NormCE2d(nn.BatchNorm2d(32), ce)
    with pytest.raises(ValueError, match="start='zero' must be"):
        NormCE2d(nn.BatchNorm2d(16), ce, start="zero")
    from timm.layers import BatchNormAct2d

    with pytest.raises(ValueError, match="applies its activation itself"):
        NormCE2d(BatchNormAct2d(16), ce)


def test_checkpoint_of_the_bare_norm_loads():
    norm = nn.BatchNorm2d(24)
    nn.init.normal_(norm.weight)
    norm(images())
    model = nn.Sequential(LAYERS["bn+ce"](24))
    result = model.load_state_dict(
        {f"0.{k}": v for k, v in norm.state_dict().items()}, strict=False
    )
    assert not result.unexpected_keys
    assert all(".ce." in key for key in result.missing_keys)
    assert torch.equal(model[0].norm.weight, norm.weight)
    assert torch.equal(model[0].norm.running_var, norm.running_var)


def test_integers_of_numpy_are_integers():
    import numpy as np

    layer = ChannelEquilibrium2d(np.int64(24), group_size=np.int64(8), newton_steps=np.int32(2))
    assert layer(images()).shape == (4, 24, 5, 6)


def test_a_batch_norm_told_not_to_track_does_not():
    block = LAYERS["bn+ce"](24)
    block.norm.track_running_stats = False
    before = buffers(block.norm)
    block(images())
    assert same(before, buffers(block.norm))


def test_a_value_too_large_for_a_half_precision_buffer_does_not_enter_it():
    block = LAYERS["bn+ce"](24).half()
    before = buffers(block.norm)
    block((1000 * images()).half())
    assert same(before, buffers(block.norm))


def test_empty_batch_through_a_norm_that_takes_none():
    block = NormCE2d(nn.InstanceNorm2d(24), ChannelEquilibrium2d(24))
    assert block(images(n=0)).shape == (0, 24, 5, 6)


def test_update_ce_stats_does_not_pass_off_the_initial_values():
    model = nn.Sequential(LAYERS["bn+ce"](24))
    model(images())
    before = buffers(model)
    for batch in (images() * torch.nan, images(n=0)):
        with pytest.raises(ValueError, match=r"no usable batch .* reached 0.ce"):
            update_ce_stats(model, [batch])
        assert same(before, buffers(model))


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float16, 1e-3), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("name", ["bn+ce", "bn+bd+relu", "ce"])
def test_half_precision_gradient_under_an_upstream_gradient_with_a_mean(name, dtype, rtol):
    """The gradients through statistics and through x cancel; they must not be rounded before."""
    torch.manual_seed(0)
    block = LAYERS[name](64)
    exact = copy.deepcopy(block).double()
    if isinstance(block, NormCE2d):
        block.act = exact.act = None
    x = images(8, 64, 7, 7, dtype=dtype)
    upstream = (images(8, 64, 7, 7, seed=3) + 10).to(dtype)
    x, z = x.requires_grad_(), x.double().detach().requires_grad_()
    block(x).backward(upstream)
    exact(z).backward(upstream.double())
    assert_close("x.grad", x.grad, z.grad, rtol)


def test_computing_w_and_s_moves_no_buffer_and_tracking_does():
    layer = ChannelEquilibrium2d(24)
    x, one = images(), torch.ones(24)
    moments, centered = layer.measure(x, batch=True)
    statistics = layer.summarize(x, moments, centered.center, norm=False)
    before = copy.deepcopy(layer.state_dict())
    inv_sqrt, inv_std = layer.bd.inv_sqrt(one, statistics), layer.ir.inv_std(one, statistics)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert torch.equal(layer.bd.inv_sqrt(one, None), layer.bd.running_inv_sqrt)
    layer.bd.track(inv_sqrt, statistics)
    layer.ir.track(inv_std, statistics)
    assert layer.bd.num_batches_tracked == layer.ir.num_batches_tracked == 1
    assert torch.equal(layer.bd.running_inv_sqrt, inv_sqrt)  # the first batch counts alone
    assert torch.equal(layer.ir.running_inv_std, inv_std)
    twin = ChannelEquilibrium2d(24)
    twin.load_state_dict(before)
    twin(x)
    now = layer.state_dict()
    assert all(torch.equal(value, now[name]) for name, value in twin.state_dict().items())
