"""Which weights read the channels of a layer, found while a network runs.

The output of an activation passes through pooling, reshaping, concatenation and gates before a
convolution or a linear layer reads it. `Readers` follows each output on this path, operator by
operator, and keeps the squared norm of the weights by which each reader reads each channel. A norm
module right after the reader divides the reader's output again, so its scale is taken into
account.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

# operators whose result has the channels of their first argument
KEEP = frozenset(
    (
        *("max_pool2d", "max_pool2d_with_indices", "avg_pool2d", "mkldnn_max_pool2d"),
        *("_adaptive_avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "native_dropout"),
        *("upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "constant_pad_nd"),
        *("reflection_pad2d", "replication_pad2d", "_to_copy", "clone", "contiguous", "detach"),
        *("alias", "lift_fresh", "_upsample_nearest_exact2d"),
    )
)
REDUCE = frozenset(("mean", "sum", "amax"))
VIEW = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "squeeze", "unsqueeze"),
        "as_strided",
    )
)
SCALE = frozenset(("mul", "div"))
ADD = frozenset(("add", "sub", "rsub"))
# operators that do not count as a use of the channels
IGNORE = frozenset(("empty_like", "zeros_like", "ones_like", "isnan", "isfinite"))
READ = frozenset(("convolution", "addmm", "mm", "linear"))


class Piece(NamedTuple):
    """All channels of one layer, at a place among the channels of a tensor."""

    layer: str
    start: int
    channels: int


class Origin(NamedTuple):
    """Whose channels a tensor holds."""

    dim: int  # dimension of the channels
    pieces: tuple[Piece, ...]
    repeat: int = 1  # neighbouring places that belong to one channel, after flattening
    scale: Tensor | None = None  # by which each channel has been multiplied since, positive


@dataclass
class _Reading:
    """A convolution or linear layer, and the channels it read."""

    origin: Origin
    power: Tensor  # squared weights, summed over kernel pixels: (groups, inputs, outputs) of each
    scale: Tensor | None = None  # scale of the norm that follows, (all outputs,)

    def of(self, piece: Piece) -> Tensor:
        """Sum of the squared weights that read each channel of a layer, (C,)."""
        power = self.power
        if self.scale is not None:
            power = power * self.scale.square().reshape(len(power), 1, -1)
        total = power.sum(2).reshape(-1, self.origin.repeat).sum(1)
        if self.origin.scale is not None:
            total = total * self.origin.scale.square()
        return total[piece.start : piece.start + piece.channels]


class Readers:
    """Follows the outputs of layers through one pass to the weights that read them.

    Attributes:
        shared: layers on a residual connection: activations of a sum, or added to something later.
    """

    def __init__(self) -> None:
        """Start without layers."""
        self.shared: set[str] = set()
        self._readings: list[_Reading] = []
        self._lost: set[str] = set()
        self._origins: Any = WeakIdKeyDictionary()
        self._outputs: Any = WeakIdKeyDictionary()  # outputs of readers, which a norm may follow
        self._sums: Any = WeakIdKeyDictionary()  # sums of two maps, as a set

    def squared_norms(self) -> dict[str, Tensor]:
        """By layer, the squared norm of the weights by which each reader reads it, (readers, C).

        Layers that are also read by anything other than convolutions and linear layers (slices,
        products of two layers, attention) are left out, because their weights are not all known.
        """
        found: dict[str, list[Tensor]] = {}
        for reading in self._readings:
            for piece in reading.origin.pieces:
                if piece.layer not in self._lost:
                    found.setdefault(piece.layer, []).append(reading.of(piece))
        return {layer: torch.stack(readings) for layer, readings in found.items()}

    def enter(self, layer: str, x: Tensor) -> None:
        """Note the input of a layer's activation."""
        if self._sums.pop(x, False):
            self.shared.add(layer)
        # what follows an activation in place does not follow the reader
        self._outputs.pop(x, None)

    def leave(self, layer: str, channels: int, dim: int, output: Tensor) -> None:
        """Follow the output of a layer from now on."""
        self._origins[output] = Origin(dim, (Piece(layer, 0, channels),))

    def add_shortcuts(self, tensors: Iterable[Any]) -> None:
        """Note that these tensors are added to others."""
        for origin in self._known(tensors):
            self.shared.update(piece.layer for piece in origin.pieces)

    def fused(self, layer: str | None, x: Tensor, others: Iterable[Any]) -> None:
        """Take in an operator with a norm and a layer inside, and perhaps a residual connection."""
        maps = [one for one in others if isinstance(one, Tensor) and one.shape == x.shape]
        self.add_shortcuts(maps)
        if maps and layer is not None:
            self.shared.add(layer)

    def follow(self, name: str, args: Sequence[Any], result: Any, *, inside_norm: bool) -> None:
        """Take in one operator that has run.

        Args:
            name: name of the operator, without namespace, overload and trailing underscore.
            args: arguments of the operator.
            result: result of the operator.
            inside_norm: whether a norm module is running; operators inside it are ignored.
        """
        flat = [item for arg in args for item in (arg if isinstance(arg, list | tuple) else (arg,))]
        known = self._known(flat)
        result = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(result, Tensor):
            self._lose(known, unless=inside_norm)
            return
        if name in VIEW and args[0] in self._outputs:
            self._outputs[result] = self._outputs[args[0]]
        elif name not in READ:
            self._outputs.pop(result, None)
        origin = None
        if name in ADD:
            origin = self._added(args, result)
        elif known:
            origin = self._after(name, args, result, known, inside_norm)
        if origin is None:
            # in place, the result may still be known as what it was
            self._origins.pop(result, None)
        else:
            self._origins[result] = origin

    def norm(self, norm: nn.Module, x: Any, output: Any) -> None:
        """Take in a norm that has run: after a reader, or on the output of a layer itself."""
        if not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return
        if x in self._outputs:
            self._outputs[x].scale = norm_scale(norm)
        origin = self._origins.get(x)
        if origin is not None and output not in self._origins and x is not output:
            self._origins[output] = _scaled(origin, norm_scale(norm))

    def _after(
        self, name: str, args: Sequence[Any], result: Tensor, known: list[Origin], inside_norm: bool
    ) -> Origin | None:
        """The origin of a result; reads by weights are noted, unknown readers lose the layer."""
        origin = None
        if name in READ:
            self._read(name, args, result)
            return None
        if name == "cat":
            return self._joined(args)
        if name in KEEP:
            origin = known[0] if _same_channels(known[0], args[0], result) else None
        elif name in SCALE or name in VIEW or name in REDUCE or name in ("permute", "transpose"):
            origin = self._moved(name, args, result)
        self._lose(known, unless=origin is not None or inside_norm or name in IGNORE)
        return origin

    def _known(self, values: Iterable[Any]) -> list[Origin]:
        tensors = (value for value in values if isinstance(value, Tensor))
        return [self._origins[value] for value in tensors if value in self._origins]

    def _lose(self, origins: Iterable[Origin], *, unless: bool) -> None:
        if not unless:
            self._lost.update(piece.layer for origin in origins for piece in origin.pieces)

    def _added(self, args: Sequence[Any], result: Tensor) -> Origin | None:
        """A sum of two maps has no origin; a map plus one value per channel keeps its own."""
        maps = [arg for arg in args[:2] if isinstance(arg, Tensor) and arg.shape == result.shape]
        if len(maps) == 2:
            self.add_shortcuts(maps)
            self._sums[result] = True
            return None
        others = (arg for arg in args[:2] if not any(arg is one for one in maps))
        self._lose(self._known(others), unless=False)
        found = self._known(maps)
        return found[0] if found else None

    def _joined(self, args: Sequence[Any]) -> Origin | None:
        tensors, dim = args[0], (args[1] if len(args) > 1 else 0)
        dim %= tensors[0].dim()
        start, pieces, lost = 0, [], []
        for tensor in tensors:
            origin = self._origins.get(tensor)
            if origin is not None:
                if origin.dim == dim and origin.repeat == 1 and origin.scale is None:
                    pieces += [p._replace(start=p.start + start) for p in origin.pieces]
                else:
                    lost.append(origin)
            start += tensor.shape[dim]
        self._lose(lost, unless=False)
        return Origin(dim, tuple(pieces)) if pieces else None

    def _moved(self, name: str, args: Sequence[Any], result: Tensor) -> Origin | None:
        """The origin after an operator that moves, merges or scales dimensions."""
        if name in SCALE:
            maps = [arg for arg in args[:2] if isinstance(arg, Tensor)]
            whole = [arg for arg in maps if arg.shape == result.shape and arg in self._origins]
            # a product of two layers is read as neither of them
            if len(whole) != 1 or (name == "div" and whole[0] is not args[0]):
                return None
            (origin,) = self._known(whole)
            factors = [arg for arg in maps if arg is not whole[0] and _is_weight(arg, origin)]
            for factor in factors:
                scale = factor.detach().double().abs().flatten()
                origin = _scaled(origin, scale if name == "mul" else scale.reciprocal())
            return origin
        x, found = args[0], self._known(args[:1])
        if not found:
            return None
        (origin,) = found
        if name in ("permute", "transpose"):
            return origin._replace(dim=moved_dim(origin.dim, name, args))
        if name in REDUCE:
            return _reduced(origin, x, args, result)
        return _viewed(origin, x, result)

    def _read(self, name: str, args: Sequence[Any], result: Tensor) -> None:
        x, weight, groups, input_first = _reader(name, args)
        origin = self._origins.get(x)
        others = self._known(arg for arg in args if isinstance(arg, Tensor) and arg is not x)
        self._lose(others, unless=False)  # a weight that is itself an activation
        if origin is None:
            return
        last = 1 if name == "convolution" else x.dim() - 1
        if origin.dim != last:
            self._lose([origin], unless=False)
            return
        self._readings.append(_Reading(origin, _powers(weight, groups, input_first)))
        self._outputs[result] = self._readings[-1]


