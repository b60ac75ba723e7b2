"""Layers of the deploy form, with which `fold_ce` replaces norm, CE and activation."""

from typing import TypeVar

import torch
from torch import Tensor, nn

import cenet.nn.fused as fused
from cenet import cpu, ops
from cenet import functional as F
from cenet.internals import hears_operators, is_batched, is_channels_last, is_tracing
from cenet.kernels.call import FoldedCECall
from cenet.nn.base import EquilibriumLayer, call_as_leaf, finish, is_proxy, refuse_script
from cenet.nn.equilibrium import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
)
from cenet.nn.norms import is_hooked

Branch = TypeVar("Branch", bound=EquilibriumLayer)

# for maps of at least this many pixels, one product per image is faster than one for all images
ROWS_OF_LARGE_MAPS = 400


class FoldedCE2d(nn.Module):
    """CE in deployment: (M + Diag(a_n)) · (x + shift).

    The convolution before it has absorbed the norm's scale.

    Shape: (N, C, H, W) -> (N, C, H, W).
    """

    # `ce_layers` does not look inside
    is_deploy_form = True
    takes_residual = True
    __prepare_scriptable__ = refuse_script

    values: Tensor
    matrix: Tensor | None
    matrix_shift: Tensor
    gain_weight: Tensor
    gain_offset: Tensor

    def __init__(self, ce: EquilibriumLayer, shift: Tensor, act: nn.Module | None) -> None:
        """Copy the tensors that `ce` uses in evaluation."""
        super().__init__()
        identity, _, reweighting = _shares(ce)
        matrix = fixed_matrix(ce)
        # the rows that the kernels read, center, rstd, γ, β and offset: they only shift x
        one, zero = torch.ones_like(shift), torch.zeros_like(shift)
        self.register_buffer("values", torch.stack([-shift, one, one, zero, zero]))
        self.register_buffer("matrix", matrix)
        shifted = torch.zeros_like(shift) if matrix is None else mix_rows(shift, matrix)
        self.register_buffer("matrix_shift", shifted.clone())  # without padding
        self.register_buffer("gain_weight", reweighting)
        # share of the identity; if there is a matrix, its diagonal holds it
        self.register_buffer("gain_offset", identity if matrix is None else 0 * identity)
        self.ir = _branch(ce, InstanceReweighting2d)
        self.act = act
        # whether nothing else reads the input, so that the result may be written over it
        self.owns_input = False

    @property
    def shift(self) -> Tensor:
        """The shift that is added to x, (C,)."""
        return -self.values[0]

    def forward(
        self, x: Tensor, residual: Tensor | None = None, act: nn.Module | None = None
    ) -> Tensor:
        """Gate each sample, mix, add the residual if there is one, activate (see `NormCE2d`)."""
        if is_proxy(x):
            return call_as_leaf(self, x, residual, act)
        act = self.act if act is None else act
        if x.device.type == "cpu" and (layer := _compilable(self, x, residual)) is not None:
            return _compiled(self, layer, x, residual, act)
        if self.ir is not None and _can_fuse(self, self.ir, x, residual):
            return _fused(self, self.ir, x, residual, act)
        dtype = F.statistics_dtype(x)
        matrix = None if self.matrix is None else self.matrix.to(dtype)
        d, c = None, self.matrix_shift.to(dtype)[None]
        if self.ir is not None:
            moments = _moments(x)
            one = moments.mean.new_ones(x.shape[1])
            gain = self.ir.gain(moments, one, self.ir.inv_std(one, None))
            d = self.gain_weight * gain + self.gain_offset
            c = c + d * self.shift
        if _is_in_rows(x) and matrix is not None and x.shape[1] % matrix.shape[-1] == 0:
            return finish(_map_rows(x, matrix, d, c), act, residual)
        return finish(F.mix(x, matrix, d, c), act, residual)


class Finish(nn.Module):
    """Residual and activation, after a CE layer that was folded into the convolution."""

    is_deploy_form = True
    takes_residual = True

    def __init__(self, act: nn.Module | None) -> None:
        """Take over the activation."""
        super().__init__()
        self.act = act

    def forward(
        self, x: Tensor, residual: Tensor | None = None, act: nn.Module | None = None
    ) -> Tensor:
        """act(x + residual)."""
        return finish(x, self.act if act is None else act, residual)


def _moments(x: Tensor) -> F.Moments:
    if cpu.can_take(x):
        return F.moments(x, None)
    pixels = x.shape[2] * x.shape[3]
    mean = x.mean((2, 3), dtype=F.statistics_dtype(x))
    centered = x - mean[:, :, None, None]
    if _is_in_rows(x):  # `vector_norm` is slow in this layout
        return F.Moments(mean, centered.square_().mean((2, 3)), None, pixels)
    spread = torch.linalg.vector_norm(centered, dim=(2, 3))
    return F.Moments(mean, spread.square() / pixels, None, pixels)


def _compilable(folded: FoldedCE2d, x: Tensor, residual: Tensor | None) -> cpu.FoldedLayer | None:
    """The layer for `cpu.folded`, or None if that cannot run it: with gradients or hooks, say."""
    ir, matrix = folded.ir, folded.matrix
    if torch.is_grad_enabled() or ir is None or matrix is None or ir.released:
        return None
    if not cpu.can_take(x, matrix.shape[-1]):
        return None
    if residual is not None and (residual.shape != x.shape or not cpu.can_take(residual)):
        return None
    if any(type(part) is not kind or is_hooked(part) for part, kind in ir.parts()):
        return None
    layer = cpu.FoldedLayer(
        matrix,
        *ir.gate,
        inv_std=ir.running_inv_std,
        share=folded.gain_weight,
        offset=folded.gain_offset,
        shift=folded.shift,
        constant=folded.matrix_shift,
    )
    return layer if all(tensor.dtype is torch.float32 for tensor in layer) else None


