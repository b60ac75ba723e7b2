"""Networks as folders: whatever CE was put into comes back the same, and no code of others runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file
from timm.data import resolve_model_data_config
from timm.layers import convert_sync_batchnorm
from timm.models import push_to_hf_hub, save_for_hf
from torch import nn

import cenet
from _training import TINY, few_digits, trainer
from cenet.models import create_model
from cenet.nn import NormCE2d, ce_layers
from cenet.run_folder import WEIGHTS
from cenet.surgery import ce_settings, restore_ce_
from cenet.train.weights import load_run

pytestmark = pytest.mark.usefixtures("quick_weights")

# by name: arguments of insert_ce_
FAST = {
    "test_resnet": {"group_size": 8, "rd_ratio": 0.5},
    "test_efficientnet": {"start": "identity"},
    "torchvision/shufflenet_v2_x0_5": {"layer": cenet.BatchDecorrelation2d, "pool": 2},
    "torchvision/mnasnet0_5": {},  # asks a state dict for its version, which files do not keep
    "torchvision/mobilenet_v3_small": {"layer": cenet.InstanceReweighting2d, "eps": 1e-3},
}
MANY = {
    **{name: {} for name in (
        "resnet18", "efficientnet_b0", "convnext_atto", "densenet121", "regnetx_002", "dla34",
        "mobilenetv3_small_050", "ghostnet_050", "cspresnet50", "dpn48b", "xception41",
        "tf_efficientnetv2_b0", "lcnet_050", "rexnet_100", "hrnet_w18_small", "skresnet18",
        "torchvision/resnet50", "torchvision/mobilenet_v2", "torchvision/densenet121",
        "torchvision/regnet_x_400mf", "torchvision/vgg11_bn", "torchvision/efficientnet_b0",
    )},
    **{name: {"start": "identity"} for name in (
        "gernet_s", "selecsls42", "repghostnet_050", "resnetv2_50", "torchvision/googlenet",
    )},
}  # fmt: skip
IMAGES = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
# what a stranger does with the folders
FRESH = """
import sys, timm, torch, cenet, cenet.models
torch.set_num_threads(1)
images = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    loaded = cenet.load(folder), timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        torch.save([model(images) for model in loaded], f"{folder}/logits.pt")
"""


def stock(name, **args):
    torch.manual_seed(0)
    if name.startswith("torchvision/"):
        # torchvision warns about the random weights of some
        return torchvision.models.get_model(name.split("/")[1], weights=None, **args)
    return timm.create_model(name, **args)


def step(model):
    """One step of training, then evaluation mode."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    logits = model.train()(IMAGES)
    (logits if isinstance(logits, torch.Tensor) else logits[0]).square().mean().backward()
    optimizer.step()
    return model.eval()


def with_ce(name, num_classes=7, **args):
    model = stock(name, num_classes=num_classes)
    cenet.insert_ce_(model, example_input=IMAGES, **args)
    return step(model)


def check_round_trips(networks, folder):
    torch.save(IMAGES, folder / "images.pt")
    folders, expected = [], []
    for name, args in networks.items():
        model = with_ce(name, **args)
        folders.append(folder / name.replace("/", "_"))
        cenet.save(model, folders[-1])
        with torch.no_grad():
            expected.append(model(IMAGES))
        assert expected[-1].isfinite().all()
    command = [sys.executable, "-W", "ignore", "-c", FRESH, str(folder / "images.pt")]
    subprocess.run([*command, *map(str, folders)], check=True, env=os.environ)
    for path, logits in zip(folders, expected, strict=True):
        for found in torch.load(path / "logits.pt"):
            assert torch.equal(found, logits), path.name


@pytest.mark.parametrize("name", FAST)
@pytest.mark.filterwarnings("ignore:the weight of")
def test_inserted_trained_saved_and_loaded(name, tmp_path):
    model = with_ce(name, **FAST[name])
    cenet.save(model, tmp_path)
    for again in (cenet.load(tmp_path), loaded_by_timm(tmp_path)):
        assert ce_settings(again) == ce_settings(model)
        assert torch.equal(again(IMAGES), model(IMAGES))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:the weight of", "ignore:The default weight init", "ignore:CE reaches"
)
def test_many_networks_are_loaded_by_somebody_else(tmp_path):
    assert len(MANY) >= 20
    check_round_trips({**FAST, **MANY}, tmp_path)


