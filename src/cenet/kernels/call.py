"""The operators as records: their arguments, in order, with their types and roles.

`NormCECall` is a call of `cenet::norm_ce`, `FoldedCECall` one of `cenet::folded_ce`. The schemas of
the operators are generated from the records, and all code reads calls by field name. A new
argument needs one new field here, and the kernel that reads it. This file does not import triton,
so that the operators can be declared where triton is missing.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter, itemgetter
from string import ascii_lowercase
from typing import Annotated, Any, NamedTuple, cast, get_args, get_type_hints

from torch import Tensor

# where norm, decorrelation and reweighting take their statistics from
ABSENT, BATCH, RUNNING = 0, 1, 2
# activations that the kernels apply; LeakyReLU's slope or ELU's α comes beside the name
FUSED_ACTIVATIONS = {"none": 0, "relu": 1, "leaky_relu": 2, "elu": 3}


class Mode(NamedTuple):
    """Source of the statistics of each part of the layer: ABSENT, BATCH or RUNNING."""

    norm: int
    bd: int  # batch decorrelation
    ir: int  # instance reweighting


# Kinds of arguments: type in Python, type in the schema, role. Parameters and constants go to the
# backward operator too; an average is changed in place, and "!" becomes its alias annotation.
_Map = Annotated[Tensor, "Tensor", "map"]
_OptionalMap = Annotated[Tensor | None, "Tensor?", "map"]
_Parameter = Annotated[Tensor | None, "Tensor?", "parameter"]
_Given = Annotated[Tensor, "Tensor", "parameter"]
_Statistic = Annotated[Tensor | None, "Tensor?", "statistic"]
_Average = Annotated[Tensor | None, "Tensor(!)?", "average"]
_Momenta = Annotated[Sequence[float], "float[]", "momenta"]
_Sources = Annotated[Sequence[int], "int[]", "constant"]
_Int = Annotated[int, "int", "constant"]
_Float = Annotated[float, "float", "constant"]
_Str = Annotated[str, "str", "constant"]


class NormCECall(NamedTuple):
    """One call of `cenet::norm_ce`: y = act(CE(norm(x)) + residual).

    A tensor is None where the layer has no such part, or where `sources` says that it is not used.
    """

    x: _Map  # (N, C, H, W)
    residual: _OptionalMap  # like x
    weight: _Parameter  # (C,), γ of the norm
    bias: _Parameter  # (C,), β of the norm
    running_mean: _Statistic  # (C,), given if the norm uses running statistics
    running_var: _Statistic  # (C,)
    inv_sqrt: _Statistic  # (G, K, K), W; given if decorrelation uses the running one
    inv_std: _Statistic  # (), s^{-1/2}; given if reweighting uses the running one
    w1: _Parameter  # (H, C), the gate's weights; see `functional.Gate`
    norm_weight: _Parameter  # (H,)
    norm_bias: _Parameter  # (H,)
    w2: _Parameter  # (C, H)
    mix_logit: _Parameter  # (), λ before its sigmoid
    blend: _Parameter  # () or (1,), α
    average_mean: _Average  # (C,), running averages that this batch moves, and their counts
    average_var: _Average  # (C,)
    norm_count: _Average  # ()
    average_inv_sqrt: _Average  # (G, K, K)
    bd_count: _Average  # ()
    average_inv_std: _Average  # ()
    ir_count: _Average  # ()
    momenta: _Momenta  # of norm, BD and IR; negative to give all batches the same weight
    sources: _Sources  # a `Mode`
    group_size: _Int  # K
    steps: _Int  # of Newton's iteration
    pool: _Int  # side of the max-pool window before the covariance
    norm_eps: _Float
    eps: _Float  # of s
    act: _Str  # a key of FUSED_ACTIVATIONS
    slope: _Float  # LeakyReLU's slope, or ELU's α

    @classmethod
    def without_gaps(cls, args: Iterable[Any]) -> "NormCECall":
        """The call with these arguments, parameters and statistics made contiguous.

        Kernels read them as flat memory; maps have their own rule (`layer.dense`), and averages
        are changed in place.
        """
        return cls._make(
            [
                value.contiguous() if small and value is not None else value
                for value, small in zip(args, _SMALL, strict=True)
            ]
        )

    @classmethod
    def from_backward(cls, *args: Any) -> tuple["NormCECall", Tensor]:
        """The call and its saved state, from what the backward operator gets after grad and y.

        The residual, statistics and averages are None: the backward pass does not need them.
        """
        return cls._make(_call_places((*args, None))), cast(Tensor, _state_place(args))

    @property
    def mode(self) -> Mode:
        """Where the statistics come from."""
        return Mode(*self.sources)

    @property
    def units(self) -> int:
        """Hidden units of the gate, 0 without one."""
        return 0 if self.w1 is None else self.w1.shape[0]

    def parameters(self) -> tuple[Tensor | None, ...]:
        """Parameters of norm, gate and mixture."""
        return cast(tuple[Tensor | None, ...], _parameters(self))

    def averages(self) -> tuple[Tensor | None, ...]:
        """Running averages to move, and their counts."""
        return cast(tuple[Tensor | None, ...], _averages(self))

    def small_tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors except maps: parameters, statistics and averages."""
        return cast(tuple[Tensor | None, ...], _small_tensors(self))

    def constants(self) -> tuple[Any, ...]:
        """Settings of the layer, which its backward pass needs too."""
        return _constants(self)

    def hashable_constants(self) -> tuple[Any, ...]:
        """The same, with `sources` in a form that dictionaries take."""
        sources, *rest = _constants(self)
        return (Mode(*sources), *rest)

    def before_activation(self) -> "NormCECall":
        """The call that returns the activation's argument and moves no average."""
        changed: dict[str, Any] = {"act": "none", **dict.fromkeys(AVERAGES)}
        return self._replace(**changed)


