"""The deploy form equals the evaluated network, or says why it cannot be had."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from _checks import assert_close
from _networks import HEAVY, NETWORKS, UNFOLDABLE, create, images, settle
from cenet import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
    NormCE2d,
    fold_ce,
    fold_conv_norm_ce,
    insert_ce_,
    load_released_ce_,
    update_ce_stats,
)
from cenet.folding import ConvWeights, fold_conv_weights
from cenet.nn.folded import ROWS_OF_LARGE_MAPS, Finish, FoldedCE2d

pytestmark = pytest.mark.usefixtures("quick_weights")

LAYERS = [ChannelEquilibrium2d, BatchDecorrelation2d, InstanceReweighting2d]


def with_ce(name, **kwargs):
    model = create(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        insert_ce_(model, **kwargs)
    return settle(model)


def norms(model):
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        pytest.param(name, layer, marks=[pytest.mark.slow] if name == HEAVY else [])
        for name in NETWORKS
        for layer in LAYERS
    ],
)
def test_folded_network_equals_the_evaluated_one(name, layer):
    model = with_ce(name, layer=layer)
    if name in UNFOLDABLE:
        with pytest.raises(ValueError, match=f"cannot fold .*{UNFOLDABLE[name]}"):
            fold_ce(model)
        return
    fresh = create(name).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        insert_ce_(fresh, layer=layer)
    assert_close("fresh logits", fold_ce(fresh)(images()), fresh(images()), 1e-5)
    # with the statistics of a few batches these untrained networks amplify float32 rounding by up
    # to 1e5, folded or not, so the exact statement is made in float64
    model.double()
    before = copy.deepcopy(model.state_dict())
    folded = fold_ce(model)
    assert_close("logits", folded(images().double()), model(images().double()), 1e-9)
    assert not norms(folded)
    left = sum(isinstance(module, FoldedCE2d) for module in folded.modules())
    sites = sum(isinstance(module, NormCE2d) for module in model.modules())
    assert left == (0 if layer is BatchDecorrelation2d else sites)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    channels_last = folded.to(memory_format=torch.channels_last)
    x = images().double().contiguous(memory_format=torch.channels_last)
    assert_close("channels_last", channels_last(x), model(images().double()), 1e-9)


def block(conv, channels=48, layer=ChannelEquilibrium2d, act=None, start="paper", **kwargs):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(channels)
    model = nn.Sequential(conv, NormCE2d(norm, layer(channels, **kwargs), act, start=start))
    for parameter in model[1].parameters():
        if parameter.dim() < 2:
            nn.init.normal_(parameter, 0.5)
    for seed in range(3):
        x = torch.randn(4, conv.in_channels, 9, 9, generator=torch.Generator().manual_seed(seed))
        model(x + 1)
    return model.eval()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("start", ["paper", "identity"])
@pytest.mark.parametrize(
    ("groups", "channels", "group_size", "merged"),
    [
        (1, 48, 16, 1),
        (1, 58, 16, 1),
        (3, 48, 16, 3),
        (6, 48, 16, 3),
        (48, 48, 16, 3),
        (2, 48, 16, None),
        (58, 58, 16, None),
        (33, 33, 16, None),  # channels // 2 is 16, and 2 does not divide the groups
        (66, 66, 16, None),
        (4, 12, 16, 1),
    ],
)
def test_every_kind_of_convolution(layer, start, groups, channels, group_size, merged):
    conv = nn.Conv2d(channels, channels, 3, padding=1, stride=2, groups=groups, bias=True)
    grouping = {} if layer is InstanceReweighting2d else {"group_size": group_size}
    model = block(conv, channels, layer, nn.ReLU(), start, **grouping)
    folded = fold_ce(model)
    x = torch.randn(4, channels, 9, 9)
    assert_close("y", folded(x), model(x), 1e-5)
    assert not norms(folded)
    if layer is BatchDecorrelation2d:
        assert isinstance(folded[1], Finish if merged else FoldedCE2d)
        assert folded[0].groups == (merged or groups)
    else:
        assert folded[0].bias is None
        assert isinstance(folded[1], FoldedCE2d)


def test_pure_function_in_float64():
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 24, 3, groups=3, dtype=torch.float64)
    scale, shift = torch.randn(2, 24, dtype=torch.float64)
    matrix = torch.randn(6, 4, 4, dtype=torch.float64)
    new = fold_conv_weights(ConvWeights(conv.weight, conv.bias, 3), scale, shift, matrix)
    x = torch.randn(2, 6, 5, 5, dtype=torch.float64)
    y = conv(x) * scale[:, None, None] + shift[:, None, None]
    dense = torch.block_diag(*matrix)
    expected = torch.einsum("ij,njhw->nihw", dense, y)
    assert new.groups == 3
    actual = nn.functional.conv2d(x, new.weight, new.bias, groups=new.groups)
    assert_close("y", actual, expected, 1e-12)


def test_half_precision_deployment():
    model = block(nn.Conv2d(3, 48, 3), act=nn.ReLU())
    folded = fold_ce(model).to(torch.bfloat16)
    x = torch.randn(4, 3, 9, 9)
    assert_close("y", folded(x.to(torch.bfloat16)), model(x), 3e-2)
    folded = fold_ce(model.double())
    assert_close("y", folded(x.double()), model(x.double()), 1e-12)


def test_folded_network_copies_saves_compiles_and_exports():
    model = block(nn.Conv2d(3, 48, 3), act=nn.ReLU())
    folded = fold_ce(model)
    x = torch.randn(4, 3, 9, 9)
    twin = fold_ce(copy.deepcopy(model))
    twin.load_state_dict(folded.state_dict())
    assert torch.equal(twin(x), folded(x))
    compiled = torch.compile(folded, fullgraph=True, backend="aot_eager")
    assert_close("compiled", compiled(x), folded(x), 1e-6)
    exported = torch.export.export(folded, (x,)).module()
    assert_close("exported", exported(x), folded(x), 1e-6)


def test_tensors_of_a_folded_network_are_no_parts_of_larger_ones():
    # torch.export.save warns about those; 24 channels leave a ragged group
    layer = NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24))
    folded = fold_ce(nn.Sequential(nn.Conv2d(3, 24, 3), layer).eval())
    for name, value in folded.state_dict().items():
        assert value.untyped_storage().nbytes() == value.nbytes, name


def test_released_variant_folds():
    layer = ChannelEquilibrium2d(48)
    donor = ChannelEquilibrium2d(48)
    state = {
        "x_weight": donor.mix_logit.detach()[None],
        "running_wm": donor.bd.running_inv_sqrt,
        "AR.fc.0.weight": donor.ir.fc1.weight.detach(),
        "AR.fc.1.weight": donor.ir.norm.weight.detach(),
        "AR.fc.1.bias": donor.ir.norm.bias.detach(),
        "AR.fc.3.weight": donor.ir.fc2.weight.detach(),
        "AR.running_scale": torch.tensor([0.7]),
    }
    load_released_ce_(layer, state)
    conv = nn.Conv2d(3, 48, 3)
    model = nn.Sequential(conv, NormCE2d(nn.BatchNorm2d(48), layer)).eval()
    nn.init.constant_(model[1].norm.weight, 0.05)  # the LayerNorm of the gate hides the rest
    x = torch.randn(4, 3, 4, 4)
    folded = fold_ce(model)
    assert_close("y", folded(x), model(x), 1e-5)
    layer.ir.released = False
    with pytest.raises(AssertionError, match="relative error"):
        assert_close("y", folded(x), model(x), 1e-5)


def test_evaluation_form_is_per_sample():
    model = fold_ce(block(nn.Conv2d(3, 48, 3)))
    x = torch.randn(5, 3, 9, 9)
    assert_close("y", torch.cat([model(sample[None]) for sample in x]), model(x), 1e-6)


def test_plain_batch_norms_are_folded_too_where_possible():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
    )
    insert_ce_(model, lambda norm, name: name == "6")
    settle(model)
    folded = fold_ce(model)
    assert [i for i, m in enumerate(folded) if isinstance(m, nn.BatchNorm2d)] == [4]
    assert_close("y", folded(images()), model(images()), 1e-5)


class Shared(nn.Module):
    """One convolution used twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm = NormCE2d(nn.BatchNorm2d(3), ChannelEquilibrium2d(3))

    def forward(self, x):
        return self.norm(self.conv(self.conv(x)))


