"""Where CE goes by default in networks of many designs, and what is said about it."""

import warnings

import pytest
import timm
import torch
from timm.utils import reparameterize_model
from torch import nn

from cenet import ChannelEquilibrium2d, NormCE2d, ce_sites, insert_ce_
from cenet.surgery import PARALLEL, find_placement

pytestmark = pytest.mark.usefixtures("quick_weights")


def on_meta(name):
    with torch.device("meta"):
        return timm.create_model(name, num_classes=10)


def chosen(model):
    return [site.name for site in ce_sites(model) if site.default]


# few residual blocks: their last norms and, outside of them, norms that feed an activation
MIXED = {
    "hgnet_tiny": (28, 36, 1),
    "ese_vovnet39b": (29, 39, 2),
    "cspnext_tiny": (27, 33, 3),
}


@pytest.mark.parametrize("name", MIXED)
def test_few_residual_blocks_are_not_the_whole_network(name):
    found = find_placement(on_meta(name))
    _, norms, blocks = MIXED[name]
    assert (sum(s.default for s in found.sites), len(found.sites), found.blocks) == MIXED[name]
    assert found.is_mixed
    assert found.reached >= 0.9 * norms
    rule, coverage = found.summary()
    assert rule.startswith("Only ")
    assert f" of {norms} norms are in the {blocks} residual block" in rule
    assert coverage.startswith(f"{found.reached} of {norms} norms of feature maps then have CE")
    assert "CE at 5 of 5 sizes" in coverage


def test_the_scales_of_a_res2net_block_are_not_residual_blocks():
    sites = chosen(on_meta("res2net50_26w_4s"))
    assert len(sites) == 16
    assert all(name.endswith(".bn3") for name in sites)


class Halves(nn.Module):
    """A shortcut of half the channels, around a branch that reads all of them or the others."""

    def __init__(self, reads_all):
        super().__init__()
        self.reads_all = reads_all
        width = 16 if reads_all else 8
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.conv1, self.norm1 = nn.Conv2d(width, 8, 1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    def forward(self, x):
        x = self.stem_norm(self.stem(x)).relu()
        y = self.conv1(x if self.reads_all else x[:, 8:])
        return x[:, :8] + self.norm2(self.conv2(self.norm1(y).relu())).relu()


def test_a_shortcut_may_be_part_of_what_the_branch_reads():
    assert chosen(Halves(reads_all=True)) == ["norm2"]  # as in DPN
    assert chosen(Halves(reads_all=False)) == ["stem_norm", "norm1", "norm2"]


def test_images_that_are_rearranged_before_the_first_convolution():
    # as in TResNet
    model = nn.Sequential(nn.PixelUnshuffle(4), nn.Conv2d(48, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    assert chosen(model) == ["2"]


def test_a_network_of_nothing_but_parallel_branches_is_refused():
    model = on_meta("repvgg_a0")
    assert {site.note for site in ce_sites(model)} == {PARALLEL}
    with pytest.raises(ValueError, match=r"61 BatchNormAct2d \(re-parameterizable branches\)") as e:
        insert_ce_(model)
    assert "and 53 more, see ce_sites" in str(e.value)
    assert len(str(e.value)) < 600


def test_reparameterization_after_insertion():
    torch.manual_seed(0)
    model = timm.create_model("repghostnet_050", num_classes=10).eval()
    with pytest.warns(UserWarning, match=r"CE reaches \d+ of 112 norms of RepGhostNet") as warned:
        sites = insert_ce_(model, start="identity")
    assert len(warned) == 1
    assert sites
    x = torch.randn(2, 3, 64, 64)
    merged = reparameterize_model(model)
    assert sum(isinstance(m, NormCE2d) for m in merged.modules()) == len(sites)
    assert len(list(merged.modules())) < len(list(model.modules()))
    torch.testing.assert_close(merged(x), model(x))


class ConvNorm(nn.Sequential):
    """As in timm's LeViT."""

    def __init__(self):
        super().__init__()
        self.c, self.bn = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)

    def fuse(self):
        return nn.utils.fuse_conv_bn_eval(self.c, self.bn)


def test_merging_a_norm_that_ce_follows_is_refused():
    model = nn.Sequential(ConvNorm(), nn.ReLU()).eval()
    assert insert_ce_(model) == ["0.bn"]
    with pytest.raises(AttributeError, match=r"would lose CE; use cenet\.fold_ce"):
        reparameterize_model(model)
    for name in ("running_mean", "running_var", "weight", "bias", "eps"):
        with pytest.raises(AttributeError, match=rf"has no {name}: merging .* would lose CE"):
            getattr(model[0].bn, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = model[0].bn.nothing


class Block(nn.Module):
    """shortcut(x) + scale · branch(x)."""

    def __init__(self, shortcut, *after):
        super().__init__()
        self.shortcut = shortcut
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), *after)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x):
        return self.shortcut(x) + self.scale * self.branch(x)


