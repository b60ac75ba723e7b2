"""`Monitor`: dormant channels, redundancy and λ of every layer during training."""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from cenet.analysis.activations import ActivationObserver, Site, unwrapped
from cenet.analysis.channels import (
    DORMANT,
    channel_correlation,
    inhibited_ratio,
    mixing_ratio,
    participation_ratio,
    relative_activity,
)
from cenet.files import append, harmless
from cenet.nn import ce_layers

EVERY = 100
# largest numbers of pixels and channels that are measured: enough for two digits, and cheap
POSITIONS = 4096
CHANNELS = 256

Values = dict[str, dict[str, float]]  # by layer and measure
Callback = Callable[[int, Values], None]
MEASURES = ("dormant_ratio", "participation_share", "correlation", "inhibited_ratio", "lambda")
FIELDS = ("step", "layer", *MEASURES)


class Monitor:
    """Measures every `every`-th forward pass of a network in training mode, and reports to `to`.

    The results of training stay the same, to the last bit: the pass itself is measured, nothing
    runs twice. A network compiled by torch.compile cannot be measured inside. Its original runs
    once more on the same batch, without gradients, and leaves running statistics and random numbers
    unchanged.

    Under DDP every process that makes a monitor measures its own batch, without communication. A
    copy of the model (such as an average of its weights) is not measured.

    Args:
        model: the object that the training loop calls: a network, DDP around it, or the result of
            torch.compile.
        every: measure each `every`-th forward pass in training mode, from the first on.
        to: a file to which rows of CSV are appended, a SummaryWriter of TensorBoard, or a function
            of the step (forward passes before this one) and of the values by layer.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> monitor = Monitor(model, to=lambda step, values: print(step, list(values)))
    >>> y = model(torch.randn(2, 3, 8, 8))
    0 ['2']
    >>> monitor.close()
    """

    def __init__(
        self, model: nn.Module, *, to: Callback | str | Path | Any, every: int = EVERY
    ) -> None:
        """Start watching."""
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r} must be a whole number of at least 1")
        if getattr(unwrapped(model), "_compiled_call_impl", None) is not None:
            raise ValueError(
                "a module compiled in place cannot be watched; use compiled = torch.compile(model) "
                "and Monitor(compiled)"
            )
        self.every, self.step = every, 0
        self._network = unwrapped(model)
        self._compiled = any(hasattr(module, "_orig_mod") for module in model.modules())
        self._tell = _receiver(to)
        self._look: _Look | None = None
        self._handles = [
            model.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
            model.register_forward_hook(_Hook(self._after), with_kwargs=True, always_call=True),
        ]

    def close(self) -> None:
        """Stop watching."""
        self._forget()
        for handle in self._handles:
            handle.remove()

    def _forget(self) -> None:
        """End a pass that was interrupted: hooks do not run after Ctrl-C."""
        look, self._look = self._look, None
        if look is not None and not self._compiled:
            look.__exit__(None, None, None)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not module.training:
            return
        self._forget()
        if self.step % self.every == 0:
            self._look = _Look(self._network)
            if not self._compiled:
                self._look.begin()
        self.step += 1

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        look, self._look = self._look, None
        if look is None:
            return
        if not self._compiled:
            look.__exit__(None, None, None)
        if output is None:  # the pass has failed
            return
        if self._compiled:
            with look:
                _run_apart(self._network, args, kwargs)
        self._tell(self.step - 1, look.values())


class _Hook:
    """A hook that does nothing in a copy of the model, or in one read from a file."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call = call

    def __call__(self, *args: Any) -> None:
        self.call(*args)

    def __reduce__(self) -> Any:
        return _Hook, (_ignore,)


def _ignore(*_: Any) -> None:
    """Do nothing, in the place of a hook."""


class _Look(ActivationObserver):
    """One forward pass, of each layer at most POSITIONS pixels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.found: dict[str, list[Any]] = {}
        self.fed: dict[str, str] = {}  # by CE layer, the layer it goes into

    def before(self, site: Site, x: Tensor) -> None:
        """Correlation among at most CHANNELS channels."""
        rows = _rows(x, site.dim)
        rows = rows[:: -(-len(rows) // CHANNELS)].double()
        mean = rows.mean(1)
        rows = rows - mean[:, None]
        self.found[site.name] = [mean, rows @ rows.T / rows.shape[1]]
        if site.ce is not None:
            self.fed[site.ce] = site.name

    def after(self, site: Site, y: Tensor) -> None:
        """Mean absolute value of every channel."""
        self.found[site.name].append(_rows(y, site.dim).float().abs().mean(1))

    def values(self) -> Values:
        """By layer; λ of a CE layer that goes into none of them, under its own name."""
        values: Values = {}
        for name, (mean, covariance, magnitude) in self.found.items():
            correlation = channel_correlation(mean, covariance).mean
            dimensions = participation_ratio(covariance)
            whole = bool(magnitude.isfinite().all())
            dormant = (relative_activity(magnitude) <= DORMANT).double().mean().item()
            values[name] = {
                "dormant_ratio": dormant if whole else math.nan,
                "inhibited_ratio": inhibited_ratio(magnitude) if whole else math.nan,
            }
            if dimensions is not None:
                values[name]["participation_share"] = dimensions / len(mean)
            if correlation is not None:
                values[name]["correlation"] = correlation
        for name, ce in ce_layers(self.root):
            mix = mixing_ratio(ce)
            if mix is not None:
                values.setdefault(self.fed.get(name, name), {})["lambda"] = mix
        return values


def _rows(x: Tensor, dim: int) -> Tensor:
    """(C, at most POSITIONS), evenly spaced in the batch."""
    rows = x.movedim(dim, 0).flatten(1)
    return rows[:, :: -(-rows.shape[1] // POSITIONS)]


def _run_apart(network: nn.Module, args: Any, kwargs: Any) -> None:
    """One more pass without gradients, which leaves buffers and random numbers as they are."""
    # copies: between forward and backward, autograd does not allow a buffer to be written
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    devices = {tensor.device for tensor in network.parameters() if tensor.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
        functional_call(network, buffers, args, kwargs)


def _receiver(to: Any) -> Callback:
    if isinstance(to, str | Path):
        return _Table(Path(to)).add
    if callable(to):
        return to  # type: ignore[no-any-return]
    if not hasattr(to, "add_scalar"):
        raise TypeError(f"to={to!r} must be a file, a SummaryWriter, or a function(step, values)")

    def add(step: int, values: Values) -> None:
        for layer, found in values.items():
            for name, value in found.items():
                to.add_scalar(f"{name}/{layer}", value, step)

    return add


class _Table:
    """A CSV file that grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.is_file() and path.stat().st_size > 0
        append(path, "" if begun else f"{','.join(FIELDS)}\n")
        with path.open(newline="") as file:
            columns = next(csv.reader(file), [])
        if tuple(columns) != FIELDS:
            raise ValueError(
                f"{path} has the columns {', '.join(columns)}, not {', '.join(FIELDS)}: it was "
                "written by something else or by an earlier version; give another file"
            )

    def add(self, step: int, values: Values) -> None:
        text = io.StringIO()
        writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
        writer.writerows(
            {"step": step, "layer": harmless(layer), **values[layer]} for layer in values
        )
        append(self.path, text.getvalue())
