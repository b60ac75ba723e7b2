"""Compiled passes over a feature map on a CPU: each does the work of several passes of PyTorch.

`functional` calls them for float32 tensors if `can_take` allows it, and computes the same in plain
PyTorch otherwise. cpu.cpp is compiled when a pass is first needed, by the C++ compiler that
torch.compile uses too. That takes two seconds, and the result is kept in the user's cache. Without
a compiler, on systems other than Linux, and inside `cenet.ops.backend("torch")`, nothing is
compiled or called.

    measure     mean, variance and second moments of every image
    apply       y = P·(x − m) + d_n ⊙ (x − m) + c_n; then a residual and ReLU, if given
    gram        Σ g·(x − m)ᵀ and Σ g: gradients of P, d and c
    gradient    Pᵀ·g + d ⊙ g + Q·(x − m) + e ⊙ (x − m) + f: gradient of x by map and moments
    pool        the largest value of each window; `spread` computes the gradient
    folded      a whole layer in deployment: measure, gate, apply

Feature maps are contiguous or channels_last, and results keep the layout. Two more functions work
on small matrices, for which PyTorch spends more time on starting operations than on computing:

    newton      W of every group by Newton's iteration; `newton_gradients` differentiates it

Results are the same for every number of threads.
"""

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from cenet.internals import (
    increment_version,
    intercepts_operators,
    is_batched,
    is_channels_last,
    memory_format_of,
)

# whether the passes may be used at all; `cenet.ops.backend` sets it
enabled = True

SOURCE = Path(__file__).with_suffix(".cpp")
# largest number of channels in a group: size of the buffers and (channels_last) of a `Row` in
# cpu.cpp
LARGEST_GROUP, LARGEST_GROUP_OF_ROWS = 64, 16
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp")
# compiler flags for the vector instructions that torch uses on this processor
INSTRUCTIONS = {
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"),
    "AVX2": ("-mavx2", "-mfma"),
}
SECONDS = 120  # time limit of the compiler


class Library(NamedTuple):
    """The compiled passes, or the reason why there are none."""

    functions: Any
    missing: str | None


@cache
def library() -> Library:
    """The passes, compiled now unless they are in the cache."""
    try:
        return Library(_loaded(), None)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return Library(None, str(error))


def _loaded() -> ctypes.CDLL:
    """The compiled file; one that is damaged in the cache is compiled again."""
    file = _compiled()
    try:
        return ctypes.CDLL(str(file))
    except OSError:
        file.unlink(missing_ok=True)  # another process may have done so
        return ctypes.CDLL(str(_compiled()))


def _compiled() -> Path:
    """File with the compiled passes; RuntimeError with the reason if it cannot be made."""
    if sys.platform != "linux":
        raise RuntimeError(f"they are compiled on Linux only, not on {sys.platform}")
    wanted = os.environ.get("CXX", "c++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise RuntimeError(f"there is no C++ compiler {wanted}; install g++, or set CXX")
    # the OpenMP library of torch itself, so that there is one pool of threads and not two
    loaded = re.findall(r"/\S+/lib(?:gomp|iomp5|omp)\S*", Path("/proc/self/maps").read_text())
    if not loaded:
        raise RuntimeError("torch has loaded no OpenMP library")
    flags = [*FLAGS, *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ())]
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=SECONDS)
    used = [SOURCE.read_bytes(), version.stdout, *(flag.encode() for flag in (*flags, loaded[0]))]
    name = f"passes-{hashlib.sha256(b'|'.join(used)).hexdigest()[:16]}.so"
    folder = _cache()
    if (folder / name).exists():
        return folder / name
    with tempfile.TemporaryDirectory(dir=folder) as own:
        built = Path(own) / name
        # two steps, because -fopenmp would link the compiler's OpenMP library
        steps = (
            [*flags, "-c", str(SOURCE), "-o", f"{built}.o"],
            ["-shared", f"{built}.o", loaded[0], "-o", str(built)],
        )
        for step in steps:
            run = subprocess.run([compiler, *step], capture_output=True, text=True, timeout=SECONDS)
            if run.returncode != 0:
                told = [line for line in run.stderr.splitlines() if "error" in line]
                reason = (told or ["no error message"])[0]
                raise RuntimeError(f"{compiler} ends with {run.returncode}: {reason}")
        built.replace(folder / name)
    return folder / name


