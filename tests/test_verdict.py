"""The verdict of a diagnosis: the right one for networks whose fault is known."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import cenet
from _planted import Planted, images
from cenet.analysis import verdict as verdicts
from cenet.analysis.command import examine
from cenet.analysis.diagnosis import Removal
from cenet.analysis.examination import is_untrained
from cenet.analysis.verdict import judge

CHANNELS = 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The digits recipes, trained shortly: batch norm, and the same with CE."""
    pytest.importorskip("sklearn")
    from cenet.train.options import Options
    from cenet.train.recipes import find_recipe
    from cenet.train.run import Job, train

    root = tmp_path_factory.mktemp("verdict")
    for name in ("digits_plain", "digits_ce"):
        recipe = replace(find_recipe(name), epochs=2, warmup_epochs=0.5, accuracy=None)
        train(Job(recipe, Options(root / name), device="cpu"))
    return root


def verdict_of(folder, tmp_path, **options):
    options = {"ablation_images": 0, **options}
    return examine(str(folder), None, tmp_path / "out", device="cpu", **options)[0]


def kill_(network, batches, share):
    """Make a share of the channels of every layer dead, and let the norms see what is left."""
    dead = 0
    with torch.no_grad():
        for norm in (m for m in network.modules() if isinstance(m, nn.BatchNorm2d)):
            count = round(share * norm.num_features)
            norm.weight[:count], norm.bias[:count] = 0, -1
            dead += count
    torch.optim.swa_utils.update_bn(batches, network)
    network.eval()
    return dead


def test_three_networks_get_three_verdicts(runs, tmp_path):
    plain = verdict_of(runs / "digits_plain", tmp_path)
    assert plain.verdict.kind == "try CE"
    assert plain.verdict.next_step == "cenet train digits_ce"
    equilibrated = verdict_of(runs / "digits_ce", tmp_path)
    assert equilibrated.verdict.kind == "nothing to do"
    assert "CE is in 6 of 6 layers already" in equilibrated.verdict.headline
    assert equilibrated.verdict.next_step is None


def test_dead_channels_are_to_be_pruned(runs, tmp_path):
    from cenet.analysis.command import _completed, _shown
    from cenet.analysis.subjects import find_examinee

    examinee = find_examinee(str(runs / "digits_plain"))
    shown = _shown(examinee, None, None, examinee.size, 64)
    dead = kill_(examinee.network, shown.batches(), 0.3)
    found = cenet.diagnose(examinee.network, shown.batches(), ablation_images=64)
    found = _completed(found, examinee, None, shown, torch.device("cpu"))
    assert found.verdict.kind == "prune"
    assert sum(map(len, found.prunable.values())) == dead == found.removal.channels
    for layer in found.layers:
        count = round(0.3 * layer.channels)
        assert layer.prunable == layer.dormant_strict == layer.rare == tuple(range(count))
    assert found.removal.loss_without == pytest.approx(found.removal.loss)
    assert f"{dead} of 448 channels contribute next to nothing" in found.verdict.headline
    assert f"Without all {dead} at once" in found.verdict.reasons[0]
    assert "prunable" in found.verdict.next_step


def test_too_few_images_do_not_condemn(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(verdicts, "WORTH_PRUNING", -1)
    found = verdict_of(runs / "digits_plain", tmp_path, limit=299)
    assert found.verdict.kind == "more images"
    assert "299 images are too few" in found.verdict.headline
    assert "at least 300 images" in found.verdict.next_step
    assert verdict_of(runs / "digits_plain", tmp_path, limit=300).verdict.kind == "prune"


def network():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, 2),
    )  # fmt: skip
    return model.eval()


def trained():
    """Its channels repeat a few of them, so that they vary in few dimensions."""
    model = network().train()
    with torch.no_grad():
        for conv in (model[0], model[3]):
            few = conv.weight[:3].clone()
            conv.weight.copy_(torch.einsum("of,fiyx->oiyx", torch.randn(CHANNELS, 3), few))
        model(images(64, 12))
    return model.eval()


