"""Fine-tuning of any classifier of timm or torchvision."""

import json
import math
import re
import warnings
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

import cenet
import cenet.train.job as job
from _training import ALONE, assert_same_run, call, metrics, stop_at, write_digits
from cenet.data import datasets
from cenet.data.datasets import FILES_MEAN, FILES_STD, InputSpec, Resident, Split, digits, load
from cenet.distributed import Processes
from cenet.run_folder import ABOUT, CONFIG, WEIGHTS
from cenet.signals import Interrupted
from cenet.train.build import build_optimizer, build_schedule, check_size
from cenet.train.checkpoint import load_optimizer_, optimizer_state
from cenet.train.classifier import Trainer
from cenet.train.command import parse
from cenet.train.cuda_graphs import capture_problem
from cenet.train.job import Job, evaluate_run, train
from cenet.train.options import Options
from cenet.train.recipes import FINETUNE, RECIPES, Recipe, read_run
from cenet.train.weights import (
    build_network,
    find_beginning,
    load_initial_weights_,
    load_pretrained_,
    load_run,
)

NAME = "test_resnet"
SIZE = 16
DIGITS = replace(
    FINETUNE, network=NAME, dataset="digits", image_size=SIZE, augment="none", epochs=1,
    batch_size=16, lr=0.1, opt="adamw",
)  # fmt: skip
ODD_MEAN, ODD_STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)


@cache
def digits_in_colour(size=SIZE, train=48, test=32):
    """A few digits as a stock network sees them."""
    whole = load(replace(DIGITS, image_size=size), None)
    return Split(
        *(
            part._replace(images=part.images[:count], labels=part.labels[:count])
            for part, count in zip(whole, (train, test), strict=True)
        )
    )


