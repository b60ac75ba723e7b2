"""Who reads a channel: found weights against Jacobians and formulas written out."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import cenet
from _planted import Tangled, images
from _shards import record
from cenet.analysis.readers import norm_scale

pytestmark = pytest.mark.usefixtures("quick_weights")

TOLERANCE = 1e-9


def statistics_(norm):
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            tensor.copy_(torch.randn(len(tensor)))
        norm.running_var.copy_(torch.rand(len(norm.running_var)) + 0.1)
    return norm


class Chain(nn.Module):
    """An activation, what lies between, a reader, and perhaps a norm behind it."""

    def __init__(self, between, reader, norm=None):
        super().__init__()
        self.act, self.between, self.reader = nn.ReLU(), between, reader
        self.norm = norm or nn.Identity()

    def tail(self, a):
        return self.norm(self.reader(self.between(a)))

    def forward(self, x):
        return self.tail(self.act(x))


def squared_jacobian(model, channels, size):
    """Sum of the squared derivatives of all outputs by each channel at a pixel in the middle."""
    a = torch.rand(1, channels, size, size, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(model.tail, a)
    middle = jacobian.flatten(0, -5)[:, 0, :, size // 2, size // 2]
    return middle.square().sum(0)


class GroupedLinear(nn.Module):
    """A linear layer on the channels of a map that has them last."""

    def __init__(self, width, outputs):
        super().__init__()
        self.linear = nn.Linear(width, outputs)

    def forward(self, x):
        return self.linear(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


CHAINS = {
    "convolution": lambda: Chain(nn.Identity(), nn.Conv2d(6, 9, 3, padding=1)),
    "then batch norm": lambda: Chain(
        nn.Identity(), nn.Conv2d(6, 9, 3, padding=1), statistics_(nn.BatchNorm2d(9))
    ),
    "groups": lambda: Chain(
        nn.Identity(), nn.Conv2d(6, 4, 3, padding=1, groups=2), statistics_(nn.BatchNorm2d(4))
    ),
    "depthwise": lambda: Chain(
        nn.Identity(), nn.Conv2d(6, 12, 3, padding=1, groups=6), statistics_(nn.BatchNorm2d(12))
    ),
    "transposed": lambda: Chain(
        nn.Identity(),
        nn.ConvTranspose2d(6, 4, 3, padding=1, groups=2),
        statistics_(nn.BatchNorm2d(4)),
    ),
    "linear on the last dimension": lambda: Chain(nn.Identity(), GroupedLinear(6, 5)),
    "batch norm first": lambda: Chain(statistics_(nn.BatchNorm2d(6)), nn.Conv2d(6, 9, 1)),
    "dropout": lambda: Chain(nn.Dropout(0.5), nn.Conv2d(6, 9, 1)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_reads_are_the_squared_jacobian(name):
    torch.manual_seed(0)
    model = CHAINS[name]().double().eval()
    found = record(model, images(2, 7, channels=6).double())
    expected = squared_jacobian(model, 6, 7)
    assert expected.min() > 0
    assert found.reads["act"][0] == pytest.approx(expected, rel=TOLERANCE)


def reads_of(model, layer="act", size=8, channels=6):
    """The only reader of a layer."""
    found = record(model.double().eval(), images(2, size, channels=channels).double())
    (reads,) = found.reads[layer]
    return reads


def test_pooling_and_flattening():
    torch.manual_seed(0)
    linear = nn.Linear(6 * 16, 5)
    flat = Chain(nn.Sequential(nn.MaxPool2d(2), nn.Flatten()), linear)
    expected = linear.weight.double().square().reshape(5, 6, 16).sum((0, 2))
    assert reads_of(flat) == pytest.approx(expected.detach(), rel=TOLERANCE)
    head = nn.Linear(6, 5)
    pooled = Chain(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), head)
    expected = head.weight.double().square().sum(0)
    assert reads_of(pooled) == pytest.approx(expected.detach(), rel=TOLERANCE)


class Meeting(nn.Module):
    """Two layers that are joined, gated, sliced, multiplied or added before one convolution."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.act1, self.act2 = nn.ReLU(), nn.ReLU()
        self.conv = nn.Conv2d(12 if how == "joined" else 3 if how == "sliced" else 6, 7, 1)
        self.squeeze, self.excite = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1)

    def forward(self, x):
        a, b = self.act1(x), self.act2(-x)
        if self.how == "joined":
            return self.conv(torch.cat([a, b], 1))
        if self.how == "gated":
            gate = self.excite(self.squeeze(a.mean((2, 3), keepdim=True))).sigmoid()
            return self.conv(a * gate)
        if self.how == "sliced":
            return self.conv(a[:, :3])
        if self.how == "multiplied":
            return self.conv(a * b)
        if self.how == "read twice":
            return self.conv(a) + self.conv(2 * a)
        return self.conv(a + b)


def test_layers_that_are_joined_are_read_at_their_places():
    model = Meeting("joined")
    squares = model.conv.weight.detach().double().square().sum((0, 2, 3))
    assert reads_of(model, "act1") == pytest.approx(squares[:6], rel=TOLERANCE)
    assert reads_of(model, "act2") == pytest.approx(squares[6:], rel=TOLERANCE)


