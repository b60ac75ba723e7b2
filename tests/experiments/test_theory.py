"""The interference game: payoffs, best responses, equilibria, refusals."""

import math
from dataclasses import replace

import pytest
import torch
from experiments.theory import (
    Game,
    best_response,
    closed_form,
    deviation_gain,
    find_equilibrium,
    game_of_block,
    interference_strength,
    kkt,
    monotonicity,
    payoff,
    potential,
    tangent,
    water_fill,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from _games import (
    ROUND_OFF,
    THREE_STARTS,
    assert_nobody_deviates,
    couple,
    random_game,
    random_power,
    rate_sum,
    ring,
    seeds,
    tensor,
    uniform,
    with_row,
)


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

    def test_strong_interference_has_three_equilibria(self):
        game = couple(2)
        reached = [find_equilibrium(game, start).power for start in THREE_STARTS]
        assert_close(torch.stack(reached), tensor([[[1, 0], [0, 1]], [[0, 1], [1, 0]],
                                                   [[0.5, 0.5], [0.5, 0.5]]]))  # fmt: skip
        for power in reached:
            assert kkt(game, power).residual.max() == 0
            assert_nobody_deviates(game, power, seed=0)

    def test_the_active_one_is_the_worst(self):
        game = couple(2)
        apart, _, together = (find_equilibrium(game, start).power for start in THREE_STARTS)
        assert_close(closed_form(game).power, together)
        assert_close(payoff(game, apart), tensor([math.log(2)] * 2))
        assert_close(payoff(game, together), tensor([2 * math.log(1.25)] * 2))

    @pytest.mark.parametrize("g", [0.5, 0.99])
    def test_weak_interference_has_one(self, g):
        for start in THREE_STARTS:
            assert_close(find_equilibrium(couple(g), start).power, THREE_STARTS[2])

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


def test_games_that_overflow_and_shapes_that_do_not_fit():
    ones = torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"noise sigma / h.*must be finite"):
        Game(torch.eye(2, dtype=torch.float64), ones * 1e300, torch.full((2, 3), 1e-300).double()
             + 1e-300, ones)  # fmt: skip
    with pytest.raises(ValueError, match="point=0: −1/h has no tangent there"):
        tangent(ones, 0)
    with pytest.raises(ValueError, match=r"got \(2,\) and \(3, 3\)"):
        game_of_block(ones, torch.eye(3, dtype=torch.float64), 0.1)
