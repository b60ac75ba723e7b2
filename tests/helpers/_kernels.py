"""Runs the kernels of one case beside the float64 reference. The one place that knows their names.

On the CPU they run in Triton's interpreter, and the operators around them are registered there too.
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache

import pytest
import torch
from torch import Tensor

from _build import Case, build, make_input, twin
from _checks import RTOL, assert_close
from _interpreter import speed_up_interpreter
from _reference import Block, Parameters, activate, decorrelate, normalize, reweight
from cenet import ops
from cenet.kernels import layer
from cenet.kernels.averages import average_
from cenet.kernels.call import AVERAGES, PARAMETERS, FoldedCECall, Mode, NormCECall
from cenet.kernels.folded_gate import SPLITS, folded_gate
from cenet.kernels.moments import measure

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    speed_up_interpreter()
interpreted = pytest.mark.skipif(not INTERPRETED, reason="triton compiles here")
each_device = pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)],
)
GATE = ("w1", "ln_weight", "ln_bias", "w2")
NAMES = ("gamma", "beta", *GATE, "mix_logit", "blend")  # of PARAMETERS, in the reference
SLOPE = {"leaky_relu": 0.1, "elu": 1.0}
GUARD = 64  # elements on either side of an allocation that nobody may write to


def tolerance(case: "Launch") -> float:
    if case.steps > 5:
        return 5e-5  # a singular covariance: float32 on the plain path is 2e-5 off, too
    if case.dtype != torch.float32 and case.act == "elu" and case.residual:
        return 2 * RTOL[case.dtype]  # the slope, y + 1, is read off a rounded y
    return RTOL[case.dtype]


@dataclass(frozen=True)
class Launch(Case):
    """A case of the layer, and how the kernels are called for it."""

    residual: bool = False
    blend: float | None = None
    running: str = ""  # "norm", "ce" or both: what takes running statistics
    affine: bool = True
    coarse: bool = False  # multiples of one half, so that pooling windows have ties
    scale: float = 1.0  # x is multiplied by it
    offset: float = 0.0  # and this is added
    spread: float = 0.0  # standard deviation of the sample means
    weights: torch.dtype = torch.float32

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != getattr(Launch, k)}
        return "-".join(f"{k}={v}" for k, v in changed.items()) or "default"


class Reference:
    """The case in float64: its leaves, its output, and their gradients."""

    def __init__(self, case: Launch) -> None:
        self.case = case
        self.x = _input(case)
        with torch.device(case.device):
            self.module = build(case)
            if not case.affine:
                torch.nn.init.ones_(self.module.norm.weight)
                torch.nn.init.zeros_(self.module.norm.bias)
            self.module.to(case.weights)
            parameters, self.constants = twin(case, self.module)
            self.parameters = Parameters(
                *(_leaf(getattr(parameters, f.name).to(case.device)) for f in fields(parameters))
            )
            self.residual = _noise(self.x, 5).to(case.dtype) if case.residual else None
            self.blend = None if case.blend is None else torch.tensor(case.blend)
            self.inv_sqrt, self.inv_std = _running_ce(case)
            self.mean, self.var = _running_norm(self.x)
            self.leaves = {"x": _leaf(self.x)}
            if self.residual is not None:
                self.leaves["residual"] = _leaf(self.residual)
            if self.blend is not None:
                self.leaves["blend"] = _leaf(self.blend)
            self.before = self._output()

    def _output(self) -> Tensor:
        """Before the activation."""
        p, block, leaves = self.parameters, self.constants, self.leaves
        x = leaves["x"]
        if "norm" in self.case.running:
            standard = (x - _channels(self.mean)) / (_channels(self.var) + block.norm_eps).sqrt()
            normalized = _channels(p.gamma) * standard + _channels(p.beta)
        else:
            normalized = normalize(x, p, block)
        y = self._equilibrium(normalized, p, block)
        if "blend" in leaves:
            y = normalized + leaves["blend"] * (y - normalized)
        return y + leaves["residual"] if "residual" in leaves else y

    def _equilibrium(self, x: Tensor, p: Parameters, block: Block) -> Tensor:
        running = "ce" in self.case.running
        parts = {}
        if "bd" in block.branches:
            parts["bd"] = _apply(x, self.inv_sqrt) if running else decorrelate(x, block)
        if "ir" in block.branches:
            parts["ir"] = _regate(x, p, self.inv_std) if running else reweight(x, p, block)
        if len(parts) == 1:
            return next(iter(parts.values()))
        lam = 1 / (1 + (-p.mix_logit).exp())
        return lam * parts["bd"] + (1 - lam) * parts["ir"]

    def differentiate(self, mask: Tensor, upstream: Tensor) -> dict[str, Tensor]:
        """Gradients, with the activation's mask given: rounding may flip a sign near zero."""
        activate(self.before, self.case.act, mask).backward(upstream.double())
        wanted = dict(self.leaves)
        if self.case.norm != "none":
            wanted |= {"gamma": self.parameters.gamma, "beta": self.parameters.beta}
        if "ir" in self.constants.branches:
            wanted |= {name: getattr(self.parameters, name) for name in GATE}
        if len(self.constants.branches) == 2:
            wanted["mix_logit"] = self.parameters.mix_logit
        return {name: leaf.grad for name, leaf in wanted.items()}