def _cache() -> Path:
    """Folder for compiled passes: in the user's cache, or temporary where that is read-only."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "cenet"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="cenet-"))
    return folder if os.access(folder, os.W_OK) else Path(tempfile.mkdtemp(prefix="cenet-"))


def can_take(x: Tensor, group_size: int = 1) -> bool:
    """Whether the passes can work on x; if not, `functional` uses plain PyTorch.

    They cannot be traced or transformed, and support neither subclasses of Tensor nor forward-mode
    derivatives.
    """
    if not _is_plain(x) or x.dim() != 4:
        return False
    largest = LARGEST_GROUP_OF_ROWS if is_channels_last(x) else LARGEST_GROUP
    return group_size <= largest and library().missing is None


def can_iterate(cov: Tensor, scale: Tensor) -> bool:
    """Whether `newton` can work on these tensors."""
    if not _is_plain(cov) or not _is_plain(scale):
        return False
    return cov.shape[-1] <= LARGEST_GROUP and library().missing is None


def _is_plain(x: Tensor) -> bool:
    """Whether x is an ordinary float32 tensor on a CPU, not empty, traced or transformed."""
    if intercepts_operators() or not enabled:
        return False
    kind = type(x)
    if kind is not Tensor and kind is not Parameter:
        return False
    if x.device.type != "cpu" or x.dtype is not torch.float32 or x.layout is not torch.strided:
        return False
    if x.numel() == 0 or x.is_neg() or is_batched(x):
        return False
    return forward_ad.unpack_dual(x).tangent is None  # type: ignore[no-untyped-call]


def dense(x: Tensor) -> Tensor:
    """x in a layout that the passes take; a copy only of a view with gaps."""
    return x if x.is_contiguous() or is_channels_last(x) else x.contiguous()


def measure(x: Tensor, group_size: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Measure every image of x (N, C, H, W).

    Returns:
        The mean rounded to float32, and the part of the mean that rounding cut off, both (N, C);
        the variance, (N, C); the second moments of the groups, (N, G, K, K), or None if
        `group_size` is None.
    """
    n, channels = x.shape[:2]
    mean, rest, var = (x.new_empty(n, channels) for _ in range(3))
    products = None if group_size is None else _products(x, group_size)
    size = LARGEST_GROUP_OF_ROWS if group_size is None else group_size
    given = map(_pointer, (x, mean, rest, var, products))
    library().functions.cenet_measure(*_shape(x, size), *given)
    return mean, rest, var, products


