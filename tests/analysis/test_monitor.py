"""The monitor in other people's training loops: it sees, and changes nothing."""

import copy
import csv
import io
import os
from collections import OrderedDict

import pytest
import timm
import torch
from torch import nn

import cenet
from _distributed import run as run_ranks
from _planted import Planted, Tangled, images
from _shards import equilibrated, train, under_ddp
from cenet.analysis import Monitor, inhibited_ratio
from cenet.analysis.monitor import FIELDS, POSITIONS
from cenet.train.run_log import RunLog


def test_training_is_the_same_to_the_last_bit():
    model = equilibrated()
    twin = copy.deepcopy(model)
    looks = []
    losses = train(model, every=2, to=lambda step, values: looks.append((step, values)))
    assert losses == train(twin)
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert [step for step, _ in looks] == [0, 2, 4]
    for _, values in looks:
        assert set(values) == {"relu", "relu#2", "elu", "relu#3", "gelu"}
        assert values["relu#2"]["lambda"] == pytest.approx(0.5, abs=0.1)
        assert "lambda" not in values["relu"]


def test_values_of_planted_channels():
    weight = torch.randn(8, 3)
    weight[4:6] = 0
    weight[6:] = weight[0]
    model = Planted(weight).train()
    looks = []
    monitor = Monitor(model, to=lambda step, values: looks.append(values))
    x = images()
    model(x)
    model.eval()(x)
    model.train()(x)
    monitor.close()
    (values,) = looks  # one in a hundred, and evaluation does not count
    assert monitor.step == 2
    with torch.no_grad():
        rows = model.conv(x).transpose(0, 1).flatten(1).double()
    kept = torch.corrcoef(rows[[0, 1, 2, 3, 6, 7]]).abs()
    assert values["act"]["inhibited_ratio"] == 0.25
    assert values["act"]["dormant_ratio"] == 0.25
    eigenvalues = torch.linalg.eigvalsh(torch.cov(rows, correction=0))
    expected = eigenvalues.sum() ** 2 / eigenvalues.square().sum() / 8
    assert values["act"]["participation_share"] == pytest.approx(expected.item())
    assert values["act"]["correlation"] == pytest.approx((kept.sum().item() - 6) / 30, abs=1e-6)


def test_dormant_channels_do_not_depend_on_scale():
    looks = []
    for factor in (1, 1e-3):
        weight = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) * factor
        weight[4:6] *= 0.05
        model = Planted(weight).train()
        monitor = Monitor(model, to=lambda step, values: looks.append(values))
        model(images())
        monitor.close()
    assert looks[0]["act"]["dormant_ratio"] == looks[1]["act"]["dormant_ratio"] == 0.25
    assert looks[0]["act"]["inhibited_ratio"] < looks[1]["act"]["inhibited_ratio"]


def test_large_maps_are_sampled_evenly():
    model = nn.Sequential(nn.Conv2d(3, 300, 1), nn.ReLU()).train()
    looks = []
    monitor = Monitor(model, to=lambda step, values: looks.append(values))
    x = images(10, 30)
    assert x[:, 0].numel() > 2 * POSITIONS
    y = model(x)
    monitor.close()
    ratio = inhibited_ratio(y.abs().mean((0, 2, 3)))
    assert looks[0]["1"]["inhibited_ratio"] == pytest.approx(ratio, abs=0.02)
    every = torch.corrcoef(model[0](x).transpose(0, 1).flatten(1)).abs()
    expected = (every.sum().item() - 300) / (300 * 299)
    assert looks[0]["1"]["correlation"] == pytest.approx(expected, abs=0.02)
    # three colours: three dimensions at most, of 150 channels that are looked at
    assert looks[0]["1"]["participation_share"] == pytest.approx(3 / 150, rel=0.1)


def test_a_compiled_network_trains_as_without():
    torch._dynamo.reset()
    model = equilibrated()
    twin = copy.deepcopy(model)
    looks = []
    losses = train(
        model, every=2, to=lambda step, values: looks.append(values),
        call=torch.compile(model, backend="aot_eager"),
    )  # fmt: skip
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()
    assert losses == train(twin, call=torch.compile(twin, backend="aot_eager"))
    for one, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert len(looks) == 3
    assert all("correlation" in values["relu"] for values in looks)


def test_a_module_compiled_in_place_is_refused():
    model = Tangled()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match=r"use compiled = torch.compile\(model\)"):
        Monitor(model, to=print)


def test_under_ddp_every_rank_looks_at_its_own():
    for (plain, _), (watched, looks) in run_ranks(under_ddp, 2):
        assert watched == plain
        assert list(looks) == [0, 2, 4]
        assert set(looks[0]) == {"relu", "relu#2", "elu", "relu#3", "gelu"}


