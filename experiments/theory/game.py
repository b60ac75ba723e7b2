"""The Gaussian interference game: channels that share positions (Eq. payoffc).

Channel c spreads its budget P_c over L positions, p_cl ≥ 0 and Σ_l p_cl = P_c, to maximize

    payoff_c(p) = Σ_l ln(1 + g_cc p_cl / (Σ_{d≠c} g_cd p_dl + σ_c / h_cl))

Positions are the pixels of one sample, L = H·W.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# how far a power may be from its budget, relative to it
BUDGET_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False)
class Game:
    """A game of C channels over L positions, in float64.

    The payoff is defined for every strategy, or the game is refused: g_cc, σ, h and the budgets are
    positive, and no strategies of the others turn the denominator of a channel negative. Negative
    g_cd are welcome within that limit.
    """

    G: Tensor  # (C, C): row c holds what channel c receives from each channel
    sigma: Tensor  # (C,)
    h: Tensor  # (C, L)
    budget: Tensor  # (C,)

    def __post_init__(self) -> None:
        """Refuse what is no game."""
        if self.G.dim() != 2 or self.G.shape[0] != self.G.shape[1]:
            raise ValueError(f"G must be square, (C, C), got {tuple(self.G.shape)}")
        channels = len(self.G)
        _check_values("G", self.G, (channels, channels))
        _check_values("sigma", self.sigma, (channels,))
        _check_values("h", self.h, (channels, self.h.shape[-1] if self.h.dim() else 0))
        _check_values("budget", self.budget, (channels,))
        _check_positive("diagonal of G", self.G.diagonal(), "every channel receives itself")
        _check_positive("sigma", self.sigma, "without noise the payoff is unbounded")
        _check_positive("h", self.h, "the noise is sigma / h; shift or scale h")
        _check_positive("budget", self.budget, "leave a channel without power out of the game")
        _check_values("noise sigma / h", self.noise, tuple(self.h.shape))
        worst = self.noise + (_off_diagonal(self.G).clamp_max(0) @ self.budget)[:, None]
        _check_positive(
            "least noise plus interference", worst, "raise sigma or weaken the negative g_cd"
        )

    @property
    def channels(self) -> int:
        """C."""
        return len(self.G)

    @property
    def positions(self) -> int:
        """L."""
        return self.h.shape[1]

    @property
    def noise(self) -> Tensor:
        """σ_c / h_cl, (C, L)."""
        return self.sigma[:, None] / self.h

    @property
    def equal_share(self) -> Tensor:
        """P_c / L at every position, (C, L)."""
        return (self.budget / self.positions)[:, None].expand_as(self.h).clone()

    def disturbance(self, power: Tensor) -> Tensor:
        """Σ_{d≠c} g_cd p_dl + σ_c / h_cl: what channel c finds at position l, (C, L)."""
        return _off_diagonal(self.G) @ power + self.noise

    def check_power(self, power: Tensor) -> None:
        """Raise ValueError unless `power` is a strategy of every channel."""
        _check_values("power", power, tuple(self.h.shape))
        if (power < 0).any():
            raise ValueError(f"{_name_first('power', power, power < 0)} must not be negative")
        spent = power.sum(1)
        wrong = (spent - self.budget).abs() > BUDGET_TOLERANCE * self.budget
        if wrong.any():
            c = int(wrong.nonzero()[0])
            raise ValueError(
                f"power of channel {c} sums to {spent[c]:.6g}, its budget is {self.budget[c]:.6g}: "
                "scale it to the budget"
            )


def payoff(game: Game, power: Tensor) -> Tensor:
    """Sum of the information rates of each channel in nats, Eq. payoffc.

    Shape: (C, L) -> (C,).
    """
    game.check_power(power)
    own = game.G.diagonal()[:, None]
    return torch.log1p(own * power / game.disturbance(power)).sum(1)


def _off_diagonal(matrix: Tensor) -> Tensor:
    return matrix - torch.diag(matrix.diagonal())


def _name_first(name: str, values: Tensor, wrong: Tensor) -> str:
    """`name[index] = value` of the first wrong entry."""
    index = tuple(wrong.nonzero()[0].tolist())
    return f"{name}[{', '.join(map(str, index))}] = {values[index]:.6g}"


def _check_values(name: str, values: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(values.shape) != shape or 0 in shape:
        raise ValueError(f"{name} must have shape {shape}, none of it 0, got {tuple(values.shape)}")
    if values.dtype != torch.float64:
        raise ValueError(f"{name} must be float64, got {values.dtype}: call .double()")
    if not values.isfinite().all():
        raise ValueError(f"{_name_first(name, values, ~values.isfinite())} must be finite")


def _check_positive(name: str, values: Tensor, reason: str) -> None:
    if (values <= 0).any():
        raise ValueError(f"{_name_first(name, values, values <= 0)} must be positive: {reason}")
