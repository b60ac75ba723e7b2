"""Baselines against formulas written out in float64, their limits, their state and their modes."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from _checks import RTOL, assert_close
from cenet.baselines import IterNorm2d, SwitchableNorm2d, SwitchableWhitening2d

SW_B = ("bw", "iw", "bn", "in", "ln")
C, K = 11, 4  # groups of 4, 4 and 3
LAYERS = {
    "iter": lambda c=C, **kw: IterNorm2d(c, **{"group_size": K} | kw),
    "sn": lambda c=C, **kw: SwitchableNorm2d(c, **kw),
    "sw a": lambda c=C, **kw: SwitchableWhitening2d(c, **{"group_size": K} | kw),
    "sw b": lambda c=C, **kw: SwitchableWhitening2d(
        c, **{"group_size": K, "statistics": SW_B} | kw
    ),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def images(n=5, c=C, h=6, w=7, seed=0, offset=1.0, **kwargs):
    """Neighbouring channels correlate; samples and channels differ in scale and offset."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = randn(n, c, h, w)
    x = (x + 0.7 * x.roll(1, 1)) * randn(n, 1, 1, 1).exp() ** 0.5 * randn(1, c, 1, 1).exp() ** 0.5
    return (x + offset * randn(n, c, 1, 1) + offset * randn(1, c, 1, 1)).to(**kwargs)


