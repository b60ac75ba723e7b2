"""The demo: what it prints, and that its headline does not depend on the scale of a network."""

import copy
import json
import pickle
from concurrent.futures import Future
from functools import partial

import pytest
import torch

import cenet.demo
from cenet.demo import MEASURES, PAPER, RESCALED, headline, rescale_, run_demo
from cenet.diagnosing.command import diagnose_loaded, diagnose_named
from cenet.diagnosing.network import find_network

pytest.importorskip("sklearn")


class InThisProcess:
    """Instead of a pool of processes: what goes to one is packed all the same."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def submit(self, function, job):
        done = Future()
        done.set_result(function(pickle.loads(pickle.dumps(job))))
        return done


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One seed, one epoch, few images without some of their channels: the runs, their folder."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cenet.demo, "ProcessPoolExecutor", InThisProcess)
        for function in (diagnose_named, diagnose_loaded):
            few = partial(function, ablation_images=16)
            patched.setattr(cenet.demo, function.__name__, few)
        return run_demo(folder, epochs=1, seeds=1), folder


@pytest.mark.slow
def test_processes_and_all_images(tmp_path, capsys):
    check(run_demo(tmp_path, epochs=1, seeds=1), tmp_path, capsys)


def test_the_comparison_and_the_page(demo, capsys):
    check(*demo, capsys)


def check(found, folder, capsys):
    assert set(found) == {"BN", "BN+CE", RESCALED}
    # finished runs are read: their seconds are the same
    before = (folder / "BN-seed0" / "metrics.jsonl").read_text()
    assert run_demo(folder, epochs=1, seeds=1) == found
    assert (folder / "BN-seed0" / "metrics.jsonl").read_text() == before
    text = capsys.readouterr().out
    for row in ("BN", "BN+CE"):
        ((metrics, diagnosis),) = found[row]
        accuracy = json.loads((folder / f"{row}-seed0" / "metrics.jsonl").read_text())["test_top1"]
        assert diagnosis.accuracy.top1 == metrics[0]["test_top1"] == pytest.approx(accuracy)
        assert {layer.has_ce for layer in diagnosis.layers} == {row == "BN+CE"}
        assert f"({100 * accuracy:.1f}–{100 * accuracy:.1f} %)" in text
    page = (folder / "report.html").read_text()
    assert "BN+CE-seed0" in page
    assert "The measures above do not move." in page


def test_the_headline_does_not_move_with_the_scale_of_a_network(demo, tmp_path):
    found, folder = demo
    loaded = find_network(str(folder / "BN-seed0"))
    rescale_(loaded.network, 10.0)
    scaled, _ = diagnose_loaded(loaded, None, device="cpu", ablation_images=16)
    (run,) = found["BN"]
    again = run._replace(diagnosis=scaled)
    assert headline({**found, "BN": [again]}) == headline(found)
    assert torch.tensor(scaled.layers[0].mean_abs).sum() > 5 * sum(run.diagnosis.layers[0].mean_abs)


def test_only_the_papers_figure_moves_in_the_rescaled_column(demo):
    found, _ = demo
    for measure in MEASURES:
        before, after = (measure.value(found[row][0]) for row in ("BN", RESCALED))
        assert after == pytest.approx(before, rel=1e-5, abs=3e-3), measure.title
    assert PAPER.value(found["BN"][0]) < 0.1
    assert PAPER.value(found[RESCALED][0]) > 0.9


def test_rescaling_leaves_the_function(demo):
    _, folder = demo
    network = find_network(str(folder / "BN-seed0")).network.eval().double()
    twin = copy.deepcopy(network)
    rescale_(twin, 0.01)
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(network(x), twin(x), rtol=1e-9, atol=1e-9)


def test_what_seeds_cannot_tell_apart_is_said_so(demo):
    found, _ = demo
    lines = "\n".join(headline(found))
    assert "CE changed" not in lines  # one seed shows nothing
    assert "One seed: test accuracy" in lines
    twice = {row: runs * 2 for row, runs in found.items()}
    dimensions = next(m for m in MEASURES if m.title == "effective dimensions / channels")
    values = [dimensions.value(found[row][0]) for row in ("BN", "BN+CE")]
    assert values[1] > values[0]
    changed = next(line for line in headline(twice) if line.startswith("CE changed"))
    assert (
        f"effective dimensions / channels {100 * values[0]:.1f} % → {100 * values[1]:.1f} %"
        in changed
    )
    same = next(line for line in headline(twice) if line.startswith("No clear difference"))
    assert "fire in < 1 % of images 0.0 % in both" in same
