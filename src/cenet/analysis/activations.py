"""Observe every activation of a network while it runs: modules, shared modules and functions.

Hooks on activation modules miss functions and norms with an activation inside, and see the input of
an in-place activation too late. So a dispatch mode observes the operators themselves, below
autograd. This changes nothing about the run: neither kernels nor graph nor rounding.
"""

from collections import Counter
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from cenet import ops
from cenet.analysis.readers import Readers, moved_dim
from cenet.nn import NormCE2d
from cenet.nn.base import EquilibriumLayer
from cenet.nn.norms import norm_channels

# name of the operator -> name of the activation. Sigmoids are left out: they are gates.
ATEN_ACTIVATIONS = {
    **{name: name for name in ("relu", "leaky_relu", "elu", "selu", "celu", "silu", "mish")},
    **{name: name for name in ("gelu", "hardswish", "softplus", "tanh", "threshold", "relu6")},
    **{name: name for name in ("softshrink", "hardshrink")},
    "_prelu_kernel": "prelu",
    "prelu": "prelu",
    "rrelu_with_noise": "rrelu",
    "hardtanh": "hardtanh",
}
MIX_LAST = ("addmm", "mm", "linear", "native_layer_norm", "_fused_rms_norm")
# operators whose result has the channels of their arguments, in the same dimension
PASS = frozenset(
    (
        *("add", "sub", "mul", "div", "clone", "detach", "alias", "native_dropout", "lift_fresh"),
        *("_to_copy", "contiguous", "view", "_unsafe_view", "reshape", "_reshape_alias"),
    )
)
WRAPPERS = ("module", "_orig_mod")  # attributes in which DDP and torch.compile keep the network


class Site(NamedTuple):
    """A place where an activation is applied to feature channels."""

    name: str  # unique in the network, the same in every pass
    activation: str
    norms: tuple[str, ...]  # norms whose outputs it activates: two where branches are added
    ce: str | None  # the CE layer between norm and activation
    dim: int  # the dimension of the channels
    channels: int
    direct: bool  # it activates the output of a norm unchanged: no sum, gate or CE between


class _Mark(NamedTuple):
    """Where a tensor comes from."""

    dim: int
    norms: tuple[str, ...] = ()
    ce: str | None = None
    direct: bool = False  # it is the output of a norm, unchanged


class _Entry(NamedTuple):
    """A module that is running."""

    module: nn.Module
    name: str | None  # None: not part of the observed network
    act: nn.Module | None  # the activation passed to a NormCE2d


