"""Parameter groups for everybody's optimizer."""

import pytest
import torch
from torch import nn

import cenet
from cenet.nn import ce_layers


class Own(nn.Module):
    """A network with a parameter of its own that has the name of α."""

    def __init__(self):
        super().__init__()
        self.blend = nn.Parameter(torch.ones(3, 3))
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.act(self.norm(self.conv(x))).mean((2, 3)))


def network(**args):
    torch.manual_seed(0)
    model = Own()
    cenet.insert_ce_(model, lambda norm, name: name == "norm", **args)
    return model


def names(model, group):
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {known[id(parameter)] for parameter in group["params"]}


@pytest.mark.parametrize("start", ["paper", "identity"])
def test_only_lambda_and_alpha_are_spared(start):
    model = network(start=start)
    ((_, layer),) = ce_layers(model)
    decayed, spared = cenet.param_groups(model, 0.25)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.25, 0.0)
    expected = {"norm.ce.mix_logit"} | ({"norm.ce.blend"} if start == "identity" else set())
    assert names(model, spared) == expected
    assert names(model, decayed) == {n for n, _ in model.named_parameters()} - expected
    # what an optimizer does with it: without a gradient, only decay moves a parameter
    with torch.no_grad():
        layer.mix_logit.fill_(0.5)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    torch.optim.SGD(cenet.param_groups(model, 0.25), lr=0.5).step()
    for name, value in model.named_parameters():
        factor = 1.0 if name in expected else 1 - 0.25 * 0.5
        assert torch.allclose(value, before[name] * factor, rtol=1e-6, atol=0), name


def test_norms_and_biases_can_be_spared_too():
    model = network()
    decayed, spared = cenet.param_groups(model, 0.1, decay_norms=False)
    assert {"norm.norm.weight", "norm.norm.bias", "conv.bias", "head.bias"} <= names(model, spared)
    assert "norm.ce.mix_logit" in names(model, spared)
    assert all(parameter.dim() > 1 for parameter in decayed["params"])
    assert {"conv.weight", "head.weight", "blend"} <= names(model, decayed)
    count = len(decayed["params"]) + len(spared["params"])
    assert count == len(list(model.parameters()))


def test_what_does_not_train_is_left_out():
    model = network()
    cenet.freeze_ce_(model)
    (only,) = cenet.param_groups(model, 0.1)
    assert not any(".ce." in name for name in names(model, only))
    model.requires_grad_(False)
    model.norm.ce.mix_logit.requires_grad_()  # λ alone
    (only,) = cenet.param_groups(model, 0.1)
    assert (names(model, only), only["weight_decay"]) == ({"norm.ce.mix_logit"}, 0)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of Own requires a gradient"):
        cenet.param_groups(model, 0.1)
    assert {group["weight_decay"] for group in cenet.param_groups(network(), 0)} == {0}
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(
            ValueError, match=f"weight_decay={wrong} must be at least 0, and finite"
        ):
            cenet.param_groups(network(), wrong)