def test_linear_branches_are_told_from_residual_blocks():
    def sites(*parts):
        stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        return chosen(nn.Sequential(stem, *parts))

    nonlinear = (nn.ReLU(), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    assert sites(Block(nn.Identity(), *nonlinear)) == ["1.branch.4"]
    assert sites(Block(nn.BatchNorm2d(8), *nonlinear), nn.ReLU()) == ["1.branch.4"]
    assert sites(Block(nn.BatchNorm2d(8)), nn.ReLU()) == ["0.1"]  # as in RepVGG
    assert sites(Block(nn.Identity())) == ["0.1"]  # the sum is linear in x
    assert sites(Block(nn.Identity()), nn.ReLU()) == ["1.branch.1"]


def test_a_third_of_the_norms_is_not_few():
    def norm():
        return nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU())

    block = (Block(nn.Identity()), nn.ReLU())
    assert chosen(nn.Sequential(nn.Conv2d(3, 8, 3), norm(), norm(), *block)) == ["3.branch.1"]
    assert len(chosen(nn.Sequential(nn.Conv2d(3, 8, 3), norm(), norm(), norm(), *block))) == 4


@pytest.mark.parametrize(("left_out", "warnings_"), [(2, 0), (3, 1)])
def test_a_third_of_the_norms_is_not_worth_a_warning(left_out, warnings_):
    tokens = [nn.GroupNorm(1, 8) for _ in range(left_out)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(2), *tokens)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert insert_ce_(model) == ["1"]
    assert len(warned) == warnings_


class Unused(nn.Module):
    """Computes a branch and does not use it, as networks with auxiliary heads do."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        self.head(x)
        return x


def test_a_norm_whose_output_is_not_used_is_named():
    notes = {site.name: (site.default, site.note) for site in ce_sites(Unused())}
    assert notes == {"norm": (True, ""), "head": (False, "not on the way to the output")}


class WithAndWithout(nn.Module):
    """An activation reads a norm, and a CE layer reads it too."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.ce = ChannelEquilibrium2d(8)

    def forward(self, x):
        x = self.norm(self.conv(x))
        return self.norm2(self.conv2(torch.cat([x.relu(), self.ce(x).relu()]))).relu()


def test_a_norm_that_a_ce_layer_follows_is_no_site():
    notes = {site.name: (site.default, site.note) for site in ce_sites(WithAndWithout())}
    assert notes == {"norm": (False, "CE is already there"), "norm2": (True, "")}


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.gate_conv, self.gate_norm = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8)

    def forward(self, x):
        gate = self.gate_norm(self.gate_conv(x)).sigmoid()
        y = self.norm(self.conv(x))
        return nn.functional.interpolate(gate, size=y.shape[-2:]) * y.relu()


def test_the_norm_of_a_gate_is_no_activated_norm():
    assert chosen(Gated()) == ["norm"]


class SumInside(nn.Module):
    """A residual block that ends in the layer with CE, as those of `cenet.models`."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = NormCE2d(nn.BatchNorm2d(8), ChannelEquilibrium2d(8), nn.ReLU())

    def forward(self, x):
        return self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()), residual=x)


def test_ce_that_is_there_is_said_to_be():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), SumInside())
    found = find_placement(model)
    assert [(s.name, s.default, s.note) for s in found.sites] == [
        ("1.bn1", False, ""),
        ("1.bn2", False, "CE is already there"),
    ]
    with pytest.raises(ValueError, match="CE is already there, at every default site"):
        insert_ce_(model)


def test_ce_that_feeds_no_activation_counts():
    ce = NormCE2d(nn.BatchNorm2d(8), ChannelEquilibrium2d(8))
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), ce, nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
    )  # fmt: skip
    assert find_placement(model).reached == 2


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.map_norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.group_norm, self.layer_norm = nn.GroupNorm(1, 484), nn.LayerNorm(8)
        self.unused = nn.BatchNorm2d(8)

    def forward(self, x):
        y = self.map_norm(self.conv(x)).relu()
        return self.layer_norm(self.group_norm(y.flatten(2).mT))


def test_norms_of_tokens_and_volumes_are_named():
    example = torch.zeros(2, 3, 24, 24)
    found = find_placement(Tokens(), example)
    assert {site.name: site.note for site in found.sites} == {
        "map_norm": "",
        "group_norm": "tokens (N, L, C)",
        "unused": "not run in evaluation",
    }
    said = found.summary()[-1]
    assert "1 LayerNorm (last dimension, as of tokens (N, L, C) or maps (N, H, W, C))" in said
    assert "1 GroupNorm (tokens (N, L, C))" in said
    video = nn.Sequential(nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ReLU())
    with pytest.raises(ValueError, match=r"left out: 1 BatchNorm3d \(volumes \(N, C, D, H, W\)\)"):
        insert_ce_(video)


def test_enough_coverage_is_not_worth_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        insert_ce_(on_meta("ese_vovnet39b"))
