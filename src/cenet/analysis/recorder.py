"""`Recorder`: statistics of every layer of a network, collected while it runs.

`LayerStatistics` holds sums of fixed size, so memory does not grow with the number of images, and
two of them can be merged. The sums are in float64; only those over the pixels of one image are
taken in float32, unless the network itself is in float64. Covariances are merged by Chan's formula,
so a mean that is large beside the deviation costs no digits, and batches of any size in any order
give the same result up to rounding.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d
from typing_extensions import override

from cenet.analysis.activations import ActivationObserver, Site
from cenet.analysis.channels import WIDEST, channel_magnitude
from cenet.analysis.readers import Readers

GRID = 32  # largest side of the map of magnitudes
CHUNK = 2**23  # values that are turned into float64 at a time
# sums over images and pixels after the activation, one value per channel
AFTER = ("sum", "abs_sum", "square_sum", "image_sum", "image_square_sum", "fired")
MAPS = ("magnitude_sum", "magnitude_before_sum")  # sums over images, one value per location


@dataclass
class LayerStatistics:
    """Sums over the images and pixels that one layer has seen.

    Attributes:
        size: height and width of the newest map.
        images: number of images.
        outputs: number of pixels after the activation.
        sum: sum of the values after the activation, (C,).
        abs_sum: sum of their absolute values, (C,).
        square_sum: sum of their squares, (C,).
        image_sum: sum over images of an image's mean absolute value, (C,).
        image_square_sum: sum over images of its square, (C,).
        fired: images in which the channel is positive at one pixel or more, (C,).
        magnitude_sum: sum over images of the ℓ2 norm over channels after the activation, (H', W').
        magnitude_before_sum: the same before the activation.
        pixels: number of pixels before the activation.
        mean: mean before the activation, of the channels `shown`, (S,).
        scatter: sum of outer products of the deviations from `mean`, (S, S).
    """

    size: tuple[int, int]
    images: int
    outputs: int
    sum: Tensor
    abs_sum: Tensor
    square_sum: Tensor
    image_sum: Tensor
    image_square_sum: Tensor
    fired: Tensor
    magnitude_sum: Tensor
    magnitude_before_sum: Tensor
    pixels: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def empty(
        cls, channels: int, size: tuple[int, int], device: torch.device | str = "cpu"
    ) -> "LayerStatistics":
        """Statistics of no images."""
        shown = len(shown_channels(channels))
        grid = (min(size[0], GRID), min(size[1], GRID))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        return cls(
            size=size,
            images=0,
            outputs=0,
            magnitude_sum=zeros(*grid),
            magnitude_before_sum=zeros(*grid),
            pixels=0,
            mean=zeros(shown),
            scatter=zeros(shown, shown),
            **{name: zeros(channels) for name in AFTER},
        )

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.abs_sum)

    @property
    def mean_abs(self) -> Tensor:
        """Mean absolute value after the activation, over images and pixels, (C,)."""
        return self.abs_sum / max(self.outputs, 1)

    @property
    def mean_abs_error(self) -> Tensor:
        """Standard error of `mean_abs`, from the spread between images, (C,); infinite for one."""
        if self.images < 2:
            return torch.full_like(self.abs_sum, torch.inf)
        mean = self.image_sum / self.images
        variance = (self.image_square_sum / self.images - mean.square()).clamp_min(0)
        return (variance / (self.images - 1)).sqrt()

    @property
    def root_mean_square(self) -> Tensor:
        """Root mean square after the activation, over images and pixels, (C,)."""
        return (self.square_sum / max(self.outputs, 1)).sqrt()

    @property
    def deviation(self) -> Tensor:
        """Standard deviation after the activation, over images and pixels, (C,)."""
        count = max(self.outputs, 1)
        return (self.square_sum / count - (self.sum / count).square()).clamp_min(0).sqrt()

    @property
    def firing(self) -> Tensor:
        """Share of images in which the channel is positive at one pixel or more, (C,)."""
        return self.fired / max(self.images, 1)

    @property
    def magnitude(self) -> Tensor:
        """ℓ2 over channels after the activation, mean over images, (H', W')."""
        return self.magnitude_sum / max(self.images, 1)

    @property
    def magnitude_before(self) -> Tensor:
        """ℓ2 over channels before the activation, mean over images, (H', W')."""
        return self.magnitude_before_sum / max(self.images, 1)

    @property
    def covariance(self) -> Tensor:
        """Biased covariance before the activation, of the channels shown, (S, S)."""
        return self.scatter / max(self.pixels, 1)

    def see_before(self, x: Tensor) -> None:
        """Add a batch before its activation, (N, C, H, W)."""
        shown = shown_channels(self.channels)
        for part in _chunks(x):
            values = part if len(shown) == self.channels else part[:, shown]
            rows = values.double().transpose(0, 1).flatten(1)
            mean = rows.mean(1)
            rows = rows - mean[:, None]  # not in place: it may be the activation itself
            self._add(rows.shape[1], mean, rows @ rows.T)
            self._add_lengths("magnitude_before_sum", part)

    def see_after(self, y: Tensor) -> None:
        """Add a batch after its activation, (N, C, H, W)."""
        self.size = (y.shape[2], y.shape[3])
        self.images += len(y)
        self.outputs += y.numel() // y.shape[1]
        values = y if y.dtype == torch.float64 else y.float()
        by_image = {
            "sum": values.sum((2, 3)),
            "abs_sum": torch.linalg.vector_norm(values, 1, (2, 3)),
            "square_sum": torch.linalg.vector_norm(values, 2, (2, 3)).double().square(),
            "fired": values.amax((2, 3)) > 0,
        }
        for name, value in by_image.items():
            getattr(self, name).add_(value.sum(0, dtype=torch.float64))
        mean = by_image["abs_sum"].double() / (y.shape[2] * y.shape[3])
        self.image_sum += mean.sum(0)
        self.image_square_sum += mean.square().sum(0)
        self._add_lengths("magnitude_sum", values)

    def merge(self, other: "LayerStatistics") -> None:
        """Add the statistics of other images."""
        self.size = other.size
        self.images += other.images
        self.outputs += other.outputs
        for name in AFTER:
            getattr(self, name).add_(getattr(other, name))
        for name in MAPS:
            own = getattr(self, name)
            own += pooled(getattr(other, name)[None], own)[0]
        self._add(other.pixels, other.mean, other.scatter)

    def to(self, device: torch.device | str) -> "LayerStatistics":
        """The same on another device."""
        moved: dict[str, Any] = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def _add_lengths(self, name: str, x: Tensor) -> None:
        """Add the length of the vector of channels at each location, (N, C, H, W)."""
        values = x if x.dtype == torch.float64 else x.float()
        own = getattr(self, name)
        own += pooled(channel_magnitude(values).double(), own).sum(0)

    def _add(self, pixels: int, mean: Tensor, scatter: Tensor) -> None:
        """Chan's formula."""
        total = self.pixels + pixels
        if total == 0:
            return
        step = mean - self.mean
        self.scatter += scatter
        self.scatter.addr_(step, step, alpha=self.pixels * pixels / total)
        self.mean += step * (pixels / total)
        self.pixels = total


