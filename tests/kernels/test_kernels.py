"""The kernels against the float64 `_reference`: in Triton's interpreter here, in full on a GPU."""

from itertools import combinations, product

import pytest
import torch

pytest.importorskip("triton")

from _checks import RTOL, assert_close
from _kernels import (
    Kernels,
    Launch,
    Reference,
    check,
    each_device,
    folded_weights,
    interpreted,
    measured,
    run_average_,
    upstream_of,
)
from cenet.nn.norms import average_

SIZES = {1: (1, 1), 3: (1, 3), 7: (7, 1), 49: (7, 7), 50: (5, 10), 196: (14, 14), 3136: (56, 56)}
CHANNELS = (16, 24, 48, 58, 64, 100, 2048)
BATCHES = (1, 2, 33)
SHAPES = [
    (pixels, c, n)
    for pixels, c, n in product(SIZES, CHANNELS, BATCHES)
    if pixels * n > 1  # one value has no statistics
]
# the interpreter's time goes with the number of elements and with that of programs
SMALL = [(pixels, c, n) for pixels, c, n in SHAPES if pixels * c * n <= 1e5 and c * n <= 3300]
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)
LAYOUTS = ("contiguous", "channels_last")
ACTS = ("relu", "leaky_relu", "elu", "none")


def pairs(shape):
    return set(combinations(enumerate(shape), 2))


def pairwise(shapes):
    """A subset in which every pair of values occurs that occurs in `shapes`, picked greedily."""
    left = set().union(*map(pairs, shapes))
    picked = []
    while left:
        best = max(shapes, key=lambda shape: (len(pairs(shape) & left), -shape[0] * shape[1]))
        picked.append(best)
        left -= pairs(best)
    return picked


PICKED = pairwise(SMALL)


