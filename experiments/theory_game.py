"""Figure of Appendix C: the interference game, its equilibria, and the distance of CE from them.

    python -m experiments.theory_game --out experiments/out/theory

Claim: the equilibrium is unique for G = W⁻¹ but not for every G; the closed form holds from a
known budget on; the linear proxy errs to second order; CE is the equilibrium to first order where
its output is positive, and not where it is clipped. docs/theory.md has the proofs.

Writes theory_game.svg and theory_game.csv (panel, series, x, y: every point drawn). Float64 on
the CPU, fixed seeds, about five seconds. Needs matplotlib.
"""

import argparse
import csv
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor

from cenet import functional as F
from experiments.theory import (
    Game,
    activation_budget,
    best_response,
    closed_form,
    find_equilibrium,
    game_of_block,
    linear_proxy,
    payoff,
)

# Okabe and Ito's colours, told apart by the colour-blind too
BLUE, ORANGE, GREEN, PINK, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9"
GREY, LIGHT, INK = "#8a8a8a", "#d9d9d9", "#222222"

Rows = list[tuple[str, str, float, float]]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def couple(g: float, h: Tensor, budget: float = 1.0) -> Game:
    """Two equal channels that disturb each other by g."""
    ones = torch.ones(2, dtype=torch.float64)
    return Game(torch.eye(2, dtype=torch.float64) * (1 - g) + g, ones, h, budget * ones)


def points(
    rows: Rows, panel: str, series: str, xs: Iterable[float], ys: Iterable[float]
) -> tuple[list[float], list[float]]:
    """Remember what is drawn."""
    xs, ys = [float(x) for x in xs], [float(y) for y in ys]
    rows += [(panel, series, x, y) for x, y in zip(xs, ys, strict=True)]
    return xs, ys


def draw_water(axes: Axes, rows: Rows) -> None:
    """Noise, interference and power of one channel at an equilibrium."""
    game = couple(0.6, 0.25 + _random(2, 10, seed=5), budget=9.0)
    power, multipliers, _ = find_equilibrium(game)
    places = range(1, game.positions + 1)
    base = torch.zeros_like(power[0])
    for label, colour, layer in (
        ("noise σ/h", LIGHT, game.noise[0]),
        ("from the other channel", GREY, game.disturbance(power)[0] - game.noise[0]),
        ("own power", BLUE, power[0]),
    ):
        _, ys = points(rows, "a", label, places, layer)
        axes.bar(places, ys, bottom=base.tolist(), width=0.82, color=colour, label=label)
        base = base + layer
    level = 1 / float(multipliers[0])
    points(rows, "a", "level 1/v0", [0], [level])
    axes.axhline(level, color=INK, linewidth=1.2, linestyle="--", label="level 1/v0")
    axes.set(xlabel="position l", xticks=[1, 5, 10], ylim=(0, 1.75 * level))
    axes.set_ylabel("power")
    axes.legend(loc="upper center", ncols=2)