def test_a_gate_is_another_reader():
    model = Meeting("gated")
    squares = [
        conv.weight.detach().double().square().sum((0, 2, 3))
        for conv in (model.squeeze, model.conv)
    ]
    found = record(model.double().eval(), images(2, 8, channels=6).double()).reads["act1"]
    assert found == pytest.approx(torch.stack(squares), rel=TOLERANCE)


def test_a_layer_may_be_read_twice():
    model = Meeting("read twice")
    squares = model.conv.weight.detach().double().square().sum((0, 2, 3))
    found = record(model.double().eval(), images(2, 8, channels=6).double()).reads["act1"]
    assert found == pytest.approx(squares.expand(2, 6), rel=TOLERANCE)


@pytest.mark.parametrize("how", ["sliced", "multiplied", "added"])
def test_what_is_not_known_is_left_out(how):
    model = Meeting(how).double().eval()
    found = record(model, images(2, 8, channels=6).double())
    assert list(found.layers) == ["act1", "act2"]
    assert "act1" not in found.reads
    assert found.shared == ({"act1", "act2"} if how == "added" else set())
    diagnosis = cenet.diagnose(model, [images(2, 8, channels=6).double()])
    assert diagnosis.layers[0].contribution is None


def test_a_shortcut_is_noted_and_only_weights_count():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(6, 6, 1), statistics_(nn.BatchNorm2d(6))
            self.act1, self.act2 = nn.ReLU(), nn.ReLU(inplace=True)
            self.head = nn.Linear(6, 2)

        def forward(self, x):
            x = self.act1(x)
            y = self.norm(self.conv(x))
            y += x
            return self.head(self.act2(y).mean((2, 3)))

    model = Block().double().eval()
    found = record(model, images(2, 8, channels=6).double())
    # one is added, the other activates the sum
    assert found.shared == {"act1", "act2"}
    scale = norm_scale(model.norm)
    squares = model.conv.weight.detach().square().sum((2, 3))
    expected = (squares * scale.square()[:, None]).sum(0)
    assert found.reads["act1"][0] == pytest.approx(expected, rel=TOLERANCE)
    assert found.reads["act2"][0] == pytest.approx(model.head.weight.detach().square().sum(0))


def test_what_only_a_shortcut_carries_is_not_prunable():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.act1, self.act2, self.conv = nn.ReLU(), nn.ReLU(), nn.Conv2d(6, 6, 1)
            with torch.no_grad():
                self.conv.weight[:, :3] = 0  # channels 0 to 2 go by the shortcut alone

        def forward(self, x):
            x = self.act1(x)
            return self.act2(self.conv(x) + x)

    x = images(20, 8, channels=6)
    x[:, [0, 3]] = -1  # dead
    layer = cenet.diagnose(Block(), [x]).layers[0]
    assert layer.contribution[:4] == (0, 0, 0, 0)
    assert layer.prunable == (0, 3)


def test_a_sum_of_two_branches_is_shared_too():
    assert record(Tangled().eval(), images()).shared == {"relu#2"}


def test_many_passes_count_once():
    model = CHAINS["convolution"]().double().eval()
    x = images(2, 7, channels=6).double()
    once = record(model, x).reads["act"]
    recorder = cenet.analysis.Recorder(model)
    with torch.no_grad(), recorder:
        for _ in range(3):
            model(x)
    assert torch.equal(recorder.reads["act"], once)
    assert torch.equal(record(model, x, x).reads["act"], once)


def test_a_pass_that_fails_is_not_taken_for_the_whole():
    model = CHAINS["convolution"]().double().eval()
    recorder = cenet.analysis.Recorder(model)
    model.reader.forward = lambda x: functional.conv2d(x, torch.zeros(1))
    with pytest.raises(RuntimeError), torch.no_grad(), recorder:
        model(images(2, 7, channels=6).double())
    del model.reader.forward
    with torch.no_grad(), recorder:
        model(images(2, 7, channels=6).double())
    expected = model.reader.weight.detach().square().sum((0, 2, 3))
    assert recorder.reads["act"][0] == pytest.approx(expected, rel=TOLERANCE)


class Two(nn.Module):
    """A layer that a convolution reads, and something else beside it."""

    def __init__(self, other):
        super().__init__()
        self.act, self.conv, self.other = nn.ReLU(), nn.Conv2d(6, 5, 1), other
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.more = nn.Conv2d(6, 5, 1)
        self.bn, self.plain = statistics_(nn.BatchNorm2d(6)), nn.BatchNorm2d(6, affine=False)
        self.wide, self.flat = nn.Linear(8, 3), nn.Linear(6 * 64, 2)
        self.after = statistics_(nn.BatchNorm2d(5))

    def forward(self, x):
        a = self.act(x)
        return self.conv(a), self.other(self, a)