def apply(
    x: Tensor,
    P: Tensor | None,
    d: Tensor | None,
    c: Tensor | None,
    *,
    less: Tensor | None = None,
    transposed: bool = False,
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    """relu(P·(x − less) + d ⊙ (x − less) + c + residual).

    Args:
        x: images, (N, C, H, W).
        P: matrices of the groups, (G, K, K); None for zeros.
        d, c, less: (N, C), or (1, C) for all images; None for zeros.
        transposed: take Pᵀ instead of P.
        residual: of the shape of x.
        relu: whether ReLU comes last.
    """
    y = torch.empty_like(x)
    residual = None if residual is None else _like(residual, x)
    P = None if P is None else P.contiguous()
    (d, d_step), (c, c_step), (less, less_step) = map(_values, (d, c, less))
    library().functions.cenet_map(
        *_shape(x, LARGEST_GROUP_OF_ROWS if P is None else P.shape[-1]),
        *(_pointer(x), _pointer(less), less_step),
        *(_pointer(P), ctypes.c_int(transposed), _pointer(d), d_step, _pointer(c), c_step),
        *(_pointer(residual), ctypes.c_int(relu), _pointer(y)),
    )
    return y


def gradient(
    g: Tensor,
    P: Tensor,
    d: Tensor | None,
    x: Tensor,
    Q: Tensor | None,
    e: Tensor,
    f: Tensor,
    less: Tensor,
) -> Tensor:
    """Pᵀ·g + d ⊙ g + Q·(x − less) + e ⊙ (x − less) + f.

    Args:
        g: gradients, (N, C, H, W).
        P: matrices of the groups, (G, K, K).
        d, e, f, less: (N, C), or (1, C) for all images; d is None for zeros.
        x: images of the shape of g.
        Q: like P; None for zeros.
    """
    y = torch.empty_like(x)
    g = _like(g, x)
    P, Q = P.contiguous(), None if Q is None else Q.contiguous()
    (d, d_step), (minus, minus_step), (e_, e_step), (f_, f_step) = map(_values, (d, less, e, f))
    library().functions.cenet_gradient(
        *_shape(x, P.shape[-1]),
        *(_pointer(g), _pointer(P), _pointer(d), d_step),
        *(_pointer(x), _pointer(minus), minus_step, _pointer(Q), _pointer(e_), e_step),
        *(_pointer(f_), f_step, _pointer(y)),
    )
    return y


def gram(g: Tensor, x: Tensor, less: Tensor | None, group_size: int) -> tuple[Tensor, Tensor]:
    """Sums over the pixels of every image: g·(x − less)ᵀ, (N, G, K, K), and g, (N, C)."""
    products, sums = _products(x, group_size), x.new_empty(x.shape[:2])
    g = _like(g, x)
    less, step = _values(less)
    given = (_pointer(g), _pointer(x), _pointer(less), step, _pointer(products), _pointer(sums))
    library().functions.cenet_gram(*_shape(x, group_size), *given)
    return products, sums


def newton(cov: Tensor, scale: Tensor, steps: int, ridge: float, floor: float) -> Tensor:
    """W of each group, as `functional.decorrelation`; the identity in the padding of the last one.

    Args:
        cov: covariances, (G, K, K).
        scale: factor of the norm, (C,).
        steps: number of steps of Newton's iteration.
        ridge, floor: the iteration starts from Σ + (ridge · tr Σ / K + floor) · I.
    """
    W = torch.empty_like(cov, memory_format=torch.contiguous_format)
    cov, scale = cov.contiguous(), scale.contiguous()
    given = map(_pointer, (cov, scale, W))
    library().functions.cenet_newton(*_of_newton(cov, scale, steps, ridge, floor), *given)
    return W


def newton_gradients(
    g: Tensor, cov: Tensor, scale: Tensor, steps: int, ridge: float, floor: float
) -> tuple[Tensor, Tensor]:
    """The gradients of cov and scale, from the gradient g of W."""
    g, cov, scale = g.contiguous(), cov.contiguous(), scale.contiguous()
    g_cov, g_scale = torch.empty_like(cov), torch.empty_like(scale)
    given = map(_pointer, (cov, scale, g, g_cov, g_scale))
    library().functions.cenet_newton_gradient(*_of_newton(cov, scale, steps, ridge, floor), *given)
    return g_cov, g_scale


def _of_newton(
    cov: Tensor, scale: Tensor, steps: int, ridge: float, floor: float
) -> tuple[Any, ...]:
    sizes = map(ctypes.c_int64, (len(scale), cov.shape[-1]))
    counts = map(ctypes.c_int, (torch.get_num_threads(), steps))
    return (*sizes, *counts, ctypes.c_float(ridge), ctypes.c_float(floor))


def pool(x: Tensor, side: int, sign: Tensor) -> Tensor:
    """The largest value of each window of side × side pixels, as `max_pool2d(ceil_mode=True)`.

    Args:
        x: images, (N, C, H, W).
        side: height and width of a window; windows at the border may be partial.
        sign: ±1 for every channel; where it is −1, the smallest value is taken.
    """
    n, channels, height, width = x.shape
    shape = (n, channels, -(-height // side), -(-width // side))
    pooled = torch.empty(shape, memory_format=memory_format_of(x))
    _pool(x, side, sign, pooled, None, None)
    return pooled


def spread(g: Tensor, x: Tensor, side: int, sign: Tensor, pooled: Tensor) -> Tensor:
    """The gradient of x from the gradient g of `pooled`, the result of `pool`."""
    gradient = torch.empty_like(x)
    _pool(x, side, sign, pooled, _like(g, x), gradient)
    return gradient


def _pool(x: Tensor, side: int, sign: Tensor, *others: Tensor | None) -> None:
    sides = map(ctypes.c_int64, (*x.shape[2:], side))
    sign = sign.to(x.dtype).contiguous()
    together = LARGEST_GROUP if is_channels_last(x) else LARGEST_GROUP_OF_ROWS  # channels of a task
    library().functions.cenet_pool(*_shape(x, together), *sides, *map(_pointer, (x, sign, *others)))


class FoldedLayer(NamedTuple):
    """The tensors of a `FoldedCE2d` in float32: d = share · gate · inv_std + offset."""

    matrix: Tensor  # (G, K, K)
    w1: Tensor  # (H, C)
    norm_weight: Tensor  # (H,)
    norm_bias: Tensor  # (H,)
    w2: Tensor  # (C, H)
    inv_std: Tensor  # ()
    share: Tensor  # ()
    offset: Tensor  # ()
    shift: Tensor  # (C,), added to x
    constant: Tensor  # (C,), the matrix times shift


def folded(
    x: Tensor,
    layer: FoldedLayer,
    *,
    norm_eps: float,
    largest: float,
    residual: Tensor | None = None,
    relu: bool = False,
    in_place: bool = False,
) -> Tensor:
    """relu((matrix + Diag(d_n))·(x + shift) + residual), image by image.

    Args:
        x: images, (N, C, H, W).
        layer: the tensors of the layer.
        norm_eps: ε of the LayerNorm in the gate.
        largest: largest input of the gate; rows with larger ones are scaled down.
        residual: of the shape of x.
        relu: whether ReLU comes last.
        in_place: write the result over x, which saves the time for allocating memory.
    """
    layer = FoldedLayer._make(tensor.contiguous() for tensor in layer)
    residual = None if residual is None else _like(residual, x)
    if in_place:
        y = x
        if not x.is_inference():
            increment_version((x,))
    else:
        y = torch.empty_like(x)
    hidden = len(layer.w1)
    matrix, w1, norm_weight, norm_bias, w2, *values = map(_pointer, layer)
    library().functions.cenet_folded(
        *_shape(x, layer.matrix.shape[-1]),
        *(_pointer(x), matrix, w1, norm_weight, norm_bias, w2),
        *(ctypes.c_int64(hidden), ctypes.c_float(norm_eps), ctypes.c_float(largest)),
        *values,
        *(_pointer(residual), ctypes.c_int(relu), _pointer(y)),
    )
    return y


def _like(y: Tensor, x: Tensor) -> Tensor:
    """y in the layout of x."""
    return y.contiguous(memory_format=memory_format_of(x))


def _products(x: Tensor, group_size: int) -> Tensor:
    n, channels = x.shape[:2]
    return x.new_empty(n, -(-channels // group_size), group_size, group_size)


def _values(values: Tensor | None) -> tuple[Tensor | None, ctypes.c_int64]:
    """Values per channel, contiguous, and their stride from image to image (0 for one row)."""
    if values is None:
        return None, ctypes.c_int64(0)
    values = values.contiguous()
    return values, ctypes.c_int64(0 if len(values) == 1 else values.shape[1])


def _shape(x: Tensor, group_size: int) -> tuple[Any, ...]:
    """The first arguments of every pass."""
    n, channels, height, width = x.shape
    sizes = (n, channels, height * width, group_size)
    flags = (int(is_channels_last(x)), torch.get_num_threads())
    return (*map(ctypes.c_int64, sizes), *map(ctypes.c_int, flags))


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