def draw_responses(axes: Axes, rows: Rows, panel: str, g: float) -> None:
    """Both best responses over two positions: equilibria are where they cross."""
    game = couple(g, torch.ones(2, 2, dtype=torch.float64))
    grid = torch.linspace(0, 1, 201, dtype=torch.float64)
    reply = []
    for share in grid:
        power = torch.stack([share, 1 - share]).repeat(2, 1)
        reply.append(float(best_response(game, power)[0, 0]))
    xs, ys = points(rows, panel, "best response of channel 1 to channel 2", grid, reply)
    axes.plot(ys, xs, color=BLUE, label="channel 1 replies")
    axes.plot(xs, ys, color=ORANGE, label="channel 2 replies")
    for number, (first, second) in enumerate(((0.15, 0.56), (0.85, 0.44))):
        power = torch.tensor([[first, 1 - first], [second, 1 - second]], dtype=torch.float64)
        path = [power]
        for _ in range(8):
            for c in range(2):
                path.append(path[-1].clone())
                path[-1][c] = best_response(game, path[-2])[c]
        steps = torch.stack(path)[:, :, 0]
        xs, ys = points(rows, panel, f"path {number + 1}", steps[:, 0], steps[:, 1])
        axes.plot(xs, ys, color=GREY, linewidth=1, linestyle=":", marker=".", markersize=4)
        axes.plot(xs[:1], ys[:1], color=GREY, marker="s", markersize=4)
    corners = ((0.9, 0.1), (0.1, 0.9), (0.5, 0.5))
    found: dict[tuple[float, float], float] = {}
    for first, second in corners:
        start = torch.tensor([[first, 1 - first], [second, 1 - second]], dtype=torch.float64)
        power = find_equilibrium(game, start).power
        at = (round(float(power[0, 0]), 9), round(float(power[1, 0]), 9))
        found[at] = float(payoff(game, power)[0])
    for (x, y), nats in found.items():
        points(rows, panel, f"equilibrium, payoff {nats:.4f}", [x], [y])
        away = {0.0: (10, -16, "left"), 0.5: (-10, -14, "right"), 1.0: (-10, 9, "right")}[x]
        axes.plot([x], [y], "o", color=INK, markersize=7, zorder=5, clip_on=False)
        axes.annotate(
            f"{nats:.3f} nats",
            (x, y),
            xytext=away[:2],
            textcoords="offset points",
            ha=away[2],
            fontsize=8,
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.85},
            zorder=6,
        )
    ticks = [0, 0.5, 1]
    axes.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), xticks=ticks, yticks=ticks)
    axes.set_xlabel("power of channel 1 at position 1")
    axes.set_ylabel("power of channel 2 at position 1")
    axes.legend(loc="lower left")


def draw_closed_form(axes: Axes, rows: Rows) -> None:
    """Powers of one channel as the budgets grow: the closed form holds from a threshold on."""
    game = couple(0.5, 0.3 + _random(2, 5, seed=3))
    least = activation_budget(game)
    lowest = replace(game, budget=1.001 * least)
    slope = least[0] / game.positions
    scales = torch.linspace(0.04, 1.8, 89, dtype=torch.float64)
    powers = torch.stack([find_equilibrium(replace(game, budget=s * least)).power for s in scales])
    for place in range(game.positions):
        # affine in the budget: known everywhere from one point where it holds
        known = closed_form(lowest).power[0, place]
        line = known + (scales - 1.001) * slope
        label = "closed form" if place == 0 else None
        xs, ys = points(rows, "d", f"closed form, position {place + 1}", scales, line)
        axes.plot(xs, ys, color=ORANGE, linewidth=1, linestyle="--", label=label)
        label = "equilibrium, five positions" if place == 0 else None
        name = f"equilibrium, position {place + 1}"
        axes.plot(*points(rows, "d", name, scales, powers[:, 0, place]), color=BLUE, label=label)
    axes.axvline(1, color=INK, linewidth=1)
    axes.axhspan(-9, 0, color=LIGHT, alpha=0.5, linewidth=0)
    top = float(powers[:, 0].max())
    axes.set(xlim=(0, 1.8), ylim=(-0.35 * top, 1.05 * top))
    axes.set_xlabel("budget / activation budget")
    axes.set_ylabel("power of channel 1")
    axes.text(1.77, -0.3 * top, "negative: no strategy", ha="right", fontsize=8, color=GREY)
    axes.legend(loc="upper left")


def draw_proxy(axes: Axes, rows: Rows) -> None:
    """Error of the linear proxy against the spread of h."""
    spreads = torch.logspace(-2.5, -0.3, 23, dtype=torch.float64)
    for g, colour in ((0.0, SKY), (0.5, BLUE), (0.9, INK)):
        errors = []
        for spread in spreads:
            game = couple(g, 1 + spread * (2 * _random(2, 16, seed=1) - 1), budget=320.0)
            errors.append((linear_proxy(game) - closed_form(game).power).square().mean().sqrt())
        xs, ys = points(rows, "e", f"g = {g}", spreads, errors)
        axes.loglog(xs, ys, color=colour, marker=".", markersize=4, label=f"g = {g:g}")
    guide = [0.02, 0.2]
    axes.loglog(guide, [0.05 * x**2 for x in guide], color=GREY, linewidth=1, linestyle="--")
    axes.text(0.085, 1.1e-4, "slope 2", color=GREY, fontsize=8)
    axes.set_xlabel("spread of h about 1")
    axes.set_ylabel("proxy − equilibrium, root mean square")
    axes.legend(loc="upper left")


