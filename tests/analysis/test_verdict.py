"""The verdict of a diagnosis: the right one for networks whose fault is known."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import cenet
from _planted import Planted, images
from cenet.analysis import verdict as verdicts
from cenet.analysis.diagnose import is_untrained
from cenet.analysis.diagnosis import Accuracy, Removal
from cenet.analysis.verdict import Evidence, judge
from cenet.diagnosing.command import diagnose_named

CHANNELS = 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The digits recipes, trained shortly: batch norm, and the same with CE."""
    pytest.importorskip("sklearn")
    from cenet.train.job import Job, train
    from cenet.train.options import Options
    from cenet.train.recipes import find_recipe

    root = tmp_path_factory.mktemp("verdict")
    for name in ("digits_plain", "digits_ce"):
        recipe = replace(find_recipe(name), epochs=2, warmup_epochs=0.5, accuracy=None)
        train(Job(recipe, Options(root / name), device="cpu"))
    return root


def verdict_of(folder, **options):
    options = {"ablation_images": 0, **options}
    return diagnose_named(str(folder), None, device="cpu", **options)[0]


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


def test_three_networks_get_three_verdicts(runs):
    plain = verdict_of(runs / "digits_plain")
    assert plain.verdict.kind == "try CE"
    assert plain.verdict.command == "cenet train digits_ce --epochs 2 --seed 0"
    assert "of the 6 layers where it could be inserted. Try it there." in plain.verdict.headline
    equilibrated = verdict_of(runs / "digits_ce")
    assert equilibrated.verdict.kind == "nothing to do"
    assert "CE is in 6 of 6 layers already" in equilibrated.verdict.headline
    assert equilibrated.verdict.next_step is None


def test_dead_channels_are_to_be_pruned(runs, tmp_path):
    from cenet.diagnosing.command import complete, find_image_set
    from cenet.diagnosing.network import find_network

    loaded = find_network(str(runs / "digits_plain"))
    shown = find_image_set(loaded, None, None, loaded.size, 64)
    dead = kill_(loaded.network, shown.batches(), 0.3)
    found = cenet.diagnose(loaded.network, shown.batches(), ablation_images=64)
    found = complete(found, loaded, None, shown, torch.device("cpu"))
    assert found.verdict.kind == "prune"
    assert sum(map(len, found.prunable.values())) == dead == found.removal.channels
    for layer in found.layers:
        count = round(0.3 * layer.channels)
        assert layer.prunable == layer.dormant_strict == layer.rare == tuple(range(count))
    assert found.removal.loss_without == pytest.approx(found.removal.loss)
    assert f"{dead} of 448 channels" in found.verdict.headline
    assert "prune them" in found.verdict.headline
    assert "features.2 10" in found.verdict.reasons[0]
    assert f"Without all {dead} at once" in found.verdict.reasons[1]
    found.write(tmp_path / "diagnosis.json")
    names = {"cenet": cenet, "Path": lambda name: tmp_path / name}
    assert eval(found.verdict.command, names) == found.prunable


