"""What the ranks do in test_sync.py, and what one process does instead."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import _reference_list
import cenet.nn.base as base
import cenet.nn.ranks as ranks_module
import cenet.nn.statistics as statistics
from _distributed import Collectives
from _reference import Block, Parameters
from cenet import (
    BatchDecorrelation2d,
    ChannelEquilibrium2d,
    InstanceReweighting2d,
    NormCE2d,
    convert_sync_ce,
)

C = 24


def norm_ce(norm=nn.BatchNorm2d, layer=ChannelEquilibrium2d, act=None, start="paper", **kwargs):
    return NormCE2d(norm(C), layer(C, **kwargs), act, start=start)


def released() -> nn.Module:
    block = norm_ce()
    block.ce.ir.released = True
    return block


def fixed_norm() -> nn.Module:
    block = norm_ce()
    block.norm.eval()
    return block


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "ce": partial(ChannelEquilibrium2d, C),
    "bd": partial(BatchDecorrelation2d, C),
    "ir": partial(InstanceReweighting2d, C),
    "bn+ce": norm_ce,
    "bn+ce+relu": lambda: norm_ce(act=nn.ReLU()),
    "bn+bd": partial(norm_ce, layer=BatchDecorrelation2d),
    "bn+ir": partial(norm_ce, layer=InstanceReweighting2d),
    "gn+ce": partial(norm_ce, partial(nn.GroupNorm, 2)),
    "syncbn+ce": partial(norm_ce, nn.SyncBatchNorm),
    "bn without affine+ce": partial(norm_ce, partial(nn.BatchNorm2d, affine=False)),
    "bn without tracking+ce": partial(norm_ce, partial(nn.BatchNorm2d, track_running_stats=False)),
    "pool": partial(norm_ce, pool=2),
    "pool alone": partial(ChannelEquilibrium2d, C, pool=2),
    "syncbn+pool": partial(norm_ce, nn.SyncBatchNorm, pool=2),
    "ragged": partial(norm_ce, group_size=10),
    "momentum None": partial(norm_ce, partial(nn.BatchNorm2d, momentum=None), momentum=None),
    "identity": partial(norm_ce, start="identity"),
    "identity+bd": partial(norm_ce, layer=BatchDecorrelation2d, start="identity"),
    "fixed bn+ce": fixed_norm,
    "released": released,
}
# layers that have a reference for images of different sizes
BLOCKS = {
    "bn+ce": Block(),
    "syncbn+ce": Block(),
    "pool": Block(pool=2),
    "ragged": Block(group_size=10),
}
# images per rank
SPLITS = {
    2: {"equal": (3, 3), "unequal": (4, 1), "single": (1, 1), "empty": (0, 5)},
    3: {"unequal": (2, 1, 3), "single": (1, 1, 1), "empty": (2, 0, 3)},
}
# batches of the ranks
MIXED = {2: ((3, 5, 7), (2, 4, 6)), 3: ((2, 5, 7), (0, 6, 6), (1, 9, 4))}
STEPS = 2


def layer(name: str) -> nn.Module:
    """A layer in float64 with every parameter away from its initial value."""
    torch.manual_seed(1)
    module = LAYERS[name]().double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def images(n: int, height: int = 5, width: int = 7, seed: int = 0) -> Tensor:
    """Images whose means and spreads differ from one to the next."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(n, C, height, width, generator=random, dtype=torch.float64)
    spread = torch.linspace(0.5, 2, n, dtype=torch.float64)[:, None, None, None]
    return values * spread + 2 * spread - 1


def steps(
    module: nn.Module, batches: list[Tensor], weights: Tensor, residual: Tensor | None = None
) -> dict[str, Any]:
    """Forward and backward over each batch; results of the last."""
    for x in batches:
        module.zero_grad()
        x = x.clone().requires_grad_()
        y = module(x) if residual is None else module(x, residual, nn.ReLU())
        (y * weights).sum().backward()
    return {
        "y": y.detach(),
        "x.grad": x.grad,
        "grads": {name: p.grad for name, p in module.named_parameters()},
        "buffers": dict(module.named_buffers()),
    }


