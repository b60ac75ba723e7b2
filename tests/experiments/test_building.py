"""Tables, figures and pages built of rows."""

import re

import pytest
from experiments import building, drawing, tables, uncertainty
from experiments.catalogue import RESULTS
from experiments.lasting_result import cases_of
from experiments.measures_table import ABLATION, MEASURES
from experiments.result import Rows
from experiments.speed import epochs_until
from scipy import stats

from _experiments import ROOT, filled, row


def test_intervals_are_those_of_a_paired_t_test():
    one, other = [90.1, 91.3, 90.4, 90.9], [90.8, 91.2, 91.1, 91.4]
    expected = stats.ttest_rel(other, one).confidence_interval(0.95)
    found = uncertainty.paired(one, other)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    text = uncertainty.difference([0.901, 0.913], [0.908, 0.912], 100, 1)
    assert text.startswith("+0.3 (−")
    assert uncertainty.difference([0.5], [0.25], 1, 2) == "−0.25"
    assert uncertainty.spread([1.0, 3.0], 100, 1, "%") == "200.0 ± 141.4 %"


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
def test_nothing_is_built_of_nothing(result, tmp_path):
    made = result.build(Rows(tmp_path))
    assert made.figure is None
    text = building.markdown(made.table)
    assert "not run" in text
    assert "%" not in text.replace("95 %", "") or "paper" in text or "labels" in text


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
def test_everything_is_built_of_all_runs(result, tmp_path):
    filled(result, tmp_path)
    made = result.build(Rows(tmp_path))
    text = building.markdown(made.table)
    assert "not run" not in text
    assert text.count("\n") == len(made.table) + 1
    assert "not chosen" not in text
    drawn = result.name.startswith(("fig", "measures_")) or result.name in (
        "lasting", "lasting_digits", "learning_speed", "main", "dormant_rates",
    )  # fmt: skip
    assert (made.figure is not None) == drawn
    building.write({result.name: made}, tmp_path / "one")
    assert len(sorted((tmp_path / "one").rglob("*.svg"))) == drawn


@pytest.mark.parametrize("result", RESULTS.values(), ids=lambda result: result.name)
def test_the_same_rows_are_drawn_the_same_way(result, tmp_path):
    filled(result, tmp_path)
    drawings = []
    for side in ("one", "two"):
        building.write({result.name: result.build(Rows(tmp_path))}, tmp_path / side)
        drawings.append([path.read_bytes() for path in sorted((tmp_path / side).rglob("*.svg"))])
    assert drawings[0] == drawings[1]


def test_numbers_of_a_table(tmp_path):
    result = RESULTS["table_branches"]
    filled(result, tmp_path)
    lines = result.build(Rows(tmp_path)).table
    assert [line["top-1"] for line in lines] == ["89.90 %", "89.80 %", "89.70 %", "89.60 %"]
    assert [line["difference (95 %)"] for line in lines] == ["", "−0.10", "−0.20", "−0.30"]
    assert [line["paper's top-1"] for line in lines] == ["76.6 %", "77.0 %", "77.3 %", "78.3 %"]


@pytest.mark.parametrize(
    ("values", "target", "sign", "expected"),
    [
        ((4, 2, 1), 2, 1, 2.0),
        ((4, 2, 1), 1.5, 1, 2.5),
        ((4, 2, 1), 9, 1, 1.0),
        ((4, 2, 1), 0.5, 1, None),
        ((0.1, 0.3, 0.2, 0.5), 0.25, -1, 1.75),
        ((0.1, 0.3, 0.2, 0.5), 0.6, -1, None),
    ],
)
def test_epochs_until_a_curve_is_there(values, target, sign, expected):
    found = epochs_until([{"x": str(value)} for value in values], "x", target, sign)
    assert found == (expected if expected is None else pytest.approx(expected))


