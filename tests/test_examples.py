"""The examples run as they stand: each inserts, trains, saves, loads and compares by itself."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import cenet
from cenet.nn import ce_layers

FOLDER = Path(__file__).parent.parent / "examples"
NEEDS = {
    "plain_pytorch": "sklearn",
    "timm_loop": "timm",
    "lightning_module": "lightning",
    "hugging_face_trainer": "transformers",
}
ON_CPU = {"lightning_module": {"accelerator": "cpu"}, "hugging_face_trainer": {"use_cpu": True}}


def test_all_examples_are_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == {*NEEDS, "digits"}


@pytest.mark.filterwarnings("ignore")  # of these libraries
@pytest.mark.parametrize("name", NEEDS)
def test_example(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip(NEEDS[name])
    monkeypatch.syspath_prepend(FOLDER)
    for module in ("digits", name):
        monkeypatch.delitem(sys.modules, module, raising=False)
    example = importlib.import_module(name)
    starts = []
    insert = cenet.insert_ce_

    def watched(*args, **kwargs):
        starts.append(kwargs["start"])
        return insert(*args, **kwargs)

    monkeypatch.setattr(cenet, "insert_ce_", watched)
    example.main(str(tmp_path / "network"), **ON_CPU.get(name, {}))
    assert "accuracy on the training images" in capsys.readouterr().out
    assert starts == ["identity"]
    network = cenet.load(tmp_path / "network")
    layers = [layer for _, layer in ce_layers(network)]
    assert len(layers) > 1
    # training has moved CE away from the identity
    assert all(float(layer.blend.abs()) > 0 for layer in layers)
    assert tuple(network.pretrained_cfg["mean"]) == (0.5, 0.5, 0.5)
    assert network(torch.zeros(1, 3, 16, 16)).shape == (1, 10)
