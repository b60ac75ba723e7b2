"""The game of Appendix C against loops, brute force and numbers found by hand."""

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
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from cenet import functional as F
from cenet.theory import (
    Game,
    activation_budget,
    best_response,
    closed_form,
    deviation_gain,
    find_equilibrium,
    game_of_block,
    interference_strength,
    kkt,
    linear_proxy,
    monotonicity,
    payoff,
    potential,
    tangent,
    water_fill,
)

ROUND_OFF = 1e-11
PAGE = Path(__file__).parent.parent / "docs" / "theory.md"
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


class TestPayoff:
    @pytest.mark.parametrize("seed", range(5))
    def test_is_the_printed_sum(self, seed):
        game = random_game(seed)
        power = random_power(game, seed + 9)
        expected = [rate_sum(game, power, c) for c in range(game.channels)]
        assert_close(payoff(game, power), tensor(expected))

    def test_by_hand(self):
        game = Game(
            tensor([[2, 1], [3, 1]]), tensor([1, 2]), tensor([[1, 0.5], [1, 2]]), tensor([1, 2])
        )
        power = tensor([[1, 0], [0.5, 1.5]])
        expected = [math.log(1 + 2 / 1.5), math.log(1 + 0.5 / 5) + math.log(1 + 1.5 / 1)]
        assert_close(payoff(game, power), tensor(expected))

    def test_negative_interference_counts(self):
        game = replace(couple(0), G=tensor([[1, -0.5], [-0.5, 1]]))
        power = tensor([[1, 0], [1, 0]])
        assert_close(payoff(game, power), tensor([math.log(3)] * 2))


class TestBestResponse:
    @given(seeds)
    @settings(max_examples=25, deadline=None)
    def test_no_deviation_pays_more(self, seed):
        game = random_game(seed, channels=3, positions=6)
        power = random_power(game, seed + 9)
        response = best_response(game, power)
        for c in range(game.channels):
            assert_close(response[c].sum(), game.budget[c])
            against = with_row(power, c, response[c])
            best = rate_sum(game, against, c)
            for trial in range(10):
                other = random_power(game, seed + 20 + trial)[c]
                for step in (1.0, 0.1, 1e-3):
                    mixed = response[c] + step * (other - response[c])
                    assert rate_sum(game, with_row(power, c, mixed), c) <= best + ROUND_OFF

    def test_fine_grid_has_nothing_better(self):
        game = random_game(3, channels=2, positions=2)
        power = random_power(game, 4)
        grid = torch.linspace(0, 1, 20_001, dtype=torch.float64)
        below = game.disturbance(power)[0]
        rates = (1 + game.G[0, 0] * game.budget[0] * grid / below[0]).log()
        rates += (1 + game.G[0, 0] * game.budget[0] * (1 - grid) / below[1]).log()
        at = grid[rates.argmax()] * game.budget[0]
        assert abs(best_response(game, power)[0, 0] - at) <= game.budget[0] / 20_000

    @given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.floats(1e-3, 1e3))
    @settings(max_examples=200, deadline=None)
    def test_water_stands_at_one_level_above_its_floor_only(self, floor, budget):
        power = water_fill(tensor(floor), tensor(budget))
        assert_close(power.sum(), tensor(budget), rtol=1e-9, atol=0)
        assert power.min() >= 0
        wet = power > 0
        surface = (power + tensor(floor))[wet]
        assert surface.max() - surface.min() <= 1e-12 * surface.max()
        assert (tensor(floor)[~wet] >= surface.max() * (1 - 1e-12)).all()

    def test_by_hand(self):
        floor = tensor([1, 2, 5])
        assert_close(water_fill(floor, tensor(0.5)), tensor([0.5, 0, 0]))
        assert_close(water_fill(floor, tensor(3)), tensor([2, 1, 0]))
        assert_close(water_fill(floor, tensor(10)), tensor([5, 4, 1]))

    def test_high_floor_costs_no_precision(self):
        floor = tensor([0, 1, 2, 4]) * 2.0**-20
        budget = tensor(4 * 2.0**-20)
        assert_close(water_fill(floor + 2.0**20, budget), water_fill(floor, budget), rtol=0, atol=0)