class ActivationObserver(TorchDispatchMode):
    """Inside the context, calls `before` and `after` around every activation of feature channels.

    Feature channels are those of 4-D maps of more than one pixel; gates and heads are left out. A
    site is named after the innermost running module: `layer1.0.act1`, or `layer1.0.relu` for a
    function called in `layer1.0`; the second call in a pass adds `#2`. CUDA operators of cenet that
    contain an activation run a second time without it, to compute the input of `before`; those that
    merge ranks run without it, and it runs afterwards, because other ranks may not be observed.
    """

    # compiled passes of `cenet.cpu` contain no activation while they are observed
    allows_passes = True

    def __init__(self, model: nn.Module) -> None:
        """Observe `model`, or the network inside it if DDP or torch.compile wrap it."""
        super().__init__()
        self.root = unwrapped(model)
        self.names: dict[int, str] = {
            id(module): name for name, module in self.root.named_modules()
        }
        self._stack: list[_Entry] = []
        self._calls: Counter[str] = Counter()
        self._marks: Any = WeakIdKeyDictionary()
        self._gated: Any = WeakIdKeyDictionary()  # sigmoid(x) -> x
        self._hooks = ExitStack()
        self.readers: Readers | None = None  # follows outputs to the weights that read them

    def before(self, site: Site, x: Tensor) -> None:
        """Called with the input of an activation, which may be overwritten afterwards."""

    def after(self, site: Site, y: Tensor) -> None:
        """Called with its output, which may be edited in place."""

    def end_pass(self) -> None:
        """Called when the network has returned."""

    def __enter__(self) -> Any:
        """Start observing."""
        self._stack.clear()
        self._calls.clear()
        for handle in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            self._hooks.callback(handle.remove)
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        """Stop observing."""
        self._hooks.close()
        super().__exit__(*args)

    def begin(self) -> None:
        """Enter from a hook of the network itself, which is running already."""
        self.__enter__()
        self._stack.append(_Entry(self.root, "", None))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, with `before` and `after` around it if it is an activation."""
        kwargs = kwargs or {}
        if func in ops.CALLS:
            return self._fused(func, args)
        name = func.overloadpacket.__name__.removesuffix("_")
        activation, x = self._activation(name, args)
        site = None if activation is None else self._site(activation, x)
        if site is not None:
            self.before(site, x)
            if self.readers is not None:
                self.readers.enter(site.name, x)
        result = func(*args, **kwargs)
        if self.readers is not None:
            self.readers.follow(name, args, result, inside_norm=self._inside_norm())
        if site is not None:
            self._finish(site, result)
            # in place: the result is still marked as the output of a norm
            self._marks[result] = _Mark(site.dim)
        else:
            self._follow(name, args, result)
        if name == "sigmoid":
            self._gated[result] = x
        return result

    def _activation(self, name: str, args: tuple[Any, ...]) -> tuple[str | None, Any]:
        """The name of the activation, None for other operators, and the tensor it is applied to."""
        x = args[0] if args else None
        if name in ("clamp", "clamp_min"):  # at zero from below: relu by another name
            from_zero = len(args) == 2 and isinstance(args[1], int | float) and args[1] == 0
            return ("relu" if from_zero else None), x
        if name == "hardtanh" and tuple(args[1:]) == (0, 6):
            return "relu6", x
        if name == "elu" and len(args) > 2:  # with a scale of its own
            return "selu", x
        if name == "mul" and all(isinstance(arg, Tensor) for arg in args):
            # x * sigmoid(x) is silu, too
            for x, gate in (args, args[::-1]):
                if self._gated.get(gate) is x:
                    return "silu", x
        return ATEN_ACTIVATIONS.get(name), x

    def _fused(self, func: Any, args: tuple[Any, ...]) -> Any:
        record = ops.CALLS[func]
        ranks = args[len(record._fields) :]
        call = record._make(args[: len(record._fields)])
        site = None if call.act == "none" else self._site(call.act, call.x)
        if site is not None and ranks:
            # a second call would wait for other ranks, which may not be observed
            before, *rest = func(*call._replace(act="none"), *ranks)
            self.before(site, before)
            result = (_activated(before, call.act, call.slope), *rest)
        else:
            if site is not None:
                self.before(site, _first(func(*call.before_activation())))
            result = func(*args)
        if self.readers is not None:
            self.readers.fused(None if site is None else site.name, call.x, args[1:])
        if site is not None:
            self._finish(site, _first(result))
        return result

    def _finish(self, site: Site, y: Tensor) -> None:
        self.after(site, y)
        if self.readers is not None:
            self.readers.leave(site.name, site.channels, site.dim, y)

    def _site(self, activation: str, x: Tensor) -> Site | None:
        name = self._name(activation)
        if name is None or x.dim() != 4:
            return None
        self._calls[name] += 1
        if self._calls[name] > 1:
            name = f"{name}#{self._calls[name]}"
        mark = self._enclosing() or self._marks.get(x) or _Mark(1)
        channels = x.shape[mark.dim]
        if x.numel() <= x.shape[0] * channels:  # one pixel, or no image
            return None
        return Site(name, activation, mark.norms, mark.ce, mark.dim, channels, mark.direct)

    def _name(self, activation: str) -> str | None:
        """Name of the innermost running module, and of the function if the module does more."""
        for entry in reversed(self._stack):
            if entry.name is None:
                continue
            if entry.act is not None and id(entry.act) in self.names:
                return self.names[id(entry.act)]
            leaf = next(entry.module.children(), None) is None
            return entry.name if leaf and entry.name else f"{entry.name}.{activation}".lstrip(".")
        return None

    def _enclosing(self) -> _Mark | None:
        """The origin of an activation inside a running norm; None outside of norms."""
        for entry in reversed(self._stack):
            if entry.name is not None and isinstance(entry.module, NormCE2d):
                return _Mark(1, (entry.name,), f"{entry.name}.ce")
            if entry.name is not None and norm_channels(entry.module) is not None:
                return _Mark(1, (entry.name,), direct=True)
        return None

    def _inside_norm(self) -> bool:
        return any(isinstance(e.module, NormCE2d) or _is_norm(e.module) for e in self._stack)

    def _follow(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Derive the origin of the result from that of the arguments."""
        result = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(result, Tensor):
            return
        given = [self._marks[arg] for arg in args if isinstance(arg, Tensor) and arg in self._marks]
        mark = None
        if name == "convolution":
            mark = _Mark(1)
        elif name in MIX_LAST:
            mark = _Mark(result.dim() - 1)
        elif name in ("permute", "transpose") and given:
            mark = given[0]._replace(dim=moved_dim(given[0].dim, name, args))
        elif name in PASS and given:
            norms = tuple(dict.fromkeys(norm for mark in given for norm in mark.norms))
            ce = next((mark.ce for mark in given if mark.ce is not None), None)
            last = given[0].dim == args[0].dim() - 1 if isinstance(args[0], Tensor) else False
            mark = _Mark(result.dim() - 1 if last else given[0].dim, norms, ce)
        if mark is None:
            self._marks.pop(result, None)
        else:
            self._marks[result] = mark

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module is self.root and all(entry.module is not self.root for entry in self._stack):
            self._calls.clear()
        act = None
        if getattr(module, "takes_residual", False):
            act = (args[2] if len(args) > 2 else None) or getattr(module, "act", None)
        self._stack.append(_Entry(module, self.names.get(id(module)), act))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        while self._stack and self._stack.pop().module is not module:
            pass
        if module is self.root and output is not None:  # None: the pass has failed
            self.end_pass()
        name = self.names.get(id(module))
        norm = module.norm if isinstance(module, NormCE2d) else module
        if self.readers is not None and args and _is_norm(norm):
            self.readers.norm(norm, args[0], output)
        if name is None or not isinstance(output, Tensor) or output.dim() != 4:
            return
        if isinstance(module, EquilibriumLayer):
            source = self._marks.get(args[0]) if args else None
            self._marks[output] = _Mark(1, source.norms if source else (), name)
        elif isinstance(module, NormCE2d):
            self._marks[output] = _Mark(1, (name,), f"{name}.ce")
        elif norm_channels(module) is not None:
            self._marks[output] = _Mark(1, (name,), direct=True)
        elif isinstance(module, nn.LayerNorm):
            self._marks[output] = _Mark(3, (name,), direct=True)


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def _activated(x: Tensor, act: str, slope: float) -> Tensor:
    """The activation that an operator calls `act`."""
    if act == "relu":
        return nn.functional.relu(x)
    activation = {"leaky_relu": nn.functional.leaky_relu, "elu": nn.functional.elu}[act]
    return activation(x, slope)


def _is_norm(module: nn.Module) -> bool:
    return norm_channels(module) is not None or isinstance(module, nn.LayerNorm | nn.BatchNorm1d)


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside DDP and torch.compile."""
    names = [name for name in WRAPPERS if isinstance(getattr(model, name, None), nn.Module)]
    if len(names) == 1 and len(list(model.children())) == 1:
        inner: nn.Module = getattr(model, names[0])
        return unwrapped(inner)
    return model
