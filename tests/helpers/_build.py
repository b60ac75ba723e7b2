"""Builds the layer under test and the parameters of its float64 twin from one case."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from _reference import Block, Parameters
from cenet import BatchDecorrelation2d, ChannelEquilibrium2d, InstanceReweighting2d, NormCE2d

ACTS = {
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "none": lambda: None,
}


@dataclass(frozen=True)
class Case:
    channels: int = 24
    n: int = 4
    height: int = 5
    width: int = 7
    norm: str = "bn"
    act: str = "relu"
    layer: str = "ce"
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float32
    pool: int = 1
    steps: int = 3
    group_size: int = 16
    gamma: float = 1.0
    beta: float = 1.0
    offset: float = 0.0
    device: str = "cpu"

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != getattr(Case, k)}
        return "-".join(f"{k}={v}" for k, v in changed.items()) or "default"

    def but(self, **changes: object) -> "Case":
        return replace(self, **changes)


def make_norm(case: Case) -> nn.Module | None:
    c = case.channels
    if case.norm == "bn":
        return nn.BatchNorm2d(c)
    if case.norm == "gn":
        return nn.GroupNorm(2, c)
    if case.norm == "in":
        return nn.InstanceNorm2d(c, affine=True)
    if case.norm == "ln2d-torchvision":
        from torchvision.models.convnext import LayerNorm2d

        return LayerNorm2d(c, eps=1e-5)
    if case.norm == "ln2d-timm":
        from timm.layers import LayerNorm2d

        return LayerNorm2d(c, eps=1e-5)
    return None


def make_layer(case: Case) -> nn.Module:
    kwargs = {"group_size": case.group_size, "newton_steps": case.steps, "pool": case.pool}
    if case.layer == "ce":
        return ChannelEquilibrium2d(case.channels, **kwargs)
    if case.layer == "bd":
        return BatchDecorrelation2d(case.channels, **kwargs)
    return InstanceReweighting2d(case.channels)


def build(case: Case, seed: int = 0) -> NormCE2d:
    """A NormCE2d with every parameter away from its initial value."""
    torch.manual_seed(seed)
    block = NormCE2d(make_norm(case), make_layer(case), ACTS[case.act]())
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name in ("norm.weight", "ce.ir.norm.weight", "ce.norm.weight"):
                parameter.copy_(1 + 0.5 * torch.randn_like(parameter))
            elif parameter.dim() < 2:
                parameter.copy_(0.5 * torch.randn_like(parameter))
        if case.norm != "none":
            block.norm.weight.mul_(case.gamma)
            block.norm.bias.mul_(case.gamma * case.beta)
    return block.to(case.device)


def twin(case: Case, block: NormCE2d) -> tuple[Parameters, Block]:
    """float64 copies of the parameters, and the constants of the reference."""

    def leaf(tensor: Tensor | None, default: float) -> Tensor:
        if tensor is None:
            tensor = torch.full((case.channels,), default)
        return tensor.detach().double().cpu().requires_grad_()

    ir = {"ce": lambda: block.ce.ir, "ir": lambda: block.ce, "bd": lambda: None}[case.layer]()
    empty = torch.zeros(1, 1)
    parameters = Parameters(
        gamma=leaf(getattr(block.norm, "weight", None), 1),
        beta=leaf(getattr(block.norm, "bias", None), 0),
        w1=leaf(empty if ir is None else ir.fc1.weight, 0),
        ln_weight=leaf(empty if ir is None else ir.norm.weight, 0),
        ln_bias=leaf(empty if ir is None else ir.norm.bias, 0),
        w2=leaf(empty if ir is None else ir.fc2.weight, 0),
        mix_logit=leaf(block.ce.mix_logit if case.layer == "ce" else empty, 0),
    )
    constants = Block(
        norm=case.norm.split("-")[0],
        groups_of_norm=2,
        group_size=case.group_size,
        steps=case.steps,
        pool=case.pool,
        branches={"ce": ("bd", "ir"), "bd": ("bd",), "ir": ("ir",)}[case.layer],
    )
    return parameters, constants


def gradient_names(case: Case) -> dict[str, str]:
    """Parameter of the block -> field of the reference."""
    names = {}
    if case.norm != "none":
        names |= {"norm.weight": "gamma", "norm.bias": "beta"}
    prefix = {"ce": "ce.ir", "ir": "ce"}.get(case.layer)
    if prefix:
        names |= {
            f"{prefix}.fc1.weight": "w1",
            f"{prefix}.norm.weight": "ln_weight",
            f"{prefix}.norm.bias": "ln_bias",
            f"{prefix}.fc2.weight": "w2",
        }
    if case.layer == "ce":
        names["ce.mix_logit"] = "mix_logit"
    return names


def make_input(case: Case, seed: int = 1) -> tuple[Tensor, "object"]:
    """A leaf tensor, and the function that turns it into the layer's input."""
    generator = torch.Generator().manual_seed(seed)
    n, c, h, w = case.n, case.channels, case.height, case.width
    views = {
        "contiguous": ((n, c, h, w), lambda t: t),
        "channels_last": ((n, c, h, w), lambda t: t.contiguous(memory_format=torch.channels_last)),
        "sliced": ((n, c + 2, 2 * h, w + 3), lambda t: t[:, 1:-1, ::2, 2:-1]),
        "expanded": ((n, c, h, 1), lambda t: t.expand(n, c, h, w)),
    }
    shape, view = views[case.layout]
    leaf = torch.randn(shape, generator=generator)
    # neighbouring channels correlate, channels differ in scale and offset
    leaf = leaf + 0.7 * leaf.roll(1, 1)
    scale = 0.3 + torch.rand(1, shape[1], 1, 1, generator=generator)
    leaf = leaf * scale + torch.randn(1, shape[1], 1, 1, generator=generator) + case.offset
    return leaf.to(case.dtype).to(case.device), view
