"""Step time and memory of Mask R-CNN on ResNet-50 with and without CE, and its overfitting.

The networks are timed alternately in one process, on the same batches. With --epochs they are then
trained from scratch on the whole folder without augmentation, in the loop of `cenet detect train`,
and a page is written for each run. Processes that read images start anew in each epoch; for a small
dataset, --times N makes an epoch of N copies of each image.

    PYTHONPATH=src python benchmarks/bench_detection.py --data COCO128 --batch 16
    PYTHONPATH=src python benchmarks/bench_detection.py --data COCO128 --rounds 0 --networks ce \
        --size 400 --batch 8 --epochs 10 --times 16 --lr 0.04 --workers 5 --runs runs
    PYTHONPATH=src python benchmarks/bench_detection.py --size 64 --rounds 2   # smoke test

Without --data the images are drawn shapes, resized.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from _runner import (
    RESULTS,
    append_rows,
    environment,
    free_memory,
    interleave,
    peak_mb,
    row,
    shape_text,
)
from cenet.detection.data import SceneSplit, load
from cenet.detection.job import DetectionJob, show_run, train
from cenet.detection.recipes import RECIPES, DetectionRecipe
from cenet.detection.trainer import DetectionOptions, DetectionTrainer
from cenet.distributed import Processes

BACKBONES = {"plain": "resnet50", "ce": "ceresnet50"}
SETTINGS = ("frozen", "synchronized", "scratch")


def recipe_of(args: argparse.Namespace, backbone: str, **changes: Any) -> DetectionRecipe:
    return replace(
        RECIPES["resnet50_ce"],
        backbone=backbone,
        dataset="shapes" if args.data is None else "coco",
        batch_size=args.batch,
        min_sizes=(args.size,),
        max_size=args.size * 5 // 3,
        precision=args.precision,
        **changes,
    )


def stepper(
    recipe: DetectionRecipe, data: SceneSplit, folder: Path, device: torch.device
) -> Callable[[], None]:
    """A step of training on the batch that is next, from the first one again after eight."""
    options = DetectionOptions(folder, workers=0, channels_last=device.type == "cuda")
    trainer = DetectionTrainer(recipe, data, options, Processes(0, 1, device))
    trainer.network.train()
    source = trainer.batches(0, 0)
    batches = [next(source) for _ in range(min(8, trainer.shard.steps))]
    place = 0

    def step() -> None:
        nonlocal place
        trainer.add_gradients(batches[place % len(batches)])
        trainer.apply_gradients()
        place += 1

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, help="folder with COCO's layout; default: drawn shapes"
    )
    parser.add_argument("--size", type=int, default=800, help="shorter side of the images")
    parser.add_argument("--batch", type=int, default=2, help="images per step")
    parser.add_argument("--precision", default="bfloat16", help="bfloat16, float16 or float32")
    parser.add_argument("--rounds", type=int, default=20, help="number of timed steps; 0: none")
    parser.add_argument("--networks", nargs="+", choices=BACKBONES, default=list(BACKBONES))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--epochs", type=int, default=0, help="epochs of training; 0: none")
    parser.add_argument("--times", type=int, default=1, help="copies of each image per epoch")
    parser.add_argument(
        "--lr", type=float, default=0.02, help="learning rate of training, for 16 images"
    )
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that read images in training"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="folder of the training runs"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "detection.csv", help="CSV file for the step times"
    )
    args = parser.parse_args()
    if args.times > 1 and args.data is None:
        parser.error(f"--times {args.times} repeats the images of --data, which is missing")

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if args.rounds:
        append_rows(args.out, time_steps(args, device))
    if args.epochs:
        overfit(args, device)


def time_steps(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    data = load(recipe_of(args, "resnet50"), args.data)
    print(data.train.report())
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for setting in args.settings:
            changes = {"setting": setting, "trainable_layers": 5 if setting == "scratch" else 3}
            steps = {
                name: stepper(
                    recipe_of(args, BACKBONES[name], **changes), data, Path(folder), device
                )
                for name in args.networks
            }
            timings = interleave(steps, args.rounds, device)
            peaks = {name: peak_mb(step, device) for name, step in steps.items()}
            first = args.networks[0]
            for name, timing in timings.items():
                ratio = timing.p50 / timings[first].p50
                peak = peaks[name]
                memory = "" if peak is None else f", {peak:.0f} MB, {peak / peaks[first]:.3f}"
                print(f"{setting:12} {args.precision} {name:5} {timing.p50:8.1f} ms a step "
                      f"({timing.p20:.1f} to {timing.p80:.1f}), {ratio:.3f} of {first}{memory}",
                      flush=True)  # fmt: skip
                columns = {"op": "maskrcnn_resnet50", "provider": name, "mode": f"step {setting}",
                           "shape": shape_text((args.batch, 3, args.size, args.size * 5 // 3)),
                           "dtype": args.precision, "layout": "channels_last"}  # fmt: skip
                rows.append(row(timing, peaks[name], {**environment(device), **columns}))
            del steps
            free_memory(device)
    return rows


def repeated(data: Path, times: int, out: Path) -> Path:
    """A folder whose epoch has each image of `data` so many times, and whose test has it once."""
    whole = json.loads((data / "instances.json").read_text())
    (out / "annotations").mkdir(parents=True, exist_ok=True)
    for name in ("train2017", "val2017"):
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to((data / "images").resolve())
    (out / "annotations" / "instances_val2017.json").write_text(json.dumps(whole))
    images, objects = whole["images"], whole["annotations"]
    step = 1 + max(record["id"] for record in images + objects)
    many = {
        "images": [{**one, "id": one["id"] + k * step} for k in range(times) for one in images],
        "annotations": [
            {**one, "id": one["id"] + k * step, "image_id": one["image_id"] + k * step}
            for k in range(times)
            for one in objects
        ],
    }
    (out / "annotations" / "instances_train2017.json").write_text(json.dumps({**whole, **many}))
    return out


def overfit(args: argparse.Namespace, device: torch.device) -> None:
    data = args.data
    if args.times > 1:
        data = repeated(data, args.times, args.runs / f"times_{args.times}")
    for name in args.networks:
        recipe = recipe_of(
            args, BACKBONES[name], setting="scratch", trainable_layers=5, epochs=args.epochs,
            lr=args.lr, schedule="cosine", warmup_epochs=args.epochs / 20, clip_grad=10.0,
            flip=False,
        )  # fmt: skip
        out = args.runs / f"overfit_{name}"
        options = DetectionOptions(
            out, resume="auto", evaluate_every=-(-args.epochs // 2), workers=args.workers,
            channels_last=device.type == "cuda",
        )  # fmt: skip
        last = train(DetectionJob(recipe, options, data, device=device.type))
        found = {key: round(value, 3) for key, value in last.items() if "_ap" in key}
        print(f"{name}: {last['updates']} updates, loss {last['train_loss']:.3f}, {found}")
        print(f"wrote {show_run(out, data, device.type)}", flush=True)


if __name__ == "__main__":
    main()