def _compiled(
    folded: FoldedCE2d,
    layer: cpu.FoldedLayer,
    x: Tensor,
    residual: Tensor | None,
    act: nn.Module | None,
) -> Tensor:
    relu = type(act) is nn.ReLU and not is_hooked(act) and not hears_operators()
    y = cpu.folded(
        cpu.dense(x),
        layer,
        norm_eps=F.GATE_NORM_EPS,
        largest=F.GATE_LARGEST,
        residual=residual,
        relu=relu,
        in_place=folded.owns_input,
    )
    return y if relu else finish(y, act, None)


def _is_in_rows(x: Tensor) -> bool:
    """Whether x is on a CPU in channels_last, each pixel a row, and needs no gradients.

    Such an x is measured and mapped without a copy. `functional.mix` would copy it into contiguous
    layout and the result back, which takes longer than the rest of the layer.
    """
    if x.device.type != "cpu" or x.dtype != F.statistics_dtype(x) or torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling() or is_tracing() or is_batched(x):
        return False
    return is_channels_last(x)


def _map_rows(x: Tensor, matrix: Tensor, d: Tensor | None, c: Tensor) -> Tensor:
    """`functional.mix` for x in channels_last: a group is a part of every row."""
    n, channels, height, width = x.shape
    groups, group_size, _ = matrix.shape

    def as_rows(images: Tensor) -> Tensor:  # (N, G, L, K), a view
        shape = (n, height * width, groups, group_size)
        return images.permute(0, 2, 3, 1).view(shape).transpose(1, 2)

    if height * width < ROWS_OF_LARGE_MAPS:
        # one product per group for all images: products of few rows are slow
        rows = as_rows(x).transpose(0, 1).reshape(groups, -1, group_size)
        y = torch.bmm(rows, matrix.mT).transpose(0, 1)
        y = y.reshape(n, height, width, channels).permute(0, 3, 1, 2)
        if d is not None:
            y.addcmul_(x, d[:, :, None, None])
    else:
        operator = matrix if d is None else matrix + torch.diag_embed(F.grouped(d, group_size))
        y = torch.empty_like(x)
        operators = operator.mT.expand(n, -1, -1, -1)
        for rows, own, mapped in zip(as_rows(x), operators, as_rows(y), strict=True):
            torch.bmm(rows, own, out=mapped)
    return y.add_(c[:, :, None, None])


def _can_fuse(
    folded: FoldedCE2d, ir: InstanceReweighting2d, x: Tensor, residual: Tensor | None
) -> bool:
    unless = fused.no_kernel_for(ir)
    given = [x, *folded.parameters(), *([] if residual is None else [residual])]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        unless = "a folded layer has gradients in plain PyTorch only (use torch.no_grad())"
    if residual is not None and residual.dtype != x.dtype:
        unless = f"the residual is of {residual.dtype}, not of {x.dtype}"
    group_size = 1 if folded.matrix is None else folded.matrix.shape[-1]
    return ops.use_kernels(x, [folded.values, *ir.gate], group_size, unless)


def _fused(
    folded: FoldedCE2d,
    ir: InstanceReweighting2d,
    x: Tensor,
    residual: Tensor | None,
    act: nn.Module | None,
) -> Tensor:
    name, slope, after = fused.inside_and_after(act)
    w1, norm_weight, norm_bias, w2 = ir.gate
    call = FoldedCECall(
        x=x,
        residual=residual,
        values=folded.values,
        matrix=folded.matrix,
        w1=w1,
        norm_weight=norm_weight,
        norm_bias=norm_bias,
        w2=w2,
        inv_std=ir.running_inv_std,
        share=folded.gain_weight,
        offset=folded.gain_offset,
        act=name,
        slope=slope,
    )
    return finish(ops.run_folded_ce(call), after, None)


def fixed_matrix(ce: EquilibriumLayer) -> Tensor | None:
    """The matrix of a CE layer in evaluation for all samples, (G, K, K); None without `bd`."""
    bd = _branch(ce, BatchDecorrelation2d)
    if bd is None:
        return None
    identity, decorrelation, _ = _shares(ce)
    return decorrelation * bd.running_inv_sqrt + identity * torch.eye(
        bd.group_size, dtype=identity.dtype, device=identity.device
    )


def _shares(ce: EquilibriumLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of identity, batch decorrelation and instance reweighting in the output of `ce`."""
    one = next(ce.buffers()).new_ones(())
    alpha = one if ce.blend is None else ce.blend.detach().squeeze(0)
    if isinstance(ce, ChannelEquilibrium2d):
        lam = ce.mix.detach()
    else:
        lam = one * isinstance(ce, BatchDecorrelation2d)
    return 1 - alpha, alpha * lam, alpha * (1 - lam)


def _branch(ce: EquilibriumLayer, kind: type[Branch]) -> Branch | None:
    return next((module for module in ce.modules() if isinstance(module, kind)), None)


def mix_rows(values: Tensor, matrix: Tensor) -> Tensor:
    """Apply `matrix` within each group of rows; the last group may be ragged."""
    groups, group_size, _ = matrix.shape
    flat = values.reshape(len(values), -1).to(matrix.dtype)
    padded = torch.nn.functional.pad(flat, (0, 0, 0, groups * group_size - len(values)))
    mixed = matrix @ padded.reshape(groups, group_size, -1)
    return mixed.flatten(0, 1)[: len(values)].reshape(values.shape)