def test_random_weights_are_recognized():
    model = network()
    assert is_untrained(model)
    found = cenet.diagnose(model, [images(4, 12)])
    assert found.model.untrained
    assert found.verdict.kind == "untrained"
    assert "random" in found.verdict.headline
    assert not is_untrained(trained())
    tuned = network()
    with torch.no_grad():
        tuned[1].bias[3] = 0.1
    assert not is_untrained(tuned)
    assert not is_untrained(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
    cenet.insert_ce_(model, example_input=images(2, 12))
    assert is_untrained(model)


def layers_of(model):
    return cenet.diagnose(model, [images(64, 12)]).layers


def test_ce_is_never_proposed_where_it_is():
    model = trained()
    plain = judge(layers_of(model), 1000, untrained=False, removal=None)
    assert plain.kind == "try CE"
    assert "['1', '4']" in plain.next_step
    cenet.insert_ce_(model, lambda norm, name: name == "1", start="identity")
    partly = judge(layers_of(model), 1000, untrained=False, removal=None)
    assert "['4']" in partly.next_step
    cenet.insert_ce_(model, lambda norm, name: name == "4", start="identity")
    fully = judge(layers_of(model), 1000, untrained=False, removal=None)
    assert fully.kind == "nothing to do"


def test_the_proposed_line_runs():
    model = trained()
    step = judge(layers_of(model), 1000, untrained=False, removal=None).next_step
    code, rest = step.split(", then ")
    assert rest == "fine-tune"
    before = model(images(4, 12))
    exec(code, {"cenet": cenet, "model": model})
    assert isinstance(model[1], cenet.NormCE2d)
    assert torch.allclose(model(images(4, 12)), before, atol=1e-5)


def test_what_removal_harms_is_not_to_be_pruned():
    layers = layers_of(trained())
    layers = (replace(layers[0], prunable=(0, 1)), *layers[1:])
    harmless = Removal(2, 500, 0.9, 0.9, 0.001, 0.3, 0.301, 0.002)
    assert judge(layers, 500, untrained=False, removal=harmless).kind == "prune"
    harmful = replace(harmless, loss_without=0.4, top1_without=0.8)
    found = judge(layers, 500, untrained=False, removal=harmful)
    assert found.kind != "prune"
    assert any("together they matter" in reason for reason in found.reasons)


def test_layers_on_a_shortcut_are_named():
    layers = layers_of(trained())
    layers = (replace(layers[0], prunable=(0, 1), shared=True), *layers[1:])
    found = judge(layers, 500, untrained=False, removal=None)
    assert any("must lose the same channels" in reason for reason in found.reasons)


@pytest.mark.parametrize(
    ("images_seen", "bound"), [(30, "10.0 %"), (3000, "0.1 %"), (1, "100.0 %")]
)
def test_confidence_follows_the_number_of_images(images_seen, bound):
    found = judge(layers_of(trained()), images_seen, untrained=False, removal=None)
    assert f"fires in at most {bound} of such images" in found.reasons[-1]


def test_channels_near_the_limit_are_undecided():
    torch.manual_seed(0)
    x = images(30, 6) * torch.rand(30, 1, 1, 1)  # images differ
    weight = torch.randn(12, 3) * torch.logspace(0, -2, 12)[:, None]
    model = Planted(weight)
    (layer,) = cenet.diagnose(model, x.split(7)).layers
    with torch.no_grad():
        by_image = model.conv(x).relu().double().mean((2, 3))
    mean = by_image.mean(0)
    error = by_image.std(0) / 30**0.5 / mean.mean()
    near = ((mean / mean.mean() - 0.1).abs() <= 2 * error).sum().item()
    assert layer.undecided == near > 0
    (one,) = cenet.diagnose(model, [x[:1]]).layers
    assert one.undecided == 12
