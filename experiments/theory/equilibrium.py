"""Nash equilibria: found by iterated best responses, recognized by Theorem nashtheo."""

from typing import NamedTuple

from torch import Tensor

from experiments.theory.best_response import water_fill
from experiments.theory.game import Game
from experiments.theory.uniqueness import interference_strength

# largest change of a power in the last sweep, relative to the highest water level
SWEEP_TOLERANCE = 1e-14


class Equilibrium(NamedTuple):
    """Powers no channel gains by changing, and what certifies them."""

    power: Tensor  # (C, L)
    multipliers: Tensor  # (C,): v0
    sweeps: int


class KKT(NamedTuple):
    """How far a strategy is from the conditions of Theorem nashtheo."""

    multipliers: Tensor  # (C,): v0, the largest marginal rate of each channel
    residual: Tensor  # (C,): Σ_l p_cl (v0_c − rate_cl), in nats


def marginal_rate(game: Game, power: Tensor) -> Tensor:
    """g_cc / (Σ_d g_cd p_dl + σ_c/h_cl): the left side of Eq. nashpoint, (C, L)."""
    return game.G.diagonal()[:, None] / (game.G @ power + game.noise)


def kkt(game: Game, power: Tensor) -> KKT:
    """Check Eq. nashpoint: the marginal rate is v0_c wherever p_cl > 0, and nowhere larger.

    With v0_c the largest rate the second half always holds, and the residual Σ_l p_cl (v0_c −
    rate_cl) is zero exactly if the first does. Payoffs are concave, so the residual also bounds
    what channel c can gain by any deviation.
    """
    game.check_power(power)
    rate = marginal_rate(game, power)
    multipliers = rate.amax(1)
    return KKT(multipliers, (power * (multipliers[:, None] - rate)).sum(1))


def find_equilibrium(
    game: Game, start: Tensor | None = None, max_sweeps: int = 10_000
) -> Equilibrium:
    """Let the channels respond to each other in turn until nobody moves.

    Certain to converge where `interference_strength` is below 1, or G symmetric and positive
    definite; elsewhere it may depend on the start, or cycle.

    Args:
        game: the game.
        start: strategies to begin with, (C, L); the equal share by default.
        max_sweeps: rounds of all channels before giving up with a RuntimeError.
    """
    power = game.equal_share if start is None else start.clone()
    game.check_power(power)
    own = game.G.diagonal()
    for sweep in range(1, max_sweeps + 1):
        before = power.clone()
        for c in range(game.channels):
            floor = game.disturbance(power)[c] / own[c]
            power[c] = water_fill(floor, game.budget[c])
        level = (power + game.disturbance(power) / own[:, None]).max()
        if (power - before).abs().max() <= SWEEP_TOLERANCE * level:
            return Equilibrium(power, kkt(game, power).multipliers, sweep)
    raise RuntimeError(
        f"best responses still move after {max_sweeps} sweeps: interference_strength is "
        f"{interference_strength(game):.3g}, and only below 1 do they settle from every start; "
        "weaken the interference or try another start"
    )
