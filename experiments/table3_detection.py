"""Table 3: Mask R-CNN on COCO with plain, CE and synchronized CE backbones.

    python experiments/table3_detection.py --data COCO --checkpoints FOLDER --device cuda
    python experiments/table3_detection.py --scale smoke

FOLDER holds the classifiers they start from: resnet50.safetensors, ceresnet50.safetensors,
resnet101.safetensors and ceresnet101.safetensors.

Claim of the paper: CE improves boxes by 2.2 AP and masks by 2.7 with ResNet-50, synchronized CE
by more, and CE by 1.3 and 0.9 with ResNet-101.
Expected cost: 5 runs on COCO, a day each on eight GPUs; about 50 s of a CPU core with --scale
smoke, which trains on drawn shapes for one epoch.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from _experiment import HERE, Study
from cenet.detection.engine import DetectionOptions
from cenet.detection.recipes import RECIPES
from cenet.detection.run import DetectionJob, train
from cenet.train.logbook import METRICS, read_metrics
from cenet.train.weights import WEIGHTS

# recipe, the paper's AP of boxes and of masks
ROWS = (
    ("resnet50_plain", 0.386, 0.342),
    ("resnet50_ce", 0.408, 0.369),
    ("resnet50_syncce", 0.420, 0.375),
    ("resnet101_plain", 0.403, 0.365),
    ("resnet101_ce", 0.416, 0.374),
)
SMOKE = (("shapes_plain", None, None), ("shapes", None, None))


def main() -> None:
    """Train what is missing, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", choices=("paper", "smoke"), default="paper")
    parser.add_argument("--data", type=Path, help="COCO, as for `cenet detect train`")
    parser.add_argument("--checkpoints", type=Path, help="folder of classifiers")
    parser.add_argument("--runs", type=Path, default=HERE / "out" / "runs")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    found = parser.parse_args()
    smoke = found.scale == "smoke"
    if not smoke and (found.data is None or found.checkpoints is None):
        parser.error("--data FOLDER and --checkpoints FOLDER are needed, or --scale smoke")
    rows = []
    for name, box, mask in SMOKE if smoke else ROWS:
        last = _last_row(name, found, smoke=smoke)
        measured = {key: value for key, value in last.items() if "_ap" in key}
        rows.append({"row": name, **measured, "paper_box_ap": box, "paper_mask_ap": mask})
    Study(
        "table3_detection", smoke, found.data, found.runs, found.out, found.device, None, 1
    ).write(rows)


def _last_row(name: str, found: Any, *, smoke: bool) -> dict[str, Any]:
    recipe = replace(RECIPES[name], epochs=1, warmup_epochs=0.5) if smoke else RECIPES[name]
    folder = found.runs / f"detect_{name}{'-epochs=1' * smoke}"
    if not (folder / WEIGHTS).is_file():
        print(f"training {folder.name}", flush=True)
        checkpoint = None if smoke else found.checkpoints / f"{recipe.backbone}.safetensors"
        options = DetectionOptions(folder, resume="auto")
        train(DetectionJob(recipe, options, found.data, checkpoint, found.device))
    return read_metrics(folder / METRICS)[-1]


if __name__ == "__main__":
    main()
