"""What docs/limits.md says does not work. If one of these turns red, correct the page."""

import pytest
import torch
from torch import nn

import cenet


@pytest.fixture
def layer():
    torch.manual_seed(0)
    layer = cenet.NormCE2d(nn.BatchNorm2d(16), cenet.ChannelEquilibrium2d(16), nn.ReLU())
    layer(torch.randn(4, 16, 6, 6))
    return layer.eval()


@pytest.fixture
def x():
    return torch.randn(4, 16, 6, 6)


def test_function_transforms(layer, x):
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda image: layer.train()(image[None])[0])(x)
    layer.eval()
    assert torch.func.jvp(layer, (x,), (x,))[1].shape == x.shape
    with pytest.raises(NotImplementedError):
        torch.func.jvp(layer.train(), (x,), (x,))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.BatchNorm3d, nn.LayerNorm])
def test_norms_that_ce_does_not_follow(norm):
    with pytest.raises(ValueError, match="no norm that CE could follow"):
        cenet.insert_ce_(nn.Sequential(norm(8), nn.ReLU()))


def test_lazy_norms_are_found_after_their_first_batch():
    network = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU())
    with pytest.raises(ValueError, match="no norm that CE could follow"):
        cenet.insert_ce_(network)
    network(torch.randn(2, 3, 8, 8))
    assert cenet.insert_ce_(network) == ["1"]
