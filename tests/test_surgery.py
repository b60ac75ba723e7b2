"""Insert, train, load, remove, convert: on real networks, and on small ones built to be awkward."""

import contextlib
import copy
import pickle
import warnings

import pytest
import timm
import torch
from torch import nn

from _checks import assert_close
from _networks import MOSTLY_FAST, NETWORKS, ZERO_INITIALISED, create, images, settle
from cenet import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
    NormCE2d,
    ce_sites,
    freeze_ce_,
    insert_ce_,
    remove_ce_,
    unfreeze_ce_,
)
from cenet.nn.norms import inner_activation

pytestmark = pytest.mark.usefixtures("quick_weights")

SITES = {  # number of default sites, first and last
    "torchvision/resnet18": (8, "layer1.0.bn2", "layer4.1.bn2"),
    "torchvision/resnet50": (16, "layer1.0.bn3", "layer4.2.bn3"),
    "torchvision/mobilenet_v2": (10, "features.3.conv.3", "features.16.conv.3"),
    "torchvision/shufflenet_v2_x1_0": (37, "conv1.1", "conv5.1"),
    "torchvision/vgg16_bn": (13, "features.1", "features.41"),
    "torchvision/densenet121": (121, "features.norm0", "features.norm5"),
    "torchvision/efficientnet_b0": (9, "features.2.1.block.3.1", "features.6.3.block.3.1"),
    "torchvision/regnet_y_400mf": (
        16,
        "trunk_output.block1.block1-0.f.c.1",
        "trunk_output.block4.block4-5.f.c.1",
    ),
    "timm/resnet50": (16, "layer1.0.bn3", "layer4.2.bn3"),
    "timm/seresnet50": (16, "layer1.0.bn3", "layer4.2.bn3"),
    "timm/mobilenetv2_100": (10, "blocks.1.1.bn3", "blocks.5.2.bn3"),
    "timm/efficientnet_b0": (9, "blocks.1.1.bn3", "blocks.5.3.bn3"),
    "timm/regnety_002": (13, "s1.b1.conv3.bn", "s4.b7.conv3.bn"),
    "timm/convnext_atto": (12, "stages.0.blocks.0.norm", "stages.3.blocks.1.norm"),
}


