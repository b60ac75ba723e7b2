"""Parameters and multiply-adds of a network, counted without computing anything.

costs.csv beside this file has the counts of all networks of the paper, for `cenet models`; a test
counts them again.
"""

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from cenet.folding import fold_ce
from cenet.models.factory import NETWORKS, create_model
from cenet.nn import NormCE2d

# Tables 1 and 2 of the paper, with CE, in billions
PAPER_GFLOPS = {
    "resnet18": 1.83,
    "resnet50": 4.16,
    "resnet101": 7.89,
    "mobilenetv2_100": 0.33,
    "shufflenetv2_x0_5": 0.05,
    "shufflenetv2_x1_0": 0.16,
}


class Parameters(NamedTuple):
    """Parameters of a network: plain, with squeeze-excite, with CE."""

    plain: int
    se: int
    ce: int


class MultiplyAdds(NamedTuple):
    """Multiply-adds of a network for one image, in inference unless the name says otherwise."""

    plain: int
    se: int
    ce_in_training: int
    ce_folded: int


class Cost(NamedTuple):
    """Cost of a network of the paper, plain, with squeeze-excite and with CE."""

    name: str
    sites: int
    parameters: Parameters
    multiply_adds: MultiplyAdds
    paper: float | None  # billions, with CE


def multiply_adds(model: nn.Module, image_size: int) -> int:
    """Multiply-adds of convolutions and matrix products for one image, in the model's mode."""
    twin = deepcopy(model).to("meta")
    batch = 2 if model.training else 1  # two samples, for batch statistics
    images = torch.empty(batch, 3, image_size, image_size, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        twin(images)
    return int(counter.get_total_flops()) // 2 // batch


def cost(name: str) -> Cost:
    """Count a network of the paper."""
    size = NETWORKS[name].input_size
    plain, se = create_model(name, None).eval(), create_model(name, "se").eval()
    ce = create_model(name, "ce")
    sites = sum(isinstance(module, NormCE2d) for module in ce.modules())
    in_training = multiply_adds(ce.train(), size)
    folded = multiply_adds(fold_ce(ce.eval()), size)
    return Cost(
        name,
        sites,
        Parameters(*(_parameters(network) for network in (plain, se, ce))),
        MultiplyAdds(multiply_adds(plain, size), multiply_adds(se, size), in_training, folded),
        PAPER_GFLOPS.get(name),
    )


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
