"""The catalogue of results: the paper's figures and tables that need training runs, and ours."""

from collections.abc import Sequence

from experiments.accuracy import Line, accuracy_table
from experiments.detection import Line as Detection
from experiments.detection import detection_comparison, detection_table
from experiments.figures import ablation, bars, curves, sweep
from experiments.inference import Line as Cost
from experiments.inference import inference_table
from experiments.lasting_result import lasting
from experiments.looking import gradcam, magnitude
from experiments.measures_table import measures, selected_measures
from experiments.mixing import mixing
from experiments.result import Result, Rows
from experiments.runs import runs
from experiments.selection import Grid, finals, selected_table, settings_table
from experiments.special import betas, correlation, label_corruption
from experiments.speed import learning_speed
from experiments.summary import Comparison, Sides, summary
from experiments.transfer import transfer

VGG_SEEDS = 5
# of runs that several results share
SEEDS = {"vgg16_plain": VGG_SEEDS, "vgg16_ce": VGG_SEEDS}
MEASURED = (("inhibited, first six layers", "inhibited_first_six"), ("dormant", "dormant"))

PAPER: tuple[Result, ...] = (
    bars(
        "fig1a", "Fig. 1 a: norms, VGG-16, CIFAR-10",
        "CE leaves fewer channels inhibited after batch norm and layer norm, and errs less",
        (("BN", "vgg16_plain"), ("BN+CE", "vgg16_ce"),
         ("LN", "vgg16_ln"), ("LN+CE", "vgg16_ln_ce")), SEEDS,
    ),
    bars(
        "fig1b", "Fig. 1 b: activations, VGG-16, CIFAR-10",
        "CE leaves fewer channels inhibited before ELU and leaky ReLU, and errs less",
        (("ELU", "vgg16_elu"), ("CE+ELU", "vgg16_elu_ce"),
         ("LReLU", "vgg16_leaky_relu"), ("CE+LReLU", "vgg16_leaky_relu_ce")), SEEDS,
    ),
    ablation(
        "fig1c", "Fig. 1 c: channels of the third layer set to zero, VGG-16, CIFAR-10",
        "with CE accuracy falls more gently, before ReLU and ELU",
        (("BN+ReLU", "vgg16_plain"), ("BN+CE+ReLU", "vgg16_ce"),
         ("BN+ELU", "vgg16_elu"), ("BN+CE+ELU", "vgg16_elu_ce")), SEEDS,
    ),
    accuracy_table(
        "table1", "Table 1: ResNets, ImageNet", "CE is more accurate than SE at the same cost",
        (
            Line("ResNet-18", "plain", "resnet18_plain", 70.4, 89.4),
            Line("ResNet-18", "SE", "resnet18_se", 71.4, 90.4),
            Line("ResNet-18", "CE", "resnet18_ce", 71.9, 90.8),
            Line("ResNet-50", "plain", "resnet50_plain", 76.6, 93.0),
            Line("ResNet-50", "SE", "resnet50_se", 77.6, 93.7),
            Line("ResNet-50", "CE", "resnet50_ce", 78.3, 94.1),
            Line("ResNet-101", "plain", "resnet101_plain", 78.0, 94.1),
            Line("ResNet-101", "SE", "resnet101_se", 78.5, 94.1),
            Line("ResNet-101", "CE", "resnet101_ce", 79.0, 94.6),
        ),
    ),
    accuracy_table(
        "table2", "Table 2: small networks, ImageNet",
        "CE gains up to 2.1 over plain networks, more than SE",
        (
            Line("MobileNetV2", "plain", "mobilenetv2_100_plain", 72.5, 90.8),
            Line("MobileNetV2", "SE", "mobilenetv2_100_se", 73.5, 91.7),
            Line("MobileNetV2", "CE", "mobilenetv2_100_ce", 74.6, 91.7),
            Line("ShuffleNetV2 0.5×", "plain", "shufflenetv2_x0_5_plain", 59.2, 82.0),
            Line("ShuffleNetV2 0.5×", "SE", "shufflenetv2_x0_5_se", 60.2, 82.4),
            Line("ShuffleNetV2 0.5×", "CE", "shufflenetv2_x0_5_ce", 60.5, 82.7),
            Line("ShuffleNetV2 1×", "plain", "shufflenetv2_x1_0_plain", 69.0, 88.6),
            Line("ShuffleNetV2 1×", "SE", "shufflenetv2_x1_0_se", 70.7, 89.6),
            Line("ShuffleNetV2 1×", "CE", "shufflenetv2_x1_0_ce", 71.2, 89.8),
        ),
    ),
    inference_table(
        "table_cost", "Tables 1 and 2: cost of inference, 32 images of 224×224",
        "CE costs as much as SE, and hardly more than the plain network",
        (
            Cost("ResNet-18", "resnet18", "plain", 1.82, 3.69, 0.003),
            Cost("ResNet-18", "resnet18", "se", 1.82, 3.69, 0.005),
            Cost("ResNet-18", "resnet18", "ce", 1.83, 4.13, 0.006),
            Cost("ResNet-50", "resnet50", "plain", 4.14, 8.61, 0.005),
            Cost("ResNet-50", "resnet50", "se", 4.15, 11.08, 0.010),
            Cost("ResNet-50", "resnet50", "ce", 4.16, 11.06, 0.009),
            Cost("ResNet-101", "resnet101", "plain", 7.87, 15.58, 0.011),
            Cost("ResNet-101", "resnet101", "se", 7.88, 19.34, 0.040),
            Cost("ResNet-101", "resnet101", "ce", 7.89, 17.05, 0.015),
            Cost("MobileNetV2", "mobilenetv2_100", "plain", 0.33),
            Cost("MobileNetV2", "mobilenetv2_100", "se", 0.33),
            Cost("MobileNetV2", "mobilenetv2_100", "ce", 0.33),
            Cost("ShuffleNetV2 0.5×", "shufflenetv2_x0_5", "plain", 0.05),
            Cost("ShuffleNetV2 0.5×", "shufflenetv2_x0_5", "se", 0.05),
            Cost("ShuffleNetV2 0.5×", "shufflenetv2_x0_5", "ce", 0.05),
            Cost("ShuffleNetV2 1×", "shufflenetv2_x1_0", "plain", 0.15),
            Cost("ShuffleNetV2 1×", "shufflenetv2_x1_0", "se", 0.15),
            Cost("ShuffleNetV2 1×", "shufflenetv2_x1_0", "ce", 0.16),
        ),
    ),
    magnitude(
        "fig_magnitude", "Fig. CEplot: ℓ2 over channels after the first norm, VGG-16, CIFAR-10",
        "the channels have a larger magnitude at every location with CE",
        (("BN", "vgg16_plain"), ("BN+CE", "vgg16_ce")), SEEDS,
    ),
    curves(
        "fig_curves", "Fig. CEeuqal a: error by epoch, ResNet-50, ImageNet",
        "CE errs less than SE and BN, in training and in validation",
        (("BN", "resnet50_plain"), ("SE", "resnet50_se"), ("CE", "resnet50_ce")),
    ),
    label_corruption(
        "fig_label_corruption", "Fig. CEeuqal b: wrong labels, VGG-16, CIFAR-10",
        "CE generalizes better at every share of wrong labels", (0.0, 0.2, 0.4, 0.6, 0.8),
    ),
    ablation(
        "fig_ablation_imagenet", "Fig. CEeuqal c: channels of the first norm set to zero, ImageNet",
        "CE makes channels more equal on ImageNet too",
        (("ResNet-50", "resnet50_plain"), ("CE-ResNet-50", "resnet50_ce"),
         ("MobileNetV2", "mobilenetv2_100_plain"), ("CE-MobileNetV2", "mobilenetv2_100_ce")),
    ),
    sweep(
        "fig_weight_decay", "Fig. CEeuqal d, e: weight decay, VGG-16, CIFAR-10",
        "weight decay inhibits channels of BN and costs accuracy; BD prevents most of it, CE more",
        (("BN", "vgg16_plain"), ("BD", "vgg16_bd"), ("CE", "vgg16_ce")),
        "weight_decay", (1e-4, 5e-4, 2e-3, 5e-3), (*MEASURED, ("top-1", "top1")),
    ),
    correlation(
        "fig_correlation", "Fig. CE-corr: correlation of channels, VGG-16, CIFAR-10",
        "BD, IR and CE all have lower correlations than BN, at every depth",
        (("BN", "vgg16_plain"), ("BD", "vgg16_bd"), ("IR", "vgg16_ir"), ("CE", "vgg16_ce")),
    ),
    detection_table(
        "table3", "Table 3: Mask R-CNN, COCO",
        "CE improves boxes by 2.2 AP and masks by 2.7 with ResNet-50, synchronized CE by more",
        (
            Detection("ResNet-50", "resnet50_plain", "resnet50_plain",
                      (38.6, 59.5, 41.9, 34.2, 56.2, 36.1)),
            Detection("+CE", "resnet50_ce", "resnet50_ce", (40.8, 62.7, 44.3, 36.9, 59.2, 39.4)),
            Detection("+SyncCE", "resnet50_syncce", "resnet50_ce",
                      (42.0, 62.6, 46.1, 37.5, 59.5, 40.3)),
            Detection("ResNet-101", "resnet101_plain", "resnet101_plain",
                      (40.3, 61.5, 44.1, 36.5, 58.1, 39.1)),
            Detection("+CE", "resnet101_ce", "resnet101_ce", (41.6, 62.8, 45.8, 37.4, 59.4, 40.0)),
        ),
    ),
    betas(
        "table_beta", "Table gammabeta: share of β ≤ 0, ImageNet", "most β are not positive",
        (("ResNet-18", "resnet18_plain", 76.0), ("ResNet-50", "resnet50_plain", 76.7),
         ("ResNet-101", "resnet101_plain", 81.8)),
    ),
    accuracy_table(
        "table_normalizers", "Table other-normalizer: other norms and activations, ImageNet",
        "CE improves all of them",
        (
            Line("ResNet-50, GN", "plain", "resnet50_gn", 75.6, 92.8),
            Line("ResNet-50, GN", "CE", "resnet50_gn_ce", 76.2, 92.9),
            Line("ResNet-50, IN", "plain", "resnet50_in", 74.2, 91.9),
            Line("ResNet-50, IN", "CE", "resnet50_in_ce", 76.0, 92.7),
            Line("ResNet-50, LN", "plain", "resnet50_ln", 71.6, 89.9),
            Line("ResNet-50, LN", "CE", "resnet50_ln_ce", 73.3, 91.3),
            Line("ResNet-18, BN, ReLU", "plain", "resnet18_plain", 70.5, 89.4),
            Line("ResNet-18, BN, ReLU", "CE", "resnet18_ce", 71.9, 90.2),
            Line("ResNet-18, BN, ELU", "plain", "resnet18_elu", 68.1, 87.6),
            Line("ResNet-18, BN, ELU", "CE", "resnet18_elu_ce", 68.7, 88.5),
        ),
    ),
    accuracy_table(
        "table_branches", "Table BCDAVICE: the branches, ResNet-50, ImageNet",
        "BD and IR alone gain 0.4 and 0.7, together in CE 1.7",
        (
            Line("ResNet-50", "plain", "resnet50_plain", 76.6),
            Line("ResNet-50", "BD", "resnet50_bd", 77.0),
            Line("ResNet-50", "IR", "resnet50_ir", 77.3),
            Line("ResNet-50", "CE", "resnet50_ce", 78.3),
        ),
    ),
    accuracy_table(
        "table_decorrelation", "Table comparewithsw: other norms that decorrelate, ImageNet",
        "CE is more accurate than IterNorm and switchable whitening (where they are, the paper "
        "does not say: in the places of their own papers, and everywhere)",
        (
            Line("ResNet-50", "IterNorm, first norm", "resnet50_iternorm_first", 77.1),
            Line("ResNet-50", "IterNorm, all norms", "resnet50_iternorm", 77.1),
            Line("ResNet-50", "SW, 7 norms", "resnet50_sw_7", 77.9),
            Line("ResNet-50", "SW, all norms", "resnet50_sw", 77.9),
            Line("ResNet-50", "CE", "resnet50_ce", 78.3),
            Line("ResNet-18", "IterNorm, first norm", "resnet18_iternorm_first", 71.1),
            Line("ResNet-18", "IterNorm, all norms", "resnet18_iternorm", 71.1),
            Line("ResNet-18", "SW, 4 norms", "resnet18_sw_4", 71.6),
            Line("ResNet-18", "SW, all norms", "resnet18_sw", 71.6),
            Line("ResNet-18", "CE", "resnet18_ce", 71.9),
        ),
    ),
    accuracy_table(
        "table_position", "Table integrationstra: which norm of a block CE follows, ImageNet",
        "CE after the third norm of a block, with four times the channels, gains 0.4 over CE "
        "after the second",
        (
            Line("ResNet-50", "CE after the second", "resnet50_ce2", 77.9),
            Line("ResNet-50", "CE after the third", "resnet50_ce", 78.3),
        ),
    ),
    gradcam(
        "fig_gradcam", "Fig. inputIDbranch: Grad-CAM for the true class, ResNet-50, ImageNet",
        "CE sees more of the object and less of the background than BD",
        (("plain", "resnet50_plain"), ("SE", "resnet50_se"), ("BD", "resnet50_bd"),
         ("CE", "resnet50_ce")),
    ),
    ablation(
        "fig_ablation_activations", "Fig. relu-norm-drop a: activations, VGG-16, CIFAR-10",
        "leaky ReLU and CE both make channels of BN + ReLU more equal",
        (("BN+ReLU", "vgg16_plain"), ("BN+ELU", "vgg16_elu"), ("BN+LReLU", "vgg16_leaky_relu"),
         ("BN+CE+ReLU", "vgg16_ce")), SEEDS,
    ),
    ablation(
        "fig_ablation_norms", "Fig. relu-norm-drop b: norms, ResNet-50, ImageNet",
        "CE is the gentlest and the most accurate of the three",
        (("BN+ReLU", "resnet50_plain"), ("SN+ReLU", "resnet50_sn"), ("BN+CE+ReLU", "resnet50_ce")),
    ),
)  # fmt: skip