def stock(classes=10, seed=0, name=NAME):
    """A network of the library with weights and statistics that nothing else has."""
    torch.manual_seed(seed)
    model = timm.create_model(name, num_classes=classes)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.running_mean.uniform_(-0.1, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def trainer(recipe, out, weights=None, data=None, **more):
    beginning = find_beginning(recipe, weights, None)
    options = Options(out, **more)
    return Trainer(recipe, data or digits_in_colour(), options, ALONE, weights, beginning=beginning)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "network.pth"
    torch.save(stock().state_dict(), path)
    return path


@pytest.fixture(scope="module")
def run(checkpoint, tmp_path_factory):
    """A run over all digits, by command."""
    out = tmp_path_factory.mktemp("run") / "tuned"
    with pytest.MonkeyPatch.context() as patch:
        arguments = (
            f"train finetune --model {NAME} --dataset digits --image-size {SIZE} --augment none "
            f"--epochs 1 --batch-size 256 --opt adamw --lr 0.01 --weights {checkpoint} --out {out} "
            "--device cpu --threads 1"
        )
        call(patch, *arguments.split())
    return out


def test_the_network_begins_as_the_trained_one(checkpoint, tmp_path):
    images = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    expected = stock().double()(images.double()).float()
    for block in ("ce", "plain"):
        network = trainer(replace(DIGITS, block=block), tmp_path, checkpoint).network.eval()
        assert bool(list(cenet.nn.ce_layers(network))) == (block == "ce")
        assert torch.allclose(network(images), expected, rtol=1e-4, atol=1e-5)
    paper = trainer(replace(DIGITS, ce_start="paper"), tmp_path, checkpoint).network.eval()
    assert not torch.allclose(paper(images), expected, atol=1e-2)


def test_a_run_is_a_folder_that_everything_reads(run, monkeypatch, tmp_path):
    images = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    network = load_run(run)
    expected = network(images)
    state = load_file(run / WEIGHTS)
    assert any(".ce.blend" in name for name in state)
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    for again in (cenet.load(run), timm.create_model(f"local-dir:{run}", pretrained=True).eval()):
        assert torch.equal(again(images), expected)
        assert again.pretrained_cfg["input_size"] == (3, SIZE, SIZE)
        assert again.pretrained_cfg["crop_pct"] == 1.0  # images in memory are shown whole
    row = json.loads((run / "metrics.jsonl").read_text())
    assert evaluate_run(run, device="cpu")["test_top1"] == row["test_top1"]
    call(monkeypatch, "export", str(run), "--format", "safetensors", "--out", f"{tmp_path}/out")
    assert torch.equal(cenet.load(tmp_path / "out")(images), expected)


@pytest.mark.slow
def test_a_run_is_diagnosed_and_reported(run, monkeypatch, capsys, tmp_path):
    call(monkeypatch, "report", str(run), "--out", f"{tmp_path}/page.html")
    arguments = ("--limit", "32", "--ablation-images", "0", "--out", f"{tmp_path}/diagnosis")
    call(monkeypatch, "diagnose", str(run), *arguments, "--device", "cpu")
    said = capsys.readouterr().out
    assert f"images of {SIZE}×{SIZE}" in said


def test_digits_are_scaled_and_repeated_for_a_stock_network():
    small, large = (load(replace(DIGITS, image_size=size), None).test.images for size in (8, 32))
    original = digits().test.images
    assert torch.equal(small, original.repeat(1, 3, 1, 1))
    assert large.shape == (len(original), 3, 32, 32)
    assert torch.equal(large[:, 0], large[:, 2])
    # the same pictures, by another library
    for found, image in zip(large[:8, 0], original[:8, 0], strict=True):
        expected = Image.fromarray(image.numpy()).resize((32, 32), Image.Resampling.BILINEAR)
        assert (found.int() - pil_to_tensor(expected)[0].int()).abs().max() <= 1
    assert load(RECIPES["digits_ce"], None).test.images.shape[1:] == (1, 8, 8)


def test_images_in_memory_are_made_smaller_as_by_another_library(monkeypatch):
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=random)
    data = Resident(images, torch.tensor([0, 1]), ("a", "b"))
    monkeypatch.setattr(datasets, "digits", lambda: Split(data, data))
    found = load(replace(DIGITS, image_size=12), None).test.images
    expected = torch.stack([
        pil_to_tensor(to_pil_image(image).resize((12, 12), Image.Resampling.BILINEAR))
        for image in images
    ])  # fmt: skip
    difference = found.int() - expected.int()
    assert difference.abs().max() <= 1
    assert difference.double().mean().abs() < 0.1  # rounded, not cut off

    for fits in (len(images) * 3 * 12 * 12, len(images) * 3 * 12 * 12 - 1):
        monkeypatch.setattr(datasets, "FITS", fits)
        if fits % 2:
            with pytest.raises(ValueError, match=r"2 images of 12×12 are more than"):
                load(replace(DIGITS, image_size=12), None)
        else:
            load(replace(DIGITS, image_size=12), None)


def test_values_of_an_input_spec():
    written = InputSpec(("a",), (0.5,), (0.25,), "", in_memory=False).as_dict()
    assert not InputSpec.from_dict(written).in_memory
    del written["in_memory"]  # an earlier version
    assert InputSpec.from_dict(written).in_memory
    assert not InputSpec.from_dict({**written, "mean": FILES_MEAN, "std": FILES_STD}).in_memory
    for std in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="std > 0"):
            InputSpec.from_dict({**written, "std": [std]})


def test_a_run_keeps_its_sites(run, monkeypatch):
    """Another version may choose other sites by default."""
    import cenet.train.weights as weights

    monkeypatch.setattr(weights, "insert_ce_", lambda *_, **__: pytest.fail("chooses sites anew"))
    assert load_run(run)


def test_pretrained_weights_bring_their_normalization(tmp_path, monkeypatch, capsys):
    """The download is replaced; timm's and torchvision's own code loads what it brings."""
    calls = []

    def from_hub(*_, **__):
        calls.append("timm")
        return stock(1000).state_dict()

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", from_hub)
    recipe = replace(DIGITS, dataset="folder", augment="imagenet")
    job = Job(
        recipe, Options(tmp_path / "run", threads=1, workers=0), write_digits(tmp_path / "data"),
        pretrained=True, device="cpu",
    )  # fmt: skip
    train(job)
    said = capsys.readouterr().out
    assert calls == ["timm"]
    assert "starting from timm/test_resnet.r160_in1k; new: 3 CE layers, fc.weight, fc.bias" in said
    assert (
        f"images of {SIZE}×{SIZE}, normalized by mean and deviation of the network {NAME}" in said
    )
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    config = timm.get_pretrained_cfg(NAME)
    for key in ("mean", "std"):
        assert about["inputs"][key] == [255 * value for value in getattr(config, key)]
    assert about["inputs"]["normalization"] == f"of the network {NAME}"
    assert about["environment"]["initial"]["weights"] == "timm/test_resnet.r160_in1k"
    # after three updates, convolutions are close to the source
    trained, source = load_file(tmp_path / "run" / WEIGHTS), stock(1000).state_dict()
    distance = (trained["conv1.0.weight"] - source["conv1.0.weight"]).abs().max()
    assert 0 < distance < 0.5
    assert trained["fc.weight"].shape[0] == 10
    # a run that goes on needs no download
    train(replace(job, options=replace(job.options, resume="auto")))
    assert calls == ["timm"]


