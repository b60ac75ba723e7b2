"""The closed form, the linear proxy, the link to CE, and the page about them."""

import csv
import math
import re
import runpy
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from experiments.theory import (
    Game,
    activation_budget,
    best_response,
    closed_form,
    find_equilibrium,
    game_of_block,
    linear_proxy,
    monotonicity,
    payoff,
    tangent,
)
from hypothesis import given, settings
from torch import Tensor
from torch.testing import assert_close

from _games import (
    THREE_STARTS,
    couple,
    normal,
    random_game,
    random_power,
    rate_sum,
    seeds,
    tensor,
    uniform,
    with_row,
)
from cenet import functional as F

PAGE = Path(__file__).parents[2] / "docs" / "theory.md"


class TestClosedForm:
    @given(seeds)
    @settings(max_examples=25, deadline=None)
    def test_is_where_the_iteration_ends_if_all_powers_are_active(self, seed):
        game = random_game(seed, budget=1.0)
        game = replace(game, budget=activation_budget(game) * 1.01 + 1e-6)
        found, multipliers, _ = find_equilibrium(game)
        assert found.min() > 0
        power, v0 = closed_form(game)
        assert_close(power, found, rtol=0, atol=1e-10)
        assert_close(v0, multipliers, rtol=1e-9, atol=0)

    def test_multipliers_are_the_derivative_of_the_best_payoff_by_the_budget(self):
        """Against others that stay: what one more unit of budget is worth."""
        game = random_game(2, budget=60.0)
        power, v0 = closed_form(game)
        step = 1e-5
        for c in range(game.channels):
            richer = replace(game, budget=with_row(game.budget, c, game.budget[c] + step))
            more = power.clone()
            more[c] += step / game.positions
            response = best_response(richer, more)
            gain = rate_sum(richer, with_row(power, c, response[c]), c) - rate_sum(game, power, c)
            assert gain / step == pytest.approx(float(v0[c]), rel=1e-5)

    @given(seeds)
    @settings(max_examples=25, deadline=None)
    def test_activation_budget_is_the_threshold(self, seed):
        game = random_game(seed)
        least = activation_budget(game)
        c = seed % game.channels
        below = with_row(1.05 * least, c, 0.999 * least[c])
        assert find_equilibrium(replace(game, budget=1.001 * least)).power.min() > 0
        idle = find_equilibrium(replace(game, budget=below)).power == 0
        assert idle[c].any()
        with pytest.raises(ValueError, match=f"for channel {c}, which has"):
            closed_form(replace(game, budget=below))

    def test_by_hand(self):
        game = Game(
            tensor([[1, 0.5], [0.5, 1]]), tensor([1, 1]), tensor([[1, 0.5], [1, 1]]), tensor([4, 4])
        )
        # noise (1, 2), (1, 1): G⁻¹ (±1/2, 0) = (±2/3, ∓1/3)
        power, v0 = closed_form(game)
        assert_close(power, tensor([[2 + 2 / 3, 2 - 2 / 3], [2 - 1 / 3, 2 + 1 / 3]]))
        assert_close(v0, tensor([2 / 9, 2 / 8]))
        assert_close(activation_budget(game), tensor([4 / 3, 2 / 3]))

    def test_refuses_a_power_below_zero(self):
        game = random_game(0, budget=0.5)
        with pytest.raises(ValueError, match=r"power\[\d, \d\] would be -.*activation_budget"):
            closed_form(game)


class TestLinearProxy:
    @staticmethod
    def around_one(spread: float, strength: float = 0.6) -> Game:
        game = random_game(1, strength=strength, budget=60.0)
        return replace(game, h=1 + spread * (2 * uniform(0, 1, *game.h.shape, seed=2) - 1))

    @pytest.mark.parametrize("strength", [0.0, 0.3, 0.9])
    def test_half_the_spread_a_quarter_of_the_error(self, strength):
        errors = []
        for spread in (0.08, 0.04, 0.02, 0.01):
            game = self.around_one(spread, strength)
            errors.append((linear_proxy(game) - closed_form(game).power).norm())
        for larger, smaller in pairwise(errors):
            assert float(larger / smaller) == pytest.approx(4, rel=0.02)

    def test_error_is_known(self):
        """G⁻¹ σ ⊙ (r_l − mean of r), r = (h − 1)²/h."""
        game = self.around_one(0.4)
        remainder = game.sigma[:, None] * (game.h - 1).square() / game.h
        expected = torch.linalg.inv(game.G) @ (remainder - remainder.mean(1, keepdim=True))
        assert_close(linear_proxy(game) - closed_form(game).power, expected)

    def test_error_of_the_tangent(self):
        h = torch.linspace(0.3, 3, 50, dtype=torch.float64)
        for point in (0.5, 1.0, 2.0, -1.0):
            assert_close(-1 / h - tangent(h, point), -((h - point) ** 2) / (point**2 * h))

    def test_point_of_the_paper_has_the_wrong_sign(self):
        h = torch.linspace(0.8, 1.2, 101, dtype=torch.float64)
        assert_close(tangent(h, -1), 2 + h)
        assert tangent(h, -1).min() > 0 > (-1 / h).max()
        assert float((tangent(h, -1) + 1 / h).abs().max()) == pytest.approx(4.05, abs=1e-9)
        assert float((tangent(h, 1) + 1 / h).abs().max()) == pytest.approx(0.05, abs=1e-9)

    def test_point_of_the_paper_leaves_the_budget_by_four_sigma(self):
        """The printed proxy with the true multipliers, against the one about h = 1."""
        game = self.around_one(0.05)
        _, v0 = closed_form(game)
        constant = (game.G.diagonal() / v0)[:, None]
        inverse = torch.linalg.inv(game.G)
        printed = inverse @ (game.sigma[:, None] * (2 + game.h) + constant)
        meant = inverse @ (game.sigma[:, None] * (game.h - 2) + constant)
        assert_close(printed - meant, (inverse @ (4 * game.sigma))[:, None].expand_as(game.h))
        assert (meant.sum(1) - game.budget).abs().max() < 0.02
        assert (printed.sum(1) - game.budget).abs().max() > 10

    def test_budget_makes_both_points_one_proxy(self):
        game = self.around_one(0.3)
        assert torch.allclose(linear_proxy(game, -1), linear_proxy(game, 1), rtol=0, atol=1e-13)
        assert_close(linear_proxy(game).sum(1), game.budget)


