"""What is seen of activations inside the fused operators, against the same in plain PyTorch."""

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

import cenet
from _checks import assert_close
from _kernels import each_device, kernels_on
from _planted import images
from _shards import record
from cenet import ChannelEquilibrium2d, NormCE2d, ops
from cenet.analysis import Monitor
from cenet.analysis.ablation import Ablation
from cenet.models import create_model


class Network(nn.Module):
    """Two activations inside NormCE2d, the second after an addition."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(3, 20, 3, padding=1)
        self.norm1 = NormCE2d(nn.BatchNorm2d(20), ChannelEquilibrium2d(20), nn.ReLU())
        self.conv2 = nn.Conv2d(20, 20, 3, padding=1)
        self.norm2 = NormCE2d(nn.BatchNorm2d(20), ChannelEquilibrium2d(20), nn.ELU())
        self.head = nn.Linear(20, 3)

    def forward(self, x):
        x = self.norm1(self.conv1(x))
        return self.head(self.norm2(self.conv2(x), residual=x).mean((2, 3)))


def both(device, run):
    """The result of `run` on the kernels, and in plain PyTorch."""
    own = Network().to(device)
    with ops.backend("torch"):
        own(images(4).to(device))  # statistics
    plain = copy.deepcopy(own)
    with kernels_on(device):
        found = run(own)
    with ops.backend("torch"):
        expected = run(plain)
    for name, value in plain.state_dict().items():
        assert_close(name, own.state_dict()[name].double(), value.double(), 1e-4)
    return found, expected


@each_device
@pytest.mark.parametrize("training", [False, True])
def test_recorder(training, device):
    x = images(3).to(device)
    found, expected = both(device, lambda model: record(model.train(training), x, x + 1))
    assert found.sites == expected.sites
    assert list(found.layers) == ["norm1.act", "norm2.act"]
    assert [site.activation for site in found.sites.values()] == ["relu", "elu"]
    for name, layer in expected.layers.items():
        own = found.layers[name]
        assert (own.mean - layer.mean).norm() < 1e-4 * layer.covariance.trace().sqrt()
        for what in (
            "covariance",
            "mean_abs",
            "root_mean_square",
            "deviation",
            "magnitude",
            "magnitude_before",
        ):
            assert_close(f"{what} of {name}", getattr(own, what), getattr(layer, what), 1e-4)
        assert torch.equal(own.firing, layer.firing)
        assert_close(f"reads of {name}", found.reads[name], expected.reads[name], 1e-4)
    assert found.shared == expected.shared


@each_device
def test_ablation(device):
    x, off = images(2).to(device), torch.tensor([0, 3, 7, 11])

    def outputs(model):
        model.eval()
        ablation, seen = Ablation(model), []
        model.head.register_forward_hook(lambda module, args, y: seen.append(y.double()))
        labels = torch.zeros(len(x), dtype=torch.long, device=device)
        ablation.run([(x, labels)], {"norm1.act": off})
        ablation.run([(x, labels)])
        return torch.stack(seen)

    found, expected = both(device, outputs)
    assert_close("logits", found, expected, 1e-4)
    assert (found[0] - found[1]).abs().max() > 1e-3


@each_device
def test_monitor(device):
    def watched(model):
        looks = []
        monitor = Monitor(model, every=1, to=lambda step, values: looks.append(values))
        model(images(3).to(device)).sum().backward()
        monitor.close()
        return looks[0], model.conv1.weight.grad.double()

    (found, grad), (expected, plain_grad) = both(device, watched)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-4), name
    assert_close("gradient", grad, plain_grad, 1e-4)


@pytest.mark.gpu
def test_a_diagnosis_is_the_same_on_a_gpu():
    torch.manual_seed(0)
    model = create_model("resnet18", num_classes=4)
    batches = [(images(8, 64, seed), torch.arange(8) % 4) for seed in range(3)]
    with torch.no_grad():
        for x, _ in batches:
            model(x)
    expected = cenet.diagnose(model, batches, ablation_images=8)
    found = cenet.diagnose(model.cuda(), batches, ablation_images=8)
    assert [layer.name for layer in found.layers] == [layer.name for layer in expected.layers]
    for own, plain in zip(found.layers, expected.layers, strict=True):
        assert own.correlation == pytest.approx(plain.correlation, rel=1e-2)
        assert own.mean_abs == pytest.approx(plain.mean_abs, rel=1e-2, abs=1e-3)
        assert own.contribution == pytest.approx(plain.contribution, rel=1e-2, abs=1e-3)
        assert own.participation_ratio == pytest.approx(plain.participation_ratio, rel=1e-2)
        assert own.mix == plain.mix
