"""The Gaussian interference game of Appendix C, and what it says about channel equilibrium.

    game            Game, payoff                                        Eq. payoffc
    best response   best_response, water_fill, deviation_gain           Eq. nasheqn
    equilibrium     find_equilibrium, kkt, marginal_rate                Theorem nashtheo
    uniqueness      interference_strength, monotonicity, potential      not in the paper
    closed form     closed_form, activation_budget                      Eq. nash-solution
    linear proxy    linear_proxy, tangent                               Eq. nash-solution-linear
    link            game_of_block                                       Eq. CE

C channels, L = H·W positions of one sample, float64 throughout. docs/theory.md says which of the
paper's statements hold.
"""

from experiments.theory.best_response import best_response, deviation_gain, water_fill
from experiments.theory.closed_form import (
    ClosedForm,
    activation_budget,
    closed_form,
    linear_proxy,
    tangent,
)
from experiments.theory.equilibrium import KKT, Equilibrium, find_equilibrium, kkt, marginal_rate
from experiments.theory.game import Game, payoff
from experiments.theory.link import game_of_block
from experiments.theory.uniqueness import interference_strength, monotonicity, potential

__all__ = [
    "KKT",
    "ClosedForm",
    "Equilibrium",
    "Game",
    "activation_budget",
    "best_response",
    "closed_form",
    "deviation_gain",
    "find_equilibrium",
    "game_of_block",
    "interference_strength",
    "kkt",
    "linear_proxy",
    "marginal_rate",
    "monotonicity",
    "payoff",
    "potential",
    "tangent",
    "water_fill",
]