BLOCKS = (("plain", "plain"), ("SE", "se"), ("CE", "ce"))
RESNETS = (("ResNet-18", "tiny_resnet18"), ("ResNet-50", "tiny_resnet50"))
SMALL = (
    ("MobileNetV2", "tiny_mobilenetv2_100"),
    ("ShuffleNetV2 0.5×", "tiny_shufflenetv2_x0_5"),
    ("ShuffleNetV2 1×", "tiny_shufflenetv2_x1_0"),
)
# what is added to batch norm
BRANCHES = (("plain", "plain"), ("SE", "se"), ("BD", "bd"), ("IR", "ir"), ("CE", "ce"))
OTHERS = (
    ("CE, with SE's parameters", "ce_small"), ("CE after the first norm", "ce_conv1"),
    ("IterNorm, first norm", "iternorm_first"), ("IterNorm, all norms", "iternorm"),
    ("SW, 4 norms", "sw_4"), ("SW, all norms", "sw"), ("SN", "sn"),
)  # fmt: skip
OTHER_NORMS = ("gn", "in", "ln")
RATES = ("lr", (0.05, 0.1, 0.2))
GRID = Grid((RATES, ("weight_decay", (1e-4, 5e-4))))
# the weight decay that held-out images chose for plain, SE and CE ResNet-18 alike
RATES_ALONE = Grid((RATES,), fixed=(("weight_decay", 2.5e-3),))