def test_pretrained_weights_of_torchvision(monkeypatch):
    name = "shufflenet_v2_x0_5"
    torch.manual_seed(3)
    source = torchvision.models.get_model(name).state_dict()
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda *_, **__: dict(source)
    )
    recipe = replace(DIGITS, network=f"torchvision/{name}", image_size=64)
    beginning = find_beginning(recipe, None, None)
    assert beginning.mean == pytest.approx((123.675, 116.28, 103.53))
    network = build_network(recipe, trainer_inputs())
    initial = load_pretrained_(network, recipe.network, 10)
    assert initial.weights == f"torchvision/{name} IMAGENET1K_V1"
    assert [n for n in initial.fresh if ".ce." not in n] == ["fc.weight", "fc.bias"]
    state = network.state_dict()
    assert torch.equal(state["stage2.0.branch2.0.weight"], source["stage2.0.branch2.0.weight"])


def test_a_folder_says_how_its_images_are_normalized(tmp_path, capsys):
    """A folder of cenet.save with CE, then a run over files; the size is that of the folder."""
    model = stock()
    # at one of the sites that insert_ce_ chooses by default
    cenet.insert_ce_(model, lambda _, name: name == "layer1.0.bn2", start="identity")
    cenet.save(model, tmp_path / "saved", image_size=24, mean=ODD_MEAN, std=ODD_STD)
    data = write_digits(tmp_path / "data")
    recipe = replace(DIGITS, dataset="folder", image_size=0, augment="imagenet", batch_size=32)
    job = Job(
        recipe, Options(tmp_path / "run", workers=0, threads=1), data, tmp_path / "saved",
        device="cpu",
    )  # fmt: skip
    train(job)
    said = capsys.readouterr().out
    assert (
        f"images of 24×24, normalized by mean and deviation of {tmp_path}/saved/config.json" in said
    )
    assert "; new: " not in said  # CE layers and classes are those of the folder
    assert [name for name, _ in cenet.nn.ce_layers(load_run(tmp_path / "run"))] == [
        "layer1.0.bn2.ce"
    ]
    stored, inputs = read_run(tmp_path / "run", Recipe)
    assert stored.image_size == 24
    assert inputs.mean == pytest.approx([255 * value for value in ODD_MEAN])
    config = cenet.load(tmp_path / "run").pretrained_cfg
    assert config["mean"] == pytest.approx(ODD_MEAN)
    assert math.floor(24 / config["crop_pct"]) == round(24 / 0.875)  # of files, the middle
    # a network of another name is refused before anything is read
    with pytest.raises(ValueError, match="saved holds test_resnet; use --model test_resnet"):
        train(replace(job, recipe=replace(recipe, network="resnet18")))
    # the folder is not needed to go on, nor the size
    (tmp_path / "saved").rename(tmp_path / "away")
    train(replace(job, options=replace(job.options, resume="auto")))
    assert "all 1 epochs are trained" in capsys.readouterr().out