class TestEquilibrium:
    @given(seeds, st.floats(0.1, 30))
    @settings(max_examples=15, deadline=None)
    def test_nobody_can_gain_by_deviating(self, seed, budget):
        game = random_game(seed, channels=3, positions=5, budget=budget)
        power = find_equilibrium(game).power
        game.check_power(power)
        assert deviation_gain(game, power).abs().max() < ROUND_OFF
        assert_nobody_deviates(game, power, seed)

    @pytest.mark.parametrize("budget", [0.5, 2.0, 30.0])
    def test_ten_thousand_deviations_pay_nothing(self, budget):
        game = random_game(11, channels=5, positions=7, budget=budget)
        power = find_equilibrium(game).power
        assert kkt(game, power).residual.max() <= 1e-10
        share = uniform(0, 1, 10_000, 7, seed=12).log().neg() ** uniform(0, 6, 10_000, 1, seed=13)
        share = share / share.sum(1, keepdim=True)  # from almost even to almost one position
        step = 10 ** uniform(-8, 0, 10_000, 1, seed=14)  # from next to it to far away
        for c in range(game.channels):
            others = sum(game.G[c, d] * power[d] for d in range(5) if d != c)
            quality = game.G[c, c] / (others + game.sigma[c] / game.h[c])
            deviation = power[c] + step * (game.budget[c] * share - power[c])
            now = (1 + quality * power[c]).log().sum()
            assert (1 + quality * deviation).log().sum(1).max() <= now + ROUND_OFF

    @given(seeds)
    @settings(max_examples=15, deadline=None)
    def test_weak_interference_forgets_the_start(self, seed):
        game = random_game(seed, strength=0.9)
        assert interference_strength(game) < 1
        reached = [find_equilibrium(game, random_power(game, seed + k)).power for k in range(3)]
        assert_close(reached[0], reached[1], rtol=0, atol=ROUND_OFF)
        assert_close(reached[0], reached[2], rtol=0, atol=ROUND_OFF)

    @pytest.mark.parametrize("seed", range(4))
    def test_equals_projected_gradient_on_the_potential(self, seed):
        """For a symmetric positive definite G the equilibrium is the minimum of a quadratic."""
        factor = uniform(0, 1, 3, 3, seed=seed)
        matrix = factor @ factor.mT + 0.5 * torch.eye(3, dtype=torch.float64)
        game = replace(random_game(seed, channels=3, positions=6), G=matrix)
        power, step = game.equal_share, 1 / float(torch.linalg.eigvalsh(matrix)[-1])
        for _ in range(150):
            power = onto_simplex(power - step * (matrix @ power + game.noise), game.budget)
        found = find_equilibrium(game).power
        assert (found == 0).any(), "the example has no corner"
        assert_close(found, power, rtol=0, atol=1e-9)

    def test_start_is_left_alone(self):
        game = random_game(0)
        start = random_power(game, 1)
        before = start.clone()
        find_equilibrium(game, start)
        assert torch.equal(start, before)

    def test_more_noise_than_power_still_settles(self):
        game = random_game(1, budget=1e-6)
        assert_nobody_deviates(game, find_equilibrium(game).power, seed=0)


def onto_simplex(values: Tensor, total: Tensor) -> Tensor:
    """Nearest point with nonnegative rows of the given sums, by bisection."""
    low, high = values.amin(1) - total, values.amax(1)
    for _ in range(60):
        middle = (low + high) / 2
        too_much = (values - middle[:, None]).clamp_min(0).sum(1) > total
        low, high = torch.where(too_much, middle, low), torch.where(too_much, high, middle)
    return (values - high[:, None]).clamp_min(0)


