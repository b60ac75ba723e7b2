"""The table of docs/results.md, from experiments/results/measures.csv, in Markdown.

    python experiments/results_table.py vgg16_plain vgg16_ce

Mean ± standard deviation over seeds, and the difference of the two recipes with its 95 % confidence
interval (paired by seed, Student's t).
"""

import argparse
import csv
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

from scipy.stats import t as student

TABLE = Path(__file__).parent / "results" / "measures.csv"
# column, its name, factor and unit, digits
LINES = (
    ("top1", "top-1", 100, "%", 2),
    ("train_loss", "training loss", 1, "", 4),
    ("test_loss", "test loss", 1, "", 3),
    ("dormant_first_six", "dormant (≤ 0.1 of the layer's mean), first six layers", 100, "%", 2),
    ("dormant", "dormant, all layers", 100, "%", 2),
    ("dormant_strict", "dormant, strictly (≤ 0.025), all layers", 100, "%", 2),
    ("rare", "fire in < 1 % of the images", 100, "%", 2),
    ("weak_contribution", "contribution ≤ 0.1 of the layer's mean", 100, "%", 2),
    ("prunable", "prunable", 100, "%", 2),
    ("duplicates", "duplicates of another channel", 100, "%", 2),
    ("participation_share", "participation ratio / channels, mean of layers", 100, "%", 2),
    ("correlation", "mean absolute correlation", 1, "", 4),
    ("gini", "Gini coefficient of importance, third layer", 1, "", 3),
    ("top1_without_half", "top-1 without half of layer 3, at random", 100, "%", 1),
    ("top1_without_least_half", "top-1 without its least important half", 100, "%", 1),
    ("inhibited_first_six", "inhibited (the paper's figure), first six layers", 100, "%", 2),
    ("inhibited", "inhibited, all layers", 100, "%", 2),
    ("mean_activation", "mean activation", 1, "", 4),
)


def table(one: str, other: str, changes: str = "") -> list[str]:
    """Lines of Markdown for two recipes."""
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["changes"] == changes]
    found = {
        recipe: {row["seed"]: row for row in rows if row["recipe"] == recipe}
        for recipe in (one, other)
    }
    seeds = sorted(set(found[one]) & set(found[other]))
    lines = [f"| n = {len(seeds)} seeds | {one} | {other} | difference, 95 % interval |"]
    lines.append("|---|---|---|---|")
    for column, name, factor, unit, digits in LINES:
        pair = [[factor * float(found[r][s][column]) for s in seeds] for r in (one, other)]
        apart = [b - a for a, b in zip(*pair, strict=True)]
        half = student.ppf(0.975, len(seeds) - 1) * stdev(apart) / sqrt(len(seeds))
        cells = [f"{fmean(v):.{digits}f} ± {stdev(v):.{digits}f} {unit}".strip() for v in pair]
        low, high = (f"{fmean(apart) + sign * half:+.{digits}f}" for sign in (-1, 1))
        cells.append(f"{fmean(apart):+.{digits}f} ({low} to {high})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs=2, metavar="RECIPE")
    parser.add_argument("--changes", default="", help="of the recipe, as in the CSV")
    arguments = parser.parse_args()
    print("\n".join(table(*arguments.recipes, arguments.changes)))


if __name__ == "__main__":
    main()