def test_resumption_is_exact_and_another_network_is_refused(checkpoint, tmp_path):
    recipe = replace(DIGITS, epochs=2, schedule="wsd", warmup_epochs=0.5, ema=0.5)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    trainer(recipe, whole, checkpoint).run()
    engine = trainer(recipe, cut, checkpoint)
    stop_at(engine, 4)
    with pytest.raises(Interrupted):
        engine.run()
    again = trainer(recipe, cut)  # without the weights
    again.resume()
    again.run()
    assert_same_run(whole, cut)
    changed = replace(recipe, network="test_resnet.r160_in1k")
    with pytest.raises(
        ValueError, match=r"network was 'test_resnet' and is 'test_resnet\.r160_in1k'"
    ):
        trainer(changed, cut).resume()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model resnet81", r"resnet81 is not a timm model \(did you mean .*resnet18"),
        ("--model torchvision/resnet81", r"of torchvision \(did you mean .*resnet18"),
        ("--opt adamww", r"opt='adamww' is not an optimizer of timm \(did you mean adamw "),
        ("--opt adahessian", r"opt=adahessian needs second derivatives"),
        ("--opt kron", r"opt=kron has a state that checkpoints cannot hold"),
        ("--opt cadafactorbv", r"opt=cadafactorbv has a state that checkpoints cannot hold"),
        ("--schedule cosin", r"cosine"),
        ("--block se", r"block=se is for the networks of the paper"),
        ("--norm gn", r"norm=gn is for the networks of the paper"),
        ("--norm-places published", r"norm_places=published is for the networks of the paper"),
        ("--image-size 4", r"image_size=4 must be at least 8"),
        ("--pretrained --weights x", r"--weights x and --pretrained exclude each other"),
        ("", r"say where the images are with --data FOLDER"),
        (
            "--weights nowhere --dataset digits --block plain --augment none",
            r"--weights nowhere does not exist",
        ),
        ("--threads 0", r"--threads 0 must be at least 1"),
        ("--workers -1", r"--workers -1 must be at least 0;"),
        ("--checkpoint-seconds inf", r"--checkpoint-seconds inf must be at least 0, and finite"),
        ("--log-to mlflow", r"mlflow is not installed; pip install mlflow"),
    ],
)
def test_what_cannot_be_trained_is_one_line(arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("cenet.train.options.find_spec", lambda _: None)
    if "--model" not in arguments:
        arguments = f"--model resnet18 {arguments}"
    given = ("train", "finetune", *arguments.split(), "--out", f"{tmp_path}/run")
    with pytest.raises(SystemExit) as left:
        call(monkeypatch, *given, "--device", "cpu")
    said = str(left.value.code)
    said = capsys.readouterr().err.strip() if said.isdigit() else said
    assert re.search(message, said), said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("identity", "hardly moves in a network with random weights; use --ce-start paper"),
        ("paper", ""),
    ],
)
def test_the_first_lines_of_a_run(start, said):
    recipe = replace(
        FINETUNE, ce_start=start, image_size=64, batch_size=8, accumulate=2, lr=0.01, lr_batch=256
    )
    begun = SimpleNamespace(
        recipe=recipe, initial=None, inputs=SimpleNamespace(normalization="of somebody"),
        processes=Processes(0, 2, torch.device("cpu")), updates_per_epoch=7,
    )  # fmt: skip
    text = "\n".join(job._first_words(begun, is_new=True))
    assert said in text
    assert ("random weights; use" in text) == (start == "identity")
    # 8 images × 2 batches × 2 processes
    assert "learning rate 0.00125 after the warm-up (0.01 × 32 images per update / 256)" in text
    assert "7 updates per epoch" in text


@pytest.mark.parametrize(
    "about", [{"architecture": {"a": 1}, "pretrained_cfg": {"mean": [0] * 3}}, {}]
)
def test_an_edited_folder_of_weights_is_one_line(about, tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(about))
    with pytest.raises(
        ValueError, match=r"is neither a finished run nor a folder of cenet.save: .*"
    ):
        find_beginning(replace(FINETUNE, network=NAME), tmp_path, None)


@pytest.mark.parametrize("size", [20, 24, 32, 64, 160, 224])
def test_timm_scales_images_as_the_test_of_a_run_does(size):
    """It rounds down, and the test to the nearest number of pixels."""
    inputs = InputSpec(("a", "b"), (1.0,) * 3, (1.0,) * 3)
    recipe = replace(FINETUNE, network=NAME, image_size=size, block="plain")
    config = build_network(recipe, inputs).pretrained_cfg
    assert math.floor(size / config["crop_pct"]) == round(size / 0.875)