class ReadTwice(Shared):
    """The convolution's output is used beside the norm."""

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


class ReturnedToo(Shared):
    """The convolution's output is itself an output."""

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y), y


class NormTwice(Shared):
    """One norm used twice."""

    def forward(self, x):
        return self.norm(self.conv(self.norm(self.conv(x))))


class PreActivation(Shared):
    """norm → CE → ReLU → convolution."""

    def forward(self, x):
        return self.conv(self.norm(x).relu())


class Between(Shared):
    """Something else stands between convolution and norm."""

    def forward(self, x):
        return self.norm(2 * self.conv(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Shared, "runs 2 times in a forward pass: it is shared"),
        (ReadTwice, "convolution that nothing else reads"),
        (ReturnedToo, "convolution that nothing else reads"),
        (NormTwice, "runs 2 times in a forward pass, not once"),
        (PreActivation, "pre-activation order"),
        (Between, "convolution that nothing else reads"),
    ],
)
def test_unknown_topologies_are_refused(make, message):
    with pytest.raises(ValueError, match=f"cannot fold norm of {make.__name__}: .*{message}"):
        fold_ce(make().eval())


def partly_foldable():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 24, 3), NormCE2d(nn.BatchNorm2d(24), ChannelEquilibrium2d(24), nn.ReLU())),
        *(nn.Conv2d(24, 24, 3), NormCE2d(nn.GroupNorm(2, 24), ChannelEquilibrium2d(24))),
        *(nn.Conv2d(24, 24, 3), ChannelEquilibrium2d(24), nn.Conv2d(24, 8, 1), nn.BatchNorm2d(8)),
    )
    for seed in range(3):
        model(images(size=16, seed=seed))
    return model.eval()