class TestKKT:
    @given(seeds, st.floats(0.1, 30))
    @settings(max_examples=25, deadline=None)
    def test_residual_vanishes_at_equilibrium_only(self, seed, budget):
        game = random_game(seed, budget=budget)
        equilibrium = find_equilibrium(game)
        multipliers, residual = kkt(game, equilibrium.power)
        assert residual.abs().max() < ROUND_OFF
        assert_close(equilibrium.multipliers, multipliers)
        away = equilibrium.power + 1e-2 * (random_power(game, seed + 9) - equilibrium.power)
        assert kkt(game, away).residual.max() > 1e-7
        assert deviation_gain(game, away).max() > 1e-12

    @given(seeds)
    @settings(max_examples=25, deadline=None)
    def test_residual_bounds_the_gain_of_every_deviation(self, seed):
        game = random_game(seed)
        power = random_power(game, seed + 9)
        gain, residual = deviation_gain(game, power), kkt(game, power).residual
        assert gain.min() >= 0
        assert (gain <= residual + ROUND_OFF).all()

    def test_conditions_of_the_theorem(self):
        """Eq. nashpoint, with the derivative of the payoff taken by autograd."""
        game = random_game(5, budget=1.0)
        power, multipliers, _ = find_equilibrium(game)
        idle = power == 0
        assert idle.any()
        assert not idle.all()
        power = power.requires_grad_()
        for c in range(game.channels):
            (rate,) = torch.autograd.grad(payoff(game, power)[c], power)
            expected = multipliers[c].expand(int((~idle[c]).sum()))
            assert_close(rate[c][~idle[c]].detach(), expected, rtol=1e-9, atol=0)
            assert (rate[c][idle[c]] <= multipliers[c]).all()

    def test_by_hand(self):
        game = couple(0.5)
        multipliers, residual = kkt(game, tensor([[1, 0], [0.5, 0.5]]))
        assert_close(multipliers, tensor([1 / 1.25, 1 / 1.5]))
        assert_close(residual, tensor([1 / 1.25 - 1 / 2.25, 0.5 / 1.5 - 0.5 / 2.0]))