class FoldedCECall(NamedTuple):
    """One call of `cenet::folded_ce`: y = act((M + Diag(w_n)) (x + shift) + residual).

    The weights of a sample are w_n = share · s^{-1/2} · gate + offset. There are no gradients.
    """

    x: _Map  # (N, C, H, W)
    residual: _OptionalMap  # like x
    values: _Given  # (5, C): −shift, 1, 1, 0 and 0 for center, rstd, γ, β and offset of the map
    matrix: _Parameter  # (G, K, K), M
    w1: _Given  # (H, C), the gate's weights; see `functional.Gate`
    norm_weight: _Given  # (H,)
    norm_bias: _Given  # (H,)
    w2: _Given  # (C, H)
    inv_std: _Given  # (), s^{-1/2}
    share: _Given  # ()
    offset: _Given  # ()
    act: _Str  # a key of FUSED_ACTIVATIONS
    slope: _Float  # LeakyReLU's slope, or ELU's α

    def without_gaps(self) -> "FoldedCECall":
        """The call with contiguous weights of the gate, which kernels read as flat memory."""
        return self._replace(
            w1=self.w1.contiguous(), norm_weight=self.norm_weight.contiguous(),
            norm_bias=self.norm_bias.contiguous(), w2=self.w2.contiguous(),
        )  # fmt: skip

    def small_tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors except maps."""
        return cast(tuple[Tensor | None, ...], _folded_tensors(self))

    def before_activation(self) -> "FoldedCECall":
        """The call that returns the activation's argument."""
        return self._replace(act="none")


def _arguments(record: Any) -> dict[str, tuple[str, str]]:
    """Type in the schema and role of each field."""
    hints = get_type_hints(record, include_extras=True)
    return {name: cast(tuple[str, str], get_args(hint)[1:]) for name, hint in hints.items()}


_ARGUMENTS = _arguments(NormCECall)
_FOLDED_ARGUMENTS = _arguments(FoldedCECall)


def _names(*roles: str, of: dict[str, tuple[str, str]] = _ARGUMENTS) -> tuple[str, ...]:
    return tuple(name for name, (_, role) in of.items() if role in roles)


PARAMETERS = _names("parameter")
AVERAGES = _names("average")
CONSTANTS = _names("constant")

# looked up once: the fields of a call are selected several times in every step
_parameters, _averages = attrgetter(*PARAMETERS), attrgetter(*AVERAGES)
_constants = attrgetter(*CONSTANTS)
_small_tensors = attrgetter(*_names("parameter", "statistic", "average"))
_folded_tensors = attrgetter(*_names("parameter", of=_FOLDED_ARGUMENTS))
_SMALL = [role in ("parameter", "statistic") for _, role in _ARGUMENTS.values()]
_BACKWARD = ("x", *PARAMETERS, "state", *CONSTANTS)
_state_place = itemgetter(_BACKWARD.index("state"))
# position of each field among them; the last, which is None, for fields that are not there
_call_places = itemgetter(
    *(_BACKWARD.index(name) if name in _BACKWARD else -1 for name in NormCECall._fields)
)


def _schema(names: Iterable[str], of: dict[str, tuple[str, str]] = _ARGUMENTS) -> str:
    letters = iter(ascii_lowercase)
    types = ((name, of[name][0]) for name in names)
    return ", ".join(
        f"{type_.replace('!', next(letters) + '!') if '!' in type_ else type_} {name}"
        for name, type_ in types
    )


NORM_CE = f"norm_ce({_schema(NormCECall._fields)}) -> (Tensor y, Tensor state)"
NORM_CE_BACKWARD = (
    f"norm_ce_backward(Tensor grad, Tensor? y, Tensor x, {_schema(PARAMETERS)}, Tensor state, "
    f"{_schema(CONSTANTS)}) -> (Tensor, Tensor, Tensor)"
)
_BETWEEN_RANKS = "int ranks, str group_name"
SYNC_NORM_CE = (
    f"sync_norm_ce({_schema(NormCECall._fields)}, {_BETWEEN_RANKS}) "
    "-> (Tensor y, Tensor state, Tensor message, Tensor messages)"
)
SYNC_NORM_CE_BACKWARD = (
    f"sync_norm_ce_backward(Tensor grad, Tensor? y, Tensor x, {_schema(PARAMETERS)}, Tensor state, "
    f"{_schema(CONSTANTS)}, Tensor message, Tensor messages, str group_name) "
    "-> (Tensor, Tensor, Tensor)"
)
FOLDED_CE = f"folded_ce({_schema(FoldedCECall._fields, _FOLDED_ARGUMENTS)}) -> Tensor"


def gradient_sizes(channels: int, parameters: Sequence[Tensor | None]) -> list[int]:
    """Elements of each parameter's gradient in the one tensor that the backward operator returns.

    γ and β have a place there even if the norm has no such parameters.
    """
    _, _, *rest = parameters
    return [channels, channels, *[0 if p is None else p.numel() for p in rest]]
