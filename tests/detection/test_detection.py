"""Backbones and detectors: what trains in each setting, synchronized statistics, deploy forms."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from _checks import RTOL, assert_close
from _detection import CHANNELS, STEM, batch, resnet_over_list, small_detector
from _distributed import run
from _weights import repeated_draws
from cenet import NormCE2d
from cenet.detection import (
    ce_fpn_backbone,
    export_backbone,
    fasterrcnn_ceresnet50_fpn,
    fold_detector,
    maskrcnn_ceresnet50_fpn,
    maskrcnn_ceresnet101_fpn,
)
from cenet.models import create_model
from cenet.nn import ce_layers

pytestmark = pytest.mark.usefixtures("quick_weights")

# of a norm: mean, variance, count; of CE: W, s^{-1/2}, and a count in each branch
NORM_BUFFERS, CE_BUFFERS = 3, 4


def convolutions(number: int) -> int:
    """Weights of the convolutions of a stage of the small ResNet-18."""
    before = STEM if number == 1 else CHANNELS[number - 2]
    own = CHANNELS[number - 1]
    # without a stride, a shortcut is needed for other channels only
    return before * own * 9 + 3 * own * own * 9 + before * own


def norms(number: int) -> int:
    """γ and β: two norms in each of two blocks, and one of the shortcut."""
    return 2 * 5 * CHANNELS[number - 1]


def gates(number: int) -> int:
    """Gate and λ of the CE in each of two blocks."""
    own = CHANNELS[number - 1]
    hidden = max(8, own // 4)
    return 2 * (2 * own * hidden + 2 * hidden + 1)


def trained(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def steps(model: nn.Module, count: int = 2) -> None:
    """Real updates with momentum and weight decay, evaluation and training in between."""
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], 0.01, momentum=0.9, weight_decay=1e-2
    )
    for step in range(count):
        model.eval()
        model.train()
        loss = sum(model(*batch(seed=step)).values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def changes(model: nn.Module) -> tuple[set[str], set[str]]:
    """Names of parameters and of buffers of the backbone's body that two updates change."""
    body = model.backbone.body
    before = {name: value.clone() for name, value in body.state_dict().items()}
    steps(model)
    moved = {n for n, value in body.state_dict().items() if not torch.equal(value, before[n])}
    parameters = {name for name, _ in body.named_parameters()}
    return moved & parameters, moved - parameters


STAGES = {3: (2, 3, 4), 5: (1, 2, 3, 4)}


@pytest.mark.parametrize("backbone", ["ceresnet18", "resnet18"])
@pytest.mark.parametrize("layers", [3, 5])
def test_frozen_trains_convolutions_alone_and_changes_no_buffer(backbone, layers):
    model = small_detector(backbone, setting="frozen", trainable_layers=layers)
    body = model.backbone.body
    stem = 3 * STEM * 49 if layers == 5 else 0
    assert trained(body) == stem + sum(map(convolutions, STAGES[layers]))
    parameters, buffers = changes(model)
    assert parameters == {n for n, p in body.named_parameters() if p.requires_grad}
    assert all("conv" in name or "downsample.0" in name for name in parameters)
    assert not buffers


@pytest.mark.parametrize("backbone", ["ceresnet18", "resnet18"])
def test_synchronized_trains_norms_too_and_leaves_gate_and_mix_as_they_are(backbone):
    model = small_detector(backbone, setting="synchronized")
    body = model.backbone.body
    assert trained(body) == sum(convolutions(n) + norms(n) for n in STAGES[3])
    parameters, buffers = changes(model)
    names = {n for n, p in body.named_parameters() if p.requires_grad}
    assert parameters == names
    assert not any(".ce." in name for name in names)
    scales = {n for n in names if n.rpartition(".")[0] and body.get_parameter(n).dim() == 1}
    assert len(scales) == 3 * 5 * 2
    # closed stages keep everything; of the three others, 5 norms and 2 CE each
    ce = 2 * CE_BUFFERS if backbone == "ceresnet18" else 0
    assert len(buffers) == 3 * (5 * NORM_BUFFERS + ce)
    assert not any(name.startswith(("bn1", "layer1")) for name in buffers)