def launch(index, rotation, shape, device="cpu"):
    """The case of a shape; dtype, layout, activation and residual change from one to the next."""
    pixels, channels, n = shape
    height, width = SIZES[pixels]
    slow = device == "cpu"
    return Launch(
        channels,
        n,
        height,
        width,
        # two values that are standardized are ±1: nothing is left of their gradient
        norm="none" if pixels * n == 2 else "bn",
        layer="bd" if pixels == 1 or (slow and channels == 2048) else "ce",
        dtype=DTYPES[(index + rotation) % 3],
        layout=LAYOUTS[(index // 3 + rotation) % 2],
        act=ACTS[(index + 2 * rotation) % len(ACTS)],
        residual=(index // 2 + rotation) % 2 == 1,
        group_size=64 if slow and channels == 2048 else 16,
        device=device,
    )


def test_picked_shapes_are_pairwise():
    assert set().union(*map(pairs, PICKED)) == set().union(*map(pairs, SMALL))
    assert len(PICKED) < len(SMALL)
    for position, values in enumerate((SIZES, CHANNELS, BATCHES)):
        assert {shape[position] for shape in PICKED} == set(values)


on_shapes_here = [
    pytest.param(launch(i, 0, shape), marks=interpreted) for i, shape in enumerate(PICKED)
]
on_shapes_there = [
    pytest.param(launch(i, rotation, shape, "cuda"), marks=pytest.mark.gpu)
    for rotation in range(3)
    for i, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize("case", [*on_shapes_here, *on_shapes_there], ids=str)
def test_shapes(case):
    check(case)


BASE = Launch()
POOLED = BASE.but(pool=2, height=7, width=9, coarse=True)
VARIATIONS = [
    *(BASE.but(norm="none", layer=b) for b in ("ce", "bd", "ir")),
    *(BASE.but(layer=b, channels=58, act=a) for b, a in (("bd", "relu"), ("ir", "elu"))),
    *(BASE.but(act=a, residual=r) for a in ACTS for r in (False, True)),
    BASE.but(layer="ir", residual=True, act="leaky_relu", layout="channels_last"),
    *(BASE.but(steps=t) for t in (1, 5)),
    # only the ridge of a ragged group keeps it from being singular
    BASE.but(steps=7, n=1, channels=18, height=1, width=2, norm="none", layer="bd", act="none"),
    BASE.but(group_size=5, layout="channels_last"),
    BASE.but(group_size=64, channels=100, height=9, width=9),
    *(BASE.but(channels=c, group_size=c) for c in (1, 3, 12)),
    *(BASE.but(layout=v) for v in ("channels_last", "sliced", "expanded")),
    *(BASE.but(layout=v, residual=True, layer="ir") for v in ("sliced", "expanded")),
    BASE.but(gamma=1e-2),
    BASE.but(affine=False),
    BASE.but(weights=torch.float16),
    *(BASE.but(dtype=d, norm="none", act="elu", residual=True) for d in HALF),
    *(BASE.but(dtype=d, layer=b, channels=58) for d in HALF for b in ("bd", "ir")),
    BASE.but(dtype=torch.float16, weights=torch.float16, blend=0.4),
    # blocks of channels differ from pass to pass, and must round alike
    BASE.but(dtype=torch.float16, channels=64, n=1, height=52, width=60),
    # far from 0, and nothing else
    *(BASE.but(dtype=d, height=24, width=24, offset=1e3) for d in HALF),
    BASE.but(dtype=torch.bfloat16, height=24, width=24, offset=1e3, scale=0.0, act="none"),
    # several splits of a sample, several blocks of samples, several of hidden units
    BASE.but(n=2, channels=16, height=52, width=60),
    *(BASE.but(n=2, channels=c, layer="ir", height=2, width=3) for c in (300, 600)),
    BASE.but(n=33, channels=64, group_size=64, height=2, width=3),
    # as few pixels as are rounded in half precision
    *(BASE.but(dtype=d, n=33, height=4, width=4, residual=d == HALF[0]) for d in HALF),
    # several samples a program, the last of them with fewer; groups that do not fill its channels
    *(BASE.but(n=70, height=h, width=w, layout="channels_last") for h, w in ((2, 2), (1, 3))),
    BASE.but(n=17, channels=37, group_size=5, height=2, width=4, residual=True, act="elu"),
    BASE.but(n=19, height=2, width=4, layer="ir", dtype=torch.float16, residual=True),
    BASE.but(n=65, height=1, width=1, layer="bd", blend=0.4),
    BASE.but(n=20, height=2, width=2, running="norm ce"),
]
POOLS = [
    POOLED,
    POOLED.but(layout="channels_last", residual=True),
    POOLED.but(norm="none", channels=58, act="none"),
    POOLED.but(layer="bd", height=8, n=1, act="elu"),
    POOLED.but(pool=3, n=3, channels=16),
    POOLED.but(n=2, channels=16, height=17, width=19, act="leaky_relu"),
    POOLED.but(running="norm"),
    POOLED.but(blend=-0.7, group_size=5),
    *(
        POOLED.but(dtype=d, channels=64, height=6, layout=v)
        for d, v in zip(HALF, LAYOUTS, strict=True)
    ),
]
BLENDS = [
    *(BASE.but(blend=0.3, layer=b, norm=n) for b in ("ce", "bd", "ir") for n in ("bn", "none")),
    BASE.but(blend=0.0, act="none", residual=True),
    BASE.but(blend=0.3, layer="bd", running="norm-ce"),
]
RUNNING = [
    *(BASE.but(running=r, layer=b) for r in ("norm", "ce", "norm-ce") for b in ("ce", "bd", "ir")),
    *(BASE.but(running="ce", norm="none", layer=b) for b in ("ce", "bd", "ir")),
    BASE.but(running="norm-ce", height=1, width=1, n=1, act="elu"),
    BASE.but(running="ce", channels=58, residual=True, layout="channels_last"),
    BASE.but(running="norm-ce", affine=False, dtype=torch.float16, channels=58),
    BASE.but(running="norm-ce", blend=0.3, dtype=torch.bfloat16, residual=True),
]


@each_device
@pytest.mark.parametrize("case", [*VARIATIONS, *POOLS, *BLENDS, *RUNNING], ids=str)
def test_variations(case, device):
    check(case.but(device=device))


def test_pooling_windows_have_ties():
    case = POOLED.but(dtype=torch.bfloat16)
    x = Reference(case).x.float()
    windows = x[:, :, :6, :8].unfold(2, 2, 2).unfold(3, 2, 2).flatten(4)
    tied = (windows == windows.amax(-1, keepdim=True)).sum(-1) > 1
    assert tied.float().mean() > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_input_that_is_not_aligned(dtype, channels_last):
    """Dense, but not at an address that vector loads like."""
    reference = Reference(BASE.but(channels=64, height=8, width=8, dtype=dtype, device="cuda"))
    kernels = Kernels(reference)
    shifted = torch.cat([reference.x.new_zeros(1), reference.x.flatten()])[1:]
    kernels.x = shifted.view_as(reference.x)
    if channels_last:
        n, c, h, w = reference.x.shape
        stored = reference.x.permute(0, 2, 3, 1).flatten()
        shifted = torch.cat([stored.new_zeros(1), stored])[1:]
        kernels.x = shifted.view(n, h, w, c).permute(0, 3, 1, 2)
    assert kernels.x.data_ptr() % 16
    y, state = kernels.forward()
    expected, _ = Kernels(reference).forward()
    assert_close("y", y, expected.double(), RTOL[dtype])
    dx = kernels.backward(upstream_of(y), y, state)["x"]
    assert dx.isfinite().all()


@each_device
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_survive_large_offsets(offset, layout, device):
    case = BASE.but(norm="none", layout=layout, offset=offset, height=9, width=11, device=device)
    assert_moments(case)


@each_device
@pytest.mark.parametrize("layer", ["ce", "ir"])
def test_moments_survive_sample_means_a_thousand_deviations_apart(layer, device):
    case = BASE.but(norm="none", spread=1e3, layer=layer, height=9, width=11, device=device)
    assert_moments(case)
    # two splits of a sample
    assert_moments(case.but(n=2, channels=16, height=40, width=50))


@each_device
@pytest.mark.parametrize("dtype", HALF)
def test_instance_moments_do_not_see_rounding(dtype, device):
    case = BASE.but(norm="none", dtype=dtype, height=24, width=25, device=device)
    reference = Reference(case)
    kernels = Kernels(reference)
    mean, var, _ = measured(kernels.saved(kernels.forward()[1]))
    x = reference.x.double()
    assert_close("mean", mean, x.mean((2, 3)), 1e-6)
    assert_close("var", var, x.var((2, 3), correction=0), 2e-6)


def assert_moments(case):
    reference = Reference(case)
    kernels = Kernels(reference)
    mean, var, cov = measured(kernels.saved(kernels.forward()[1]))
    x = reference.x.double()
    assert_close("mean", mean, x.mean((2, 3)), 1e-6)
    assert_close("var", var, x.var((2, 3), correction=0), 2e-6)
    if case.layer == "ir":
        return
    dense = torch.cov(x.transpose(0, 1).flatten(1), correction=0)
    for group, start in enumerate(range(0, case.channels, 16)):
        block = dense[start : start + 16, start : start + 16]
        assert_close("cov", cov[group, : len(block), : len(block)], block, 2e-6)
        assert cov[group, len(block) :].abs().sum() == 0


@each_device
@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_block_survives_large_offsets(offset, device):
    """The bound of the layers in test_numerics: the input itself is rounded by offset · 6e-8."""
    case = BASE.but(offset=offset, height=9, width=11, act="none", device=device)
    check(case, 1e-5 + 1e-6 * offset)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        *(pytest.param("cpu", dtype, marks=interpreted) for dtype in HALF),
        *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in HALF),
    ],
)
@pytest.mark.parametrize("layer", ["ce", "bd"])
def test_gradient_under_an_upstream_gradient_with_a_mean(layer, device, dtype):
    """What goes through x and through the statistics cancels; it must not be rounded before."""
    case = BASE.but(n=8, channels=64, height=7, act="none", affine=False, layer=layer)
    reference = Reference(case.but(dtype=dtype, device=device))
    kernels = Kernels(reference)
    y, state = kernels.forward()
    upstream = upstream_of(torch.full_like(y, 10))
    grads = kernels.backward(upstream, y, state)
    expected = reference.differentiate(y > 0, upstream)
    assert_close("gradient of x", grads["x"], expected["x"], RTOL[dtype])


@each_device
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, outside the tiles
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pool", [1, 2])
def test_the_largest_float16_values_stay_finite(layout, pool, device):
    case = BASE.but(dtype=torch.float16, act="none", layout=layout, pool=pool, device=device)
    check(case.but(scale=1e4))
    reference = Reference(case)
    kernels = Kernels(reference)
    # the difference of two of them is no float16, and a channel may be constant
    kernels.x = torch.where(reference.x > 0, 6e4, -6e4).to(reference.x)
    kernels.x[:, 3] = 6e4
    y, state = kernels.forward()
    grads = kernels.backward(upstream_of(y), y, state)
    assert all(tensor.isfinite().all() for tensor in (y, *grads.values()))


@each_device
@pytest.mark.parametrize(
    "case",
    [
        BASE.but(residual=True),
        BASE.but(dtype=torch.bfloat16, layout="channels_last", channels=58),
        POOLED.but(dtype=torch.float16),
    ],
    ids=str,
)
def test_repeats_are_equal_bit_for_bit(case, device):
    kernels = Kernels(Reference(case.but(device=device)))

    def results():
        y, state = kernels.forward()
        return [y, *kernels.backward(upstream_of(y), y, state).values()]

    first = results()
    for _ in range(19 if device == "cuda" else 1):
        assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))