def _scaled(origin: Origin, scale: Tensor | None) -> Origin:
    if scale is None:
        return origin
    return origin._replace(scale=scale if origin.scale is None else scale * origin.scale)


def _is_weight(factor: Tensor, origin: Origin) -> bool:
    """Whether a factor is a parameter with one value per channel, and not a gate."""
    base = factor if factor._base is None else factor._base
    channels = sum(piece.channels for piece in origin.pieces)
    return isinstance(base, nn.Parameter) and factor.numel() == channels and origin.repeat == 1


def norm_scale(norm: nn.Module) -> Tensor | None:
    """The factor by which a norm multiplies each channel: γ / √(running variance + ε), or γ alone.

    Batch norm in evaluation divides by numbers it keeps. Other norms divide by what they measure on
    each image, which is the same for a whole group of channels, so that γ is what differs.
    """
    given: Any = norm
    weight: Tensor | None = getattr(given, "weight", None)
    variance: Tensor | None = getattr(given, "running_var", None)
    scale = None if weight is None else weight.detach().double().abs()
    if variance is None:
        return scale
    inverse: Tensor = (variance.detach().double() + given.eps).rsqrt()
    return inverse if scale is None else scale * inverse


def moved_dim(dim: int, name: str, args: Sequence[Any]) -> int:
    """Where a dimension is after permute or transpose."""
    rank = args[0].dim()
    if name == "permute":
        order = [place % rank for place in args[1]]
    else:
        order = list(range(rank))
        left, right = (place % rank for place in args[1:3])
        order[left], order[right] = order[right], order[left]
    return order.index(dim)


