"""Time of a run on one H200: measured, or estimated from its network."""

from experiments.collecting import parts_of
from experiments.runs import DetectorRun, LastingRun, Run
from experiments.tables import Row

# training images, and height and width that multiply-adds are counted at
IMAGES = {
    "imagenet": 1_281_167, "cifar10": 50_000, "tinyimagenet": 50_000, "digits": 1_347,
    "coco": 117_266, "coco128": 96, "shapes": 400,
}  # fmt: skip
# images a second of plain networks in bfloat16 and CUDA graphs, measured where a commit is named in
# benchmarks/results, else from multiply-adds, at the rate that ResNet-50 reaches
SPEEDS = {
    ("vgg16", 32): 67_000,
    ("resnet50", 64): 31_000,
    ("resnet50", 224): 5_300,
}
MULTIPLY_ADDS = {  # billions at 224×224
    "resnet18": 1.82, "resnet50": 4.14, "resnet101": 7.87, "mobilenetv2_100": 0.33,
    "shufflenetv2_x0_5": 0.05, "shufflenetv2_x1_0": 0.15,
}  # fmt: skip
# small networks wait for memory and launches, not for arithmetic
FASTEST = 4.0  # times ResNet-50
ON_A_CPU = 5_000.0  # images a second of networks for digits
WATCHED = 3.0  # times as long as in CUDA graphs
DETECTION = 54.0  # images a second of Mask R-CNN, batch 16 (docs/detection.md)
START = 20.0  # seconds, with the diagnosis but for the ablation
# test images that are ablated, and how often a network takes each: 60 times, and once per channel.
# A pass in float32 counts like a step of training in bfloat16
ABLATED = {"imagenet": 5_000, "cifar10": 10_000, "tinyimagenet": 10_000, "digits": 450}
PASSES = {"vgg16": 60 + 128}
PASSES_OF_OTHERS = 60 + 64


def seconds(run: Run, rows: list[Row]) -> float:
    """Of a run; the fastest of the same recipe and epochs tells, where no speed is known.

    Args:
        run: one that is missing.
        rows: of the runs that exist; several may have shared the GPU.
    """
    recipe = run.made
    if isinstance(run, LastingRun):
        seen = recipe.tasks * recipe.epochs * min(recipe.images, IMAGES[run.dataset])
        return START + seen / SPEEDS.get((recipe.network, 32), ON_A_CPU)
    if isinstance(run, DetectorRun):
        return IMAGES[recipe.dataset] * recipe.epochs / DETECTION
    speed = SPEEDS.get((recipe.network, recipe.image_size))
    passes = 0
    if "ablation" in parts_of(run):
        passes = ABLATED[recipe.dataset] * PASSES.get(recipe.network, PASSES_OF_OTHERS)
    start = START + passes / (speed or _about(recipe.network, recipe.image_size))
    known = [
        float(row["seconds"])
        for row in rows
        if row["recipe"] == run.recipe and int(row["epochs"]) == recipe.epochs
    ]
    if speed is None and known and not run.watched:
        return start + min(known)
    images = IMAGES[recipe.dataset] * recipe.epochs
    speed = speed or _about(recipe.network, recipe.image_size)
    return start + images / speed * (WATCHED if run.watched else 1.0)


def _about(network: str, size: int) -> float:
    """Images a second, at the rate of arithmetic that ResNet-50 reaches."""
    if network not in MULTIPLY_ADDS:  # digits
        return ON_A_CPU
    faster = min(FASTEST, MULTIPLY_ADDS["resnet50"] / MULTIPLY_ADDS[network])
    return SPEEDS["resnet50", 64 if size <= 64 else 224] * faster


def in_words(amount: float) -> str:
    """3 min, 2.5 h."""
    return f"{amount / 60:.0f} min" if amount < 5400 else f"{amount / 3600:.1f} h"