def quiet_insert(model, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return insert_ce_(model, *args, **kwargs)


torch_conversion = nn.SyncBatchNorm.convert_sync_batchnorm


def same_state(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", NETWORKS)
def test_default_placement(name):
    model = create(name)
    before = copy.deepcopy(model.state_dict())
    chosen = [site.name for site in ce_sites(model) if site.default]
    assert (len(chosen), chosen[0], chosen[-1]) == SITES[name]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", NETWORKS)
def test_life_of_a_network(name):
    """Insert → every parameter gets a gradient → stock weights load → remove restores the bits."""
    model = settle(create(name))
    original = copy.deepcopy(model)
    expected = original(images())
    zeroed = ZERO_INITIALISED.get(name, 0)
    reported = pytest.warns(UserWarning, match=f"weight of {zeroed} norms was all zero")
    with reported if zeroed else contextlib.nullcontext():
        sites = insert_ce_(model)
    assert len(sites) == SITES[name][0]
    assert not any(module.training for module in model.modules())

    model.train()
    model(images()).square().mean().backward()
    without = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert not without
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())

    result = model.load_state_dict(original.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys
    assert all(".ce." in key for key in result.missing_keys)

    model.eval()
    assert remove_ce_(model) == sites
    assert same_state(model, original)
    assert torch.equal(model(images()), expected)
    assert [type(m) for m in model.modules()] == [type(m) for m in original.modules()]


@pytest.mark.parametrize("name", NETWORKS)
def test_remove_right_after_insert(name):
    model = settle(create(name))
    original = copy.deepcopy(model)
    quiet_insert(model)
    remove_ce_(model)
    assert same_state(model, original)
    assert torch.equal(model(images()), original(images()))


@pytest.mark.parametrize("name", MOSTLY_FAST)
def test_identity_start_leaves_the_logits(name):
    single = create(name).eval()
    expected = single(images())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        insert_ce_(single, start="identity")
    assert_close("logits", single(images()), expected, 1e-6)
    # with the statistics of a few batches these untrained networks amplify float32 rounding by up
    # to 1e5 with or without CE, so the exact statement is made in float64
    model = settle(create(name)).double()
    expected = model(images().double())
    sites = insert_ce_(model, start="identity")
    assert_close("logits", model(images().double()), expected, 1e-10)
    model.train()(images().double()).sum().backward()
    blends = [model.get_submodule(site).ce.blend for site in sites]
    assert all(blend.grad is not None for blend in blends)


@pytest.mark.parametrize("name", MOSTLY_FAST)
def test_synchronized_batch_norm_conversion_keeps_the_ce(name):
    model = create(name)
    quiet_insert(model)
    settle(model)
    expected = model(images())
    # torch's own conversion drops the activation of timm's fused norms, with or without CE
    fused = any(inner_activation(module) is not None for module in model.modules())
    convert = timm.layers.convert_sync_batchnorm if fused else torch_conversion
    converted = convert(copy.deepcopy(model))
    count = sum(isinstance(module, ChannelEquilibrium2d) for module in converted.modules())
    assert count == SITES[name][0]
    assert torch.equal(converted(images()), expected)
    if "convnext" not in name:
        kinds = {type(m.norm) for m in converted.modules() if isinstance(m, NormCE2d)}
        assert all(issubclass(kind, nn.SyncBatchNorm) for kind in kinds)
    outputs = []
    for network in (converted, model):
        torch.manual_seed(0)  # dropout
        outputs.append(network.double().train()(images(seed=5).double()))
    assert_close("training", *outputs, 1e-8)


def test_timm_conversion_of_norms_that_carry_their_activation():
    model = timm.create_model("mobilenetv2_100", num_classes=10)
    insert_ce_(model, lambda norm, name: name.endswith("bn2"))
    settle(model)
    from timm.layers import convert_sync_batchnorm

    converted = convert_sync_batchnorm(copy.deepcopy(model))
    assert any(isinstance(module, nn.SyncBatchNorm) for module in converted.modules())
    assert torch.equal(converted(images()), model(images()))


def test_ce_goes_between_a_fused_norm_and_its_activation():
    from timm.layers import BatchNormAct2d

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), BatchNormAct2d(16, act_layer=nn.ReLU6))
    original = copy.deepcopy(model)
    assert insert_ce_(model) == ["1"]
    wrapper = model[1]
    assert isinstance(wrapper.act, nn.ReLU6)
    assert isinstance(wrapper.norm.act, nn.Identity)
    features = model[0](images(size=16))
    plain = nn.BatchNorm2d(16)
    expected = copy.deepcopy(wrapper.ce)(plain(features)).clamp(0, 6)
    assert_close("y", wrapper(features), expected, 1e-5)
    remove_ce_(model)
    assert isinstance(model[1], BatchNormAct2d)
    assert isinstance(model[1].act, nn.ReLU6)
    original[1].load_state_dict(model[1].state_dict())
    assert torch.equal(model.eval()(images(size=16)), original.eval()(images(size=16)))


def test_drop_layer_and_activation_of_a_fused_norm_come_back():
    from timm.layers import BatchNormAct2d

    model = nn.Sequential(nn.Conv2d(3, 16, 3), BatchNormAct2d(16, drop_layer=nn.Dropout2d))
    insert_ce_(model)
    assert [type(part) for part in model[1].act] == [nn.Dropout2d, nn.ReLU]
    remove_ce_(model)
    assert isinstance(model[1].drop, nn.Dropout2d)
    assert isinstance(model[1].act, nn.ReLU)


def test_zero_weight_is_raised_reported_and_restored():
    model = timm.create_model("resnet18", num_classes=10)
    assert not model.layer1[0].bn2.weight.any()
    with pytest.warns(UserWarning, match=r"8 norms was all zero.*layer1\.0\.bn2.*remove_ce_"):
        insert_ce_(model)
    assert (model.layer1[0].bn2.norm.weight == 1).all()
    remove_ce_(model)
    assert not model.layer1[0].bn2.weight.any()


def test_a_trained_weight_is_not_put_back_to_zero():
    model = timm.create_model("resnet18", num_classes=10)
    quiet_insert(model)
    with torch.no_grad():
        model.layer1[0].bn2.norm.weight.add_(0.1)
    model = pickle.loads(pickle.dumps(model))
    remove_ce_(model)
    assert (model.layer1[0].bn2.weight == 1.1).all()
    assert not model.layer1[1].bn2.weight.any()


def test_filter_layer_and_arguments():
    model = create("torchvision/resnet18")
    with pytest.raises(
        ValueError, match=r"matched no norm of ResNet; candidates: bn1 \(BatchNorm2d\)"
    ):
        insert_ce_(model, lambda norm, name: False)
    sites = insert_ce_(model, lambda norm, name: name == "bn1", group_size=32, pool=2)
    assert sites == ["bn1"]
    assert model.bn1.ce.bd.group_size == 32
    insert_ce_(model, layer=BatchDecorrelation2d, newton_steps=5)
    assert isinstance(model.layer1[0].bn2.ce, BatchDecorrelation2d)
    assert model.layer1[0].bn2.ce.newton_steps == 5
    insert_ce_(model, lambda norm, name: name.endswith("bn1"), layer=InstanceReweighting2d)
    assert isinstance(model.layer4[1].bn1.ce, InstanceReweighting2d)
    assert isinstance(model.bn1.ce, ChannelEquilibrium2d)
    assert len(remove_ce_(model)) == 17