def build(name, **kwargs):
    """A layer with every parameter away from its initial value."""
    torch.manual_seed(0)
    layer = LAYERS[name](**kwargs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return layer


def push(layer, mean, second):
    """Put all weight on one statistic for the mean and on one for the (co)variance."""
    logits = layer.var_logits if isinstance(layer, SwitchableNorm2d) else layer.cov_logits
    with torch.no_grad():
        layer.mean_logits.fill_(-1000)[mean] = 0
        logits.fill_(-1000)[second] = 0
    return layer


# the formulas, one sample and one group at a time -------------------------------------------------


def inverse_root(sigma, steps):
    """Newton's iteration as printed in the papers."""
    p = torch.eye(len(sigma), dtype=sigma.dtype)
    for _ in range(steps):
        p = 0.5 * (3 * p - p @ p @ p @ (sigma / sigma.trace()))
    return p / sigma.trace().sqrt()


def groups(layer):
    return [slice(i, i + layer.group_size) for i in range(0, layer.num_features, layer.group_size)]


def affine(layer, y):
    if layer.weight is None:
        return y
    return layer.weight[:, None, None] * y + layer.bias[:, None, None]


def rows(x):
    return x.transpose(0, 1).flatten(1)


def iter_norm(layer, x, mean, matrices):
    centered = x - mean[:, None, None]
    parts = [
        torch.einsum("ij,njhw->nihw", w, centered[:, g])
        for g, w in zip(groups(layer), matrices, strict=True)
    ]
    return affine(layer, torch.cat(parts, 1))


def iter_matrices(layer, x, root):
    eye = torch.eye(layer.num_features, dtype=x.dtype)
    sigma = torch.cov(rows(x), correction=0) + layer.eps * eye
    return [root(sigma[g, g], layer.newton_steps) for g in groups(layer)]


def switchable_norm(layer, x, batch):
    w, v = layer.mean_logits.exp(), layer.var_logits.exp()
    w, v = w / w.sum(), v / v.sum()
    out = []
    for sample in x:
        mean = w[0] * sample.mean((1, 2)) + w[1] * sample.mean() + w[2] * batch[0]
        var = v[0] * sample.flatten(1).var(1, correction=0) + v[2] * batch[1]
        var = var + v[1] * sample.var(correction=0)
        out.append((sample - mean[:, None, None]) / (var[:, None, None] + layer.eps).sqrt())
    return affine(layer, torch.stack(out))


def switchable_whitening(layer, x, batch):
    w, v = layer.mean_logits.exp(), layer.cov_logits.exp()
    w, v = w / w.sum(), v / v.sum()
    eye = torch.eye(layer.num_features, dtype=x.dtype)
    out = []
    for sample in x:
        own = torch.cov(sample.flatten(1), correction=0)
        means = {"bw": batch[0], "iw": sample.mean((1, 2)), "ln": sample.mean()}
        covs = {"bw": batch[1], "iw": own, "ln": sample.var(correction=0) * eye}
        means |= {"bn": means["bw"], "in": means["iw"]}
        covs |= {"bn": covs["bw"] * eye, "in": own * eye}
        mean = sum(weight * means[k] for weight, k in zip(w, layer.statistics, strict=True))
        cov = sum(weight * covs[k] for weight, k in zip(v, layer.statistics, strict=True))
        cov = cov + layer.eps * eye
        centered = sample.flatten(1) - mean[:, None]
        parts = [inverse_root(cov[g, g], layer.newton_steps) @ centered[g] for g in groups(layer)]
        out.append(torch.cat(parts).reshape(sample.shape))
    return affine(layer, torch.stack(out))


def blocks(layer, matrix):
    """The groups of a matrix over all channels, padded with zeros: (G, K, K)."""
    out = matrix.new_zeros(len(groups(layer)), layer.group_size, layer.group_size)
    for i, g in enumerate(groups(layer)):
        part = matrix[g, g]
        out[i, : len(part), : len(part)] = part
    return out


def expected(layer, x):
    """What `layer` gives in training."""
    mean = rows(x).mean(1)
    if isinstance(layer, IterNorm2d):
        return iter_norm(layer, x, mean, iter_matrices(layer, x, inverse_root))
    if isinstance(layer, SwitchableNorm2d):
        return switchable_norm(layer, x, (mean, rows(x).var(1, correction=0)))
    return switchable_whitening(layer, x, (mean, torch.cov(rows(x), correction=0)))


def expected_in_evaluation(layer, x):
    """What `layer` gives in evaluation, from its buffers."""
    if isinstance(layer, IterNorm2d):
        sizes = [min(layer.group_size, layer.num_features - g.start) for g in groups(layer)]
        matrices = [m[:size, :size] for m, size in zip(layer.running_inv_sqrt, sizes, strict=True)]
        return iter_norm(layer, x, layer.running_mean, matrices)
    if isinstance(layer, SwitchableNorm2d):
        return switchable_norm(layer, x, (layer.running_mean, layer.running_var))
    cov = torch.block_diag(*layer.running_cov)[: layer.num_features, : layer.num_features]
    return switchable_whitening(layer, x, (layer.running_mean, cov))


def compare(layer, x, formula, rtol):
    """Value and all gradients of `layer`, against `formula` on a float64 copy of it."""
    twin = copy.deepcopy(layer).double()
    x, z = x.clone().requires_grad_(), x.double().requires_grad_()
    y, reference = layer(x), formula(twin, z)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(direction.to(y.dtype))
    reference.backward(direction.to(y.dtype).double())
    assert y.dtype == x.dtype
    assert_close("y", y, reference, rtol)
    assert_close("x.grad", x.grad, z.grad, 4 * rtol)
    for (name, own), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert_close(name, own.grad, other.grad, 4 * rtol)


# value and gradients ------------------------------------------------------------------------------


@each_layer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kwargs", [{}, {"affine": False, "eps": 0.1}, {"c": 8}], ids=str)
def test_training(name, dtype, kwargs):
    layer = build(name, dtype=dtype, **kwargs)
    compare(layer, images(c=layer.num_features, dtype=dtype), expected, RTOL[dtype])


@each_layer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_evaluation(name, dtype):
    layer = build(name, dtype=dtype, momentum=0.4)
    for seed in range(3):
        layer(images(seed=seed, dtype=dtype))
    compare(layer.eval(), images(seed=7, dtype=dtype), expected_in_evaluation, RTOL[dtype])


@pytest.mark.parametrize("name", ["iter", "sw a", "sw b"])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_newton_steps_are_part_of_the_definition(name, steps):
    compare(build(name, newton_steps=steps, dtype=torch.float64), images(), expected, 1e-9)


@each_layer
def test_second_derivative(name):
    layer = build(name, c=3, dtype=torch.float64)
    x = images(3, 3, 2, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(layer, (x,))


@each_layer
def test_far_from_zero(name):
    x = images(dtype=torch.float32) + 300
    layer = build(name)
    assert_close("y", layer(x), expected(copy.deepcopy(layer).double(), x.double()), 1e-4)


# limits -------------------------------------------------------------------------------------------


def test_iter_norm_with_many_steps_is_zca():
    layer = IterNorm2d(C, group_size=K, newton_steps=30, affine=False, dtype=torch.float64)
    x = images()

    def root(sigma, steps):
        values, vectors = torch.linalg.eigh(sigma)
        return vectors @ (values**-0.5).diag() @ vectors.T

    y = layer(x)
    zca = iter_norm(layer, x, rows(x).mean(1), iter_matrices(layer, x, root))
    assert_close("zca", y, zca, 1e-10)
    layer.eps = 1e-12
    y = layer(x)
    cov = torch.cov(rows(y), correction=0)
    for g in groups(layer):
        whole = torch.eye(g.stop - g.start, dtype=torch.float64)[: C - g.start, : C - g.start]
        assert_close("cov", cov[g, g], whole, 1e-9)
    assert rows(y).mean(1).abs().max() < 1e-9


def torch_norms(dtype=torch.float64):
    return [
        nn.InstanceNorm2d(C, affine=True, dtype=dtype),
        nn.GroupNorm(1, C, dtype=dtype),
        nn.BatchNorm2d(C, dtype=dtype),
    ]


def assert_same_passes(layer, reference, seed=0):
    """Output and gradient of one batch."""
    x, z = images(seed=seed).requires_grad_(), images(seed=seed).requires_grad_()
    y, expected = layer(x), reference(z)
    y.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    assert_close("y", y, expected, 1e-10)
    assert_close("x.grad", x.grad, z.grad, 1e-9)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_switchable_norm_of_one_choice_is_a_norm_of_torch(index):
    layer, norm = push(build("sn", dtype=torch.float64), index, index), torch_norms()[index]
    norm.load_state_dict({k: layer.state_dict()[k] for k in norm.state_dict()})
    for seed in range(3):
        assert_same_passes(layer, norm, seed)
    for name, buffer in norm.named_buffers():
        assert_close(name, layer.get_buffer(name).double(), buffer.double(), 1e-12)
    layer.eval()
    norm.eval()
    assert_close("evaluation", layer(images(seed=5)), norm(images(seed=5)), 1e-10)


def test_switchable_whitening_of_the_batch_is_iter_norm():
    layer = push(build("sw a", momentum=1.0, dtype=torch.float64), 0, 0)
    twin = IterNorm2d(C, group_size=K, momentum=1.0, dtype=torch.float64)
    twin.load_state_dict({"weight": layer.weight, "bias": layer.bias}, strict=False)
    assert_same_passes(layer, twin)
    assert_close("running_mean", layer.running_mean, twin.running_mean, 1e-12)


def test_switchable_whitening_of_one_instance_whitens_each_sample():
    layer = SwitchableWhitening2d(C, group_size=K, newton_steps=30, affine=False, eps=1e-12)
    y = push(layer.double(), 1, 1)(images())
    for sample in y:
        cov = torch.cov(sample.flatten(1), correction=0)
        for g in groups(layer):
            assert_close("cov", cov[g, g], torch.eye(len(cov[g]), dtype=cov.dtype), 1e-9)


@pytest.mark.parametrize(("index", "norm"), [(3, 0), (4, 1), (2, 2)], ids=["in", "ln", "bn"])
def test_switchable_whitening_of_a_diagonal_is_a_norm_of_torch(index, norm):
    layer = push(build("sw b", newton_steps=30, dtype=torch.float64), index, index)
    norm = torch_norms()[norm]
    norm.load_state_dict({"weight": layer.weight, "bias": layer.bias}, strict=False)
    for seed in range(3):
        assert_same_passes(layer, norm, seed)
    layer.eval()
    norm.eval()
    assert_close("evaluation", layer(images(seed=5)), norm(images(seed=5)), 1e-10)


# running values -----------------------------------------------------------------------------------


@each_layer
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
def test_running_values(name, momentum):
    layer = build(name, momentum=momentum, dtype=torch.float64)
    running = {key: value.clone() for key, value in layer.named_buffers()}
    for step in range(1, 4):
        x = images(seed=step)
        layer(x)
        batch = {"running_mean": rows(x).mean(1)}
        if name == "iter":
            matrices = iter_matrices(layer, x, inverse_root)
            own = blocks(layer, torch.block_diag(*matrices))
            own[-1, -1, -1] = 1  # the padding of 11 = 4 + 4 + 3
            batch["running_inv_sqrt"] = own
        elif name == "sn":
            batch["running_var"] = rows(x).var(1)
        else:
            batch["running_cov"] = blocks(layer, torch.cov(rows(x)))
        weight = 1 / step if momentum is None else momentum
        for key, value in batch.items():
            running[key] = (1 - weight) * running[key] + weight * value
            assert_close(key, layer.get_buffer(key), running[key], 1e-11)
    assert layer.num_batches_tracked == 3
    layer.eval()(images())
    assert layer.num_batches_tracked == 3


@each_layer
def test_fresh_evaluation_of_pure_batch_statistics_is_the_affine_map(name):
    layer = LAYERS[name](eps=1e-12)
    if name != "iter":
        layer.newton_steps = 30  # switchable norm has none
        push(layer, *((2, 2) if name == "sn" else (0, 0)))
    x = images(dtype=torch.float32)
    assert_close("y", layer.eval()(x), x, 1e-5)


@each_layer
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_batch_enters_no_buffer(name, value):
    layer = build(name)
    layer(images(dtype=torch.float32))
    before = copy.deepcopy(layer.state_dict())
    x = images(dtype=torch.float32)
    x[1, 2, 3, 4] = value
    layer(x)
    assert all(torch.equal(before[key], tensor) for key, tensor in layer.state_dict().items())


@each_layer
def test_buffers_stay_in_place_and_do_not_disturb_autograd(name):
    layer = build(name)
    addresses = [buffer.data_ptr() for buffer in layer.buffers()]
    x = images(dtype=torch.float32).requires_grad_()
    y = layer.eval()(x)
    layer.train()(x.detach())
    y.sum().backward()  # raises if a buffer that autograd kept has changed
    assert addresses == [buffer.data_ptr() for buffer in layer.buffers()]
    assert all(buffer.grad_fn is None for buffer in layer.buffers())


@each_layer
def test_state_dict_round_trip_and_reset(name):
    layer, fresh = build(name), LAYERS[name]()
    initial = copy.deepcopy(fresh.state_dict())
    layer(images(dtype=torch.float32))
    fresh.load_state_dict(layer.state_dict())
    x = images(seed=4, dtype=torch.float32)
    assert torch.equal(fresh.eval()(x), layer.eval()(x))
    fresh.reset_parameters()
    assert all(torch.equal(initial[key], tensor) for key, tensor in fresh.state_dict().items())


# dtypes, layouts, sizes ---------------------------------------------------------------------------


@each_layer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_half_precision_input(name, dtype, training):
    """Only the output is rounded."""
    layer = build(name).train(training)
    twin = copy.deepcopy(layer).double()
    x = images(dtype=dtype)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    formula = expected if training else expected_in_evaluation
    rtol = {torch.float16: 4e-4, torch.bfloat16: 3e-3}[dtype]
    assert_close("y", y, formula(twin, x.double()), rtol)
    twin(x.double())
    for buffer, reference in zip(layer.buffers(), twin.buffers(), strict=True):
        assert buffer.dtype in (torch.float32, torch.long)
        assert_close("buffer", buffer.double(), reference.double(), 1e-5)


@each_layer
def test_float16_does_not_overflow(name):
    """The sum of squares of a channel exceeds the largest half."""
    x = images(8, h=20, w=20, dtype=torch.float16) * 100
    assert LAYERS[name]()(x).isfinite().all()


@each_layer
@pytest.mark.parametrize("training", [True, False])
def test_channels_last(name, training):
    layer = build(name).train(training)
    twin = copy.deepcopy(layer)
    x = images(dtype=torch.float32)
    z = x.to(memory_format=torch.channels_last)
    y = layer(z)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert twin(x).is_contiguous()
    assert_close("y", y, copy.deepcopy(twin)(x), 1e-6)


@each_layer
@pytest.mark.parametrize("shape", [(6, C, 1, 1), (1, C, 3, 4), (2, C, 1, 1)], ids=str)
def test_few_values(name, shape):
    layer = build(name)
    x = images(*shape, dtype=torch.float32).requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad.isfinite().all()
    layer = build(name, dtype=torch.float64)
    assert_close("y", layer(images(*shape)), expected(layer, images(*shape)), 1e-9)


@each_layer
@pytest.mark.parametrize("training", [True, False])
def test_empty_batch_and_constant_input(name, training):
    layer = build(name).train(training)
    before = copy.deepcopy(dict(layer.named_buffers()))
    assert layer(torch.zeros(0, C, 5, 6)).shape == (0, C, 5, 6)
    assert all(torch.equal(before[key], buffer) for key, buffer in layer.named_buffers())
    x = torch.full((3, C, 5, 6), 2.0, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


@each_layer
def test_meta_device(name):
    layer = LAYERS[name](device="meta", dtype=torch.float64)
    assert layer(images(device="meta")).shape == (5, C, 6, 7)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert layer(images()).isfinite().all()


# compilers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["iter", "sn", "sw b"])
@pytest.mark.parametrize("training", [True, False])
def test_compiles_to_one_graph(name, training):
    torch._dynamo.reset()
    eager = build(name).train(training)
    layer = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for seed, n in enumerate((4, 2, 7, 5)):
        x = images(n, seed=seed, dtype=torch.float32).requires_grad_()
        z = x.detach().clone().requires_grad_()
        y, reference = compiled(x), eager(z)
        y.pow(3).mean().backward()
        reference.pow(3).mean().backward()
        assert_close("y", y, reference, 1e-6)
        assert_close("x.grad", x.grad, z.grad, 1e-5)
    assert counter.frame_count <= 2
    for own, other in zip(layer.buffers(), eager.buffers(), strict=True):
        assert_close("buffer", own.double(), other.double(), 1e-6)


@each_layer
def test_evaluation_exports(name):
    layer = build(name).eval()
    batch = torch.export.Dim("batch", min=2, max=64)
    x = images(dtype=torch.float32)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: batch},))
    x = images(9, seed=2, dtype=torch.float32)
    assert_close("y", exported.module()(x), layer(x), 1e-6)


