"""Runs that begin with trained weights."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from _training import ALONE, TINY, few_digits, trainer
from cenet.data.datasets import input_spec_of
from cenet.files import digest
from cenet.run_folder import WEIGHTS
from cenet.train import RECIPES
from cenet.train.classifier import Trainer
from cenet.train.job import Job, train
from cenet.train.options import Options
from cenet.train.weights import build_network, load_initial_weights_, load_run

PLAIN = replace(TINY, block="plain", epochs=1)
CE = replace(TINY, ce_start="identity", epochs=1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    trainer(PLAIN, folder, few_digits()).run()
    return folder


def made(recipe, classes=10):
    inputs = input_spec_of(few_digits().train, torch.device("cpu"))
    return build_network(recipe, inputs._replace(classes=tuple(map(str, range(classes)))))


def test_ce_that_begins_as_identity_leaves_a_trained_network(plain):
    network = made(CE)
    found = load_initial_weights_(network, plain, 10)
    assert found.fresh
    assert all(".ce." in name for name in found.fresh)
    assert str(found).endswith("weights.safetensors; new: 6 CE layers")
    assert found.digest == digest(load_file(plain / WEIGHTS), "")  # under its own names
    images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = load_run(plain)(images)
    assert torch.allclose(network.eval()(images), expected, rtol=0, atol=1e-6)
    other = made(replace(CE, ce_start="paper"))
    load_initial_weights_(other, plain, 10)
    assert not torch.allclose(other.eval()(images), expected, atol=1e-2)


def test_a_classifier_of_other_classes_begins_anew(plain):
    network = made(PLAIN, classes=7)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = load_initial_weights_(network, plain / WEIGHTS, 7)
    head = [name for name, value in before.items() if value.shape[:1] == (7,)]
    assert list(found.fresh) == head
    assert len(head) == 2
    trained = load_file(plain / WEIGHTS)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name] if name in head else trained[name]), name


def test_weights_that_do_not_fit_are_refused(plain, tmp_path):
    with pytest.raises(ValueError, match=r"--weights .* are of another network: .* missing"):
        load_initial_weights_(made(RECIPES["vgg16_plain"]), plain, 10)
    with pytest.raises(ValueError, match=r"nothing does not exist"):
        load_initial_weights_(made(PLAIN), plain / "nothing", 10)
    state = load_file(plain / WEIGHTS)
    name = next(iter(state))
    save_file({**state, name: state[name] * torch.nan}, tmp_path / "nan.safetensors")
    with pytest.raises(ValueError, match=rf"has values that are not finite: {name}"):
        load_initial_weights_(made(PLAIN), tmp_path / "nan.safetensors", 10)
    bias = next(key for key, value in state.items() if value.dim() == 1 and len(value) != 10)
    wide = {**state, bias: torch.zeros(len(state[bias]) + 1)}  # other channels, not other classes
    save_file(wide, tmp_path / "wide.safetensors")
    with pytest.raises(ValueError, match=r"of another network: 1 of another shape"):
        load_initial_weights_(made(PLAIN), tmp_path / "wide.safetensors", 10)
    whole = made(CE).state_dict()
    last = [key for key in whole if ".ce." in key][-1]
    save_file(
        {key: value for key, value in whole.items() if key != last}, tmp_path / "a.safetensors"
    )
    with pytest.raises(ValueError, match=r"1 missing"):
        load_initial_weights_(made(CE), tmp_path / "a.safetensors", 10)
    with pytest.raises(ValueError, match="ce_start=identity is for CE; block=plain has none"):
        replace(CE, block="plain")


def test_a_run_says_what_it_began_with_and_goes_on_without_it(plain, tmp_path, capsys):
    source = tmp_path / "source.safetensors"
    source.write_bytes((plain / WEIGHTS).read_bytes())
    small = replace(CE, batch_size=256)
    out = tmp_path / "run"
    train(Job(small, Options(out), weights=source, device="cpu"))
    assert f"starting from {source}; new: 6 CE layers" in capsys.readouterr().out
    about = json.loads((out / "run.json").read_text())["environment"]["initial"]
    assert about["weights"] == str(source)
    assert len(about["digest"]) == 64
    source.unlink()
    train(Job(small, Options(out, resume="auto"), weights=source, device="cpu"))
    assert json.loads((out / "run.json").read_text())["environment"]["initial"] == about


def test_the_seed_still_decides_what_is_new(plain, tmp_path):
    one, two = (
        Trainer(replace(CE, seed=seed), few_digits(), Options(tmp_path / str(seed)), ALONE, plain)
        for seed in (0, 1)
    )
    a, b = one.network.state_dict(), two.network.state_dict()
    differ = {name for name in a if not torch.equal(a[name], b[name])}
    assert differ
    assert all(".ce." in name for name in differ)