def test_weights_for_images_of_one_channel_are_refused(tmp_path):
    images = {"input_size": [1, 24, 24], "mean": [0.5], "std": [0.5]}
    (tmp_path / CONFIG).write_text(json.dumps({"architecture": NAME, "pretrained_cfg": images}))
    with pytest.raises(ValueError, match=r"--weights .* takes images of 1 channels, and not 3"):
        find_beginning(replace(FINETUNE, network=NAME), tmp_path, None)


def test_an_edited_run_is_one_line(run, tmp_path):
    about = json.loads((run / ABOUT).read_text())
    (tmp_path / ABOUT).write_text(json.dumps({**about, "environment": []}))
    with pytest.raises(ValueError, match=r"run\.json is not of this version of `cenet train`"):
        find_beginning(read_run(tmp_path, Recipe)[0], None, tmp_path)


def test_pretrained_is_for_stock_networks(monkeypatch):
    with pytest.raises(SystemExit, match="use the recipe finetune, or --weights FILE"):
        call(monkeypatch, "train", "digits_ce", "--pretrained")


def test_a_network_without_norms_for_ce_can_be_trained_without():
    recipe = replace(DIGITS, network="test_vit", image_size=160)
    with pytest.raises(
        ValueError, match=r"into test_vit: .* no norm .*; --block plain trains without"
    ):
        build_network(recipe, trainer_inputs())
    plain = replace(recipe, block="plain")
    network = build_network(plain, trainer_inputs())
    check_size(network, plain, trainer_inputs())
    assert network.pretrained_cfg["architecture"] == "test_vit"


def test_a_network_without_logits_is_refused():
    class Two(nn.Module):
        def forward(self, x):
            return x.mean((2, 3)), x.mean((2, 3))

    inputs = trainer_inputs()
    with pytest.raises(ValueError, match=r"for two images it returns tuple in training"):
        check_size(Two(), DIGITS, inputs)

    def fails(_):
        raise AssertionError("Input height (16) doesn't match model (224)")

    model = nn.Identity()
    model.forward = fails
    with pytest.raises(ValueError, match=r"match model \(224\); change --image-size"):
        check_size(model, DIGITS, inputs)
    one_pixel = nn.Sequential(nn.AdaptiveAvgPool2d(1), cenet.ChannelEquilibrium2d(inputs.channels))
    with pytest.raises(ValueError, match=r"\(2, \d, 1, 1\); change --image-size$"):
        check_size(one_pixel, DIGITS, inputs)


def trainer_inputs():
    data = digits_in_colour().train
    return cenet.data.datasets.input_spec_of(data)


def test_a_classifier_that_is_a_convolution_begins_anew(tmp_path):
    torch.manual_seed(0)
    source = torchvision.models.squeezenet1_1(num_classes=7)
    torch.save(source.state_dict(), tmp_path / "w.pth")
    recipe = replace(DIGITS, network="torchvision/squeezenet1_1", block="plain", image_size=64)
    network = build_network(recipe, trainer_inputs())
    found = load_initial_weights_(network, tmp_path / "w.pth", 10)
    assert found.fresh == ("classifier.1.weight", "classifier.1.bias")


def goes_on_exactly(name):
    """Between save and load, metadata goes through JSON."""
    images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    recipe = replace(RECIPES["digits_plain"], opt=name)

    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 5))

    def steps(model, optimizer):
        torch.manual_seed(1)
        for _ in range(2):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()

    first, second = network(), network()
    one, two = (build_optimizer(recipe, m, images_per_update=64) for m in (first, second))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of timm's older optimizers
        steps(first, one)
        tensors, metadata = optimizer_state(one)
        tensors = {key: value.clone() for key, value in tensors.items()}
        load_optimizer_(two, tensors, json.loads(json.dumps(metadata)))
        second.load_state_dict(first.state_dict())
        steps(first, one)
        steps(second, two)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), (name, key)