def test_what_can_be_folded_is_and_the_rest_is_listed():
    model = partly_foldable()
    with pytest.raises(ValueError, match="cannot fold 5 of Sequential: it does not follow a norm"):
        fold_ce(model)
    with pytest.warns(
        UserWarning, match=r"2 CE layers of Sequential stay .*\(5\); .*\(3\)"
    ) as said:
        folded = fold_ce(model, strict=False)
    assert len(said) == 1
    assert said[0].filename == __file__
    assert folded.not_folded == {
        "5": "it does not follow a norm in a NormCE2d; build it as NormCE2d(norm, ce)",
        "3": "its norm is GroupNorm; CE is folded after batch norms only",
    }
    assert isinstance(folded[1], FoldedCE2d)
    assert isinstance(folded[3], NormCE2d)
    assert isinstance(folded[7], nn.Identity)
    x = images(size=16).double()
    assert_close("y", folded(images(size=16)), model.double()(x), 1e-5)


def test_a_network_of_which_nothing_can_be_folded_is_refused():
    model = partly_foldable()
    model[1] = nn.ReLU().eval()
    with pytest.raises(ValueError, match="cannot fold 5 of Sequential"):
        fold_ce(model, strict=False)


def test_nothing_is_listed_where_everything_is_folded():
    model = block(nn.Conv2d(3, 48, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fold_ce(model, strict=False).not_folded == fold_ce(model).not_folded == {}


class ReadOtherwise(Shared):
    """A read that autograd does not see."""

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y).relu() * (y > 0)


class WeightElsewhere(Shared):
    """The weight is used without the convolution."""

    def forward(self, x):
        return self.norm(self.conv(x)) + nn.functional.conv2d(x, self.conv.weight)


@pytest.mark.parametrize("make", [ReadOtherwise, WeightElsewhere])
def test_what_the_trace_cannot_see_the_comparison_does(make):
    torch.manual_seed(0)
    model = make()
    for _ in range(3):
        model(torch.randn(4, 3, 8, 8) + 1)
    with pytest.raises(ValueError, match=f"cannot fold {make.__name__}: its outputs would change"):
        fold_ce(model.eval())


def test_hooks_are_not_lost():
    for part in ("0", "1", "1.norm", "1.ce"):
        model = block(nn.Conv2d(3, 48, 3))
        model.get_submodule(part).register_forward_hook(lambda module, args, output: 2 * output)
        with pytest.raises(ValueError, match="hook"):
            fold_ce(model)


def test_a_norm_act_of_unknown_kind_is_left_alone():
    class Tripled(nn.BatchNorm2d):
        def __init__(self, channels):
            super().__init__(channels)
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(3 * super().forward(x))

    model = nn.Sequential(nn.Conv2d(3, 8, 3), Tripled(8), *block(nn.Conv2d(8, 48, 3))).eval()
    folded = fold_ce(model)
    assert isinstance(folded[1], Tripled)
    x = torch.randn(4, 3, 9, 9)
    assert_close("y", folded(x), model(x), 1e-5)


@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_images_far_from_the_running_mean(offset):
    model = block(nn.Conv2d(3, 48, 1))
    x = torch.randn(4, 3, 9, 9) + offset
    exact = copy.deepcopy(model).double()(x.double())
    assert_close("y", fold_ce(model)(x), exact, 1e-6 * offset + 1e-5)


def test_empty_batch():
    folded = fold_ce(block(nn.Conv2d(3, 48, 3)))
    assert folded(torch.randn(0, 3, 9, 9)).shape == (0, 48, 7, 7)


def test_other_refusals():
    model = block(nn.Conv2d(3, 48, 3))
    with pytest.raises(ValueError, match=r"evaluation mode; call model.eval\(\)"):
        fold_ce(model.train())
    with pytest.raises(ValueError, match="has no CE layer"):
        fold_ce(nn.Sequential(nn.Conv2d(3, 3, 1)).eval())
    with pytest.raises(ValueError, match="pass the network that holds both"):
        fold_ce(model.eval()[1])
    loose = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), ChannelEquilibrium2d(48)).eval()
    with pytest.raises(ValueError, match="does not follow a norm in a NormCE2d"):
        fold_ce(loose)
    grouped = nn.Sequential(
        nn.Conv2d(3, 48, 3), NormCE2d(nn.GroupNorm(2, 48), ChannelEquilibrium2d(48))
    )
    with pytest.raises(ValueError, match="its norm is GroupNorm"):
        fold_ce(grouped.eval())
    by_batch = nn.Sequential(
        nn.Conv2d(3, 48, 3),
        NormCE2d(nn.BatchNorm2d(48, track_running_stats=False), ChannelEquilibrium2d(48)),
    )
    with pytest.raises(ValueError, match="CE is folded after batch norms only"):
        fold_ce(by_batch.eval())

    folded = fold_ce(block(nn.Conv2d(3, 48, 3)))
    assert not any(module.training for module in folded.modules())
    with pytest.raises(ValueError, match="folded already"):
        fold_ce(folded)
    with pytest.raises(ValueError, match="has no CE layer"):
        update_ce_stats(folded, [torch.randn(2, 3, 9, 9)])
    with pytest.raises(ValueError, match="fold before compiling"):
        fold_ce(torch.compile(block(nn.Conv2d(3, 48, 3))))

    class Standardized(nn.Conv2d):
        def forward(self, x):
            weight = self.weight / self.weight.std()
            return nn.functional.conv2d(x, weight, self.bias)

    with pytest.raises(ValueError, match="Standardized may change its weight before using it"):
        fold_ce(block(Standardized(3, 48, 3)))