def sample(channels: int = 8, positions: int = 196) -> Tensor:
    """Correlated features of one sample after a norm with γ and no shift."""
    eye = torch.eye(channels, dtype=torch.float64)
    x = (eye + 0.4 * _normal(channels, channels, seed=0)) @ _normal(channels, positions, seed=1)
    x = (x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True)
    return (0.2 + _random(channels, seed=2))[:, None] * x


def draw_link(axes: Axes, rows: Rows) -> None:
    """Distance of the block's output from the equilibrium of its game."""
    x = sample()
    sigma = torch.cov(x, correction=0)
    three, root = F.newton_inverse_sqrt(sigma, 3), F.newton_inverse_sqrt(sigma, 20)
    cases = {
        "root of Σ, half clipped": (root, False, ORANGE, "--"),
        "W, half clipped": (three, False, ORANGE, "-"),
        "root of Σ, all positive": (root, True, BLUE, "--"),
        "W, all positive": (three, True, BLUE, "-"),
        "diagonal of W, half clipped": (torch.diag(three.diagonal()), False, GREEN, ":"),
    }
    epsilons = torch.logspace(-5, -3, 7, dtype=torch.float64)
    for label, (operator, lift, colour, style) in cases.items():
        features = x
        if lift:
            shift = torch.linalg.solve(operator, 0.1 - (operator @ x).amin(1))
            features = x + shift[:, None]
        out = (operator @ features).relu()
        scale = (out - out.mean(1, keepdim=True)).norm()
        games = [game_of_block(features, operator, float(e)) for e in epsilons]
        distance = [(find_equilibrium(game).power - out).norm() / scale for game in games]
        xs, ys = points(rows, "f", label, epsilons, distance)
        axes.loglog(xs, ys, color=colour, linestyle=style, label=label)
    axes.set(ylim=(3e-6, 200), xlabel="ε: how far h strays from 1")
    axes.set_ylabel("relu(W x̃) − equilibrium, relative")
    axes.legend(loc="upper left")


TITLES = {
    "a": "An equilibrium: power up to one level",
    "b": "Weak interference, g = 0.5: one equilibrium",
    "c": "Strong interference, g = 2: three",
    "d": "Closed form: from a known budget on",
    "e": "Linear proxy: error of second order",
    "f": "CE and its game: first order, or not at all",
}


def draw() -> tuple[plt.Figure, Rows]:
    """The figure, and every point on it."""
    rows: Rows = []
    style = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.edgecolor": GREY,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.linewidth": 1.8,
        "svg.hashsalt": "cenet",
    }
    with plt.rc_context(style):
        figure, grid = plt.subplots(2, 3, figsize=(12.5, 7.6), layout="constrained")
        axes = dict(zip(TITLES, grid.flat, strict=True))
        for panel, title in TITLES.items():
            axes[panel].set_title(f"{panel}   {title}")
        draw_water(axes["a"], rows)
        draw_responses(axes["b"], rows, "b", 0.5)
        draw_responses(axes["c"], rows, "c", 2.0)
        draw_closed_form(axes["d"], rows)
        draw_proxy(axes["e"], rows)
        draw_link(axes["f"], rows)
    return figure, rows


def main() -> None:
    """Draw, and write figure and points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("experiments/out/theory"))
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    figure, rows = draw()
    figure.savefig(out / "theory_game.svg", metadata={"Date": None})
    with (out / "theory_game.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("panel", "series", "x", "y"))
        writer.writerows((panel, name, f"{x:.9g}", f"{y:.9g}") for panel, name, x, y in rows)
    print(f"{out / 'theory_game.svg'}, {out / 'theory_game.csv'} ({len(rows)} points)")


if __name__ == "__main__":
    main()