def test_a_bad_argument_leaves_the_model_as_it_was():
    model = create("torchvision/resnet18")
    with pytest.raises(ValueError, match="group_size=0"):
        insert_ce_(model, group_size=0)
    with pytest.raises(TypeError, match="groupsize"):
        insert_ce_(model, groupsize=4)
    with pytest.raises(ValueError, match="start='zero'"):
        insert_ce_(model, start="zero")
    assert not any(isinstance(module, NormCE2d) for module in model.modules())
    fused = timm.create_model("mobilenetv2_100")
    with pytest.raises(ValueError, match="start='zero'"):
        insert_ce_(fused, lambda norm, name: True, start="zero")
    assert not any(isinstance(module, NormCE2d) for module in fused.modules())
    assert isinstance(fused.bn1.act, nn.ReLU6)


def test_nothing_to_do_is_an_error():
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    with pytest.raises(ValueError, match="no norm that CE could follow"):
        insert_ce_(plain)
    assert ce_sites(plain) == []
    for edit in (remove_ce_, freeze_ce_, unfreeze_ce_):
        with pytest.raises(ValueError, match="Sequential has no"):
            edit(plain)
    bare = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2))
    with pytest.raises(
        ValueError, match=r"choose with filter_fn among the candidates: 1 \(BatchNorm2d\)"
    ):
        insert_ce_(bare)
    with pytest.raises(ValueError, match=r"itself a norm; use NormCE2d\(BatchNorm2d"):
        insert_ce_(nn.BatchNorm2d(8))
    twice = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    insert_ce_(twice)
    with pytest.raises(ValueError, match="already there, after every norm of Sequential"):
        insert_ce_(twice)
    with pytest.raises(ValueError, match="itself a NormCE2d"):
        remove_ce_(twice[1])


def test_norms_after_global_pooling_are_skipped():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Conv2d(8, 8, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
    )
    assert insert_ce_(model) == ["1"]


def test_the_longer_branch_of_a_block_is_the_residual_one():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.short_conv, self.short_norm = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
            self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)

        def forward(self, x):
            y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
            shortcut = self.short_norm(self.short_conv(x))
            return (shortcut + y).relu()

    assert insert_ce_(Block()) == ["norm2"]


def test_a_network_that_takes_no_image_needs_an_example():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
            self.head = nn.Linear(8 * 9 * 5, 2)

        def forward(self, x):
            return self.head(self.norm(self.conv(x)).relu().flatten(1))

    with pytest.raises(ValueError, match="pass example_input=a batch it accepts"):
        insert_ce_(Picky())
    assert insert_ce_(Picky(), example_input=torch.randn(1, 4, 11, 7)) == ["norm"]
    assert insert_ce_(Picky(), lambda norm, name: True) == ["norm"]


def test_a_shared_norm_gets_one_ce_under_all_its_names():
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 8, 3), norm, nn.ReLU())
    expected = copy.deepcopy(model).eval()(images(size=16))
    assert insert_ce_(model) == ["1", "4"]
    assert model[1] is model[4]
    assert model(images(size=16)).isfinite().all()
    remove_ce_(model)
    assert not any(parameter.is_meta for parameter in model.parameters())
    norm.reset_running_stats()
    assert torch.equal(model.eval()(images(size=16)), expected)
    assert model[1] is norm
    assert model[4] is norm


def test_an_activation_of_the_users_own_stays():
    model = nn.Sequential(NormCE2d(nn.BatchNorm2d(8), ChannelEquilibrium2d(8), nn.ELU()))
    remove_ce_(model)
    assert isinstance(model[0][0], nn.BatchNorm2d)
    assert isinstance(model[0][1], nn.ELU)


def test_dtype_and_mode_follow_the_norm():
    model = create("torchvision/resnet18").to(torch.bfloat16).eval()
    model.layer1[0].bn2.train()
    insert_ce_(model)
    assert model.layer1[0].bn2.ce.training
    assert not model.layer1[1].bn2.ce.training
    assert model.layer1[0].bn2.ce.mix_logit.dtype == torch.bfloat16


def test_frozen_batch_norm_of_torchvision_detection():
    from torchvision.models import resnet18
    from torchvision.ops import FrozenBatchNorm2d

    model = resnet18(norm_layer=FrozenBatchNorm2d)
    assert len(insert_ce_(model)) == 8
    assert model(images()).isfinite().all()