def sample(seed: int, channels: int = 6, positions: int = 64) -> Tensor:
    """Features x̃ of one sample: correlated, standardized, scaled by γ, no shift."""
    blend = torch.eye(channels, dtype=torch.float64) + 0.4 * normal(channels, channels, seed=seed)
    x = blend @ normal(channels, positions, seed=seed + 1)
    x = (x - x.mean(1, keepdim=True)) / x.std(1, correction=0, keepdim=True)
    return uniform(-1, 1, channels, seed=seed + 2)[:, None] * x


def lifted(x: Tensor, operator: Tensor) -> Tensor:
    """x plus the shift β that makes every output positive."""
    out = operator @ x
    return x + torch.linalg.solve(operator, 0.1 - out.amin(1))[:, None]


def covariance(x: Tensor) -> Tensor:
    return torch.cov(x, correction=0)


class TestLink:
    """Eq. CE as a game: what holds exactly, what to first order, and what does not."""

    operators = pytest.mark.parametrize("steps", [1, 3, 20], ids=["T1", "T3", "root"])

    @operators
    def test_proxy_is_the_output_exactly(self, steps):
        x = sample(0)
        operator = F.newton_inverse_sqrt(covariance(x), steps)
        x = lifted(x, operator)
        for epsilon in (1e-3, 1e-4):
            game = game_of_block(x, operator, epsilon)
            assert_close(linear_proxy(game), operator @ x, rtol=0, atol=1e-9)

    @operators
    def test_equilibrium_is_the_output_to_first_order(self, steps):
        x = sample(1)
        operator = F.newton_inverse_sqrt(covariance(x), steps)
        x = lifted(x, operator)
        errors = []
        for epsilon in (8e-4, 4e-4, 2e-4, 1e-4):
            power = find_equilibrium(game_of_block(x, operator, epsilon)).power
            errors.append(float((power - operator @ x).norm() / (operator @ x).norm()))
        assert errors[-1] < 1e-3
        for larger, smaller in pairwise(errors):
            assert larger / smaller == pytest.approx(2, rel=0.02)

    def test_full_block_is_such_a_game_too(self):
        x = sample(2)
        gain = uniform(0.1, 2, len(x), seed=3)
        operator = 0.4 * F.newton_inverse_sqrt(covariance(x), 3) + 0.6 * torch.diag(gain)
        x = lifted(x, operator)
        game = game_of_block(x, operator, 1e-4)
        assert monotonicity(game) > 0
        assert_close(find_equilibrium(game).power, operator @ x, rtol=0, atol=2e-3)
        assert_close(linear_proxy(game), operator @ x, rtol=0, atol=1e-9)

    @operators
    def test_game_of_a_block_has_one_equilibrium(self, steps):
        x = sample(3)
        game = game_of_block(x, F.newton_inverse_sqrt(covariance(x), steps), 1e-4)
        assert monotonicity(game) > 0
        reached = [find_equilibrium(game, random_power(game, k)).power for k in range(2)]
        assert_close(reached[0], reached[1], rtol=0, atol=1e-8)

    def test_standardized_features_as_h_are_no_game(self):
        x = sample(4)
        ones = torch.ones(len(x), dtype=torch.float64)
        with pytest.raises(ValueError, match=r"h\[\d+, \d+\] = -.* must be positive"):
            Game(torch.eye(len(x), dtype=torch.float64), ones, x, ones)

    def test_powers_are_uncorrelated_because_the_root_was_put_in(self):
        """cov(p) = W Σ W: the identity for the root, Σ⁻¹ if the covariance itself is taken as G."""
        x = sample(5)
        sigma = covariance(x)
        values, basis = torch.linalg.eigh(sigma)
        root = (basis * values.rsqrt()) @ basis.mT
        for operator, expected in (
            (root, torch.eye(len(x), dtype=torch.float64)),
            (torch.linalg.inv(sigma), torch.linalg.inv(sigma)),
        ):
            game = game_of_block(lifted(x, operator), operator, 1e-7)
            assert_close(covariance(find_equilibrium(game).power), expected, rtol=1e-3, atol=1e-3)

    def test_without_interference_clipping_commutes(self):
        x = sample(6)
        operator = torch.diag(uniform(0.5, 3, len(x), seed=7))
        power = find_equilibrium(game_of_block(x, operator, 1e-6)).power
        assert (power == 0).double().mean() > 0.3
        assert_close(power, (operator @ x).relu(), rtol=0, atol=1e-4)

    def test_with_interference_it_does_not(self):
        """By hand: W x̃ = ((5, −3), (−1, 3)), and channel 2 takes 1/4 of what clipping left it."""
        operator = tensor([[2, -1], [-1, 2]])
        x = tensor([[3, -1], [1, 1]])
        assert_close((operator @ x).relu(), tensor([[5, 0], [0, 3]]))
        power = find_equilibrium(game_of_block(x, operator, 1e-7)).power
        assert_close(power, tensor([[5, 0], [0.25, 2.75]]), rtol=0, atol=1e-5)

    def test_clipped_output_stays_away_from_the_equilibrium(self):
        x = sample(7)
        operator = F.newton_inverse_sqrt(covariance(x), 3)
        out = (operator @ x).relu()
        distances = []
        for epsilon in (1e-3, 1e-5):
            power = find_equilibrium(game_of_block(x, operator, epsilon)).power
            distances.append(float((power - out).norm() / out.norm()))
        assert min(distances) > 0.03
        assert distances[0] == pytest.approx(distances[1], rel=0.1)


