"""What a channel does against the others: water-filling."""

import torch
from torch import Tensor

from experiments.theory.game import Game, payoff


def water_fill(floor: Tensor, budget: Tensor) -> Tensor:
    """Power max(0, level − floor), at the level where it sums to the budget.

    Exact: the level is that of the k lowest positions, for the one k where it covers them and no
    other.

    Shape: floor (…, L), budget (…) -> (…, L).
    """
    floor = floor - floor.amin(-1, keepdim=True)  # the sums below lose nothing to a high floor
    lowest = floor.sort(-1).values
    count = torch.arange(1, floor.shape[-1] + 1, dtype=floor.dtype)
    levels = (budget[..., None] + lowest.cumsum(-1)) / count
    active = (levels > lowest).sum(-1, keepdim=True)
    return (levels.gather(-1, active - 1) - floor).clamp_min(0)


def best_response(game: Game, power: Tensor) -> Tensor:
    """The strategy of each channel that is best against the others' in `power`.

    Channel c meets the floor (Σ_{d≠c} g_cd p_dl + σ_c/h_cl) / g_cc; its water level is 1/v0_c. The
    payoff is strictly concave in the channel's own power, so there is one best response.

    Shape: (C, L) -> (C, L).
    """
    game.check_power(power)
    return water_fill(game.disturbance(power) / game.G.diagonal()[:, None], game.budget)


def deviation_gain(game: Game, power: Tensor) -> Tensor:
    """What each channel would gain, in nats, if it alone changed its strategy (Eq. nasheqn).

    Zero for every channel exactly at a Nash equilibrium.

    Shape: (C, L) -> (C,).
    """
    before, response = payoff(game, power), best_response(game, power)
    gains = []
    for c in range(game.channels):
        alone = power.clone()
        alone[c] = response[c]
        gains.append(payoff(game, alone)[c] - before[c])
    return torch.stack(gains)
