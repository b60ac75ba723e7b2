"""Runs and diagnoses by the contract, with made-up numbers that look like those of a network."""

import base64
import json
import math
import random
import struct
import zlib
from dataclasses import replace

from cenet.train.recipes import RECIPES


def diagnosis(seed=0, *, layers=13, ce=True, name="cevgg16"):
    """A whole diagnosis; more channels sleep without CE."""
    draw = random.Random(seed)
    found = [layer(draw, index, layers, ce=ce) for index in range(layers)]
    shown = [found[0], found[layers // 2], found[-1]]
    ratios = [round(0.1 * step, 1) for step in range(10)]
    drops = sorted((draw.expovariate(60 if ce else 30) for _ in range(64)), reverse=True)
    draw.shuffle(drops)
    return {
        "format": "cenet.diagnosis",
        "version": 1,
        "model": {"name": name, "checkpoint": "weights.safetensors", "parameters": 14_728_266},
        "environment": {"cenet": "0.1.0", "torch": "2.9", "command": ["cenet", "diagnose"]},
        "data": {
            "folder": "cifar10/test",
            "images": 10_000,
            "size": [32, 32],
            "classes": ["cat", "dog"],
            "skipped": [{"path": "test/cat/broken.png", "reason": "cannot identify image file"}],
        },
        "accuracy": {"top1": 0.896 if ce else 0.878, "top5": 0.991},
        "threshold": 1e-2,
        "layers": found,
        "first_six": sum(one["inhibited_ratio"] for one in found[:6]) / len(found[:6]),
        "matrices": [
            {"layer": one["name"], "channels": list(range(24)), "values": matrix(draw, 24, ce)}
            for one in shown
        ],
        "ablation": {
            "layer": found[2]["name"],
            "ratios": ratios,
            "top1": [
                [0.1 + 0.79 / (1 + math.exp(9 * (r - (0.62 if ce else 0.45)) + draw.gauss(0, 0.3)))
                 for _ in range(5)]
                for r in ratios
            ],
            "seed": seed,
        },
        "importance": {"layer": found[2]["name"], "drop": drops, "gini": 0.41 if ce else 0.63},
        "sites": [one["norm"] for one in found],
        "gradcam": [
            {
                "image": png(draw, 24),
                "overlay": png(draw, 24),
                "label": "cat",
                "predicted": draw.choice(["cat", "dog"]),
            }
            for _ in range(4)
        ],
    }  # fmt: skip


def layer(draw, index, layers, *, ce):
    depth = index / layers
    channels = 64 * 2 ** int(depth * 4)
    quiet = (0.02 if ce else 0.16) * (1 - 0.6 * depth) + draw.uniform(0, 0.02)
    strengths = [
        draw.uniform(0, 0.009) if draw.random() < quiet else math.exp(draw.gauss(-1 - depth, 0.6))
        for _ in range(channels)
    ]
    asleep = [channel for channel, value in enumerate(strengths) if value < 1e-2]
    side = max(4, 32 // 2 ** int(depth * 5))
    low = 1 + draw.uniform(0, 0.2)
    return {
        "name": f"features.{3 * index + 2}.relu",
        "activation": "relu",
        "norm": f"features.{3 * index + 1}",
        "channels": channels,
        "height": side,
        "width": side,
        "mean_abs": strengths,
        "asleep": asleep,
        "inhibited_ratio": len(asleep) / channels,
        "correlation": (0.08 if ce else 0.15) + draw.uniform(0, 0.05) + 0.1 * depth,
        "constant": 1 if index == 3 else 0,
        "magnitude": [
            [
                2 + 3 * math.exp(-((x - side / 2) ** 2 + (y - side / 2) ** 2) / side)
                + draw.uniform(0, 0.3)
                for x in range(side)
            ]
            for y in range(side)
        ],
        "gamma": {"mean": 0.4, "std": 0.1, "abs_below_1e-2": quiet},
        "beta": {"mean": -0.1, "std": 0.1, "share_nonpositive": 0.7},
        "ce_site": True,
        "has_ce": ce,
        "lambda": 0.3 + 0.4 * depth + draw.uniform(-0.05, 0.05) if ce else None,
        "spectrum": {"min": low, "median": low + 0.6, "max": low + 1.2 + depth} if ce else None,
    }  # fmt: skip


def matrix(draw, size, ce):
    values = [[1.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i):
            near = 0.5 if i // 6 == j // 6 and not ce else 0.0
            values[i][j] = values[j][i] = max(-1.0, min(1.0, draw.gauss(near, 0.18)))
    return values


def png(draw, side):
    """A picture of noise, as a data URI."""
    rows = b"".join(
        b"\0" + bytes(draw.randrange(256) for _ in range(3 * side)) for _ in range(side)
    )
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return "data:image/png;base64," + base64.b64encode(content).decode()


def metrics(seed=0, *, epochs=30, ce=True):
    draw = random.Random(seed)
    rows = []
    for epoch in range(1, epochs + 1):
        left = math.exp(-epoch / 8)
        rows.append(
            {
                "epoch": epoch,
                "updates": 196 * epoch,
                "lr": 0.1,
                "train_loss": 0.05 + 2 * left + draw.uniform(0, 0.05),
                "train_top1": 0.99 - 0.6 * left,
                "test_loss": 0.42 + 1.6 * left + draw.uniform(0, 0.1),
                "test_top1": (0.9 if ce else 0.88) - 0.5 * left + draw.uniform(-0.01, 0.01),
                "test_top5": 0.99 - 0.3 * left,
                "seconds": 11.0,
                "images_per_second": 4500.0,
            }
        )
    return rows


def watch(*, ce=True):
    """Lines of channels.csv: two layers, every 100 updates."""
    lines = ["step,layer,inhibited_ratio,correlation,lambda"]
    for step in range(0, 1000, 100):
        late = step / 1000
        lines.append(f"{step},a,{(0.1 if ce else 0.5) * late},{0.5 - 0.2 * late},")
        lines.append(f"{step},b,{0.02 * late},,{0.5 if ce else ''}")
    return lines


def write_run(folder, seed=0, *, ce=True, layers=13, epochs=30, measured=True, watched=False):
    """A folder as `cenet train` leaves it, with a diagnosis and channels.csv if asked for."""
    folder.mkdir(parents=True)
    recipe = replace(RECIPES["vgg16_ce" if ce else "vgg16_plain"], seed=seed).as_dict()
    facts = {"cenet": "0.1.0", "commit": "c5ed317", "device": "cpu x86_64", "command": ["cenet"]}
    (folder / "run.json").write_text(json.dumps({"recipe": recipe, "environment": facts}))
    rows = metrics(seed, epochs=epochs, ce=ce)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if watched:
        (folder / "channels.csv").write_text("\n".join(watch(ce=ce)) + "\n")
    if measured:
        name = "cevgg16" if ce else "vgg16"
        found = diagnosis(seed, layers=layers, ce=ce, name=name)
        (folder / "diagnosis.json").write_text(json.dumps(found))
    return folder


def write_three_runs(root):
    """The folders of plain, ce and ce_again, which was not measured."""
    return [
        write_run(root / "plain", 0, ce=False),
        write_run(root / "ce", 1),
        write_run(root / "ce_again", 2, measured=False, epochs=20),  # shorter: cells stay empty
    ]