class TestPage:
    """docs/theory.md and the figure say what the code finds."""

    page = PAGE.read_text()

    def test_counterexamples(self):
        game = couple(2)
        apart, _, together = (find_equilibrium(game, s) for s in THREE_STARTS)
        for equilibrium in (apart, together):
            nats = f"{float(payoff(game, equilibrium.power)[0]):.4f}"
            assert f"{nats} | {float(equilibrium.multipliers[0]):g} |" in self.page
        operator, x = tensor([[2, -1], [-1, 2]]), tensor([[3, -1], [1, 1]])
        first, second = find_equilibrium(game_of_block(x, operator, 1e-7)).power[1].tolist()
        assert f"is ({first:.2f}, {second:.2f})" in self.page

    def test_names_exist(self):
        classes = set(re.findall(r"`(Test\w+)`", self.page))
        files = (Path(__file__), Path(__file__).with_name("test_theory.py"))
        written = {
            n for file in files for n in re.findall(r"^class (Test\w+)", file.read_text(), re.M)
        }
        assert classes == written - {"TestPage", "TestRefusals", "TestPayoff", "TestBestResponse"}
        for name in ("kkt", "potential", "activation_budget", "monotonicity", "game_of_block"):
            assert f"`{name}`" in self.page

    def test_figure(self, tmp_path, monkeypatch):
        pytest.importorskip("matplotlib")
        script = PAGE.parent.parent / "experiments" / "theory_game.py"
        monkeypatch.setattr(sys, "argv", [str(script), "--out", str(tmp_path / "new")])
        runpy.run_path(str(script), run_name="__main__")
        assert (tmp_path / "new" / "theory_game.svg").read_text().count("<path") > 100
        lines: dict[str, list[tuple[float, float]]] = {}
        with (tmp_path / "new" / "theory_game.csv").open() as file:
            for row in csv.DictReader(file):
                key = f"{row['panel']} {row['series']}"
                lines.setdefault(key, []).append((float(row["x"]), float(row["y"])))
        assert {key[0] for key in lines} == set("abcdef")
        for g in ("0.0", "0.5", "0.9"):
            assert slope(lines[f"e g = {g}"][:10]) == pytest.approx(2, abs=0.05)
        for name in ("W, all positive", "root of Σ, all positive", "diagonal of W, half clipped"):
            assert slope(lines[f"f {name}"]) == pytest.approx(1, abs=0.05)
        for name, text in (("W", "apart for W with three"), ("root of Σ", "for the exact root")):
            line = lines[f"f {name}, half clipped"]
            assert slope(line) == pytest.approx(0, abs=0.01)
            assert f"{100 * line[0][1]:.0f} % {text}" in self.page


def slope(line: list[tuple[float, float]]) -> float:
    """Of a straight line in logarithmic axes, from its ends."""
    (x0, y0), (x1, y1) = line[0], line[-1]
    return math.log(y1 / y0) / math.log(x1 / x0)