def _lines(networks: Sequence[tuple[str, str]], rows: Sequence[tuple[str, str]]) -> list[Line]:
    return [
        Line(network, label, f"{family}_{row}")
        for network, family in networks
        for label, row in rows
    ]


def _vgg(rows: Rows) -> Sides:
    return {"plain": runs("vgg16_plain", VGG_SEEDS), "CE": runs("vgg16_ce", VGG_SEEDS)}


def _tiny(title: str, network: str, seeds: int) -> Comparison:
    def sides(rows: Rows) -> Sides:
        return {label: finals(f"{network}_{row}", GRID, seeds, rows) for label, row in BLOCKS}

    return Comparison(f"{title}, Tiny ImageNet-100", sides)


OURS: tuple[Result, ...] = (
    summary(
        "main", "Top-1 without anything, with SE and with CE: all networks over seeds",
        "does CE help?",
        [
            Comparison("VGG-16, CIFAR-10 (JPEG copy)", _vgg),
            *(_tiny(*network, 5) for network in RESNETS),
            *(_tiny(*network, 3) for network in SMALL),
        ],
    ),
    settings_table(
        "settings", "Learning rate and weight decay that were tried, Tiny ImageNet-100",
        "which settings suit the plain network, SE and CE?",
        _lines(RESNETS, BLOCKS), GRID,
    ),
    measures(
        "vgg16", "VGG-16, CIFAR-10 (JPEG copy): accuracy and every measure of channels",
        "does CE wake channels up, and does it help?",
        (("batch norm", "vgg16_plain"), ("with CE", "vgg16_ce")), VGG_SEEDS,
    ),
    measures(
        "vgg16_short", "The same, in a few lines", "as above",
        (("batch norm", "vgg16_plain"), ("with CE", "vgg16_ce")), VGG_SEEDS,
        {
            "top1": "top-1",
            "test_loss": "test loss",
            "duplicates": "channels that duplicate another",
            "participation_share":
                "effective dimensions / channels (participation ratio of the covariance)",
            "dormant": "dormant channels: mean activation ≤ 0.1 × the mean of their layer",
            "inhibited_first_six":
                "inhibited channels: mean activation < 0.01, the paper's figure, first six layers",
            "inhibited": "the same, all layers",
        },
    ),
    selected_table(
        "tiny_resnets", "ResNets, Tiny ImageNet-100 (first 100 wnids)",
        "is CE more accurate than the plain network and than SE, each at its best settings?",
        _lines(RESNETS, BLOCKS), GRID, 5,
    ),
    *(
        selected_measures(
            f"measures_{network.removeprefix('tiny_')}",
            f"{title}, Tiny ImageNet-100: every measure of channels",
            "does CE wake channels up, and makes it them less redundant?",
            _lines([(title, network)], BLOCKS), GRID, 5,
        )
        for title, network in RESNETS
    ),
    sweep(
        "dormant_rates", "Dormant channels at equal settings: ResNet-18, Tiny ImageNet-100",
        "does CE, one of its branches, or the learning rate leave channels dormant?",
        [(label, f"tiny_resnet18_{row}") for label, row in BRANCHES if label != "SE"],
        "lr", (0.1, 0.2),
        (("top-1", "top1"), ("dormant", "dormant"), ("prunable", "prunable")),
        seeds=3, weight_decay=2.5e-3,
    ),
    mixing(
        "fig_lambda", "λ of CE by layer, and while networks train",
        "how much does CE take from the batch (λ), and how much from the image (1 − λ)?",
        [Line("VGG-16, CIFAR-10", "CE", "vgg16_ce")],
        [Line(f"{title}, Tiny ImageNet-100", "CE", f"{network}_ce") for title, network in RESNETS],
        GRID, 5,
    ),
    selected_table(
        "tiny_small", "Small networks, Tiny ImageNet-100 (first 100 wnids)",
        "the same for networks of few multiply-adds", _lines(SMALL, BLOCKS), GRID, 3,
    ),
    selected_table(
        "tiny_variants", "ResNet-18 with what the paper compares, Tiny ImageNet-100",
        "which part of CE matters, where, and after which norm?",
        [
            *_lines(RESNETS[:1], (*BRANCHES, *OTHERS)),
            *(
                Line(f"ResNet-18, {norm.upper()}", label, f"tiny_resnet18_{norm}{suffix}")
                for norm in OTHER_NORMS
                for label, suffix in (("plain", ""), ("CE", "_ce"))
            ),
        ],
        RATES_ALONE, 3,
    ),
    learning_speed(
        "learning_speed", "Updates until a network is where the plain one ends, Tiny ImageNet-100",
        "does CE learn faster, each network at its best learning rate?",
        _lines(RESNETS[:1], BRANCHES), RATES_ALONE, 3,
    ),
    transfer(
        "transfer", "CE in a trained network: ResNet-18, Tiny ImageNet-100, 8 more epochs",
        "does a trained network gain more from further training if it gets CE as an identity?",
        "tiny_resnet18", 3,
    ),
    transfer(
        "transfer_cifar10", "Fine-tuning: ResNet-18 from Tiny ImageNet-100 to CIFAR-10, 8 epochs",
        "does a trained network learn other images better if it gets CE as an identity?",
        "tiny_resnet18", 3, "cifar10",
    ),
    detection_comparison(
        "coco128", "Mask R-CNN from Tiny ImageNet classifiers: 96 images of COCO, 32 to test",
        "do classifiers hand their weights to detectors, with CE and without? (no comparison)",
        (Detection("plain", "coco128_plain", "tiny_resnet50_plain"),
         Detection("CE", "coco128_ce", "tiny_resnet50_ce")),
        GRID, 3,
    ),
    lasting(
        "lasting", "Learning that lasts: VGG-16, 10,000 images of CIFAR-10 (JPEG copy)",
        "does a network with CE keep its ability to learn over 25 tasks with labels drawn anew?",
        "vgg16", 3,
    ),
    lasting(
        "lasting_digits", "Learning that lasts: vgg6, 1,347 images of digits, on a CPU",
        "the same at a small scale", "vgg6", 3,
    ),
)  # fmt: skip

RESULTS = {result.name: result for result in (*PAPER, *OURS)}