def test_scratch_trains_everything():
    model = small_detector(setting="scratch", trainable_layers=5)
    body = model.backbone.body
    hidden = max(8, STEM // 4)
    stem = 3 * STEM * 49 + 2 * STEM + 2 * STEM * hidden + 2 * hidden + 1
    stages = sum(convolutions(n) + norms(n) + gates(n) for n in STAGES[5])
    assert trained(body) == stem + stages == sum(p.numel() for p in body.parameters())
    parameters, buffers = changes(model)
    assert parameters == {name for name, _ in body.named_parameters()}
    assert buffers == {name for name, _ in body.named_buffers()}


def test_counts_of_the_detectors_of_the_paper():
    with torch.device("meta"):
        models = {
            setting: ce_fpn_backbone("ceresnet50", setting=setting).body
            for setting in ("frozen", "synchronized")
        }
    # a stage of n bottlenecks of width w after c channels
    widths, blocks = (64, 128, 256, 512), (3, 4, 6, 3)
    weights = scales = 0
    for number in (1, 2, 3):
        width, before = widths[number], 4 * widths[number - 1]
        first = before * width + 9 * width**2 + 4 * width**2 + before * 4 * width
        other = 4 * width**2 + 9 * width**2 + 4 * width**2
        weights += first + (blocks[number] - 1) * other
        scales += 2 * (blocks[number] * (2 * width + 4 * width) + 4 * width)
    assert trained(models["frozen"]) == weights
    assert trained(models["synchronized"]) == weights + scales


def test_detectors_are_torchvisions():
    with torch.device("meta"):
        mask = maskrcnn_ceresnet50_fpn(num_classes=5, setting="synchronized")
        box, deep = fasterrcnn_ceresnet50_fpn(), maskrcnn_ceresnet101_fpn()
    assert sum(isinstance(m, NormCE2d) for m in mask.modules()) == 14
    assert sum(layer.frozen for _, layer in ce_layers(mask)) == 4  # stem and first stage
    assert mask.roi_heads.box_predictor.cls_score.out_features == 5
    for pool in (mask.roi_heads.box_roi_pool, mask.roi_heads.mask_roi_pool):
        assert pool.scales == [1 / 4, 1 / 8, 1 / 16, 1 / 32]
    assert all(layer.frozen for _, layer in ce_layers(box))
    assert not any(isinstance(m, nn.BatchNorm2d) for m in box.modules())
    assert sum(isinstance(m, NormCE2d) for m in deep.modules()) == 8


def test_a_classifier_becomes_a_backbone(tmp_path):
    torch.manual_seed(1)
    classifier = create_model("resnet18", num_classes=7, channels=CHANNELS)
    with torch.no_grad():
        classifier(torch.randn(4, 3, 64, 64))  # statistics
    path = tmp_path / "weights.safetensors"
    save_file(dict(classifier.state_dict()), path)
    x = torch.randn(2, 3, 64, 64)
    expected = classifier.eval().forward_features(x)
    for setting in ("frozen", "synchronized", "scratch"):
        pyramid = ce_fpn_backbone(
            "ceresnet18", setting=setting, checkpoint=path, channels=CHANNELS
        ).eval()
        assert_close(setting, pyramid.body(x)["3"], expected, RTOL[torch.float32])
        assert list(pyramid(x)) == ["0", "1", "2", "3", "pool"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: {k: v for k, v in s.items() if ".ce." not in k},
            r"ceresnet18: these weights are of another network: 90 missing \(.*, …\); it has no CE",
        ),
        (
            lambda s: {**s, "conv1.weight": s["conv1.weight"][:8], "x": torch.ones(1)},
            r"1 unknown \(x\), 1 of another shape \(conv1.weight \(8, 3, 7, 7\) instead",
        ),
        (lambda s: {**s, "bn1.norm.bias": s["bn1.norm.bias"] * torch.nan}, r"not finite: bn1"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, message, tmp_path):
    state = create_model("resnet18", num_classes=7, channels=CHANNELS).state_dict()
    save_file(change(dict(state)), tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=message):
        ce_fpn_backbone("ceresnet18", checkpoint=tmp_path / "w.safetensors", channels=CHANNELS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "cevgg16"}, r"'cevgg16' is not a backbone; use one of ceresnet18, resnet18"),
        ({"setting": "melted"}, r"setting='melted' must be one of frozen, synchronized, scratch"),
        ({"trainable_layers": 6}, r"trainable_layers=6 must be 0 to 5"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ce_fpn_backbone(**{"name": "ceresnet18", **arguments})


# synchronized statistics

SIZES = {2: ((2, 64, 96), (1, 96, 64)), 3: ((1, 64, 64), (2, 96, 64), (1, 64, 96))}


def images_of(rank: int, ranks: int) -> torch.Tensor:
    n, height, width = SIZES[ranks][rank]
    random = torch.Generator().manual_seed(rank)
    return (rank + 1) * torch.randn(n, 3, height, width, generator=random, dtype=torch.float64)


def body_of(backbone: str) -> nn.Module:
    torch.manual_seed(3)
    with repeated_draws():  # in the processes of the ranks too, which know no fixture
        body = ce_fpn_backbone(
            backbone, setting="synchronized", trainable_layers=5, channels=CHANNELS
        ).body.double()
    with torch.no_grad():
        for parameter in body.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return body.train()


def features(rank: int, ranks: int, backbone: str):
    body = body_of(backbone)
    found = body(images_of(rank, ranks))
    sum(feature.sin().sum() for feature in found.values()).backward()
    gradients = {n: p.grad for n, p in body.named_parameters() if p.requires_grad}
    detached = [feature.detach() for feature in found.values()]
    return detached, dict(body.named_buffers()), gradients


def both(rank: int, ranks: int):
    return {name: features(rank, ranks, name) for name in ("ceresnet18", "resnet18")}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_with_images_of_different_sizes_are_one_batch(ranks):
    """Features, running statistics and gradients of a whole backbone, against a single process over
    the list of all images."""
    found = run(both, ranks, ranks)
    for backbone in ("ceresnet18", "resnet18"):
        body = body_of(backbone)
        stages, seen = resnet_over_list(body, [images_of(rank, ranks) for rank in range(ranks)])
        sum(x.sin().sum() for maps in stages for x in maps).backward()
        for rank in range(ranks):
            features, buffers, _ = found[rank][backbone]
            for number, feature in enumerate(features):
                assert_close(f"stage {number}", feature, stages[number][rank], 1e-9)
            for name, value in seen.items():
                # one step of a momentum of 0.1 away from 0 and 1; CE copies its first batch
                expected = {"running_mean": 0.1 * value, "running_var": 0.9 + 0.1 * value}
                wanted = expected.get(name.rpartition(".")[2], value)
                assert_close(f"{name} of rank {rank}", buffers[name], wanted, 1e-9)
        for name, parameter in body.named_parameters():
            if parameter.requires_grad:
                summed = sum(found[rank][backbone][2][name] for rank in range(ranks))
                assert_close(name, summed, parameter.grad, 1e-8)


# deploy


def test_a_folded_detector_finds_the_same():
    for setting in ("frozen", "scratch"):
        model = small_detector(setting=setting, trainable_layers=5)
        if setting == "scratch":
            steps(model, 1)
        model = model.double().eval()
        folded = fold_detector(model)
        norms = (nn.BatchNorm2d, nn.SyncBatchNorm, FrozenBatchNorm2d, NormCE2d)
        assert not any(isinstance(module, norms) for module in folded.modules())
        images = [image.double() for image in batch()[0]]
        with torch.no_grad():
            for ours, theirs in zip(folded(images), model(images), strict=True):
                assert ours.keys() == theirs.keys()
                for name, value in theirs.items():
                    assert_close(name, ours[name].double(), value.double(), 1e-4)
    with pytest.raises(ValueError, match="evaluation mode"):
        fold_detector(small_detector())
    with pytest.raises(ValueError, match="no CE layer to fold"):
        fold_detector(small_detector("resnet18").eval())


@pytest.mark.slow
def test_the_backbone_is_exported(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = small_detector().eval()
    export_backbone(model, tmp_path / "b.onnx", torch.randn(1, 3, 64, 96))
    session = onnxruntime.InferenceSession(tmp_path / "b.onnx")
    x = torch.randn(3, 3, 64, 96)
    names = [output.name for output in session.get_outputs()]
    assert names == ["0", "1", "2", "3", "pool"]
    with torch.no_grad():
        expected = model.backbone(x)
    for name, value in zip(names, session.run(None, {"images": x.numpy()}), strict=True):
        assert_close(name, torch.from_numpy(value), expected[name], 1e-4)