def test_learning_rates_that_are_tensors_belong_to_their_groups():
    """The same file may be loaded twice."""
    rates = (0.5, 0.25)

    def optimizer(*rates):
        groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": torch.tensor(r)} for r in rates]
        return torch.optim.AdamW(groups)

    tensors, metadata = optimizer_state(optimizer(*rates))
    for _ in range(2):
        found = optimizer(1.0, 1.0)
        load_optimizer_(found, tensors, metadata)
        assert tuple(float(group["lr"]) for group in found.param_groups) == rates
        assert not any("lr" in group for group in metadata["groups"])


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion"])
def test_an_optimizer_of_timm_goes_on_exactly(name):
    goes_on_exactly(name)


@pytest.mark.slow
def test_all_optimizers_of_timm_go_on_exactly_or_are_refused():
    taken = []
    for name in timm.optim.list_optimizers():
        try:
            replace(DIGITS, opt=name)
        except ValueError:
            continue
        taken.append(name)
        goes_on_exactly(name)
    assert {"adamw", "lamb", "lion", "muon", "sgd", "adafactor"} <= set(taken)


def test_schedules():
    """10 epochs of 10 updates after a warm-up of 10 updates; by the formulas, not by timm."""
    rates = {}
    for name in ("constant", "wsd", "rsqrt", "tanh"):
        recipe = replace(RECIPES["digits_plain"], schedule=name, epochs=10, warmup_epochs=1.0)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
        schedule = build_schedule(recipe, optimizer, updates_per_epoch=10)
        rates[name] = []
        for update in range(100):
            schedule.step_update(update)
            rates[name].append(optimizer.param_groups[0]["lr"])
        assert rates[name][:10] == pytest.approx([0.05 * i for i in range(10)], rel=1e-4)
    assert rates["constant"][10:] == pytest.approx([0.5] * 90)
    assert rates["wsd"][10:82] == pytest.approx([0.5] * 72)
    assert rates["wsd"][82:] == pytest.approx([0.5 * (1 - math.sqrt(i / 18)) for i in range(18)])
    assert rates["rsqrt"][40] == pytest.approx(0.5 / math.sqrt(1 + 30 / 10))
    assert all(later < before for before, later in pairwise(rates["tanh"][10:]))
    assert rates["tanh"][-1] < 0.01


@pytest.mark.parametrize(
    ("opt", "held"), [("momentum", True), ("adamw", True), ("adagrad", False), ("lamb", False)]
)
def test_cuda_graphs_hold_optimizers_whose_state_is_on_the_gpu(opt, held):
    problem = capture_problem(replace(DIGITS, opt=opt), torch.device("cuda"), 1)
    assert (problem is None) == held
    if not held:
        assert problem.startswith(f"--cuda-graphs cannot hold --opt {opt}")


@pytest.mark.gpu
@pytest.mark.parametrize("opt", ["adamw", "adam", "nadam", "radam", "adamax", "rmsprop"])
def test_cuda_graphs_train_as_without_them(opt, tmp_path):
    """Two epochs of 12 updates, of which the first three are not captured."""
    recipe = replace(DIGITS, opt=opt, epochs=2, batch_size=4, lr=0.02, precision="float32")
    found = []
    for graphs in (False, True):
        device = Processes(0, 1, torch.device("cuda"))
        options = Options(tmp_path / str(graphs), cuda_graphs=graphs)
        Trainer(recipe, digits_in_colour(), options, device).run()
        found.append(metrics(tmp_path / str(graphs)))
    for one, other in zip(*found, strict=True):
        assert other["train_loss"] == pytest.approx(one["train_loss"], rel=1e-2)


@pytest.mark.parametrize("name", ["--model=test_resnet", "--network=test_resnet"])
def test_a_network_is_named_in_any_spelling(name):
    assert parse(["finetune", name, "--data", "photos"]).recipe.network == "test_resnet"


def test_a_network_must_be_named(monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"^finetune needs a network: --model NAME"):
        call(monkeypatch, "train", "finetune", "--data", "photos")
    with pytest.raises(SystemExit) as left:
        call(monkeypatch, "train", "finetune", "--help")
    assert left.value.code == 0


def test_weights_that_cannot_be_downloaded(monkeypatch):
    def fail(*_, **__):
        raise OSError("no connection")

    monkeypatch.setattr("timm.create_model", fail)
    with pytest.raises(ValueError, match=r"resnet18 cannot be loaded: no connection; .*--weights"):
        load_pretrained_(nn.Linear(1, 1), "resnet18", 2)
