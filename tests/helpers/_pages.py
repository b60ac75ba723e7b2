"""Made-up runs and diagnoses that look like those of a network, and a page read back."""

import base64
import json
import math
import random
import struct
import zlib
from dataclasses import replace
from html.parser import HTMLParser

from cenet.analysis.diagnosis import Diagnosis
from cenet.report.pages import build_page
from cenet.report.sources import from_diagnosis
from cenet.train.recipes import RECIPES

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{7*7}}"


class Reader(HTMLParser):
    """Tags, attributes, headings and the cells of every table by the id of its figure."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.headings, self.tables = [], [], [], {}
        self.text, self._figure, self._cell, self._raw = "", None, False, None
        self.scripts = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        found = dict(attrs)
        if tag == "figure":
            self._figure = found.get("id")
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append(int(tag[1]))
        if tag == "tr" and self._figure:
            self.tables.setdefault(self._figure, []).append([])
        if tag in ("td", "th"):
            self._cell = True
            if self._figure:
                self.tables[self._figure][-1].append("")
        self._raw = tag if tag in ("script", "style") else None

    def handle_endtag(self, tag):
        if tag == "figure":
            self._figure = None
        if tag in ("td", "th"):
            self._cell = False
        self._raw = None

    def handle_data(self, data):
        if self._raw == "script":
            self.scripts.append(data)
        elif not self._raw:
            self.text += data
        if self._cell and self._figure:
            self.tables[self._figure][-1][-1] += data


def figures(page):
    return {figure.key: figure for section in page.sections for figure in section.figures}


def sections(one):
    return [section.key for section in build_page([one]).sections]


def source(found):
    """What the page is made from, of the content of a diagnosis.json."""
    return from_diagnosis(Diagnosis.from_dict(found))


def diagnosis(seed=0, *, layers=13, ce=True, name="cevgg16"):
    """The content of a diagnosis.json; without CE more channels are dormant."""
    draw = random.Random(seed)
    found = [layer(draw, index, layers, ce=ce) for index in range(layers)]
    shown = [found[0], found[layers // 2], found[-1]]
    return {
        "format": "cenet.diagnosis",
        "version": 3,
        "model": {
            "name": name,
            "checkpoint": "runs/a/weights.safetensors",
            "parameters": 14_728_266,
            "untrained": False,
        },
        "environment": {"cenet": "0.1.0", "torch": "2.9", "command": ["cenet", "diagnose"]},
        "data": {
            "folder": "cifar10/test",
            "images": 10_000,
            "size": [32, 32],
            "classes": ["cat", "dog"],
            "skipped": [{"path": "test/cat/broken.png", "reason": "cannot identify image file"}],
        },
        "accuracy": {"top1": 0.896 if ce else 0.878, "top5": 0.991, "classes": 10},
        "verdict": {
            "kind": "nothing to do" if ce else "try CE",
            "headline": "Nothing to do: few channels are idle." if ce else "Try CE.",
            "reasons": ["2.1 % of the channels are dormant.", "They vary in 40 % of dimensions."],
            "next_step": None if ce else "Train with and without CE, and compare.",
            "command": None if ce else "cenet train vgg16_ce --data cifar10 --out runs/vgg16_ce",
        },
        "layers": found,
        "threshold": 1e-2,
        "first_six": sum(one["inhibited_ratio"] for one in found[:6]) / len(found[:6]),
        "batch_norms": [
            {
                "name": one["norm"],
                "channels": one["channels"],
                "nonpositive": 3,
                "activation": "relu",
            }
            for one in found
        ],
        "matrices": [
            {"layer": one["name"], "channels": list(range(24)), "values": matrix(draw, 24, ce)}
            for one in shown
        ],
        "ablation": ablation(draw, found[2]["name"], seed, ce=ce),
        "importance": {
            "layer": found[2]["name"],
            "images": 512,
            "divergence": [draw.expovariate(60 if ce else 30) for _ in range(64)],
            "standard_error": [draw.uniform(0.001, 0.002) for _ in range(64)],
            "gini": 0.41 if ce else 0.63,
        },
        "removal": {
            "channels": 37,
            "images": 2000,
            "top1": 0.9,
            "top1_without": 0.8985,
            "top1_error": 0.002,
            "loss": 0.3,
            "loss_without": 0.31,
            "loss_error": 0.004,
        },
        "sites": [one["norm"] for one in found],
        "gradcam": [
            {
                "image": png(draw, 24),
                "overlay": png(draw, 24),
                "label": "cat",
                "predicted": draw.choice(["cat", "dog"]),
                "target": "cat",
                "evidence": [[0.5] * 7] * 7,
            }
            for _ in range(4)
        ],
    }


def ablation(draw, name, seed, *, ce):
    ratios = [round(0.1 * step, 1) for step in range(10)]
    half = 0.62 if ce else 0.45

    def top1(ratio, half):
        return 0.1 + 0.79 / (1 + math.exp(9 * (ratio - half) + draw.gauss(0, 0.3)))

    return {
        "layer": name,
        "images": 512,
        "ratios": ratios,
        "top1": [[top1(ratio, half) for _ in range(5)] for ratio in ratios],
        "least_important_first": [top1(ratio, half + 0.2) for ratio in ratios],
        "seed": seed,
    }


def layer(draw, index, layers, *, ce):
    depth = index / layers
    channels = 64 * 2 ** int(depth * 4)
    quiet = (0.02 if ce else 0.16) * (1 - 0.6 * depth) + draw.uniform(0, 0.02)
    strengths = [
        draw.uniform(0, 0.009) if draw.random() < quiet else math.exp(draw.gauss(-1 - depth, 0.6))
        for _ in range(channels)
    ]
    mean = sum(strengths) / channels
    activity = [value / mean for value in strengths]
    side = max(4, 32 // 2 ** int(depth * 5))
    low = 1 + draw.uniform(0, 0.2)

    def numbers(condition):
        return [channel for channel, value in enumerate(activity) if condition(value)]

    inhibited = [channel for channel, value in enumerate(strengths) if value < 1e-2]
    return {
        "name": f"features.{3 * index + 2}.relu",
        "activation": "relu",
        "norm": f"features.{3 * index + 1}",
        "channels": channels,
        "height": side,
        "width": side,
        "mean_abs": strengths,
        "activity": activity,
        "dormant_0.1": numbers(lambda value: value <= 0.1),
        "dormant_0.025": numbers(lambda value: value <= 0.025),
        "undecided": 1 if index == 1 else 0,
        "firing": [min(1.0, value) for value in activity],
        "fires_below_1_percent": numbers(lambda value: value < 0.01),
        "saturated": [0] if index == 0 else [],
        "duplicates": [1, 2] if index == 2 else [],
        "contribution": [value * draw.uniform(0.5, 2) for value in activity] if index else None,
        "prunable": numbers(lambda value: value < 0.015),
        "shared": False,
        "participation_ratio": channels * (0.3 + 0.1 * ce + draw.uniform(0, 0.2) - 0.2 * depth),
        "correlation": (0.08 if ce else 0.15) + draw.uniform(0, 0.05) + 0.1 * depth,
        "correlation_in_groups": (0.02 if ce else 0.16) + 0.1 * depth,
        "constant": 1 if index == 3 else 0,
        "magnitude": magnitude(draw, side),
        "magnitude_before": [[4.0] * side] * side,
        "gamma": {"mean": 0.4, "std": 0.1, "abs_below_1e-2": quiet},
        "beta": {"mean": -0.1, "std": 0.1, "share_nonpositive": 0.7},
        "inhibited": inhibited,
        "inhibited_ratio": len(inhibited) / channels,
        "ce_site": True,
        "has_ce": ce,
        "lambda": 0.3 + 0.4 * depth + draw.uniform(-0.05, 0.05) if ce else None,
        "spectrum": {"min": low, "median": low + 0.6, "max": low + 1.2 + depth} if ce else None,
    }


def magnitude(draw, side):
    middle = side / 2
    return [
        [
            2 + 3 * math.exp(-((x - middle) ** 2 + (y - middle) ** 2) / side) + draw.uniform(0, 0.3)
            for x in range(side)
        ]
        for y in range(side)
    ]


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
    lines = ["step,layer,dormant_ratio,participation_share,correlation,inhibited_ratio,lambda"]
    for step in range(0, 1000, 100):
        late = step / 1000
        dormant = (0.1 if ce else 0.5) * late
        lines.append(f"{step},a,{dormant},{0.4 + 0.1 * late},{0.5 - 0.2 * late},0.3,")
        lines.append(f"{step},b,{0.02 * late},0.2,,0.1,{0.5 if ce else ''}")
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