class TestUniqueness:
    """The paper: one equilibrium, whatever G. Right: one if G is positive definite."""

    starts = tensor([[[0.6, 0.4], [0.4, 0.6]], [[0.4, 0.6], [0.6, 0.4]], [[0.5, 0.5], [0.5, 0.5]]])

    def test_strong_interference_has_three_equilibria(self):
        game = couple(2)
        reached = [find_equilibrium(game, start).power for start in self.starts]
        assert_close(torch.stack(reached), tensor([[[1, 0], [0, 1]], [[0, 1], [1, 0]],
                                                   [[0.5, 0.5], [0.5, 0.5]]]))  # fmt: skip
        for power in reached:
            assert kkt(game, power).residual.max() == 0
            assert_nobody_deviates(game, power, seed=0)

    def test_the_active_one_is_the_worst(self):
        game = couple(2)
        apart, _, together = (find_equilibrium(game, start).power for start in self.starts)
        assert_close(closed_form(game).power, together)
        assert_close(payoff(game, apart), tensor([math.log(2)] * 2))
        assert_close(payoff(game, together), tensor([2 * math.log(1.25)] * 2))

    @pytest.mark.parametrize("g", [0.5, 0.99])
    def test_weak_interference_has_one(self, g):
        for start in self.starts:
            assert_close(find_equilibrium(couple(g), start).power, self.starts[2])

    def test_the_limit_is_g_equal_to_one(self):
        game = couple(1)
        assert monotonicity(game) == pytest.approx(0, abs=1e-15)
        for share in (0.1, 0.5, 0.7):
            power = tensor([[share, 1 - share], [1 - share, share]])
            assert kkt(game, power).residual.max() < ROUND_OFF

    @given(seeds)
    @settings(max_examples=25, deadline=None)
    def test_symmetric_and_not_positive_definite_allows_several(self, seed):
        matrix = uniform(0, 2, 4, 4, seed=seed)
        matrix = (matrix + matrix.mT) / 2
        matrix.fill_diagonal_(1)
        values, basis = torch.linalg.eigh(matrix)
        assume(values[0] < -0.05)
        ones = torch.ones(4, dtype=torch.float64)
        game = Game(matrix, ones, ones[:, None].repeat(1, 2), ones)
        push = 0.1 * torch.stack([basis[:, 0], -basis[:, 0]], 1)
        other = find_equilibrium(game, game.equal_share + push).power
        for power in (game.equal_share, other):
            assert kkt(game, power).residual.max() < ROUND_OFF
        assert (other - game.equal_share).abs().max() > 0.1
        assert potential(game, other) < potential(game, game.equal_share) - 1e-3

    @given(seeds)
    @settings(max_examples=15, deadline=None)
    def test_positive_definite_has_one_though_interference_is_strong(self, seed):
        factor = uniform(0, 1, 4, 4, seed=seed)
        matrix = factor @ factor.mT + 0.05 * torch.eye(4, dtype=torch.float64)
        game = replace(random_game(seed, positions=5), G=matrix)
        assert interference_strength(game) > 1
        assert monotonicity(game) > 0
        reached = [find_equilibrium(game, random_power(game, seed + k)).power for k in range(3)]
        assert_close(reached[0], reached[1], rtol=0, atol=1e-9)
        assert_close(reached[0], reached[2], rtol=0, atol=1e-9)

    def test_best_responses_may_circle_around_the_only_equilibrium(self):
        game = ring(2)
        share = game.equal_share
        assert kkt(game, share).residual.max() == 0
        start = tensor([[0.6, 0.4]] * 3)
        with pytest.raises(RuntimeError, match=r"after 50 sweeps: interference_strength is 2,"):
            find_equilibrium(game, start, max_sweeps=50)
        assert_close(find_equilibrium(ring(0.9), start).power, share)

    def test_numbers_by_hand(self):
        assert interference_strength(couple(0.7)) == pytest.approx(0.7)
        assert interference_strength(ring(2)) == pytest.approx(2)
        assert monotonicity(couple(0.7)) == pytest.approx(0.3)
        game = replace(couple(0), G=tensor([[2, -0.8], [-0.5, 1]]))
        assert interference_strength(game) == pytest.approx(math.sqrt(0.2))
        assert monotonicity(game) == pytest.approx((3 - math.sqrt(1 + 4 * 0.65**2)) / 2)
        signs = tensor([[1, -0.4, 0.4], [0.4, 1, 0.4], [0.4, 0.4, 1]])
        assert interference_strength(replace(ring(0), G=signs)) == pytest.approx(0.8)
        assert_close(potential(couple(2), tensor([[1, 0], [0.5, 0.5]])), tensor(0.75 + 1 + 2))

    @given(seeds)
    @settings(max_examples=15, deadline=None)
    def test_best_response_minimizes_the_potential(self, seed):
        matrix = uniform(0, 1, 3, 3, seed=seed)
        matrix = matrix + matrix.mT + torch.eye(3, dtype=torch.float64)
        game = replace(random_game(seed, channels=3, positions=4), G=matrix)
        power = random_power(game, seed + 9)
        response = best_response(game, power)
        for c in range(3):
            least = potential(game, with_row(power, c, response[c]))
            for trial in range(10):
                other = random_power(game, seed + 20 + trial)[c]
                mixed = response[c] + 0.01 * (other - response[c])
                assert potential(game, with_row(power, c, mixed)) >= least - ROUND_OFF


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


GAME = random_game(0)


