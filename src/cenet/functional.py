"""The channel equilibrium block as pure functions: the paper in plain PyTorch.

The block is one pass that measures and one pass that applies, with small-tensor algebra between:

    moments(x)         mean (N,C), var (N,C), cov (G,K,K)           reads x
    decorrelation      W (G,K,K)       Eq. batch-co, Eq. Newtoniter
    inverse_std        s^{-1/2} ()     Eq. inputAII, Eq. reparam1
    instance_gain      a (N,C)         Eq. reparam1, Eq. reparam2 (instance_gate)
    coefficients       P (G,K,K), d (N,C), c (N,C)                   Eq. CE with Eq. D_n-relax
    mix(x, P, d, c)    P·x + d_n ⊙ x + c_n                           reads x, writes y

N samples, C channels, G groups of K channels (the last group takes the remainder and is padded), L
= H·W pixels. The normalizer enters as x̃ = scale ⊙ x + shift, one value per channel. Equation names
are the labels in the paper's source; docs/paper.md has the whole table.

Numerics: everything is computed in float32, or in float64 for float64 input, with autocast
disabled; `mix` returns the dtype and memory format of x. Variances and covariances are biased (1/L,
1/M).
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, max_pool2d, pad

from cenet import cpu
from cenet.internals import is_batched, is_tracing, memory_format_of, unsafe_view

# Σ + (RIDGE · tr Σ / K + RIDGE_FLOOR) · I: relative, so that weak channels keep their correlations;
# the floor only decides what happens when a whole group is zero
RIDGE = 1e-5
RIDGE_FLOOR = 1e-10
GATE_NORM_EPS = 1e-5
# largest input of the gate; larger ones are scaled down, because LayerNorm squares what they become
GATE_LARGEST = 2.0**40

Params = ParamSpec("Params")
Result = TypeVar("Result")


class Moments(NamedTuple):
    """Instance mean and variance over `pixels` values; covariance of each group, if taken."""

    mean: Tensor  # (N, C)
    var: Tensor  # (N, C)
    cov: Tensor | None  # (G, K, K)
    pixels: int  # L
    window_mean: Tensor | None = None  # (N, C), of x or its pooled windows, as in cov


class Centered(NamedTuple):
    """Images with a constant subtracted from every channel: x = values − less + offset + center.

    Without this, float32 would lose as many digits as mean / deviation has, because gradients would
    be sums of large terms that cancel. The coefficients add the constant again, so the output does
    not depend on it, and it needs no gradient.
    """

    values: Tensor  # (N, C, H, W)
    offset: Tensor | None = None  # (N, C), of the images
    center: Tensor | None = None  # (C,)
    less: Tensor | None = None  # (N, C) or (1, C), still to be subtracted from values, by `mix`
    meeting: "Meeting | None" = None  # to be passed to `mix`


class Meeting:
    """Joins two gradients of images, that of `mix` and that of measuring, in one compiled pass.

    In the backward pass `mix` comes first. It stores its matrices here and returns the gradient of
    its output unchanged; the backward of measuring takes the matrices and computes both gradients.
    That is possible only if the images are used once: not if they are mapped twice, nor after a
    backward pass that can itself be differentiated.

    Attributes:
        uses: how often the images have been used.
        left: matrices and factors of the map, stored until measuring takes them.
    """

    def __init__(self) -> None:
        """Start with images that have not been mapped."""
        self.uses = 0
        self.left: tuple[Tensor, Tensor | None] | None = None

    def take(self) -> tuple[Tensor, Tensor | None] | None:
        """Return what the map has stored, and forget it."""
        left, self.left = self.left, None
        return left


class Gate(NamedTuple):
    """θ of Eq. reparam2: two bias-free linear layers with a LayerNorm between them."""

    w1: Tensor  # (hidden, C)
    norm_weight: Tensor  # (hidden,)
    norm_bias: Tensor  # (hidden,)
    w2: Tensor  # (C, hidden)


class Coefficients(NamedTuple):
    """The map that `mix` applies. P is None without decorrelation, d without a per-sample term."""

    P: Tensor | None  # (G, K, K)
    d: Tensor | None  # (N, C)
    c: Tensor  # (N, C) or (1, C)


def full_precision(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Disable autocast around `function`, whose first argument is a tensor."""

    @wraps(function)
    def wrapped(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        tensor = cast(Tensor, args[0])
        if tensor.is_meta:  # has no autocast
            return function(*args, **kwargs)
        with torch.autocast(tensor.device.type, enabled=False):
            return function(*args, **kwargs)

    return wrapped


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype statistics of x are computed in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def sign_of(scale: Tensor) -> Tensor:
    """+1 or −1 per channel, never 0."""
    return 1 - 2 * scale.signbit().to(scale.dtype)


def num_groups(channels: int, group_size: int) -> int:
    """Number of groups of `group_size` contiguous channels, a ragged last one counted."""
    return -(-channels // group_size)


def in_layout_of(x: Tensor, y: Tensor) -> Tensor:
    """y in the memory layout of x: channels_last or contiguous."""
    if not torch.compiler.is_compiling() and (is_batched(x) or is_batched(y)):
        return y.contiguous()  # torch.vmap knows this layout only
    return y.contiguous(memory_format=memory_format_of(x))


def grouped(values: Tensor, group_size: int) -> Tensor:
    """(…, C) -> (…, G, K), the last group padded with zeros."""
    channels = values.shape[-1]
    groups = num_groups(channels, group_size)
    if groups * group_size != channels:
        values = pad(values, (0, groups * group_size - channels))
    return values.reshape(*values.shape[:-1], groups, group_size)


def _grouped_pixels(x: Tensor, group_size: int) -> Tensor:
    """(N, C, H, W) -> (N·G, K, L), the last group padded with zeros."""
    n, channels, height, width = x.shape
    groups = num_groups(channels, group_size)
    if groups * group_size != channels:
        x = pad(x, (0, 0, 0, 0, 0, groups * group_size - channels))
    return x.reshape(n * groups, group_size, height * width)


def subtracted(x: Tensor, center: Tensor) -> Centered:
    """x less a constant per channel, (C,)."""
    if cpu.can_take(x):
        return Centered(x, None, center, center[None])
    return Centered(x - center[:, None, None], None, center)


class _Moments(torch.autograd.Function):
    """Center x, and take the mean and variance (N,C) and group covariance (G,K,K) of the result.

    The covariance is what varies inside the images plus what varies between their means (the law of
    total variance of Appendix B, for the whole matrix): both parts are positive semidefinite. The
    gradient is linear in the values, so backward is a `mix`, and differentiable again.

    The mean that is returned is that of the centered values: the rounding error of the mean that
    was subtracted, which matters if that was large. The centered values are a result too, so that
    backward can add the gradients of measuring and of mapping in place. With a `meeting`, compiled
    passes do all of this; then the values are x itself, and `mix` subtracts `less`.
    """

    @staticmethod
    def forward(
        x: Tensor, group_size: int | None, meeting: Meeting | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        if meeting is not None:
            values = x.view_as(x)
            less, mean, var, inside = cpu.measure(x, group_size)
        else:
            x = x.contiguous()  # the matrix products over the pixels of a group need it
            less = image_means(x)
            values = x - less[:, :, None, None]
            mean, var, inside = _measure(values, group_size)
        if inside is None or group_size is None:
            return values, less, mean, var, None
        between = grouped(_from_batch_mean(less, mean), group_size).transpose(0, 1)  # (G, N, K)
        cov = inside.mean(0) + between.mT @ between / len(x)
        return values, less, mean, var, cov

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Tensor, int | None, Meeting | None], output: tuple[Tensor, ...]
    ) -> None:
        values, less, mean, *_ = output
        ctx.save_for_backward(values if inputs[2] is None else inputs[0], less, mean)
        ctx.mark_non_differentiable(less)
        ctx.group_size, ctx.meeting = inputs[1:]
        ctx.set_materialize_grads(False)  # no zeros in the size of values that are not mapped

    @staticmethod
    def backward(
        ctx: Any,
        grad: Tensor | None,
        _less: None,
        grad_mean: Tensor | None,
        grad_var: Tensor | None,
        grad_cov: Tensor | None,
    ) -> tuple[Tensor, None, None]:
        values, less, mean = ctx.saved_tensors
        n, channels, height, width = values.shape
        grad_mean = torch.zeros_like(mean) if grad_mean is None else grad_mean
        grad_var = torch.zeros_like(mean) if grad_var is None else grad_var
        P = None
        d = 2 / (height * width) * grad_var
        c = grad_mean / (height * width) - d * mean
        if grad_cov is not None:
            P = (grad_cov + grad_cov.mT) / (n * height * width)
            distance = grouped(_from_batch_mean(less, mean) - mean, ctx.group_size)  # (N, G, K)
            c = c + _of_each_image(P, distance)[:, :channels]
        of_map = None if grad is None or ctx.meeting is None else ctx.meeting.take()
        if grad is not None and of_map is not None:
            matrix, factors = of_map
            return cpu.gradient(grad, matrix, factors, values, P, d, c, less), None, None
        may_pass = ctx.meeting is not None and not torch.is_grad_enabled()
        if may_pass and cpu.can_take(values) and not is_batched(c):
            own = cpu.apply(values, P, d, c, less=less)
        else:
            # not through its decorator: dynamo cannot follow a change of autocast inside a backward
            own = mix.__wrapped__(  # type: ignore[attr-defined]
                values, P, d, c, None if ctx.meeting is None else less
            )
        if grad is not None:
            own = own + grad if torch.is_grad_enabled() else own.add_(grad)
        return own, None, None


def image_means(x: Tensor) -> Tensor:
    """Mean of each channel of each image, (N, C)."""
    return x.mean((2, 3))


def _measure(values: Tensor, group_size: int | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mean and variance (N, C) of centered values, and their second moments (N, G, K, K)."""
    n, channels, height, width = values.shape
    mean = values.mean((2, 3))
    if group_size is None:
        length = torch.linalg.vector_norm(values, dim=(2, 3))
        return mean, length.square() / (height * width), None
    pixels = _grouped_pixels(values, group_size)
    inside = pixels @ pixels.mT / (height * width)
    inside = inside.reshape(n, -1, group_size, group_size)
    var = inside.diagonal(dim1=-2, dim2=-1).flatten(1)[:, :channels]
    return mean, var.contiguous(), inside


def _of_each_image(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Matrices of groups (G, K, K) times vectors of images (N, G, K), as (N, G · K).

    The images are the rows of one product per group: one product per image would be slower.
    """
    return (vectors.transpose(0, 1) @ matrix.mT).transpose(0, 1).flatten(1)


def _from_batch_mean(less: Tensor, mean: Tensor) -> Tensor:
    """Mean of each image, less + mean, minus the mean of the batch, (N, C).

    `mean` is small. If `less` is large, it must first lose the batch's mean, or their sum would
    round `mean` away.
    """
    whole = less - less.mean(0) + mean
    return whole - whole.mean(0)


@full_precision
def moments(
    x: Tensor, group_size: int | None = 16, pool: int = 1, sign: Tensor | None = None
) -> Moments:
    """Measure x: instance moments (Eq. IN) and the covariance of each group (Eq. batch-co).

    Args:
        x: feature map of any floating dtype and layout.
        group_size: channels per covariance group; None leaves the covariance out.
        pool: side of the max-pool window x goes through before its covariance is taken (1 = none).
            Windows at the border may be partial, so every pixel counts.
        sign: ±1 per channel. Pooling sign·x and not x makes pooling commute with an affine map
            whose scale has that sign.

    Shape: x (N, C, H, W); mean and var (N, C); cov (G, K, K), zero in the padding of a ragged
    group.
    """
    if group_size is None and not cpu.can_take(x):
        x = x.to(statistics_dtype(x))
        mean = x.mean((2, 3))
        var = (x - mean[:, :, None, None]).square().mean((2, 3))
        return Moments(mean, var, None, x.shape[2] * x.shape[3])
    found, images = centered_moments(x, group_size, pool, sign)
    assert found.window_mean is not None
    assert images.center is not None
    mean, window_mean = found.mean + images.center, found.window_mean + images.center
    return Moments(mean, found.var, found.cov, found.pixels, window_mean)


@full_precision
def centered_moments(
    x: Tensor, group_size: int | None = 16, pool: int = 1, sign: Tensor | None = None
) -> tuple[Moments, Centered]:
    """`moments` with means relative to a common center, and the centered images for `mix`."""
    x = x.to(statistics_dtype(x))
    pixels = x.shape[2] * x.shape[3]
    values, less, mean, var, cov, meeting = _centered(x, group_size if pool == 1 else None)
    center = less.mean(0)
    offset = less - center
    mean = offset + mean
    images = Centered(values, offset, center, None if meeting is None else less, meeting)
    if group_size is None or pool == 1:
        return Moments(mean, var, cov, pixels, mean), images
    pooled = _pooled(x, pool, sign)
    _, less, window_mean, _, cov, _ = _centered(pooled, group_size)
    return Moments(mean, var, cov, pixels, less - center + window_mean), images


def _pooled(x: Tensor, pool: int, sign: Tensor | None) -> Tensor:
    """The largest value of each window; of a channel whose sign is −1, the smallest."""
    if cpu.can_take(x):
        sign = x.new_ones(x.shape[1]) if sign is None else sign
        return cast(Tensor, _Pooled.apply(cpu.dense(x), pool, sign))
    return _pool(x, pool, sign)


def _pool(x: Tensor, pool: int, sign: Tensor | None) -> Tensor:
    """`_pooled` in plain PyTorch."""
    if sign is None:
        return max_pool2d(x, pool, ceil_mode=True)
    signs = sign.to(x.dtype)[:, None, None]
    return max_pool2d(signs * x, pool, ceil_mode=True) * signs


class _Pooled(torch.autograd.Function):
    """`_pooled` by a compiled pass; torch's pooling on a CPU takes longer than the whole layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pool: int, sign: Tensor) -> Tensor:
        pooled = cpu.pool(x, pool, sign)
        ctx.save_for_backward(x, sign, pooled)
        ctx.pool = pool
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, sign, pooled = ctx.saved_tensors
        if not torch.is_grad_enabled() and cpu.can_take(grad):
            return cpu.spread(grad, x, ctx.pool, sign, pooled), None, None
        (own,) = _gradients_in_pytorch(lambda x: _pool(x, ctx.pool, sign), (x,), grad)
        assert own is not None
        return own, None, None


def _centered(x: Tensor, group_size: int | None) -> tuple[Any, ...]:
    """The results of `_Moments`, and a `Meeting` if they come from a compiled pass, else None."""
    if not cpu.can_take(x, group_size or 1):
        return *_Moments.apply(x, group_size, None), None
    meeting = Meeting()
    return *_Moments.apply(cpu.dense(x), group_size, meeting), meeting


@full_precision
def newton_inverse_sqrt(sigma: Tensor, steps: int = 3) -> Tensor:
    """Newton iterate for (Σ / tr Σ)^{-1/2} after `steps` steps, Eq. Newtoniter.

    The number of steps is part of the definition: at 3 the iterate is far from converged, and its
    spectrum lies in [1, 1.5^steps] for every positive semidefinite Σ. Computed in the coupled form
    Y → (Σ/trΣ)^{1/2}, Z → (Σ/trΣ)^{-1/2}: the same polynomial as the printed iteration, without
    its instability.

    Shape: (…, K, K) -> (…, K, K).
    """
    eye = torch.eye(sigma.shape[-1], dtype=sigma.dtype, device=sigma.device)
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    eye = 1.5 * eye
    minus_half_y = sigma / (-2 * trace)
    z = step = eye + minus_half_y
    for _ in range(steps - 1):
        minus_half_y = minus_half_y @ step
        step = eye + z @ minus_half_y
        z = step @ z
    return z


@full_precision
def decorrelation(cov: Tensor, scale: Tensor, newton_steps: int = 3) -> Tensor:
    """Batch decorrelation operator W of each group, from the covariance of x and the norm's scale.

    Σ = cov ⊙ (scale scaleᵀ) (Eq. batch-co) plus a relative ridge, then Eq. Newtoniter. W = I in the
    padding of a ragged group.

    Shape: cov (G, K, K), scale (C,) -> (G, K, K).
    """
    if cpu.can_iterate(cov, scale):
        return cast(Tensor, _Decorrelation.apply(cov, scale, newton_steps))
    return _decorrelation(cov, scale, newton_steps)


def _decorrelation(cov: Tensor, scale: Tensor, newton_steps: int) -> Tensor:
    """`decorrelation` in plain PyTorch."""
    group_size = cov.shape[-1]
    scale_GK = grouped(scale, group_size)
    sigma = cov * scale_GK[:, :, None] * scale_GK[:, None, :]
    trace = sigma.diagonal(dim1=-2, dim2=-1).sum(-1)
    if scale.numel() % group_size == 0:
        eye = torch.eye(group_size, dtype=sigma.dtype, device=sigma.device)
        ridge = RIDGE / group_size * trace + RIDGE_FLOOR
        return newton_inverse_sqrt(sigma + ridge[:, None, None] * eye, newton_steps)
    valid_GK = grouped(torch.ones_like(scale), group_size)
    ridge = RIDGE * trace / valid_GK.sum(-1) + RIDGE_FLOOR
    inv_sqrt = newton_inverse_sqrt(
        sigma + torch.diag_embed(ridge[:, None] * valid_GK), newton_steps
    )
    return inv_sqrt * valid_GK[:, :, None] + torch.diag_embed(1 - valid_GK)


class _Decorrelation(torch.autograd.Function):
    """`decorrelation` by a compiled function, and its gradients by another."""

    @staticmethod
    def forward(ctx: Any, cov: Tensor, scale: Tensor, newton_steps: int) -> Tensor:
        ctx.save_for_backward(cov, scale)
        ctx.newton_steps = newton_steps
        return cpu.newton(cov, scale, newton_steps, RIDGE, RIDGE_FLOOR)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cov, scale = ctx.saved_tensors
        if torch.is_grad_enabled() or not cpu.can_iterate(grad, scale):
            steps = ctx.newton_steps
            found = _gradients_in_pytorch(
                lambda cov, scale: _decorrelation(cov, scale, steps), (cov, scale), grad
            )
            return *found, None
        given = (grad, cov, scale, ctx.newton_steps, RIDGE, RIDGE_FLOOR)
        return *cpu.newton_gradients(*given), None


def inverse_std(var: Tensor, scale: Tensor, eps: float = 1e-5) -> Tensor:
    """s^{-1/2}; s is the mean of σ̃² = var ⊙ scale² over (N, C) (Eq. inputAII, Eq. reparam1)."""
    return ((var * scale.square()).mean() + eps).rsqrt()


def gate_input(variance: Tensor) -> Tensor:
    """Scale down those rows of the gate's input whose squares would overflow; (N, C) -> (N, C).

    The gate's LayerNorm removes the factor again, so the gate's value does not depend on it. Nor
    does the gradient, because the factor counts as a constant.
    """
    variance = variance.clamp(max=torch.finfo(variance.dtype).max)
    largest = variance.detach().amax(-1, keepdim=True)
    return variance / (largest / GATE_LARGEST).clamp_min(1)


@full_precision
def instance_gate(variance: Tensor, gate: Gate) -> Tensor:
    """Gate of instance reweighting in (0, 1): sigmoid(W2 relu(LN(W1 variance_n))) (Eq. reparam2).

    Shape: (N, C) -> (N, C).
    """
    gate = Gate(*(weight.to(variance.dtype) for weight in gate))
    hidden = linear(gate_input(variance), gate.w1)
    hidden = layer_norm(hidden, hidden.shape[-1:], gate.norm_weight, gate.norm_bias, GATE_NORM_EPS)
    return linear(hidden.relu(), gate.w2).sigmoid()


def instance_gain(var: Tensor, scale: Tensor, inv_std: Tensor, gate: Gate) -> Tensor:
    """Instance reweighting a_n = gate(σ̃²_n / s) · s^{-1/2} (Eq. inputAII, Eq. reparam1).

    The gate's input is σ̃²/s. Its LayerNorm removes the factor 1/s, so this is the function of the
    paper, except that the LayerNorm's ε does not switch the gate off when the norm's scale is
    small.

    Shape: var (N, C), scale (C,), inv_std () -> (N, C).
    """
    return instance_gate(var * scale.square() * inv_std.square(), gate) * inv_std


@full_precision
def coefficients(
    scale: Tensor,
    shift: Tensor,
    *,
    inv_sqrt: Tensor | None = None,
    gain: Tensor | None = None,
    lam: Tensor | None = None,
    blend: Tensor | None = None,
) -> Coefficients:
    """Fold norm and block into one affine map per sample: (λW + (1−λ)Diag(a_n)) (scale ⊙ x +
    shift).

    Eq. CE with the relaxed operator of Eq. D_n-relax. One branch may be missing; then there is no
    λ.

    Args:
        scale: of the normalizer, (C,).
        shift: of the normalizer, (C,), or (N, C) if images have been centered.
        inv_sqrt: W of the batch decorrelation branch, (G, K, K).
        gain: a_n of the instance reweighting branch, (N, C).
        lam: λ in (0, 1), needed when both branches are there.
        blend: α. The result is x̃ + α · (block(x̃) − x̃).
    """
    shift = shift.reshape(-1, scale.numel())
    matrix = d = c = None
    if inv_sqrt is not None:
        group_size = inv_sqrt.shape[-1]
        weighted = inv_sqrt if lam is None else lam * inv_sqrt
        matrix = weighted * grouped(scale, group_size)[:, None, :]
        c = _of_each_image(weighted, grouped(shift, group_size))[:, : scale.numel()]
    if gain is not None:
        weighted = gain if lam is None else (1 - lam) * gain
        d = weighted * scale
        c = weighted * shift if c is None else torch.addcmul(c, weighted, shift)
    assert c is not None, "coefficients need inv_sqrt, gain or both"
    if blend is not None:
        matrix = None if matrix is None else blend * matrix
        d = (1 - blend) * scale[None] if d is None else (1 - blend) * scale + blend * d
        c = (1 - blend) * shift + blend * c
    return Coefficients(matrix, d, c)


@full_precision
def mix(
    x: Tensor,
    P: Tensor | None,
    d: Tensor | None,
    c: Tensor,
    less: Tensor | None = None,
    meeting: Meeting | None = None,
) -> Tensor:
    """y = P·x + d_n ⊙ x + c_n, P acting inside each group of channels.

    Args:
        x: feature map of any floating dtype and layout.
        P: matrices of the groups, (G, K, K), or None.
        d: factors of channels, (N, C), (1, C) or None.
        c: constants, (N, C) or (1, C).
        less: (N, C) or (1, C), subtracted from x first; None for zero.
        meeting: `Centered.meeting`, if x comes from `centered_moments`.

    Shape: x (N, C, H, W) -> (N, C, H, W), in the dtype and memory format of x.
    """
    values = x.to(c.dtype)
    if P is not None and P.dtype == c.dtype and cpu.can_take(values, P.shape[-1]):
        y = cast(Tensor, _Mapped.apply(cpu.dense(values), P, d, c, less, meeting))
    else:
        y = _mix(values, P, d, c, less)
    return in_layout_of(x, y.to(x.dtype))


def _mix(
    values: Tensor, P: Tensor | None, d: Tensor | None, c: Tensor, less: Tensor | None
) -> Tensor:
    """`mix` in plain PyTorch; the result is contiguous if there is a P."""
    if less is not None:
        values = values - less[:, :, None, None]
    if P is None:
        assert d is not None, "mix needs P, d or both"
        return torch.addcmul(c[:, :, None, None], d[:, :, None, None], values)
    n, channels, height, width = values.shape
    groups, group_size, _ = P.shape
    operator = P if d is None else P + torch.diag_embed(grouped(d, group_size))
    y = torch.baddbmm(
        grouped(c, group_size).expand(n, -1, -1).reshape(n * groups, group_size, 1),
        operator.expand(n, -1, -1, -1).reshape(n * groups, group_size, group_size),
        _grouped_pixels(values, group_size),
    )
    # autograd does not take it for a view, so that a residual block may add to it in place for free
    shape = [n, groups * group_size, height, width]
    # a trace gets an ordinary view, because it would fix the arguments of `unsafe_view`
    y = y.view(shape) if is_tracing() else cast(Tensor, unsafe_view(y, shape))
    return y if groups * group_size == channels else y[:, :channels]


class _Mapped(torch.autograd.Function):
    """`mix` as a compiled pass, its gradients as two; the second may be left to `_Moments`."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        P: Tensor,
        d: Tensor | None,
        c: Tensor,
        less: Tensor | None,
        meeting: Meeting | None,
    ) -> Tensor:
        ctx.save_for_backward(values, P, d, c, less)
        ctx.meeting = meeting
        if meeting is not None:
            meeting.uses += 1
        return cpu.apply(values, P, d, c, less=less)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, P, d, c, less = ctx.saved_tensors
        if torch.is_grad_enabled() or not cpu.can_take(grad) or not cpu.can_take(values):
            if ctx.meeting is not None:
                ctx.meeting.uses += 1
                ctx.meeting.left = None
            inputs = (values, P, d, c)
            found = _gradients_in_pytorch(
                lambda values, P, d, c: _mix(values, P, d, c, less), inputs, grad
            )
            return *found, None, None
        own = grad_P = grad_d = grad_c = None
        if any(ctx.needs_input_grad[1:]):
            products, grad_c = cpu.gram(grad, values, less, P.shape[-1])
            grad_P = products.sum(0)
            if d is not None:
                grad_d = products.diagonal(dim1=-2, dim2=-1).flatten(1)[:, : d.shape[1]]
                grad_d = grad_d.sum_to_size(d.shape)
            grad_c = grad_c.sum_to_size(c.shape)
        if ctx.needs_input_grad[0] and ctx.meeting is not None and ctx.meeting.uses == 1:
            ctx.meeting.left = (P, d)
            own = grad
        elif ctx.needs_input_grad[0]:
            own = cpu.apply(in_layout_of(values, grad), P, d, None, transposed=True)
        return own, grad_P, grad_d, grad_c, None, None


def _gradients_in_pytorch(
    function: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], grad: Tensor
) -> list[Tensor | None]:
    """Gradients of function(*inputs) in plain PyTorch, to be differentiated again or traced."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # views, because d may itself have been computed from the values
        inputs = tuple(x if x is None else (x if again else x.detach()).view_as(x) for x in inputs)
        if not again:
            inputs = tuple(x if x is None else x.requires_grad_() for x in inputs)
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        y = function(*inputs)
        found = iter(torch.autograd.grad(y, wanted, grad, create_graph=again))
    return [next(found) if x is not None and x.requires_grad else None for x in inputs]


def channel_equilibrium(
    x: Tensor,
    gate: Gate,
    lam: Tensor,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    inv_sqrt: Tensor | None = None,
    inv_std: Tensor | None = None,
    group_size: int = 16,
    newton_steps: int = 3,
    pool: int = 1,
    eps: float = 1e-5,
) -> Tensor:
    """Channel equilibrium of scale ⊙ x + shift, Eq. CE: the whole block as one function.

    Args:
        x: input of the normalizer, or its output when scale and shift are left out.
        gate: weights of the instance gate.
        lam: λ, the share of batch decorrelation.
        scale: factor of the normalizer as an affine map, (C,).
        shift: its constant, (C,).
        inv_sqrt: W to use instead of the batch's own: its running average, in evaluation.
        inv_std: s^{-1/2} to use instead of the batch's own, likewise.
        group_size: as in `ChannelEquilibrium2d`.
        newton_steps: as in `ChannelEquilibrium2d`.
        pool: as in `ChannelEquilibrium2d`.
        eps: as in `ChannelEquilibrium2d`.
    """
    dtype = statistics_dtype(x)
    scale = x.new_ones(x.shape[1], dtype=dtype) if scale is None else scale.to(dtype)
    shift = torch.zeros_like(scale) if shift is None else shift.to(dtype)
    _, var, cov, *_ = moments(x, group_size if inv_sqrt is None else None, pool, sign_of(scale))
    if inv_sqrt is None:
        assert cov is not None
        inv_sqrt = decorrelation(cov, scale, newton_steps)
    if inv_std is None:
        inv_std = inverse_std(var, scale, eps)
    gain = instance_gain(var, scale, inv_std, gate)
    return mix(x, *coefficients(scale, shift, inv_sqrt=inv_sqrt, gain=gain, lam=lam))