def batches_of(split: tuple[int, ...]) -> tuple[list[Tensor], Tensor, Tensor]:
    """Batches of all ranks, weights of the loss, a residual."""
    batches = [images(sum(split), seed=seed) for seed in range(STEPS)]
    return batches, images(sum(split), seed=100), images(sum(split), seed=200)


def alone(name: str, split: tuple[int, ...]) -> dict[str, Any]:
    """One process on the images of all ranks."""
    module = layer({"syncbn+ce": "bn+ce", "syncbn+pool": "pool"}.get(name, name))
    batches, weights, residual = batches_of(split)
    return steps(module, batches, weights, residual if name == "bn+ce+relu" else None)


def of_rank(rank: int, split: tuple[int, ...], whole: Tensor) -> Tensor:
    return whole.split(split)[rank]


def synchronized(rank: int, name: str, split: tuple[int, ...]) -> dict[str, Any]:
    module = convert_sync_ce(layer(name))
    batches, weights, residual = batches_of(split)
    mine = partial(of_rank, rank, split)
    # no NaN on the way either, as the share of a rank without images may leave one
    with torch.autograd.set_detect_anomaly(0 in split):
        return steps(
            module,
            [mine(batch) for batch in batches],
            mine(weights),
            mine(residual) if name == "bn+ce+relu" else None,
        )


def mixed_batch(rank: int, ranks: int, seed: int = 0) -> Tensor:
    n, height, width = MIXED[ranks][rank]
    return images(n, height, width, seed=seed + rank) * (rank + 1) + rank


def mixed(rank: int, ranks: int, name: str) -> dict[str, Any]:
    """Images of different sizes on every rank."""
    x = mixed_batch(rank, ranks)
    return steps(convert_sync_ce(layer(name)), [x], mixed_batch(rank, ranks, seed=100))


def mixed_reference(ranks: int, name: str) -> tuple[dict[str, Any], _reference_list.Result]:
    xs = [mixed_batch(rank, ranks) for rank in range(ranks)]
    return list_reference(name, xs, [mixed_batch(rank, ranks, seed=100) for rank in range(ranks)])


def list_reference(
    name: str, batches: list[Tensor], weights: list[Tensor]
) -> tuple[dict[str, Any], _reference_list.Result]:
    """Outputs and gradients of the list of all images in float64, and what buffers average."""
    block = layer(name)
    ir = block.ce.ir
    tensors = [block.norm.weight, block.norm.bias, ir.fc1.weight, ir.norm.weight, ir.norm.bias]
    tensors += [ir.fc2.weight, block.ce.mix_logit]
    p = Parameters(*(tensor.detach().clone().requires_grad_() for tensor in tensors))
    xs = [batch.clone().requires_grad_() for batch in batches]
    result = _reference_list.equilibrium(xs, p, BLOCKS[name])
    sum((y * weight).sum() for y, weight in zip(result.outputs, weights, strict=True)).backward()
    names = ["norm.weight", "norm.bias", "ce.ir.fc1.weight", "ce.ir.norm.weight"]
    names += ["ce.ir.norm.bias", "ce.ir.fc2.weight", "ce.mix_logit"]
    grads = {n: getattr(p, field).grad for n, field in zip(names, vars(p), strict=True)}
    return {"ys": result.outputs, "x.grads": [x.grad for x in xs], "grads": grads}, result


def _equal_weights(counts: Tensor) -> Tensor:
    return torch.full_like(counts, 1 / len(counts))[:, None]


