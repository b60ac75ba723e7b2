"""From a block of the network to a game: what the paper's match of Eq. CE means.

The paper sets G = D_n^{1/2}, h = x̄ and σ = γ in Eq. nash-solution-linear. A standardized x̄ is
negative at about half of the pixels, where such a game has no payoff. What can be said instead: any
positive definite operator W, applied to features x̃ with W x̃ > 0 everywhere, is the limit ε → 0 of
the equilibria of

    G = W⁻¹,    σ = 1/ε,    h_l = 1 + ε(x̃_l − mean of x̃),    P = Σ_l max(0, W x̃_l)

The linear proxy of this game is W x̃ exactly, for every ε; its equilibrium is W x̃ + O(ε). Where W x̃
is negative somewhere, the block clips after mixing while the channels of the game mix what the
others have clipped: the two agree only if W is diagonal.
"""

import torch
from torch import Tensor

from experiments.theory.game import Game


def game_of_block(features: Tensor, operator: Tensor, epsilon: float) -> Game:
    """The game whose equilibrium stands behind relu(`operator` @ `features`).

    Args:
        features: x̃ of one sample, output of the norm.
        operator: W of batch decorrelation, or λW + Diag(a_n) of the block; positive definite.
        epsilon: size of the deviations of h from 1. Below one over the largest deviation of x̃, and
            smaller where W⁻¹ has negative entries.

    Shape: features (C, L), operator (C, C).
    """
    if features.dim() != 2 or operator.shape != (len(features), len(features)):
        raise ValueError(
            "features must be (C, L) and operator (C, C), got "
            f"{tuple(features.shape)} and {tuple(operator.shape)}"
        )
    if not torch.allclose(operator, operator.mT, rtol=1e-9, atol=0):
        raise ValueError("operator must be symmetric: W and λW + Diag(a_n) are")
    least = float(torch.linalg.eigvalsh(operator)[0])
    if not least > 0:
        raise ValueError(f"operator must be positive definite, its least eigenvalue is {least:.6g}")
    deviation = features - features.mean(1, keepdim=True)
    limit = 1 / max(float(-deviation.min()), 1e-300)
    if not 0 < epsilon < limit:
        raise ValueError(
            f"epsilon={epsilon} must be in (0, {limit:.6g}), or h = 1 + epsilon (x̃ − mean) is not "
            "positive"
        )
    inverse = torch.linalg.inv(operator)
    return Game(
        G=(inverse + inverse.mT) / 2,
        sigma=torch.full_like(features[:, 0], 1 / epsilon),
        h=1 + epsilon * deviation,
        budget=(operator @ features).relu().sum(1),
    )
