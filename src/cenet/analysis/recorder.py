"""`Recorder`: the statistics of all layers while a network runs on whatever it is given."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from cenet.analysis.readers import Readers
from cenet.analysis.statistics import AFTER, MAPS, LayerStatistics
from cenet.analysis.watching import ActivationWatch, Site


class Recorder(ActivationWatch):
    """Inside the context, every pass of `model` adds to the statistics of its activations.

    Memory does not grow with the number of images. In-place operations, shared activation modules
    and functions are told apart (see `ActivationWatch`); the run itself is not changed. A pass is
    one call of `model`; where only parts of it are called, enter the context once per pass.

    Attributes:
        sites: by name, in the order of execution.
        layers: their statistics.
        reads: by layer, the squared norm of the weights by which each convolution or linear layer
            reads each channel, (readers, C). Layers that something else reads too are left out.
        shared: layers on a residual connection: activations of a sum, or added to something later.

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
        """Start watching."""
        self.readers = None if self.reads else Readers()
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        """Stop watching."""
        super().__exit__(*args)
        if args[0] is None:
            self.end_pass()
        self.readers = None

    def end_pass(self) -> None:
        """Keep who reads each layer: weights do not change from one pass to the next."""
        if self.readers is not None:
            self.reads, self.shared = self.readers.squared_norms(), self.readers.shared
        if self.reads:
            self.readers = None

    @override
    def before(self, site: Site, x: Tensor) -> None:
        x = x.movedim(site.dim, 1)
        if site.name not in self.layers:
            size = (x.shape[2], x.shape[3])
            self.sites[site.name] = site
            self.layers[site.name] = LayerStatistics.empty(site.channels, size, x.device)
        self.layers[site.name].see_before(x)

    @override
    def after(self, site: Site, y: Tensor) -> None:
        self.layers[site.name].see_after(y.movedim(site.dim, 1))

    def merge(self, other: "Recorder") -> None:
        """Take in what another recorder of the same network has seen."""
        for name, seen in other.layers.items():
            if name not in self.layers:
                self.sites[name] = other.sites[name]
                self.layers[name] = LayerStatistics.empty(seen.channels, seen.size)
            self.layers[name].merge(seen)
        self.reads, self.shared = {**other.reads, **self.reads}, self.shared | other.shared

    def sum_over_processes_(self, device: torch.device | str = "cpu") -> None:
        """Give all processes of the default group what each has seen, as one.

        A collective: every process calls it, with images or without. One process alone has nothing
        to sum.

        Args:
            device: what the backend of the group sums on: "cuda" for NCCL.
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
