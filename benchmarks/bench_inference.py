"""Inference time, multiply-adds and parameters of the paper's networks, for its Tables 1 and 2.

Batches have 32 images of 224×224 in float32. Each network is timed plain, with squeeze-excite and
with CE, as it would be deployed: batch norms are folded into convolutions in all three, and so is
what can be folded of CE. The three are timed alternately, so that other work on the machine affects
all of them.

    python benchmarks/bench_inference.py                       # on a CPU
    python benchmarks/bench_inference.py --device cuda --rounds 30

Rows go to experiments/results/inference.csv and replace those of the same network and device.
"""

import argparse
import csv
import statistics
from functools import partial
from pathlib import Path

import torch
from torch import nn

from _runner import folded_plain, seconds
from cenet import fold_ce
from cenet.environment import environment
from cenet.models import create_model
from cenet.models.cost import multiply_adds

NETWORKS = (
    "resnet18", "resnet50", "resnet101", "mobilenetv2_100", "shufflenetv2_x0_5", "shufflenetv2_x1_0"
)  # fmt: skip
BLOCKS = ("plain", "se", "ce")
BATCH, SIZE = 32, 224
KEY = ("network", "block", "device")


def built(network: str, block: str) -> nn.Module:
    """The folded network in evaluation mode."""
    torch.manual_seed(0)
    model = create_model(network, block).eval()
    return fold_ce(model) if block == "ce" else folded_plain(model)


def rows(network: str, device: torch.device, rounds: int, command: str) -> list[dict[str, object]]:
    """One for each block."""
    models = {block: built(network, block).to(device) for block in BLOCKS}
    images = torch.randn(BATCH, 3, SIZE, SIZE, device=device)
    times: dict[str, list[float]] = {block: [] for block in BLOCKS}
    for number in range(rounds + 1):
        for block, model in models.items():
            found = seconds(torch.no_grad()(partial(model, images)), device)
            if number:  # the first warms up
                times[block].append(found)
    facts = environment(device, 1)
    about = {
        "rounds": rounds, "threads": torch.get_num_threads(), "hardware": facts["device"],
        "torch": facts["torch"], "commit": facts["commit"], "command": command,
    }  # fmt: skip
    made = []
    for block, model in models.items():
        p20, *_, p80 = statistics.quantiles(times[block], n=5)
        ratio = statistics.median(a / b for a, b in zip(times[block], times["plain"], strict=True))
        parameters = create_model(network, block).parameters()
        made.append({
            "network": network, "block": block, "device": device.type,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "multiply_adds": multiply_adds(model, SIZE),
            "seconds_p20": f"{p20:.4g}", "seconds_p50": f"{statistics.median(times[block]):.4g}",
            "seconds_p80": f"{p80:.4g}", "ratio_to_plain": f"{ratio:.4g}", **about,
        })  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("experiments/results/inference.csv"))
    parser.add_argument("--commit", default="", help="commit of this code, if git is not available")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    command = f"bench_inference.py --device {device} --rounds {arguments.rounds}"
    found = []
    for network in NETWORKS:
        own = rows(network, device, arguments.rounds, command)
        for row in own:
            row["commit"] = arguments.commit or row["commit"]
            print(network, row["block"], row["seconds_p50"], "s,", row["ratio_to_plain"])
        found += own
    replaced = {tuple(row[name] for name in KEY) for row in found}
    kept = []
    if arguments.out.is_file():
        with arguments.out.open(newline="") as file:
            kept = [r for r in csv.DictReader(file) if tuple(r[n] for n in KEY) not in replaced]
    with arguments.out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *found])


if __name__ == "__main__":
    main()
