"""Games of a few channels, and payoffs by plain loops."""

import math

import torch
from experiments.theory import (
    Game,
)
from hypothesis import strategies as st
from torch import Tensor

ROUND_OFF = 1e-11


seeds = st.integers(0, 2**31 - 1)


def tensor(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def uniform(low: float, high: float, *shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_game(
    seed: int, channels: int = 4, positions: int = 9, strength: float = 0.6, budget: float = 2.0
) -> Game:
    """A game of any G whose interference_strength is at most `strength`."""
    ratio = uniform(0, 1, channels, channels, seed=seed).fill_diagonal_(0)
    ratio = strength * ratio / ratio.sum(1, keepdim=True)
    own = uniform(0.5, 2, channels, seed=seed + 1)
    return Game(
        own[:, None] * (ratio + torch.eye(channels, dtype=torch.float64)),
        uniform(0.5, 2, channels, seed=seed + 2),
        uniform(0.3, 1.7, channels, positions, seed=seed + 3),
        uniform(0.5, 1, channels, seed=seed + 4) * budget,
    )


def random_power(game: Game, seed: int) -> Tensor:
    share = uniform(0, 1, game.channels, game.positions, seed=seed) ** 3
    return game.budget[:, None] * share / share.sum(1, keepdim=True)


def couple(g: float, positions: int = 2) -> Game:
    """Two equal channels that disturb each other by g, everywhere alike."""
    ones = torch.ones(2, dtype=torch.float64)
    return Game(tensor([[1, g], [g, 1]]), ones, ones[:, None].repeat(1, positions), ones)


def ring(g: float) -> Game:
    """Three equal channels over two positions, each disturbed by the next."""
    eye = torch.eye(3, dtype=torch.float64)
    ones = torch.ones(3, dtype=torch.float64)
    return Game(eye + g * eye.roll(1, 1), ones, ones[:, None].repeat(1, 2), ones)


def rate_sum(game: Game, power: Tensor, c: int) -> float:
    """Eq. payoffc of channel c, term by term."""
    total = 0.0
    for place in range(game.h.shape[1]):
        below = float(game.sigma[c] / game.h[c, place])
        for d in range(len(game.G)):
            if d != c:
                below += float(game.G[c, d] * power[d, place])
        total += math.log(1 + float(game.G[c, c] * power[c, place]) / below)
    return total


def with_row(power: Tensor, c: int, row: Tensor) -> Tensor:
    changed = power.clone()
    changed[c] = row
    return changed


def assert_nobody_deviates(game: Game, power: Tensor, seed: int) -> None:
    """By brute force: no random strategy and no shift of power between two positions pays."""
    for c in range(game.channels):
        now = rate_sum(game, power, c)
        for trial in range(8):
            other = random_power(game, seed + trial)[c]
            for step in (1.0, 0.1, 1e-3):
                mixed = power[c] + step * (other - power[c])
                assert rate_sum(game, with_row(power, c, mixed), c) <= now + ROUND_OFF
        for source in power[c].nonzero().flatten().tolist():
            for target in range(game.positions):
                moved = power[c].clone()
                amount = min(1e-3, float(moved[source]))
                moved[source] -= amount
                moved[target] += amount
                assert rate_sum(game, with_row(power, c, moved), c) <= now + ROUND_OFF


# of two channels over two positions: each leads to another equilibrium of `couple(2)`
THREE_STARTS = tensor(
    [[[0.6, 0.4], [0.4, 0.6]], [[0.4, 0.6], [0.6, 0.4]], [[0.5, 0.5], [0.5, 0.5]]]
)