def pooled(maps: Tensor, grid: Tensor) -> Tensor:
    """Maps (N, H, W), averaged to the height and width of `grid`."""
    return adaptive_avg_pool2d(maps, (grid.shape[0], grid.shape[1]))


def shown_channels(channels: int) -> list[int]:
    """The channels among which covariances are kept: all, or WIDEST of them evenly spaced."""
    count = min(channels, WIDEST)
    return [place * channels // count for place in range(count)]


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    """x in chunks of whole images that are cheap to turn into float64."""
    images = max(1, CHUNK // max(1, x[0].numel())) if len(x) else 1
    return torch.split(x, images)


class Recorder(ActivationObserver):
    """Inside the context, every pass of `model` adds to the statistics of its activations.

    Memory does not grow with the number of images. In-place operations, shared activation modules
    and functions each have a name of their own (see `ActivationObserver`), and the pass computes
    what it computes without the recorder. A pass is one call of `model`; if you call only parts of
    it, enter the context once per pass.

    Attributes:
        sites: by name, in the order of execution.
        layers: their statistics.
        reads: by layer, the squared norm of the weights by which each convolution or linear layer
            reads each channel, (readers, C). Layers that something else reads too are left out.
        shared: layers on a residual connection: activations of a sum, or added to a sum later.

    >>> from torchvision.models import resnet18
    >>> model = resnet18().eval()
    >>> with torch.no_grad(), Recorder(model) as recorder:
    ...     y = model(torch.randn(2, 3, 64, 64))
    >>> recorder.layers["relu"].mean_abs.shape
    torch.Size([64])
    """

    def __init__(self, model: nn.Module) -> None:
        """Record nothing yet."""
        super().__init__(model)
        self.sites: dict[str, Site] = {}
        self.layers: dict[str, LayerStatistics] = {}
        self.reads: dict[str, Tensor] = {}
        self.shared: set[str] = set()

    def __enter__(self) -> Any:
        """Start recording."""
        self.readers = None if self.reads else Readers()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        """Stop recording."""
        super().__exit__(*args)
        if args[0] is None:
            self.end_pass()
        self.readers = None

    def end_pass(self) -> None:
        """Keep the readers of each layer; later passes have the same, so they are followed once."""
        if self.readers is not None:
            self.reads, self.shared = self.readers.squared_norms(), self.readers.shared
        if self.reads:
            self.readers = None

    @override
    def before(self, site: Site, x: Tensor) -> None:
        """Add the input of an activation to its layer."""
        x = x.movedim(site.dim, 1)
        if site.name not in self.layers:
            size = (x.shape[2], x.shape[3])
            self.sites[site.name] = site
            self.layers[site.name] = LayerStatistics.empty(site.channels, size, x.device)
        self.layers[site.name].see_before(x)

    @override
    def after(self, site: Site, y: Tensor) -> None:
        """Add the output of an activation to its layer."""
        self.layers[site.name].see_after(y.movedim(site.dim, 1))

    def merge(self, other: "Recorder") -> None:
        """Add the statistics of another recorder of the same network."""
        for name, seen in other.layers.items():
            if name not in self.layers:
                self.sites[name] = other.sites[name]
                self.layers[name] = LayerStatistics.empty(seen.channels, seen.size)
            self.layers[name].merge(seen)
        self.reads, self.shared = {**other.reads, **self.reads}, self.shared | other.shared

    def sum_over_processes_(self, device: torch.device | str = "cpu") -> None:
        """Sum the statistics over all processes of the default group, in each of them.

        A collective: every process calls it, with images or without. One process alone has nothing
        to sum.

        Args:
            device: device on which the backend of the group sums: "cuda" for NCCL.
        """
        if not dist.is_initialized():
            return
        known: list[Any] = [None] * dist.get_world_size()
        own = {name: (self.sites[name], self.layers[name].size) for name in self.layers}
        reads = {name: read.cpu() for name, read in self.reads.items()}
        dist.all_gather_object(known, (own, reads, self.shared))
        layers: dict[str, LayerStatistics] = {}
        every: dict[str, tuple[Site, tuple[int, int]]] = {}
        for sites, reads, shared in known:
            for name, found in sites.items():
                every.setdefault(name, found)
            self.reads = {**{name: read.to(device) for name, read in reads.items()}, **self.reads}
            self.shared |= shared
        for name, (site, size) in every.items():
            # as the first process that has it, so that all sum maps of one size
            layer = LayerStatistics.empty(site.channels, size, device)
            if name in self.layers:
                layer.merge(self.layers[name].to(device))
            layers[name] = _summed(layer)
        self.sites = {name: site for name, (site, _) in every.items()}
        self.layers = layers


def _summed(seen: LayerStatistics) -> LayerStatistics:
    """The same over all processes: the mean first, then deviations from that mean."""

    def total(values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    counts = torch.tensor([seen.images, seen.outputs, seen.pixels], device=seen.mean.device)
    images, outputs, pixels = (int(count) for count in total(counts))
    mean = total(seen.mean * (seen.pixels / max(pixels, 1)))
    step = seen.mean - mean
    scatter = total(seen.scatter + seen.pixels * step.outer(step))
    sums: dict[str, Any] = {name: total(getattr(seen, name)) for name in (*AFTER, *MAPS)}
    return replace(
        seen, images=images, outputs=outputs, pixels=pixels, mean=mean, scatter=scatter, **sums
    )