UNKNOWN = {
    "a slice": lambda m, a: a[:, :3].sum(),
    "a product": lambda m, a: m.more(a * a.roll(1, 2)),
    "more channels": lambda m, a: functional.pad(a, (0, 0, 0, 0, 0, 1)),
    "joined flat": lambda m, a: torch.cat([a.flatten(1), a.flatten(1)], 1),
    "joined scaled": lambda m, a: torch.cat([m.bn(a), a], 1),
    "a weight": lambda m, a: functional.conv2d(torch.ones(1, 6, 8, 8).double(), a[:1] * 1.0),
    "another dimension": lambda m, a: m.wide(a),
    "a divisor": lambda m, a: m.more(1 / (a + 1)),
    "a mean of channels": lambda m, a: a.mean(1),
    "a gate": lambda m, a: a.sigmoid(),
    "a broadcast sum": lambda m, a: a.mean((2, 3), keepdim=True) + torch.ones(1, 6, 8, 8),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_one_reader_that_is_not_known_is_enough(name):
    model = Two(UNKNOWN[name]).double().eval()
    assert "act" not in record(model, images(2, 8, channels=6).double()).reads
    plain = Two(lambda m, a: None).double().eval()
    assert "act" in record(plain, images(2, 8, channels=6).double()).reads


KNOWN = {
    "batch norm twice": lambda m, a: m.more(m.plain(m.bn(a))),
    "a layer scale": lambda m, a: m.more(a * m.scale.view(1, 6, 1, 1)),
    "divided by a parameter": lambda m, a: m.more(a / m.scale.view(6, 1, 1)),
    "a view before the norm": lambda m, a: m.after(m.more(a).view(-1, 5, 8, 8)),
    "an activation in place before the norm": lambda m, a: m.after(m.more(a).relu_()),
    "a sum in place before the norm": lambda m, a: m.after(m.more(a).add_(m.more(a).detach() * 0)),
    "strides of one pixel": lambda m, a: m.more(
        nn.functional.adaptive_avg_pool2d(a.to(memory_format=torch.channels_last), 1)
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_second_reader_is_the_squared_jacobian(name):
    torch.manual_seed(0)
    model = Two(KNOWN[name]).double().eval()
    found = record(model, images(2, 8, channels=6).double()).reads["act"][1]
    scale = torch.ones(6).double()
    if name == "batch norm twice":
        scale = norm_scale(model.bn) * norm_scale(model.plain)
    elif name == "a layer scale":
        scale = model.scale.detach()
    elif name == "divided by a parameter":
        scale = 1 / model.scale.detach()
    outputs = norm_scale(model.after) if "view" in name else torch.ones(5).double()
    weights = model.more.weight.detach().square().sum((2, 3)) * outputs.square()[:, None]
    assert found == pytest.approx(weights.sum(0) * scale.square(), rel=TOLERANCE)


def test_a_gate_of_one_image_is_not_taken_for_a_parameter():
    model = Two(lambda m, a: m.more(a * torch.rand(1, 6, 1, 1).double())).double().eval()
    found = record(model, images(1, 8, channels=6).double()).reads["act"][1]
    assert found == pytest.approx(model.more.weight.detach().square().sum((0, 2, 3)))


def test_a_network_that_fails_after_its_first_reader():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.act1, self.act2, self.fail = nn.ReLU(), nn.ReLU(), True
            self.conv1, self.conv2 = nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)

        def forward(self, x):
            x = self.act2(self.conv1(self.act1(x)))
            if self.fail:
                raise RuntimeError("late")
            return self.conv2(x)

    model = Late().eval()
    recorder = cenet.analysis.Recorder(model)
    for model.fail in (True, False):
        try:
            with torch.no_grad(), recorder:
                model(images(2, 8, channels=6))
        except RuntimeError:
            assert model.fail
    assert list(recorder.reads) == ["act1", "act2"]


def test_weights_are_looked_at_once():
    model = CHAINS["convolution"]().double().eval()
    x = images(2, 7, channels=6).double()
    recorder = record(model, x)
    before = recorder.reads["act"].clone()
    with torch.no_grad():
        model.reader.weight *= 2
        with recorder:
            model(x)
    assert torch.equal(recorder.reads["act"], before)


def test_an_empty_recorder_takes_in_shortcuts_too():
    model = Meeting("added").double().eval()
    found, empty = record(model, images(2, 8, channels=6).double()), cenet.analysis.Recorder(model)
    empty.merge(found)
    assert empty.shared == found.shared == {"act1", "act2"}


def test_what_norms_multiply_by():
    norm = statistics_(nn.BatchNorm2d(4)).double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        ratio = norm.eval()(x).flatten(2).std(2) / x.flatten(2).std(2)
    assert norm_scale(norm) == pytest.approx(ratio[0], rel=1e-9)
    bare = nn.BatchNorm2d(4, affine=False)
    assert norm_scale(bare) == pytest.approx((torch.ones(4).double() + bare.eps).rsqrt())
    group = nn.GroupNorm(2, 4)
    with torch.no_grad():
        group.weight.copy_(torch.tensor([1.0, -2.0, 0.5, 0.0]))
    assert norm_scale(group).tolist() == [1, 2, 0.5, 0]
    assert norm_scale(nn.InstanceNorm2d(4)) is None