def changed(name: str, index: tuple[int, ...], value: float) -> Tensor:
    values = getattr(GAME, name).clone()
    values[index] = value
    return values


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"G": GAME.G[:3]}, r"G must be square, \(C, C\), got \(3, 4\)"),
            ({"G": GAME.G[0]}, r"G must be square, \(C, C\), got \(4,\)"),
            ({"G": changed("G", (1, 2), math.nan)}, r"G\[1, 2\] = nan must be finite"),
            ({"G": changed("G", (1, 1), 0)}, r"diagonal of G\[1\] = 0 must be positive"),
            ({"G": changed("G", (1, 2), -9)}, r"least .*\[1, 0\] = -.* positive: raise sigma"),
            ({"G": GAME.G.float()}, r"G must be float64, got torch.float32: call .double\(\)"),
            ({"sigma": changed("sigma", (2,), 0)}, r"sigma\[2\] = 0 must be positive: without"),
            ({"sigma": GAME.sigma[:2]}, r"sigma must have shape \(4,\).*, got \(2,\)"),
            ({"h": changed("h", (0, 3), -0.5)}, r"h\[0, 3\] = -0.5 must be positive: .* shift"),
            ({"h": changed("h", (0, 3), math.inf)}, r"h\[0, 3\] = inf must be finite"),
            ({"h": GAME.h[:, :0]}, r"h must have shape \(4, 0\), none of it 0"),
            ({"budget": changed("budget", (3,), -1)}, r"budget\[3\] = -1 must be positive: leave"),
        ],
    )
    def test_no_game(self, fields, message):
        with pytest.raises(ValueError, match=message):
            replace(GAME, **fields)

    @pytest.mark.parametrize(
        "function",
        [payoff, best_response, deviation_gain, kkt, find_equilibrium],
        ids=lambda function: function.__name__,
    )
    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda p: with_row(p, 1, -p[1]), r"power\[1, 0\] = -.* must not be negative"),
            (lambda p: with_row(p, 1, p[1] * math.nan), r"power\[1, 0\] = nan must be finite"),
            (lambda p: with_row(p, 1, p[1] * 1.1), r"channel 1 sums to .*: scale it to the budget"),
            (lambda p: p[:, 1:], r"power must have shape \(4, 9\).*got \(4, 8\)"),
        ],
        ids=["negative", "nan", "over-budget", "shape"],
    )
    def test_no_strategy(self, function, spoil, message):
        with pytest.raises(ValueError, match=message):
            function(GAME, spoil(GAME.equal_share))

    def test_potential_needs_symmetry(self):
        with pytest.raises(ValueError, match=r"G must be symmetric .*, \|g_cd − g_dc\| is up to 2"):
            potential(ring(2), ring(2).equal_share)

    def test_closed_form_needs_an_inverse(self):
        with pytest.raises(ValueError, match=r"G is singular: .* use find_equilibrium"):
            closed_form(couple(1))

    @pytest.mark.parametrize(
        ("operator", "epsilon", "message"),
        [
            ([[1, 0.5], [0.4, 1]], 0.1, "operator must be symmetric"),
            ([[1, 2], [2, 1]], 0.1, "positive definite, its least eigenvalue is -1"),
            ([[1, 0], [0, 1]], 0.5, r"epsilon=0.5 must be in \(0, 0.5\)"),
            ([[1, 0], [0, 1]], 0.0, r"epsilon=0.0 must be in \(0, 0.5\)"),
        ],
    )
    def test_no_block(self, operator, epsilon, message):
        with pytest.raises(ValueError, match=message):
            game_of_block(tensor([[3, -1], [1, 1]]), tensor(operator), epsilon)


class TestPage:
    """docs/theory.md and the figure say what the code finds."""

    page = PAGE.read_text()

    def test_counterexamples(self):
        game = couple(2)
        apart, _, together = (find_equilibrium(game, s) for s in TestUniqueness.starts)
        for equilibrium in (apart, together):
            nats = f"{float(payoff(game, equilibrium.power)[0]):.4f}"
            assert f"{nats} | {float(equilibrium.multipliers[0]):g} |" in self.page
        operator, x = tensor([[2, -1], [-1, 2]]), tensor([[3, -1], [1, 1]])
        first, second = find_equilibrium(game_of_block(x, operator, 1e-7)).power[1].tolist()
        assert f"is ({first:.2f}, {second:.2f})" in self.page

    def test_names_exist(self):
        classes = set(re.findall(r"`(Test\w+)`", self.page))
        assert classes == {name for name in globals() if name.startswith("Test")} - {
            *("TestPage", "TestRefusals", "TestPayoff", "TestBestResponse")
        }
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


def test_games_that_overflow_and_shapes_that_do_not_fit():
    ones = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"noise sigma / h.*must be finite"):
        Game(torch.eye(2, dtype=torch.float64), ones * 1e300, torch.full((2, 3), 1e-300).double()
             + 1e-300, ones)  # fmt: skip
    with pytest.raises(ValueError, match="point=0: −1/h has no tangent there"):
        tangent(ones, 0)
    with pytest.raises(ValueError, match=r"got \(2,\) and \(3, 3\)"):
        game_of_block(ones, torch.eye(3, dtype=torch.float64), 0.1)