def test_learning_speed_is_against_the_plain_network_of_the_seed(tmp_path):
    result = RESULTS["learning_speed"]
    for run in result.needs:
        best = run.made.lr == 0.1  # inside the grid
        tables.add({"trials": [row(run.name, top1=0.6 if best else 0.5)]}, tmp_path)
    for run in result.then(Rows(tmp_path)):
        # twice as fast as the plain network, whose loss is 1 / epoch
        faster = 2 if run.recipe.endswith("_ce") else 1
        epochs = [{"name": run.name, "epoch": e, "train_loss": 1 / (faster * e),
                   "test_top1": min(0.1 * e, 0.3)} for e in range(1, 5)]  # fmt: skip
        tables.add({"runs": [row(run.name)], "epochs": epochs}, tmp_path)
    lines = {line[""]: line for line in result.build(Rows(tmp_path)).table}
    loss, top1 = list(lines["CE"])[-2:]
    assert lines["plain"][loss] == "1.000 ± 0.000"
    assert lines["CE"][loss] == "0.500 ± 0.000"
    assert lines["CE"][top1] == "0.750 ± 0.000"


@pytest.mark.parametrize(("network", "data"), [("vgg16", "cifar10"), ("vgg6", "digits")])
def test_the_rate_over_many_tasks_is_the_best_of_a_seed_that_counts_no_more(
    network, data, tmp_path
):
    case = cases_of(network)[0]
    for place, trial in enumerate(case.trials):
        assert trial.seed == 0
        tables.add(
            {"lasting": [{"name": trial.name, "accuracy": (0.3, 0.5, 0.4)[place]}]}, tmp_path
        )
    found = case.finals(3, Rows(tmp_path))
    assert [run.seed for run in found] == [1, 2, 3]
    assert {run.made.lr for run in found} == {0.02}
    assert {(run.made.network, run.dataset) for run in found} == {(network, data)}


def test_measures_of_several_networks_are_compared_with_the_first(tmp_path):
    """Of the seeds that all have; measures that some run has not are left out."""
    result = RESULTS["measures_resnet18"]
    for run in result.needs:
        top1 = 0.6 if (run.made.lr, run.made.weight_decay) == (0.1, 5e-4) else 0.5
        tables.add({"trials": [row(run.name, top1=top1)]}, tmp_path)
    beyond = [run for run in result.then(Rows(tmp_path)) if run.is_trial]
    for run in beyond:
        tables.add({"trials": [row(run.name, top1=0.1)]}, tmp_path)
    dormant = {"plain": (0.1, 0.2, 0.3), "se": (0.2, 0.3, 0.4), "ce": (0.4, 0.6)}
    for side, values in dormant.items():
        for seed, value in enumerate(values):
            name = f"tiny_resnet18_{side}-seed{seed}"
            gini = "" if (side, seed) == ("ce", 1) else 0.5
            own = row(name, dormant=value, gini=gini)
            own |= {
                measure.column: 0.0
                for measure in MEASURES
                if measure.column not in own and measure.column not in ABLATION
            }
            tables.add({"runs": [own]}, tmp_path)
    made = result.build(Rows(tmp_path))
    (line,) = (line for line in made.table if line["n = 2 seeds"] == "dormant, all layers")
    assert list(line.values())[1:] == [
        "15.00 ± 7.07 %", "25.00 ± 7.07 %", "50.00 ± 14.14 %",
        "+10.00 (+10.00 to +10.00)", "+35.00 (−28.53 to +98.53)",
    ]  # fmt: skip
    assert list(line)[-2:] == ["SE − plain, 95 % interval", "CE − plain, 95 % interval"]
    texts = {line["n = 2 seeds"] for line in made.table}
    assert len(texts) == len(MEASURES) - len(ABLATION) - 1
    assert not any("Gini" in text for text in texts)


