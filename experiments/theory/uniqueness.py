"""When there is one equilibrium only: two conditions, and the potential behind the second."""

import torch
from torch import Tensor

from experiments.theory.game import Game


def interference_strength(game: Game) -> float:
    """Spectral radius of |g_cd| / g_cc, d ≠ c.

    Below 1 the best responses are a contraction: one equilibrium, reached from every start.
    """
    ratio = (game.G / game.G.diagonal()[:, None]).abs()
    ratio.fill_diagonal_(0)
    return float(torch.linalg.eigvals(ratio).abs().max())


def monotonicity(game: Game) -> float:
    """Smallest eigenvalue of (G + Gᵀ)/2. Above 0 there is one equilibrium.

    For a symmetric G this is sharp: if it is negative or 0, some noise and budgets give several.
    """
    return float(torch.linalg.eigvalsh((game.G + game.G.mT) / 2)[0])


def potential(game: Game, power: Tensor) -> Tensor:
    """½ Σ_l p_lᵀ G p_l + Σ_cl p_cl σ_c/h_cl, for a symmetric G.

    Each best response minimizes it over the channel's own strategies, so the equilibria are its
    stationary points, and for a positive definite G its one minimum.
    """
    if not torch.equal(game.G, game.G.mT):
        gap = float((game.G - game.G.mT).abs().max())
        raise ValueError(f"G must be symmetric to have a potential, |g_cd − g_dc| is up to {gap:g}")
    game.check_power(power)
    return 0.5 * (power * (game.G @ power)).sum() + (power * game.noise).sum()