def test_freezing_a_network():
    model = create("torchvision/resnet18")
    insert_ce_(model)
    names = freeze_ce_(model)
    assert len(names) == 8
    assert names[0] == "layer1.0.bn2.ce"
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.train()(images()).sum().backward()
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed
    assert not any(".ce." in key for key in changed)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert not any(".ce." in name for name in trainable)
    assert unfreeze_ce_(model) == names
    model(images())
    assert any(".ce." in k and not torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_inserting_twice_does_not_move_on_to_the_norm_before():
    model = create("torchvision/resnet18")
    insert_ce_(model)
    assert not any(site.default for site in ce_sites(model))
    with pytest.raises(ValueError, match="already there, at every default site of ResNet"):
        insert_ce_(model)


def test_a_norm_already_followed_by_a_layer_of_the_users_is_left_alone():
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), ChannelEquilibrium2d(16), nn.ReLU()
    )
    assert [site.note for site in ce_sites(model)] == ["CE is already there"]
    with pytest.raises(ValueError, match="CE is already there"):
        insert_ce_(model)


def test_sites_follow_the_size_of_the_example():
    small = torch.zeros(2, 3, 32, 32)
    model = create("torchvision/resnet18")
    assert len(insert_ce_(model, example_input=small)) == 6
    model.train()(torch.randn(4, 3, 32, 32)).sum().backward()


class MadeInForward(nn.Module):
    """Does not run on meta tensors."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x):
        x = x - torch.tensor([0.5, 0.4, 0.3]).view(1, 3, 1, 1)
        y = self.norm(self.conv(x)).relu()
        return y if y.mean() > 0 else -y


def test_a_network_that_does_not_run_on_meta_tensors_runs_on_real_ones():
    model = MadeInForward()
    before = copy.deepcopy(model.state_dict())
    assert insert_ce_(model) == ["norm"]
    remove_ce_(model)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filter_fn": ["bn1"]}, r"filter_fn=\['bn1'\] must be a function"),
        ({"layer": "bd"}, "layer='bd' must be a class: ChannelEquilibrium2d"),
        ({"layer": ChannelEquilibrium2d(4)}, "must be a class: ChannelEquilibrium2d"),
        ({"layer": nn.BatchNorm2d}, "must be a class: ChannelEquilibrium2d"),
        ({"example_input": (1, 2)}, "example_input must be one tensor, got tuple"),
    ],
    ids=["filter", "string", "instance", "norm", "example"],
)
def test_arguments_of_the_wrong_type_are_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        insert_ce_(create("torchvision/resnet18"), **arguments)


class Caching(nn.Module):
    """Registers its layers under two names and keeps a tensor from its first forward pass."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.body = nn.Sequential(self.conv, self.norm, nn.ReLU())
        self.grid = None

    def forward(self, x):
        y = self.body(x)
        if self.grid is None:
            self.grid = torch.ones_like(y[:1])
        return y + self.grid


def test_looking_at_a_network_leaves_nothing_behind():
    model = Caching()
    before = copy.deepcopy(model.state_dict())
    ce_sites(model)
    assert model.grid is None
    state = model.state_dict()
    assert all(torch.equal(before[key], value) for key, value in state.items())
    with torch.inference_mode():
        assert all(site.default for site in ce_sites(model))
    assert sorted(insert_ce_(model)) == ["body.1", "norm"]
    assert model(images(size=16)).isfinite().all()


def test_remove_after_torch_conversion_keeps_the_activation():
    from timm.layers import BatchNormAct2d

    model = nn.Sequential(nn.Conv2d(3, 16, 3), BatchNormAct2d(16)).eval()
    expected = model(images(size=16))
    insert_ce_(model)
    model = torch_conversion(model)
    remove_ce_(model)
    assert_close("y", model(images(size=16)), expected, 1e-6)


def test_fused_norm_with_dropout_alone():
    from timm.layers import BatchNormAct2d

    norm = BatchNormAct2d(8, apply_act=False, drop_layer=nn.Dropout2d).eval()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU())
    insert_ce_(model, lambda norm, name: True)
    assert isinstance(model[1].act, nn.Dropout2d)
    assert not model[1].ce.training
    remove_ce_(model)
    assert isinstance(model[1].drop, nn.Dropout2d)


def test_stock_checkpoint_loads_into_frozen_batch_norms():
    from torchvision.models import resnet18
    from torchvision.ops import FrozenBatchNorm2d

    model = resnet18(norm_layer=FrozenBatchNorm2d)
    insert_ce_(model)
    result = model.load_state_dict(resnet18().state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all(".ce." in key for key in result.missing_keys)