def test_the_main_table_compares_what_is_there(tmp_path):
    """VGG-16: two seeds of both and a third of one; on Tiny ImageNet nothing was chosen yet."""
    for name, top1 in (("plain-seed0", 0.5), ("plain-seed1", 0.6), ("plain-seed2", 0.9),
                       ("ce-seed0", 0.52), ("ce-seed1", 0.64)):  # fmt: skip
        own = row(f"vgg16_{name}", top1=top1, train_loss=1.0, test_loss=2 * top1)
        tables.add({"runs": [own]}, tmp_path)
    made = RESULTS["main"].build(Rows(tmp_path))
    vgg, *others = made.table
    assert vgg["top-1, plain"] == "66.67 ± 20.82 % (n = 3)"
    assert (vgg["top-1, SE"], vgg["top-1, CE"]) == ("–", "58.00 ± 8.49 % (n = 2)")
    low, high = stats.ttest_rel([52, 64], [50, 60]).confidence_interval(0.95)
    text = f"+3.00 ({low:+.2f} to {high:+.2f})".replace("-", "−")
    assert vgg["CE − plain, 95 % interval"] == text
    assert len(others) == 5
    assert {cell for line in others for cell in list(line.values())[1:]} == {"not run", ""}
    panel = made.figure.axes[0]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == [vgg[""]]
    ((dots, _, bars),) = panel.containers
    assert list(dots.get_xdata()) == pytest.approx([3])
    assert bars[0].get_segments()[0][:, 0] == pytest.approx([low, high])
    drawing.plt.close(made.figure)


def test_lambda_by_layer_and_while_training(tmp_path):
    result = RESULTS["fig_lambda"]
    for seed, (one, other) in enumerate(((0.2, 0.9), (0.4, 0.7))):
        name = {"name": f"vgg16_ce-seed{seed}"}
        layers = [name | {"title": title, "lambda": value}
                  for title, value in (("a", one), ("without", ""), ("b", other))]  # fmt: skip
        # in training, the record of the second seed ends with the other's layer a at 0.8
        lambdas = [name | {"epoch": e, "layer": layer, "lambda": 0.5 + e * way * (1 + seed) / 10}
                   for e in (1, 2) for layer, way in (("a", 1), ("b", -1))]  # fmt: skip
        found = {"runs": [row(name["name"])], "layers": layers, "lambdas": lambdas}
        tables.add(found, tmp_path)
    made = result.build(Rows(tmp_path))
    line = made.table[0]
    assert (line["n"], line["CE layers"], line["λ, mean of layers"]) == ("2", "2", "0.550 ± 0.000")
    assert line["smallest λ of a layer"] == "0.300 ± 0.141 (`a`)"
    assert line["largest λ of a layer"] == "0.800 ± 0.141 (`b`)"
    after, training = made.figure.axes
    assert [list(dots.get_ydata()) for dots in after.lines] == [[0.2, 0.4], [0.9, 0.7]]
    drawn = [(list(one.get_xdata()), list(one.get_ydata())) for one in training.lines]
    assert drawn == [([1, 2], pytest.approx([0.65, 0.8])), ([1, 2], pytest.approx([0.35, 0.2]))]
    drawing.plt.close(made.figure)


def test_both_shares_of_nonpositive_betas(tmp_path):
    result = RESULTS["table_beta"]
    filled(result, tmp_path)
    lines = result.build(Rows(tmp_path)).table
    assert [line["β ≤ 0, all batch norms"] for line in lines] == [
        "10.0 % of 1,000", "20.0 % of 1,000", "30.0 % of 1,000",
    ]  # fmt: skip
    assert [line["β ≤ 0, directly before ReLU"] for line in lines] == [
        "25.0 % of 400", "25.2 % of 400", "25.5 % of 400",
    ]  # fmt: skip
    assert [line["paper"] for line in lines] == ["76.0 %", "76.7 %", "81.8 %"]


def test_maps_are_averaged_over_seeds_and_compared(tmp_path):
    result = RESULTS["fig_magnitude"]
    (plain, ce) = ([run for run in result.needs if run.recipe == f"vgg16_{row}"]
                   for row in ("plain", "ce"))  # fmt: skip
    grids = {
        plain[0]: [[1.0, 2.0]], plain[1]: [[3.0, 4.0]],  # mean 2, 3
        ce[0]: [[2.5, 2.0]],
    }  # fmt: skip
    for run, grid in grids.items():
        maps = [{"name": run.name, "layer": "f", "i": i, "j": j, "value": value}
                for i, line in enumerate(grid) for j, value in enumerate(line)]  # fmt: skip
        tables.add({"runs": [row(run.name)], "maps": maps}, tmp_path)
    made = result.build(Rows(tmp_path))
    lines = [list(line.values()) for line in made.table]
    assert lines[0] == ["BN", "2", "2.500 ± 1.414", "2.000", "3.000"]
    assert lines[1] == ["BN+CE", "1", "2.250", "2.000", "2.500", "50 %"]
    shown = [axes.images[0].get_array().tolist() for axes in made.figure.axes[:2]]
    assert shown == [[[2.0, 3.0]], [[2.5, 2.0]]]
    assert made.figure.axes[0].images[0].get_clim() == made.figure.axes[1].images[0].get_clim()
    drawing.plt.close(made.figure)


