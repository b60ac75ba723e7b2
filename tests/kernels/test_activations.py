"""Every file with a list of activations has those that the kernels have."""

import torch

from cenet.analysis.activations import _activated
from cenet.kernels.call import FUSED_ACTIVATIONS
from cenet.models.staged import ACTIVATIONS
from cenet.nn.fused import fused_activation
from cenet.ops import _through_activation


def test_all_lists_have_the_activations_of_the_kernels():
    modules = {fused_activation(kind())[0]: kind() for kind in ACTIVATIONS}
    assert modules.keys() == FUSED_ACTIVATIONS.keys() - {"none"}
    for name, module in modules.items():
        _, slope = fused_activation(module)
        x = torch.linspace(-3, 3, 50, requires_grad=True)
        y = module(x)
        torch.testing.assert_close(_activated(x, name, slope), y)
        upstream = torch.arange(1.0, 51.0)
        (expected,) = torch.autograd.grad(y, x, upstream)
        torch.testing.assert_close(_through_activation(upstream, y, name, slope), expected)