def test_rows_of_csv(tmp_path):
    path = tmp_path / "logs" / "channels.csv"
    for _ in range(2):  # a second monitor goes on where the first stopped
        train(equilibrated(), every=4, to=path)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows[::5]] == ["0", "4", "0", "4"]
    assert list(rows[0]) == list(FIELDS)
    for name in ("dormant_ratio", "participation_share", "correlation", "inhibited_ratio"):
        assert all(0 <= float(row[name]) <= 1 for row in rows), name
    assert [row["layer"] for row in rows if row["lambda"]] == ["relu#2"] * 4


def test_a_table_is_a_file_of_its_own_and_runs_no_formula(tmp_path):
    """Links and pipes are refused as in the folder of a run, and names of layers are text."""
    victim, pipe = tmp_path / "victim.csv", tmp_path / "pipe.csv"
    (tmp_path / "link.csv").symlink_to(victim)
    os.mkfifo(pipe)
    for path, reason in ((tmp_path / "link.csv", "a link"), (pipe, "not a regular file")):
        with pytest.raises(OSError, match=reason):
            Monitor(Tangled(), to=path)
    assert not victim.exists()
    network = nn.Sequential(OrderedDict({"c": nn.Conv2d(3, 4, 1), "+r": nn.ReLU()}))
    (tmp_path / "own.csv").touch()  # an empty one gets its header, too
    monitor = Monitor(network, every=1, to=tmp_path / "own.csv")
    network(images(2, 4))
    monitor.close()
    assert ",'+r," in (tmp_path / "own.csv").read_text()


def test_a_table_with_other_columns_is_refused(tmp_path):
    path = tmp_path / "channels.csv"
    path.write_text("step,layer,inhibited_ratio,correlation,lambda\n")
    with pytest.raises(ValueError, match="has the columns step, layer, inhibited_ratio"):
        Monitor(Tangled(), to=path)
    assert path.read_text().count("\n") == 1


def test_a_resumed_run_takes_up_rows_of_an_earlier_version(tmp_path):
    """Rows are read by the names of their columns; those that are trained again are dropped."""
    path = tmp_path / "channels.csv"
    path.write_text(
        "step,layer,inhibited_ratio,correlation,lambda\n0,relu,0.5,0.1,\n8,relu,0.25,0.2,0.5\n"
    )
    log = RunLog(tmp_path)
    log._forget_channels(8)
    log.add_channels(8, {"relu": {"dormant_ratio": 0.125, "correlation": 0.3}})
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "8"]
    assert (rows[0]["inhibited_ratio"], rows[0]["dormant_ratio"]) == ("0.5", "")
    assert (rows[1]["dormant_ratio"], rows[1]["correlation"]) == ("0.125", "0.3")


def test_tensorboard(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        train(equilibrated(), every=4, to=writer)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("inhibited_ratio/relu")] == [0, 4]
    assert [event.step for event in events.Scalars("lambda/relu#2")] == [0, 4]


def test_lambda_of_ce_that_feeds_no_activation_has_its_own_name():
    model = timm.create_model("mobilenetv2_035", num_classes=2)
    sites = cenet.insert_ce_(model)
    looks = []
    monitor = Monitor(model.train(), to=lambda step, values: looks.append(values))
    model(images(2, 64))
    monitor.close()
    assert {f"{site}.ce" for site in sites} <= set(looks[0])


def test_a_failing_pass_is_not_told_and_leaves_nothing_behind():
    model, looks = Tangled().train(), []
    monitor = Monitor(model, every=1, to=lambda step, values: looks.append(step))
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 8, 8))
    assert not looks
    model(images())
    assert looks == [1]
    monitor.close()
    assert not nn.modules.module._global_forward_hooks
    assert not model._forward_hooks


def test_copies_are_not_watched():
    model, looks = Tangled().train(), []
    monitor = Monitor(model, every=1, to=lambda step, values: looks.append(step))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        twin.train()(images())
    assert not looks
    model(images())
    assert looks == [0]
    monitor.close()


def test_arguments_are_checked():
    for every in (0, 1.5):
        with pytest.raises(ValueError, match=f"every={every} must be a whole number of at least 1"):
            Monitor(Tangled(), to=print, every=every)
    with pytest.raises(TypeError, match="to=3 must be a file, a SummaryWriter, or a function"):
        Monitor(Tangled(), to=3)


def test_an_interrupted_pass_leaves_nothing_behind():
    """Ctrl-C skips hooks; closing the monitor, or the next pass, tidies up."""
    model = Planted(torch.randn(4, 3)).train()
    monitor = Monitor(model, every=1, to=lambda step, values: None)
    handle = model.act.register_forward_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(images())
    monitor.close()
    handle.remove()
    assert torch._C._len_torch_dispatch_stack() == 0


def interrupt(*_):
    raise KeyboardInterrupt