def _input(case: Launch) -> Tensor:
    leaf, view = make_input(case.but(dtype=torch.float32, device="cpu"))
    leaf = case.scale * leaf + case.offset + case.spread * _noise(leaf[:, :1, :1, :1], 3)
    if case.coarse:
        leaf = (2 * leaf).round() / 2
    return view(leaf.to(case.dtype).to(case.device))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().double().contiguous().clone().requires_grad_()


def _noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(like.shape, generator=generator, device="cpu").to(like.device)


def _channels(values: Tensor) -> Tensor:
    return values.double().view(1, -1, 1, 1)


def _running_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, var = x.float().mean((0, 2, 3)), x.float().var((0, 2, 3), correction=0)
    return mean + 0.3 * _noise(mean, 7), var * (1 + 0.2 * _noise(var, 8)).abs() + 0.1


def _running_ce(case: Launch) -> tuple[Tensor, Tensor]:
    """Not symmetric, so that a transposition shows; the identity in the padding."""
    size, groups = case.group_size, -(-case.channels // case.group_size)
    inside = (torch.arange(groups * size) < case.channels).view(groups, size)
    noise = 0.2 * _noise(torch.empty(groups, size, size), 6)
    noise = noise * inside[:, :, None] * inside[:, None, :]
    return torch.eye(size) + noise, torch.tensor(0.8)


def _apply(x: Tensor, matrices: Tensor) -> Tensor:
    size = matrices.shape[-1]
    parts = []
    for matrix, values in zip(matrices.double(), x.split(size, 1), strict=True):
        k = values.shape[1]
        parts.append(torch.einsum("ij,njhw->nihw", matrix[:k, :k], values))
    return torch.cat(parts, 1)


def _regate(x: Tensor, p: Parameters, inv_std: Tensor) -> Tensor:
    r = inv_std.double()
    hidden = (x.var((2, 3), correction=0) * r**2) @ p.w1.T
    hidden = hidden - hidden.mean(1, keepdim=True)
    hidden = hidden / (hidden.square().mean(1, keepdim=True) + 1e-5).sqrt()
    hidden = (hidden * p.ln_weight + p.ln_bias).clamp_min(0)
    return (r * torch.sigmoid(hidden @ p.w2.T))[:, :, None, None] * x


class Kernels:
    """The same case on the kernels."""

    def __init__(self, reference: Reference) -> None:
        case, module = reference.case, reference.module
        norm, ce = module.norm, module.ce
        bd, ir = {"ce": (1, 1), "bd": (1, 0), "ir": (0, 1)}[case.layer]
        source = 2 if "ce" in case.running else 1
        frozen = "norm" in case.running
        mode = Mode(0 if case.norm == "none" else 2 if frozen else 1, bd * source, ir * source)
        affine = case.norm != "none" and case.affine
        gate = (ce.ir if case.layer == "ce" else ce).gate if ir else (None,) * 4
        self.given = make_call(
            reference.x,
            residual=reference.residual,
            weight=norm.weight if affine else None,
            bias=norm.bias if affine else None,
            running_mean=reference.mean if frozen else None,
            running_var=reference.var if frozen else None,
            inv_sqrt=reference.inv_sqrt if mode.bd == 2 else None,
            inv_std=reference.inv_std if mode.ir == 2 else None,
            **dict(zip(("w1", "norm_weight", "norm_bias", "w2"), gate, strict=True)),
            mix_logit=ce.mix_logit if case.layer == "ce" else None,
            blend=reference.blend,
            sources=mode,
            group_size=case.group_size,
            steps=case.steps,
            pool=case.pool,
            act=case.act,
            slope=SLOPE.get(case.act, 0.0),
        )
        self.case = case
        self.x, self.residual = reference.x, reference.residual

    @property
    def call(self) -> NormCECall:
        """What the operator would get; x may have been replaced."""
        return self.given._replace(x=self.x)

    def forward(self) -> tuple[Tensor, Tensor]:
        with poisoned():
            return layer.forward(self.call)

    def saved(self, state: Tensor) -> layer.Saved:
        return layer.unpack(state, self.call)

    def backward(self, upstream: Tensor, y: Tensor, state: Tensor) -> dict[str, Tensor]:
        needed = y if self.case.residual and self.case.act != "none" else None
        call = self.call._replace(residual=None)
        with poisoned():
            grads = layer.backward(call, upstream, needed, state)
        parts = layer.parameter_gradients(call, grads.small)
        small = {}
        for field, name in zip(PARAMETERS, NAMES, strict=True):
            parameter, part = getattr(call, field), parts[field]
            if part is not None:
                small[name] = part if parameter is None else part.view(parameter.shape)
        return {"x": grads.x, "residual": grads.residual, **small}


def make_call(x: Tensor, **given: object) -> NormCECall:
    """A call with everything absent that is not given."""
    rest = {"group_size": 16, "steps": 3, "pool": 1, "norm_eps": 1e-5, "eps": 1e-5, "slope": 0.0}
    rest |= {"momenta": (0.0, 0.0, 0.0), "act": "none"}
    fields = dict.fromkeys(NormCECall._fields) | rest | given
    tensors = {name: v.detach() for name, v in fields.items() if isinstance(v, Tensor)}
    return NormCECall(**fields | tensors | {"x": x})


@contextmanager
def poisoned() -> Iterator[None]:
    """Whatever is allocated is NaN until it is written, and has guards that nobody may write to."""
    allocated = []

    def poison(original):
        def allocate(*args, **kwargs):
            plain = original(*args, **kwargs)
            if not plain.is_floating_point():
                return plain
            flat = plain.new_full((plain.numel() + 2 * GUARD,), math.nan)
            allocated.append(flat)
            return flat.as_strided(plain.shape, plain.stride(), GUARD)

        return allocate

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            patch.setattr(owner, name, poison(getattr(owner, name)))
        yield
    for flat in allocated:
        assert flat[:GUARD].isnan().all(), "a kernel wrote before its output"
        assert flat[-GUARD:].isnan().all(), "a kernel wrote behind its output"


def upstream_of(y: Tensor) -> Tensor:
    # not pure noise: the gradient of a scalar such as λ would be a sum of terms that cancel
    return (_noise(y, 2) + y.float()).to(y.dtype).contiguous(memory_format=layout_of(y))


def layout_of(x: Tensor) -> torch.memory_format:
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def check(case: Launch, rtol: float | None = None) -> None:
    """Values, layout and every gradient of a case against the reference."""
    rtol = tolerance(case) if rtol is None else rtol
    reference = Reference(case)
    kernels = Kernels(reference)
    y, state = kernels.forward()
    exact = activate(reference.before, case.act, reference.before > 0)
    assert_close("y", y, exact, rtol)
    # rounding flips signs near zero: gradients are compared on the tested mask
    flipped = (y > 0) != (reference.before > 0)
    if case.act != "none":
        size = reference.before.square().mean().sqrt()
        assert (reference.before[flipped].abs() <= 10 * rtol * size).all()
    upstream = upstream_of(y)
    grads = kernels.backward(upstream, y, state)
    expected = reference.differentiate(y > 0, upstream)
    assert y.dtype == grads["x"].dtype == case.dtype
    for tensor in (y, grads["x"]):
        assert tensor.is_contiguous(memory_format=layout_of(kernels.x))
    if case.weights != torch.float32:
        rtol = max(rtol, RTOL[case.weights])
    for name, value in expected.items():
        assert_close(f"gradient of {name}", grads.get(name), value, rtol)


def measured(saved: layer.Saved) -> tuple[Tensor, Tensor, Tensor]:
    """Instance mean and variance (N, C), covariance (G, K, K) of a launch without a norm."""
    found = saved.found
    origin = found.values[8] + found.values[0]
    return found.instances[0] + origin, found.instances[1], found.matrices[2]


def run_average_(
    norm: Sequence[Tensor | None],
    bd: Sequence[Tensor | None],
    ir: Sequence[Tensor | None],
    batch: dict[str, Tensor],
    count: int,
    momenta: Sequence[float | None],
) -> None:
    """The kernel's running averages, for batch values of norm (mean, biased var), BD and IR."""
    values = torch.zeros(10, len(batch["mean"]), device=batch["mean"].device)
    values[0], values[5] = batch["mean"], batch["var"]
    numbers = [-1.0 if momentum is None else momentum for momentum in momenta]
    averages = dict(zip(AVERAGES, (*norm, *bd, *ir), strict=True))
    call = make_call(values.new_empty(count, 1, 1, 1), momenta=numbers, **averages)
    average_(call, values, batch["inv_sqrt"], batch["inv_std"])


@cache
def register_on_cpu() -> torch.library.Library:
    library = torch.library.Library("cenet", "IMPL")
    for name in ("norm_ce", "sync_norm_ce", "folded_ce"):
        library.impl(name, getattr(ops, f"_{name}"), "CPU")
    for name in ("norm_ce_backward", "sync_norm_ce_backward"):
        library.impl(name, getattr(ops, f"_{name}"), "CPU")
    return library


@contextmanager
def kernels_on(device: str) -> Iterator[None]:
    """Layers on `device` run on the kernels, on the CPU too."""
    with pytest.MonkeyPatch.context() as patch, ops.backend("triton"):
        if device == "cpu":
            register_on_cpu()
            patch.setattr(ops, "_why_not", lambda *_: None)
            patch.setattr(ops, "_device_of", lambda *_: nullcontext())
        yield


def folded_weights(
    x: Tensor, gate: Sequence[Tensor], inv_std: Tensor, share: Tensor, offset: Tensor
) -> tuple[Tensor, int]:
    """w_n of a folded layer, and into how many parts a sample was split for it."""
    with kernels_on(x.device.type):
        parts = measure(x, 16, gram=False, most_splits=SPLITS)
        values = x.new_empty(5, x.shape[1])
        call = FoldedCECall(
            x, None, values, None, *gate, inv_std, share, offset, act="none", slope=0.0
        )
        w = folded_gate(call, parts)
    return w, parts.splits