def test_grad_cams_of_the_paper_and_se_side_by_side(tmp_path):
    result = RESULTS["fig_gradcam"]
    filled(result, tmp_path)
    made = result.build(Rows(tmp_path))
    assert [line[""] for line in made.table] == ["plain", "SE", "BD", "CE"]
    assert [line["image 2, a"] for line in made.table] == ["p0", "p1", "p2", "p3"]
    assert len(made.figure.axes) == 2 * 4
    assert made.figure.axes[5].images[0].get_array().tolist() == [[0, 0.5], [0.5, 1]]
    drawing.plt.close(made.figure)


def test_label_corruption_matches_training_error(tmp_path):
    result = RESULTS["fig_label_corruption"]
    for run in result.needs:
        # CE is at BN's last training accuracy in its second epoch, whose test accuracy is 0.55
        is_ce = run.recipe.endswith("ce")
        curve = (
            [(0.3, 0.3), (0.6, 0.55), (0.9, 0.5)]
            if is_ce
            else [(0.2, 0.2), (0.4, 0.4), (0.6, 0.45)]
        )
        name = {"name": run.name}
        epochs = [name | {"epoch": e, "train_top1": a, "test_top1": b}
                  for e, (a, b) in enumerate(curve, 1)]  # fmt: skip
        tables.add({"runs": [row(run.name)], "epochs": epochs}, tmp_path)
    line = result.build(Rows(tmp_path)).table[2]
    assert line["test error, BN"] == "55.00 %"
    assert line["test error, CE"] == "50.00 %"
    assert line["test error, CE, as BN in training"] == "45.00 %"


def test_a_smoke_figure_says_that_it_is_one(tmp_path):
    figure, axes = drawing.plt.subplots()
    axes.plot([1, 2])
    drawing.save(figure, tmp_path / "x.svg", smoke=True)
    assert "SMOKE TEST" in (tmp_path / "x.svg").read_text()


def test_pages_hold_what_is_built():
    made = building.built(RESULTS, Rows())
    shown = {}
    for page in building.PAGES:
        text = page.read_text()
        assert building.page_built(page, text, made) == text, "run `make results`"
        shown[page.name] = {name for _, name, _ in building.BLOCK.findall(text)}
        for picture in re.findall(r"!\[\w+\]\((\S+/results/\S+)\)", text):
            assert (page.parent / picture).is_file()
    assert shown["results.md"] == {*RESULTS} - {"vgg16_short", "transfer_cifar10"}
    assert shown["finetuning.md"] == {"transfer_cifar10"}
    assert shown["README.md"] == {"main"}
    assert shown["guide.md"] == {"main", "settings", "vgg16_short"}
    for name, result in made.items():
        if result.figure is not None:
            assert (ROOT / building.FIGURES / f"{name}.svg").is_file()
            drawing.plt.close(result.figure)


def test_a_block_without_a_number_is_a_line():
    text = "<!-- result: a -->\nold\n<!-- end of a -->"
    empty = building.Built([{"": "CE", "n": "0", "top-1": "not run"}])
    shown = building.page_with(text, {"a": empty})
    assert shown.splitlines()[1].startswith("Not run yet; `python -m experiments list a`")
    for line in ({"": "CE", "top-1": "90 %"}, {"top-1": "not run", "paper's top-1": "76 %"}):
        shown = building.page_with(text, {"a": building.Built([line])})
        assert "| --- |" in shown