def test_too_few_images_do_not_condemn(runs, monkeypatch):
    few = verdict_of(runs / "digits_plain", limit=299)
    assert few.verdict.kind == "more images"  # not "try CE"
    assert "at least 300 images" in few.verdict.next_step
    assert verdict_of(runs / "digits_plain", limit=300).verdict.kind == "try CE"
    layers = [replace(few.layers[0], prunable=tuple(range(9))), *few.layers[1:]]
    evidence = Evidence(layers, 299, False, few.accuracy, None, few.sites)
    condemned = judge(evidence)
    assert condemned.kind == "more images"
    assert "299 images are too few" in condemned.headline
    assert judge(replace(evidence, images=300)).kind == "prune"


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
    assert not found.prunable
    assert not is_untrained(trained())
    tuned = network()
    with torch.no_grad():
        tuned[1].bias[3] = 0.1
    assert not is_untrained(tuned)
    assert not is_untrained(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
    for name in ("running_var", "running_mean", "weight"):
        changed = network()
        with torch.no_grad():
            getattr(changed[1], name)[2] = 0.5
        assert not is_untrained(changed), name
    cenet.insert_ce_(model, example_input=images(2, 12))
    assert is_untrained(model)


def evidence_of(model, **changes):
    found = cenet.diagnose(model, [images(64, 12)])
    given = Evidence(found.layers, 1000, False, None, None, found.sites)
    return replace(given, **changes)


def test_ce_is_never_proposed_where_it_is():
    model = trained()
    plain = judge(evidence_of(model))
    assert (plain.kind, plain.command) == (
        "try CE",
        'cenet.insert_ce_(model, start="identity")',
    )
    cenet.insert_ce_(model, lambda norm, name: name == "1", start="identity")
    partly = judge(evidence_of(model, sites=("1", "4")))
    assert "name in ['4']" in partly.command
    cenet.insert_ce_(model, lambda norm, name: name == "4", start="identity")
    fully = judge(evidence_of(model))
    assert (fully.kind, fully.command) == ("nothing to do", None)
    assert fully.headline == "No channel is prunable. CE is in 2 of 2 layers already."


@pytest.mark.parametrize("change", [{"has_ce": True}, {"ce_site": False}])
def test_ce_goes_only_to_sites_without_it(change):
    evidence = evidence_of(trained())
    assert judge(evidence).kind == "try CE"
    layers = [replace(layer, **change) for layer in evidence.layers]
    assert judge(replace(evidence, layers=layers)).kind == "nothing to do"


def test_redundant_is_below_a_quarter():
    evidence = evidence_of(trained())
    for dimensions, kind in ((4.9, "try CE"), (5.0, "nothing to do")):
        layers = [replace(layer, participation_ratio=dimensions) for layer in evidence.layers]
        assert judge(replace(evidence, layers=layers)).kind == kind


@pytest.mark.parametrize("sites", [("1", "4"), ("1", "4", "9")])
def test_the_proposed_line_runs(sites):
    model = trained()
    command = judge(evidence_of(model, sites=sites)).command
    assert ("lambda" in command) == (len(sites) == 3)
    before = model(images(4, 12))
    exec(command, {"cenet": cenet, "model": model})
    assert isinstance(model[1], cenet.NormCE2d)
    assert isinstance(model[4], cenet.NormCE2d)
    assert torch.allclose(model(images(4, 12)), before, atol=1e-5)


def test_few_values_say_nothing_about_dimensions():
    """Independent channels look redundant when there are fewer values than channels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64), nn.ReLU()).train()
    with torch.no_grad():
        model[0].weight[:, :, 0, 0] = torch.linalg.qr(torch.randn(64, 64)).Q
        model(torch.randn(100, 64, 2, 2))
    model.eval()
    few = cenet.diagnose(model, [torch.randn(3, 64, 2, 2)])
    assert few.layers[0].participation_ratio < 16
    assert few.verdict.kind == "more images"
    assert "12 values for each of 64 channels" in few.verdict.headline
    many = cenet.diagnose(model, [torch.randn(400, 64, 2, 2)])
    assert many.layers[0].participation_ratio > 50
    assert many.verdict.kind == "nothing to do"
    # many images, but of one pixel in effect
    layer = replace(few.layers[0], height=1, width=1)
    assert judge(Evidence([layer], 639, False, None, None, ("1",))).kind == "more images"
    assert judge(Evidence([layer], 640, False, None, None, ("1",))).kind == "try CE"


@pytest.mark.parametrize(("top1", "kind"), [(0.34, "at chance"), (0.5, "try CE")])
def test_a_network_that_guesses_is_told_so(top1, kind):
    found = judge(evidence_of(trained(), accuracy=Accuracy(top1, 1.0, 3)))
    assert found.kind == kind
    if kind == "at chance":
        assert "34.0 % with 3 classes, no better than guessing" in found.headline
        assert "order of the classes" in found.next_step


def prunable(evidence, *channels, **changes):
    first, *rest = evidence.layers
    return replace(evidence, layers=[replace(first, prunable=channels, **changes), *rest])


def test_what_removal_harms_is_not_to_be_pruned():
    harmless = Removal(2, 500, 0.9, 0.9, 0.001, 0.3, 0.301, 0.002)
    evidence = prunable(evidence_of(trained(), removal=harmless), 0, 1)
    assert judge(evidence).kind == "prune"
    harmful = replace(harmless, loss_without=0.4, top1_without=0.8)
    found = judge(replace(evidence, removal=harmful))
    assert found.kind == "try CE"
    assert "but not together" in found.headline
    assert "top-1 goes from 90.0 % to 80.0 %" in found.headline


@pytest.mark.parametrize(
    ("rise", "error", "kind"),
    [
        (0.0029, 0.0, "prune"),
        (0.0031, 0.0, "try CE"),
        (0.1, 0.051, "prune"),
        (0.1, 0.049, "try CE"),
    ],
)
def test_harmless_is_two_standard_errors_or_one_percent(rise, error, kind):
    removal = Removal(2, 500, 0.9, 0.9, 0.001, 0.3, 0.3 + rise, error)
    assert judge(prunable(evidence_of(trained(), removal=removal), 0, 1)).kind == kind


def test_one_percent_is_worth_pruning():
    evidence = evidence_of(trained())

    def kind(channels):
        """The verdict on one layer with one prunable channel."""
        names = ("mean_abs", "activity", "firing", "contribution")
        values = dict.fromkeys(names, (1.0,) * channels)
        layer = replace(evidence.layers[0], channels=channels, prunable=(0,), **values)
        return judge(replace(evidence, layers=[layer])).kind

    assert kind(100) == "prune"
    assert kind(101) != "prune"


def test_a_layer_through_which_nothing_passes_is_named():
    evidence = evidence_of(trained())
    found = judge(prunable(evidence, *range(CHANNELS)))
    assert any("Nothing passes through 2 at all" in reason for reason in found.reasons)


def test_a_few_prunable_channels_are_not_worth_it(monkeypatch):
    monkeypatch.setattr(verdicts, "WORTH_PRUNING", 0.05)
    evidence = evidence_of(trained())
    assert judge(prunable(evidence, 0)).headline.startswith(
        "Pruning is not worth it: 1 of 40 channels (2.5 %)"
    )
    assert judge(prunable(evidence, 0, 1)).kind == "prune"


def test_layers_on_a_residual_connection_are_named():
    evidence = evidence_of(trained())
    found = judge(prunable(evidence, 0, 1, shared=True))
    assert any("On a residual connection" in reason for reason in found.reasons)
    found = judge(prunable(evidence, 0, 1))
    assert not any("On a residual connection" in reason for reason in found.reasons)


@pytest.mark.parametrize(("count", "bound"), [(30, "10.0 %"), (3000, "0.1 %")])
def test_confidence_follows_the_number_of_images(count, bound):
    found = judge(evidence_of(trained(), images=count))
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