@each_device
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about the bad values
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("momenta", [(0.1, 0.1, 0.1), (None, None, None), (0.0, 1.0, 0.3)])
@pytest.mark.parametrize("parts", ["norm+bd+ir", "norm", "bd", "ir"])
def test_running_averages(parts, momenta, dtype, device):
    """Those of the plain layers, batch after batch; some of them must not enter."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"mean": (24,), "var": (24,), "inv_sqrt": (2, 16, 16), "inv_std": ()}
    owner = {"mean": "norm", "var": "norm", "inv_sqrt": "bd", "inv_std": "ir"}
    own = {k: torch.ones(s, dtype=dtype, device=device) for k, s in shapes.items()}
    counts = {p: torch.tensor(0, device=device) for p in ("norm", "bd", "ir")}
    plain, plain_counts = ({k: v.clone() for k, v in d.items()} for d in (own, counts))
    given = {k: v if owner[k] in parts else None for k, v in own.items()}
    given_counts = {p: v if p in parts else None for p, v in counts.items()}
    for step in range(8):
        batch = {k: torch.rand(s, generator=generator) + 0.5 for k, s in shapes.items()}
        if step in (2, 4):
            bad = {2: torch.nan, 4: torch.inf}[step]
            for value in batch.values():
                value.flatten()[-1] = bad
        if step == 5:
            batch["var"][3] = 1e5  # too large for a half-precision buffer
        if step == 6:
            batch["inv_std"] = torch.zeros(())  # of an overflowing variance
        batch = {k: v.to(device) for k, v in batch.items()}
        run_average_(
            (given["mean"], given["var"], given_counts["norm"]),
            (given["inv_sqrt"], given_counts["bd"]),
            (given["inv_std"], given_counts["ir"]),
            batch,
            33,
            momenta,
        )
        batch["var"] = batch["var"] * (33 / 32)
        batch["inv_std"] = batch["inv_std"].where(batch["inv_std"] > 0, torch.nan)
        for part, momentum in zip(counts, momenta, strict=True):
            if part in parts:
                averages = [(plain[k], batch[k]) for k in shapes if owner[k] == part]
                average_(averages, plain_counts[part], momentum, debias=part != "norm")
    for part, count in counts.items():
        assert count == plain_counts[part], part
    for name, value in own.items():
        rtol = 1e-6 if dtype == torch.float32 else 2e-3
        assert_close(name, value, plain[name].double(), rtol)


@each_device
@pytest.mark.parametrize(
    ("shape", "splits"), [((1, 48, 40, 50), 4), ((2, 200, 3, 5), 1), ((17, 16, 4, 4), 1)]
)
def test_the_gate_of_a_folded_layer(shape, splits, device):
    """Against its formula in float64: samples in several splits, the last shorter; channels and
    samples in several blocks."""
    torch.manual_seed(0)
    channels, units = shape[1], 12
    x = torch.randn(shape) * torch.rand(*shape[:2], 1, 1) + 10 * torch.randn(*shape[:2], 1, 1)
    x += torch.linspace(0, 3, shape[2])[:, None]  # splits differ in their means
    w1, w2 = torch.randn(units, channels), torch.randn(channels, units)
    gate = (w1, torch.rand(units), torch.randn(units), w2)
    inv_std, share, offset = torch.tensor(0.7), torch.tensor(0.4), torch.tensor(0.1)
    given = [t.to(device) for t in (x, *gate, inv_std, share, offset)]
    w, found_splits = folded_weights(given[0], given[1:5], *given[5:])
    assert found_splits == splits
    u = x.double().var((2, 3), correction=0) * inv_std**2
    _, weight, bias, _ = (t.double() for t in gate)
    hidden = torch.nn.functional.layer_norm(u @ w1.double().T, (units,), weight, bias).relu()
    expected = share * inv_std * (hidden @ w2.double().T).sigmoid() + offset
    assert_close("w", w.cpu(), expected, 2e-6)