# words --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"c": 0}, "num_features=0"),
        ({"c": 2.0}, "num_features=2.0"),
        ({"eps": 0}, "eps=0"),
        ({"momentum": 0}, "momentum=0"),
        ({"momentum": 1.5}, "momentum=1.5"),
    ],
    ids=str,
)
@each_layer
def test_bad_arguments(name, kwargs, text):
    with pytest.raises(ValueError, match=text):
        LAYERS[name](**kwargs)


@pytest.mark.parametrize("name", ["iter", "sw a"])
@pytest.mark.parametrize("argument", ["group_size", "newton_steps"])
def test_bad_counts(name, argument):
    with pytest.raises(ValueError, match=f"{argument}=0 must be an integer, at least 1"):
        LAYERS[name](**{argument: 0})


@pytest.mark.parametrize("statistics", [(), "bw", ("bw", "bw"), ("bw", "gn"), ("iw", "ln"), None])
def test_bad_statistics(statistics):
    with pytest.raises(ValueError, match=r"statistics=.* must be different names"):
        SwitchableWhitening2d(8, statistics=statistics)


@each_layer
def test_bad_input(name):
    layer = LAYERS[name]()
    with pytest.raises(TypeError, match="floating-point"):
        layer(torch.zeros(2, C, 3, 3, dtype=torch.long))
    for shape in ((2, C), (2, C + 1, 3, 3)):
        with pytest.raises(ValueError, match=rf"expected (a 4-D input|{C} channels)"):
            layer(torch.zeros(shape))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.zeros(1, C, 1, 1))
    layer.eval()(torch.zeros(1, C, 1, 1))


def test_repr():
    assert "groups=3x16+10, newton_steps=5" in repr(IterNorm2d(58, group_size=16))
    assert "statistics=bw+iw" in repr(SwitchableWhitening2d(58))
    assert "58, eps=1e-05, momentum=0.1, affine=True" in repr(SwitchableNorm2d(58))
