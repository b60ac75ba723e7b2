"""The equilibrium where every power is active, and its linear proxy.

Eq. nash-solution with the multipliers that meet the budgets. Summing G p_l = diag(G)/v0 − n_l over
the positions, n_l = σ/h_l the noise and n̄ its mean over positions, gives

    1/v0_c = ((G P)_c + L n̄_c) / (L g_cc),      p_l = P/L + G⁻¹(n̄ − n_l)

so the multipliers drop out: a channel spends its equal share, plus what the noise decides.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from experiments.theory.game import Game


class ClosedForm(NamedTuple):
    """Eq. nash-solution: an equilibrium if all its powers are positive."""

    power: Tensor  # (C, L)
    multipliers: Tensor  # (C,): v0


def closed_form(game: Game) -> ClosedForm:
    """The equilibrium with every power active; ValueError where there is none."""
    power = game.equal_share + _solved(game, _centered(-game.noise))
    if (power <= 0).any():
        c = int(power.amin(1).argmin())
        raise ValueError(
            f"power[{c}, {int(power[c].argmin())}] would be {float(power[c].min()):.6g}: not every "
            f"power is active. Give each channel more than its activation_budget "
            f"({float(activation_budget(game)[c]):.6g} for channel {c}, which has "
            f"{float(game.budget[c]):.6g}), or use find_equilibrium"
        )
    own = game.G.diagonal()
    received = game.G @ game.budget + game.noise.sum(1)
    return ClosedForm(power, game.positions * own / received)


def activation_budget(game: Game) -> Tensor:
    """L · max_l (G⁻¹(n_l − n̄))_c: the closed form holds if every budget is above its own, (C,)."""
    return game.positions * _solved(game, _centered(game.noise)).amax(1)


def tangent(h: Tensor, point: float) -> Tensor:
    """−1/h to first order about `point`: −2/point + h/point². Its error is −(h − point)²/(point²h).

    The paper takes −1 and writes 2 + h; h is positive, so 1 is meant: h − 2.
    """
    if point == 0:
        raise ValueError("point=0: −1/h has no tangent there; use 1")
    return (h - 2 * point) / point**2


def linear_proxy(game: Game, point: float = 1.0) -> Tensor:
    """Eq. nash-solution-linear at the game's budgets: P/L + G⁻¹ σ ⊙ (h_l − h̄)/point².

    The constant of the tangent drops out with the multipliers, so `point` and −`point` are one
    proxy. Nothing keeps it positive.

    Shape: (C, L).
    """
    slope = game.sigma[:, None] * tangent(game.h, point)
    return game.equal_share + _solved(game, _centered(slope))


def _centered(values: Tensor) -> Tensor:
    return values - values.mean(1, keepdim=True)


def _solved(game: Game, right: Tensor) -> Tensor:
    """G⁻¹ right."""
    if torch.linalg.matrix_rank(game.G) < game.channels:
        raise ValueError("G is singular: the closed form needs its inverse; use find_equilibrium")
    solution: Tensor = torch.linalg.solve(game.G, right)
    return solution