def pair(layer=ChannelEquilibrium2d, channels=24, act=None, **conv):
    """A convolution and a NormCE2d, both away from their initial values."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(6, channels, 3, padding=1, **conv),
        NormCE2d(nn.BatchNorm2d(channels), layer(channels), act),
    ).double()
    nn.init.normal_(network[1].norm.weight, 1, 0.5)
    nn.init.normal_(network[1].norm.bias)
    for _ in range(3):
        network(2 * torch.randn(8, 6, 9, 9, dtype=torch.float64) + 1)
    return network.eval()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("conv", [{}, {"bias": False}, {"groups": 2}], ids=str)
def test_one_convolution_and_its_norm_ce_fold_alone(layer, conv):
    before, after = pair(layer, act=nn.ReLU(), **conv)
    state = copy.deepcopy(nn.Sequential(before, after).state_dict())
    x = torch.randn(2, 6, 7, 5, dtype=torch.float64)
    residual = torch.randn(2, 24, 7, 5, dtype=torch.float64)
    folded, rest = fold_conv_norm_ce(before, after)
    assert not norms(rest)
    assert_close("y", rest(folded(x)), after(before(x)), 1e-10)
    expected = after(before(x), residual, nn.ELU())
    assert_close("with a residual", rest(folded(x), residual, nn.ELU()), expected, 1e-10)
    now = nn.Sequential(before, after).state_dict()
    assert all(torch.equal(value, now[name]) for name, value in state.items())


class Layouts(TorchDispatchMode):
    """Counts results of one size that are not in channels_last."""

    def __init__(self, size):
        super().__init__()
        self.size, self.others = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.size:
            self.others += not result.is_contiguous(memory_format=torch.channels_last)
        return result


@pytest.mark.parametrize("layer", [ChannelEquilibrium2d, InstanceReweighting2d])
@pytest.mark.parametrize("channels", [32, 24])
@pytest.mark.parametrize("side", [5, 21])
def test_a_folded_layer_works_in_channels_last(layer, channels, side):
    """Small maps and large ones; 24 channels have a ragged group."""
    assert 5**2 < ROWS_OF_LARGE_MAPS < 21**2
    before, after = pair(layer, channels=channels, act=nn.ReLU())
    x = (torch.randn(3, 6, side, side) + 20).contiguous(memory_format=torch.channels_last)
    residual = torch.randn(3, channels, side, side).contiguous(memory_format=torch.channels_last)
    expected = after(before(x.double()), residual.double())
    folded, rest = (module.float() for module in fold_conv_norm_ce(before, after))
    maps = folded.to(memory_format=torch.channels_last)(x)
    assert_close("with gradients", rest(maps, residual), expected, 1e-5)
    with torch.no_grad(), Layouts(maps.shape) as layouts:
        y = rest(maps, residual)
    assert_close("without", y, expected, 1e-5)
    assert y.is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        half = rest(maps.bfloat16(), residual.bfloat16())
    assert_close("in bfloat16", half.float(), expected, 5e-2)
    if channels % 16 == 0 or layer is InstanceReweighting2d:
        assert layouts.others == 0


def test_a_folded_layer_is_exported_for_any_batch_size_in_channels_last():
    _, rest = fold_conv_norm_ce(*pair(channels=32))
    maps = torch.randn(6, 32, 21, 21, dtype=torch.float64)
    maps = maps.contiguous(memory_format=torch.channels_last)
    sizes = {"x": {0: torch.export.Dim("batch")}}
    with torch.no_grad():
        program = torch.export.export(rest, (maps[:3],), dynamic_shapes=sizes)
        assert_close("y", program.module()(maps), rest(maps), 1e-12)


def test_decorrelation_alone_leaves_nothing_of_one_pair_but_its_activation():
    folded, rest = fold_conv_norm_ce(*pair(BatchDecorrelation2d))
    assert isinstance(rest, Finish)
    assert folded.bias is not None


def test_a_pair_that_cannot_be_folded_is_named():
    conv, norm_ce = pair()
    with pytest.raises(TypeError, match="conv is a Linear; pass the Conv2d before the norm"):
        fold_conv_norm_ce(nn.Linear(3, 3), norm_ce)
    with pytest.raises(TypeError, match="norm_ce is a ChannelEquilibrium2d; build it as NormCE2d"):
        fold_conv_norm_ce(conv, norm_ce.ce)
    with pytest.raises(ValueError, match=r"evaluation mode; call norm_ce.eval\(\) first"):
        fold_conv_norm_ce(conv, copy.deepcopy(norm_ce).train())
    with pytest.raises(ValueError, match="conv has 8 output channels, but norm_ce has 24"):
        fold_conv_norm_ce(nn.Conv2d(3, 8, 1), norm_ce)
    group_norm = NormCE2d(nn.GroupNorm(2, 24), ChannelEquilibrium2d(24)).eval()
    with pytest.raises(
        ValueError, match="its norm is GroupNorm; CE is folded after batch norms only"
    ):
        fold_conv_norm_ce(conv, group_norm)
    conv.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="its convolution has hooks"):
        fold_conv_norm_ce(conv, norm_ce)