def loaded_by_timm(folder, **args):
    return timm.create_model(f"local-dir:{folder}", pretrained=True, **args).eval()


NETWORKS = {
    "registered": lambda: timm.create_model("ceshufflenetv2_x0_5", num_classes=3, start="identity"),
    "squeeze-excite": lambda: create_model("resnet18", "se", num_classes=3, norm="gn"),
    "inserted": lambda: with_ce("test_efficientnet", start="identity"),
    "inserted by name": lambda: timm.create_model(
        "with_ce", network="torchvision/shufflenet_v2_x0_5", num_classes=3
    ),
    "more inserted": lambda: with_ce_in_the_last_norm(timm.create_model("ceshufflenetv2_x0_5")),
    "removed": lambda: without_ce(timm.create_model("ceshufflenetv2_x0_5")),
}


def with_ce_in_the_last_norm(model, last="conv5.1"):
    cenet.insert_ce_(model, lambda norm, name: name == last, group_size=8)
    return model


def without_ce(model):
    cenet.remove_ce_(model)
    return model


@pytest.mark.parametrize("kind", NETWORKS)
def test_timms_own_functions_write_what_cenet_writes(kind, tmp_path):
    model = step(NETWORKS[kind]())
    save_for_hf(model, tmp_path / "timm", safe_serialization=True)
    cenet.save(model, tmp_path / "cenet")
    for folder in (tmp_path / "timm", tmp_path / "cenet"):
        for again in (loaded_by_timm(folder), cenet.load(folder)):
            assert torch.equal(again(IMAGES), model(IMAGES))
            assert ce_settings(again) == ce_settings(model)
            assert again.pretrained_cfg["architecture"] == model.pretrained_cfg["architecture"]