def _no_spread(means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return statistics._average(means, counts), torch.zeros_like(means)


def _with_counts(
    order: tuple[int, int, int], messages: Tensor, layout: Any, center: Tensor | None
) -> Any:
    counts, rest = messages[:, :3], messages[:, 3:]
    return statistics.merge(torch.cat([counts[:, list(order)], rest], 1), layout, center)


def _whole_windows_only(x: Tensor, *args: Any) -> Tensor:
    told, layout = statistics.message(x, *args), args[-1]
    n, _, height, width = x.shape
    count = told.new_tensor([n * (height // layout.pool) * (width // layout.pool)])
    return torch.cat([told[:2], count, told[3:]])


class _OwnGradientOnly:
    @staticmethod
    def apply(parts: Tensor, ranks: Any) -> Tensor:
        return parts[dist.get_rank()]


MUTATIONS: dict[str, tuple[Any, str, Any]] = {
    "ranks weigh alike": (statistics, "_weights", _equal_weights),
    "nothing between the ranks": (statistics, "_mean_and_spread", _no_spread),
    "windows at the edge do not count": (base, "message", _whole_windows_only),
    "s weighs pixels": (base, "merge", partial(_with_counts, (1, 1, 2))),
    "covariance weighs images": (base, "merge", partial(_with_counts, (0, 1, 0))),
    "covariance weighs pixels, not windows": (base, "merge", partial(_with_counts, (0, 1, 1))),
    "norm weighs images": (base, "merge", partial(_with_counts, (0, 0, 2))),
    "gradient of the own loss only": (ranks_module, "_SumOfOwnPart", _OwnGradientOnly),
}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    owner, attribute, replacement = MUTATIONS[name]
    original = getattr(owner, attribute)
    setattr(owner, attribute, replacement)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, C, 3),
        NormCE2d(nn.BatchNorm2d(C), ChannelEquilibrium2d(C, pool=2), nn.ReLU()),
        nn.Conv2d(C, C, 3),
        NormCE2d(nn.BatchNorm2d(C), ChannelEquilibrium2d(C), nn.ReLU()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(C, 5),
    ).double()


def train(model: nn.Module, n: int, part: Callable[[Tensor], Tensor], scale: float) -> None:
    """Five steps of SGD on the part of each batch of n images that a rank has."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    random = torch.Generator().manual_seed(3)
    for _ in range(5):
        x = part(torch.randn(n, 3, 9, 9, generator=random, dtype=torch.float64))
        labels = part(torch.randint(5, (n,), generator=random))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels, reduction="sum")
        (loss * scale / n).backward()
        optimizer.step()


def ddp(rank: int, split: tuple[int, ...]) -> dict[str, Tensor]:
    # DDP takes the mean over ranks, so a sum over all images needs their number
    model = DistributedDataParallel(convert_sync_ce(network()))
    train(model, sum(split), partial(of_rank, rank, split), scale=len(split))
    return model.module.state_dict()


def counted(rank: int, name: str) -> dict[str, list[str]]:
    """Collectives of a forward pass, its backward pass, and of passes that must have none."""
    module = convert_sync_ce(layer(name))
    names = {}
    with Collectives() as forward:
        y = module(images(3, seed=rank).requires_grad_())
    with Collectives() as backward:
        y.sum().backward()
    names["forward"], names["backward"] = forward.names, backward.names
    with Collectives() as evaluation:
        module.eval()(images(3).requires_grad_()).sum().backward()
        if "syncbn" not in name:  # torch's own then talks, and only on a GPU
            frozen = module.train()
            getattr(frozen, "ce", frozen).freeze()
            frozen(images(3))
    names["evaluation"] = evaluation.names
    return names


def second_derivative(module: nn.Module, x: Tensor, weights: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    y = module(x)
    (gradient,) = torch.autograd.grad((y.square() * weights).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), x)[0]


def checkpointed(module: nn.Module, x: Tensor, weights: Tensor, *, reentrant: bool) -> Any:
    x = x.clone().requires_grad_()
    y = checkpoint(module, x, use_reentrant=reentrant)
    (y * weights).sum().backward()
    return x.grad, dict(module.named_buffers())


def error_of(function: Callable[[], Any]) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def compiled(rank: int, name: str) -> dict[str, Any]:
    """Eager and compiled, two sizes per rank."""
    torch._dynamo.reset()
    eager = convert_sync_ce(layer(name))
    module = copy.deepcopy(eager)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager")
    results = {}
    for kind, run in (("eager", eager), ("compiled", fast)):
        for n in (3, 4):
            x = images(n + rank, seed=rank).requires_grad_()
            y = run(x)
            (y * y.detach().sin()).sum().backward()
        buffers = dict((eager if kind == "eager" else module).named_buffers())
        results[kind] = {"y": y.detach(), "x.grad": x.grad, "buffers": buffers}
    return results