def _reader(name: str, args: Sequence[Any]) -> tuple[Tensor, Tensor, int, bool]:
    """Input, weight, groups, and whether the first dimension of the weight is the input's."""
    if name == "convolution":
        return args[0], args[1], int(args[8]), bool(args[6])
    if name == "addmm":
        return args[1], args[2], 1, True
    return args[0], args[1], 1, name == "mm"


def _powers(weight: Tensor, groups: int, input_first: bool) -> Tensor:
    """Squared weights, summed over the pixels of a kernel: (groups, inputs, outputs) of a group."""
    squares = weight.detach().double().square()
    squares = squares.flatten(2).sum(2) if squares.dim() > 2 else squares
    by_group = squares.reshape(groups, -1, squares.shape[1])
    return by_group if input_first else by_group.transpose(1, 2)


def _same_channels(origin: Origin, x: Any, result: Tensor) -> bool:
    same_rank = isinstance(x, Tensor) and x.dim() == result.dim()
    return bool(same_rank and x.shape[origin.dim] == result.shape[origin.dim])


def _reduced(origin: Origin, x: Tensor, args: Sequence[Any], result: Tensor) -> Origin | None:
    dims = args[1] if len(args) > 1 and args[1] is not None else list(range(x.dim()))
    gone = {place % x.dim() for place in (dims if isinstance(dims, list | tuple) else [dims])}
    if origin.dim in gone:
        return None
    if result.dim() == x.dim():
        return origin
    return origin._replace(dim=origin.dim - sum(place < origin.dim for place in gone))


def _viewed(origin: Origin, x: Tensor, result: Tensor) -> Origin | None:
    """After a change of shape: the channels stay whole, or are flattened with what follows them."""
    if result.shape == x.shape:
        return origin
    before = math.prod(x.shape[: origin.dim])
    after = math.prod(x.shape[origin.dim + 1 :])
    width = x.shape[origin.dim]
    place = 1
    for dim, size in enumerate(result.shape):
        rest = math.prod(result.shape[dim + 1 :])
        if place == before and size == width and rest == after:
            return origin._replace(dim=dim)
        if place == before and size == width * after and rest == 1:
            return origin._replace(dim=dim, repeat=origin.repeat * after)
        place *= size
    return None