class Hub:
    """Stands in for the upload to the Hugging Face hub."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, **_):
        return self

    def create_repo(self, repo_id, **_):
        return SimpleNamespace(repo_id=repo_id)

    def file_exists(self, **_):
        return False

    def upload_folder(self, folder_path, **_):
        shutil.copytree(folder_path, self.folder)


@pytest.mark.filterwarnings("ignore:the weight of")
@pytest.mark.parametrize("name", ["test_resnet", "torchvision/shufflenet_v2_x0_5"])
def test_pushed_to_the_hub(name, tmp_path, monkeypatch):
    model = with_ce(name)
    cenet.save(model, tmp_path / "saved")  # recognizes networks of torchvision
    monkeypatch.setattr("timm.models._hub.HfApi", Hub(tmp_path / "hub"))
    push_to_hf_hub(model, "somebody/network", safe_serialization=True)
    assert torch.equal(loaded_by_timm(tmp_path / "hub")(IMAGES), model(IMAGES))


@pytest.mark.filterwarnings("ignore:the weight of")
def test_timm_fine_tunes_it_for_other_classes_and_takes_its_features(tmp_path):
    model = with_ce("test_resnet")
    cenet.save(model, tmp_path)
    other = loaded_by_timm(tmp_path, num_classes=2)
    assert other(IMAGES).shape == (4, 2)
    features = model.forward_features(IMAGES)
    assert torch.equal(other.forward_features(IMAGES), features)
    wrapped = loaded_by_timm(tmp_path, features_only=True)
    assert torch.equal(wrapped(IMAGES)[-1], features)


def test_images_and_classes_are_kept(tmp_path):
    model = with_ce("test_efficientnet", num_classes=3, start="identity")
    image = {"image_size": 48, "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)}
    cenet.save(
        model, tmp_path, classes=["ant", "bee", "cat"], **image, data="ants", metrics={"top-1": 0.5}
    )
    for again in (cenet.load(tmp_path), loaded_by_timm(tmp_path)):
        config = resolve_model_data_config(again)
        assert config["input_size"] == (3, 48, 48)
        assert [tuple(config[key]) for key in ("mean", "std")] == [image["mean"], image["std"]]
        assert tuple(again.pretrained_cfg["label_names"]) == ("ant", "bee", "cat")
    card = (tmp_path / "README.md").read_text()
    for words in ("ant, bee, cat", "3×48×48", "(0.1, 0.2, 0.3)", "ants", "| top-1 | 0.5 |",
                  "test_efficientnet", "cenet.load(", "Licence: not chosen"):  # fmt: skip
        assert words in card
    assert "license:" not in card.split("---")[1]
    again = cenet.load(tmp_path)
    cenet.save(again, tmp_path, metrics={"top-1": 0.25})  # nobody has edited the card
    card = (tmp_path / "README.md").read_text()
    assert "| top-1 | 0.25 |" in card
    assert "trained on | not said" in card
    for text in ("mine", card.replace("not said", "bees"), ""):
        (tmp_path / "README.md").write_text(text)
        with pytest.warns(UserWarning, match=r"README.md was kept, because somebody edited it"):
            cenet.save(again, tmp_path)
        assert (tmp_path / "README.md").read_text() == text
    config = resolve_model_data_config(cenet.load(tmp_path))
    assert (config["input_size"], tuple(config["std"])) == ((3, 48, 48), image["std"])
    with pytest.raises(ValueError, match=r"classes has 2 names, the network 3 outputs"):
        cenet.save(model, tmp_path, classes=["ant", "bee"])
    with pytest.raises(ValueError, match=r"std=\(0.0, 1.0\) must have a value each"):
        cenet.save(model, tmp_path, mean=(0, 0), std=(0, 1))
    with pytest.raises(ValueError, match=r"for pixels from 0 to 1; divide mean and std by 255"):
        cenet.save(model, tmp_path, mean=(120, 110, 100), std=(50, 50, 50))
    cenet.save(model, tmp_path / "white", mean=(1, 1, 1))
    assert cenet.load(tmp_path / "white").pretrained_cfg["mean"] == [1, 1, 1]
    for names in ([1, 2, 3], ["ant", "bee", 3]):
        with pytest.raises(ValueError, match=rf"classes={re.escape(str(names))} must be names"):
            cenet.save(model, tmp_path, classes=names)
    with pytest.raises(ValueError, match=r"std=0.5 must have a value for every channel \(3\)"):
        cenet.save(model, tmp_path, std=0.5)
    for place in ("nowhere", "README.md"):
        with pytest.raises(ValueError, match=rf"{place} is not a folder; to load from the hub, d"):
            cenet.load(tmp_path / place)


GREY = {
    "with CE": lambda: with_ce_in_the_last_norm(stock("test_resnet", in_chans=1), "bn1"),
    "without": lambda: stock("test_resnet", in_chans=1),
    "ours": lambda: stock("ceshufflenetv2_x0_5", in_chans=1),
    "another of ours": lambda: stock("cevgg6", in_chans=1),
}


@pytest.mark.parametrize("kind", GREY)
def test_grey_images(kind, tmp_path):
    model = GREY[kind]()
    colours = model.pretrained_cfg["mean"]
    for save in (cenet.save, save_for_hf):
        folder = tmp_path / save.__name__
        save(model, folder, **({"safe_serialization": True} if save is save_for_hf else {}))
        config = cenet.load(folder).pretrained_cfg
        assert config["input_size"][0] == len(config["mean"]) == len(config["std"]) == 1
        assert config["mean"] == pytest.approx([sum(colours) / len(colours)])
    card = (tmp_path / "save" / "README.md").read_text()
    assert f"| images | 1×{config['input_size'][1]}×" in card
    assert f"| mean, std | ({config['mean'][0]}" in card
    cenet.save(model, tmp_path / "own", mean=[0.3], std=[0.2])
    assert cenet.load(tmp_path / "own").pretrained_cfg["mean"] == [0.3]
    with pytest.raises(ValueError, match=r"must have a value each for every channel \(1\)"):
        cenet.save(model, tmp_path / "three", mean=(0.5,) * 3, std=(0.2,) * 3)


@pytest.mark.parametrize(
    "image", [{"mean": (float("inf"),) * 3}, {"mean": (float("nan"),) * 3}, {"image_size": 2**30}]
)
def test_what_could_not_be_loaded_is_not_written(image, tmp_path):
    with pytest.raises(ValueError, match=r"pretrained_cfg lacks"):
        cenet.save(stock("test_resnet"), tmp_path, **image)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["test_resnet", "torchvision/shufflenet_v2_x0_5"])
def test_a_head_that_was_replaced_by_hand(name, tmp_path):
    model = stock(name)
    for classes in (3, 5):  # by the name that timm has for the second network, too
        model.fc = nn.Linear(model.fc.in_features, classes)
        cenet.save(model.eval(), tmp_path, classes=[str(i) for i in range(classes)])
        for again in (cenet.load(tmp_path), loaded_by_timm(tmp_path)):
            assert torch.equal(again(IMAGES), model(IMAGES))
        model = again


@pytest.mark.parametrize(
    ("name", "convert"),
    # torch's conversion drops the activations of timm's norms
    [
        ("test_resnet", nn.SyncBatchNorm.convert_sync_batchnorm),
        ("test_efficientnet", convert_sync_batchnorm),
    ],
)
def test_synchronized_networks_are_saved(name, convert, tmp_path):
    model = with_ce(name, start="identity")
    logits = model(IMAGES)
    cenet.save(cenet.convert_sync_ce(convert(model)), tmp_path)
    assert torch.equal(cenet.load(tmp_path)(IMAGES), logits)


def test_names_of_classes_that_do_not_fit_are_refused(tmp_path):
    cenet.save(stock("test_resnet", num_classes=3), tmp_path, classes="abc")
    config = json.loads((tmp_path / "config.json").read_text())
    for names, words in ((["a"], "1 classes"), ("abc", "'abc'"), (3, "3")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "label_names": names}))
        with pytest.raises(ValueError, match=rf"label_names are {words}, and the network has 3"):
            cenet.load(tmp_path)
    for wrong in (3, None, ["a"]):
        names = json.dumps({**config, "label_names": ["a", "b", wrong]})
        (tmp_path / "config.json").write_text(names)
        with pytest.raises(
            ValueError, match=r"config.json changed\? Its label_names are \['a', 'b'"
        ):
            cenet.load(tmp_path)


def test_the_nearest_network_is_named(tmp_path):
    model = stock("torchvision/resnet18")
    model.conv1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False)
    with pytest.raises(
        ValueError, match=r"torchvision/resnet18 with .* differs from it in 2 places"
    ):
        cenet.save(model, tmp_path)
    model = stock("torchvision/mobilenet_v3_large")  # the small one has no such norm
    cenet.insert_ce_(model, lambda _, name: name == "features.16.1")
    model.features[0][0] = nn.Conv2d(1, 16, 3, 2, 1, bias=False)
    with pytest.raises(ValueError, match=r"mobilenet_v3_large with .* differs from it in 2 places"):
        cenet.save(model, tmp_path)


class Own(nn.Module):
    """A network of a user, with CE of its own in it."""

    def __init__(self, width, slope=0.0):
        super().__init__()
        self.width, self.slope = width, slope
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, stride=2), nn.BatchNorm2d(width))
        self.own = NormCE2d(nn.BatchNorm2d(width), cenet.ChannelEquilibrium2d(width), nn.ReLU())
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        y = nn.functional.leaky_relu(self.stem(x), self.slope)
        return self.head(self.own(y).mean((2, 3)))


def test_a_class_of_your_own_is_built_only_if_you_pass_it(tmp_path):
    torch.manual_seed(0)
    model = Own(8, slope=0.3)
    cenet.insert_ce_(model, lambda _, name: name == "stem.1", group_size=4)
    step(model)
    images = {"image_size": 64, "mean": (0.5,) * 3, "std": (0.2,) * 3}
    with pytest.raises(
        ValueError, match=r"size and normalization of images for .*:Own are not known; give"
    ):
        cenet.save(model, tmp_path, network_args={"width": 8, "slope": 0.3})
    with pytest.raises(ValueError, match=r"Own cannot be built: .*missing 1 required .*'width'"):
        cenet.save(model, tmp_path, **images)
    with pytest.raises(ValueError, match=r"differs from it in 1 places, such as  \(Own\)"):
        cenet.save(model, tmp_path, network_args={"width": 8}, **images)
    assert not list(tmp_path.iterdir())
    cenet.save(model, tmp_path, network_args={"width": 8, "slope": 0.3}, **images)
    with pytest.raises(ValueError, match=r"class test_sharing:Own, which is not imported from"):
        cenet.load(tmp_path)
    again = cenet.load(tmp_path, network=Own)
    assert torch.equal(again(IMAGES), model(IMAGES))
    cenet.save(stock("test_resnet"), tmp_path / "stock")
    with pytest.raises(ValueError, match=r"stock says how its network is built; remove network="):
        cenet.load(tmp_path / "stock", network=Own)
    cenet.save(again, tmp_path / "again")  # it knows its arguments now
    assert torch.equal(cenet.load(tmp_path / "again", network=Own)(IMAGES), model(IMAGES))


def test_whoever_can_read_the_description_can_read_the_weights(tmp_path):
    cenet.save(stock("test_resnet"), tmp_path)
    modes = {(tmp_path / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_names_of_other_classes_are_forgotten(tmp_path):
    model = stock("test_resnet", num_classes=3)
    cenet.save(model, tmp_path / "three", classes=("ant", "bee", "cat"))
    model.reset_classifier(2)
    cenet.save(model, tmp_path / "two")
    assert cenet.load(tmp_path / "three").pretrained_cfg["label_names"]
    assert not cenet.load(tmp_path / "two").pretrained_cfg.get("label_names")


def test_nothing_is_said_about_the_weights_that_a_network_began_with(tmp_path):
    """Their name and licence, above all."""
    model = stock("test_resnet")
    assert {"hf_hub_id", "tag", "license"} <= {
        key for key, value in model.pretrained_cfg.items() if value
    }
    cenet.save(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
    assert not {"url", "hf_hub_id", "tag", "license", "description", "notes"} & written.keys()


def edit(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["model_args"])
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "change",
    [
        lambda args: args["network_args"].update(checkpoint_path="others.pth"),
        lambda args: args["network_args"].update(pretrained=True),
        lambda args: args.update(network="exploding:Network"),
        lambda args: args.update(network="hf-hub:somebody/network"),
        lambda args: args.update(network="local-dir:."),
        lambda args: args.update(network=3),
        lambda args: args.update(ce=[{"sites": ["bn1"], "layer": "exploding"}]),
        lambda args: args["ce"][0]["sites"].append("nowhere"),
        lambda args: args["ce"][0]["args"].update(group_size=3),
        lambda args: args.pop("ce"),
    ],
    ids=range(10),
)
@pytest.mark.filterwarnings("ignore:the weight of")
def test_an_edited_folder_runs_nothing_and_is_one_error(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("exploding.py").write_text("from pathlib import Path; Path('exploded').touch()")
    torch.save(stock("test_resnet", num_classes=7).state_dict(), "others.pth")
    cenet.save(with_ce("test_resnet"), "folder")
    edit(tmp_path / "folder", change)
    with pytest.raises(ValueError, match="folder") as error:
        cenet.load("folder")
    assert len(str(error.value).splitlines()) == 1
    assert not Path("exploded").exists()


def test_pickles_are_not_read(tmp_path):
    save_for_hf(timm.create_model("ceshufflenetv2_x0_5"), tmp_path, safe_serialization=False)
    assert [path.name for path in tmp_path.glob("*model*")] == ["pytorch_model.bin"]
    with pytest.raises(ValueError, match=r"has no model.safetensors; other files .* not read"):
        cenet.load(tmp_path)


@pytest.mark.filterwarnings("ignore:the weight of")
def test_the_folder_of_a_run_keeps_its_own_weights(tmp_path):
    model = timm.create_model("test_resnet", num_classes=3)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="is the folder of a run, which has its own weights"):
        cenet.save(model, tmp_path)
    for size in (-5, 0, "x", True):
        with pytest.raises(ValueError, match=rf"^image_size={size!r} must be an integer"):
            cenet.save(model, tmp_path / "other", image_size=size)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.filterwarnings("ignore:the weight of")
def test_a_network_of_other_arguments_is_named_or_refused(tmp_path):
    args = {"width_mult": 0.25, "num_classes": 3}
    model = stock("torchvision/mobilenet_v2", norm_layer=lambda width: nn.GroupNorm(4, width))
    with pytest.raises(ValueError, match=r"this MobileNetV2 could not be built .* network_args="):
        cenet.save(model, tmp_path)
    model = stock("torchvision/mobilenet_v2", **args)
    cenet.insert_ce_(model)
    with pytest.raises(ValueError, match=r"could not be built again"):
        cenet.save(model, tmp_path)
    cenet.save(step(model), tmp_path, network="torchvision/mobilenet_v2", network_args=args)
    assert torch.equal(loaded_by_timm(tmp_path)(IMAGES), model(IMAGES))
    moved = timm.create_model("test_resnet")
    moved.conv1[0].stride = (1, 1)  # same weights, another network
    with pytest.raises(
        ValueError, match=r"differs from it in 1 places, such as conv1.0 \(Conv2d\)"
    ):
        cenet.save(moved, tmp_path)


@pytest.mark.filterwarnings("ignore:the weight of")
def test_timms_description_follows_what_is_put_in_and_taken_out():
    model = timm.create_model("test_resnet", in_chans=1)
    before = dict(model.pretrained_cfg)
    cenet.insert_ce_(model, lambda _, name: name == "bn1")
    cenet.insert_ce_(model, lambda _, name: name == "layer1.0.bn2", start="identity")
    args = model._model_args
    assert model.pretrained_cfg == {**before, "architecture": "with_ce"}
    assert (args["network"], args["network_args"]) == ("test_resnet", {"in_chans": 1})
    assert [entry["sites"] for entry in args["ce"]] == [["bn1"], ["layer1.0.bn2"]]
    cenet.remove_ce_(model)
    assert model.pretrained_cfg == before
    assert model._model_args == {"in_chans": 1}


@pytest.mark.filterwarnings("ignore:the weight of")
def test_settings_are_restored_whatever_ce_there_was():
    model = timm.create_model("test_resnet")
    cenet.insert_ce_(model, lambda _, name: name in ("bn1", "layer1.0.bn2"), momentum=None)
    cenet.insert_ce_(
        model, lambda _, name: name == "layer2.0.bn2", layer=cenet.InstanceReweighting2d
    )
    settings = json.loads(json.dumps(ce_settings(model)))
    other = timm.create_model("test_resnet")
    cenet.insert_ce_(other, lambda _, name: name in ("bn1", "layer3.0.bn2"), group_size=4)
    restore_ce_(other, settings)
    assert ce_settings(other) == settings
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(IMAGES), model.eval()(IMAGES))
    cenet.remove_ce_(other)  # weights that were zero before CE are zero again
    zero = [name for name, p in other.named_parameters() if "bn2.weight" in name and not p.any()]
    assert zero == [n for n, p in timm.create_model("test_resnet").named_parameters()
                    if "bn2.weight" in n and not p.any()]  # fmt: skip


@pytest.mark.usefixtures("one_thread")
def test_runs_are_such_folders(tmp_path):
    trainer(replace(TINY, epochs=1, ce_start="identity"), tmp_path, few_digits()).run()
    assert list(tmp_path.glob("step-*.safetensors"))  # timm alone would take that
    images = few_digits().test.images / 255
    expected = load_run(tmp_path)(images)
    for again in (loaded_by_timm(tmp_path), cenet.load(tmp_path)):
        assert torch.equal(again(images), expected)
        assert again.pretrained_cfg["input_size"] == (1, 8, 8)
        assert tuple(again.pretrained_cfg["label_names"]) == tuple("0123456789")
        assert len(dict(ce_layers(again))) == 6
    pixels = few_digits().train.images.double() / 255
    assert again.pretrained_cfg["mean"] == pytest.approx([pixels.mean().item()])
    assert again.pretrained_cfg["std"] == pytest.approx([pixels.std(correction=0).item()])
    (tmp_path / "config.json").unlink()  # older runs have none
    assert torch.equal(cenet.load(tmp_path)(images), expected)
    (tmp_path / WEIGHTS).unlink()  # a run that is not finished
    assert cenet.load(tmp_path)(images).isfinite().all()


def test_the_weights_are_a_state_dict_that_is_noticed_to_be_damaged(tmp_path):
    model = with_ce("test_efficientnet", start="identity")
    cenet.save(nn.DataParallel(model), tmp_path)
    file = tmp_path / "model.safetensors"
    assert load_file(file).keys() == model.state_dict().keys()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match="does not match its digest"):
        cenet.load(tmp_path)
    file.unlink()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"is not a folder of cenet\.save"):
        cenet.load(tmp_path / "empty")
