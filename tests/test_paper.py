"""What the paper claims, as assertions: what holds, and what docs/paper.md corrects."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from cenet import BatchDecorrelation2d, ChannelEquilibrium2d
from cenet import functional as F

CHANNELS = 16
ROUND_OFF = 1e-9


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def uniform(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=generator(seed), dtype=torch.float64)


def trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)


def trace_normalized(sigma: Tensor) -> Tensor:
    return sigma / trace(sigma)[..., None, None]


def covariances(count: int, rank: int, seed: int, channels: int = CHANNELS) -> Tensor:
    """Random covariance matrices of trace one and of the given rank."""
    factor = normal(count, channels, rank, seed=seed)
    return trace_normalized(factor @ factor.mT)


def correlations(count: int, seed: int, channels: int = CHANNELS) -> Tensor:
    sigma = covariances(count, channels + 4, seed, channels)
    std = sigma.diagonal(dim1=-2, dim2=-1).sqrt()
    return sigma / std[..., :, None] / std[..., None, :]


def with_spectrum(eigenvalues: Tensor, seed: int) -> Tensor:
    basis = torch.linalg.qr(normal(len(eigenvalues), len(eigenvalues), seed=seed)).Q
    return trace_normalized((basis * eigenvalues) @ basis.T)


def scaled(rho: Tensor, gamma: Tensor) -> Tensor:
    """Σ = γγᵀ ⊙ ρ divided by its trace."""
    return trace_normalized(rho * gamma[..., :, None] * gamma[..., None, :])


def exact_inverse_sqrt(sigma: Tensor) -> Tensor:
    """Σ^{-1/2} by eigendecomposition; the pseudo-inverse root if Σ is singular."""
    eigenvalues, basis = torch.linalg.eigh(sigma)
    inverse = torch.where(eigenvalues > 1e-12, eigenvalues.clamp_min(1e-12).rsqrt(), 0.0)
    return (basis * inverse[..., None, :]) @ basis.mT


def printed_newton(sigma: Tensor, steps: int) -> Tensor:
    """Eq. Newtoniter as printed."""
    iterate = torch.eye(sigma.shape[-1], dtype=sigma.dtype)
    for _ in range(steps):
        iterate = 0.5 * (3 * iterate - iterate @ iterate @ iterate @ sigma)
    return iterate


def spectral_newton(sigma: Tensor, steps: int) -> Tensor:
    """Eq. Newtoniter applied to each eigenvalue in float64."""
    eigenvalues, basis = torch.linalg.eigh(sigma.double())
    gain = torch.ones_like(eigenvalues)
    for _ in range(steps):
        gain = 0.5 * (3 * gain - gain**3 * eigenvalues)
    return (basis * gain) @ basis.T


def smallest_eigenvalue(matrix: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(matrix)[..., 0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def applied(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


TRACE_ONE = {
    "full-rank": covariances(50, 2 * CHANNELS, seed=0),
    "rank-3": covariances(50, 3, seed=1),
    "rank-1": covariances(50, 1, seed=2),
    "white": torch.eye(CHANNELS, dtype=torch.float64)[None] / CHANNELS,
    "one-channel": torch.diag(torch.eye(CHANNELS, dtype=torch.float64)[0])[None],
    "condition-1e6": with_spectrum(torch.logspace(0, -6, CHANNELS, dtype=torch.float64), 3)[None],
}
any_covariance = pytest.mark.parametrize("sigma", TRACE_ONE.values(), ids=TRACE_ONE.keys())
any_steps = pytest.mark.parametrize("steps", range(1, 8))


class TestProposition1Part1:
    """|γ̂_c| > |γ_c| for γ̂ = Wγ."""

    counterexample_gamma = torch.tensor([1, 0.1], dtype=torch.float64)
    counterexample = scaled(
        torch.tensor([[1, 0.5], [0.5, 1]], dtype=torch.float64), counterexample_gamma
    )

    def test_one_step_enlarges_every_gamma(self):
        gamma = normal(500, CHANNELS, seed=0)
        sigma = scaled(correlations(500, seed=1), gamma)
        ratio = applied(F.newton_inverse_sqrt(sigma, 1), gamma) / gamma
        assert ratio.min() > 1 + ROUND_OFF
        assert ratio.max() < 2

    def test_one_step_formula_of_the_proof(self):
        gamma, rho = normal(CHANNELS, seed=2), correlations(1, seed=3)[0]
        weight = gamma.square() / gamma.square().sum()
        expected = 0.5 * (3 - rho @ weight) * gamma
        assert_close(F.newton_inverse_sqrt(scaled(rho, gamma), 1) @ gamma, expected)

    def test_one_step_keeps_gamma_of_identical_channels(self):
        gamma = normal(CHANNELS, seed=4)
        sigma = scaled(torch.ones(CHANNELS, CHANNELS, dtype=torch.float64), gamma)
        assert_close(F.newton_inverse_sqrt(sigma, 1) @ gamma, gamma)

    @any_steps
    def test_zero_gamma_stays_zero(self, steps):
        gamma = normal(CHANNELS, seed=5)
        gamma[3] = 0
        sigma = scaled(correlations(1, seed=6)[0], gamma)
        assert (F.newton_inverse_sqrt(sigma, steps) @ gamma)[3] == 0

    @pytest.mark.parametrize(
        ("steps", "expected"), [(1, 1.002), (2, 1.001), (3, 0.998), (7, 0.979)]
    )
    def test_later_steps_can_shrink_the_strong_channel(self, steps, expected):
        gamma = self.counterexample_gamma
        ratio = (F.newton_inverse_sqrt(self.counterexample, steps) @ gamma / gamma).tolist()
        assert ratio[0] == pytest.approx(expected, abs=5e-4)
        assert ratio[1] > 1

    def test_two_steps_can_shrink_the_strong_channel(self):
        gamma = torch.tensor([1, 0.25], dtype=torch.float64)
        rho = torch.tensor([[1, 0.88], [0.88, 1]], dtype=torch.float64)
        ratio = F.newton_inverse_sqrt(scaled(rho, gamma), 2) @ gamma / gamma
        assert float(ratio[0]) == pytest.approx(0.9994, abs=5e-5)

    def test_exact_root_can_shrink_the_strong_channel(self):
        gamma = self.counterexample_gamma
        ratio = (exact_inverse_sqrt(self.counterexample) @ gamma / gamma).tolist()
        assert ratio[0] == pytest.approx(0.977, abs=5e-4)
        assert ratio[1] > 1

    def test_exact_root_can_shrink_the_sum_of_magnitudes(self):
        gamma = torch.tensor([1, 1, 0.25], dtype=torch.float64)
        rho = torch.tensor([[1, 0.85, 0.95], [0.85, 1, 0.95], [0.95, 0.95, 1]], dtype=torch.float64)
        gamma_hat = exact_inverse_sqrt(scaled(rho, gamma)) @ gamma
        assert float(gamma_hat.abs().sum() / gamma.sum()) == pytest.approx(0.958, abs=5e-4)

    def test_premise_that_every_iterate_is_the_root_needs_a_single_channel(self):
        one = torch.ones(1, 1, dtype=torch.float64)
        assert_close(F.newton_inverse_sqrt(one, 1), exact_inverse_sqrt(one))
        sigma = covariances(200, 2 * CHANNELS, seed=7)
        gap = F.newton_inverse_sqrt(sigma, 1) - exact_inverse_sqrt(sigma)
        assert torch.linalg.matrix_norm(gap).min() > 1


class TestProposition1BehindOtherNorms:
    """The proof needs every channel of x̃ to have the deviation |γ_c|: LN does not give it."""

    gamma = torch.tensor([0.17, 1], dtype=torch.float64)
    rho = 0.87

    def features(self) -> Tensor:
        """One image, two channels: exact deviations 10 and 1, exact correlation `rho`, no mean."""
        noise = normal(2, 64, seed=0)
        noise -= noise.mean(1, keepdim=True)
        white = torch.linalg.solve(torch.linalg.cholesky(noise @ noise.T / 64), noise)
        second = self.rho * white[0] + math.sqrt(1 - self.rho**2) * white[1]
        return torch.stack([10 * white[0], second]).view(1, 2, 8, 8)

    def growth(self, norm: nn.Module) -> Tensor:
        """γ̂ / γ after one Newton step on the covariance of what the norm returns."""
        norm.weight.data.copy_(self.gamma)
        normalized = norm(self.features()).detach()
        rho = torch.corrcoef(normalized[0].flatten(1))[0, 1]
        assert float(rho) == pytest.approx(self.rho)  # all that the paper asks for
        sigma = F.moments(normalized, 2).cov
        assert sigma is not None
        return F.newton_inverse_sqrt(sigma[0], 1) @ self.gamma / self.gamma

    def test_layer_norm_can_leave_a_hundredth_of_a_gamma(self):
        norm = nn.GroupNorm(1, 2, eps=0, dtype=torch.float64)
        assert self.growth(norm).tolist() == pytest.approx([0.0103, 1.3391], abs=5e-5)

    def test_formula_with_unequal_deviations(self):
        norm = nn.GroupNorm(1, 2, eps=0, dtype=torch.float64)
        rho = torch.tensor([[1, self.rho], [self.rho, 1]], dtype=torch.float64)
        deviation = torch.tensor([10, 1], dtype=torch.float64)
        power = deviation * self.gamma.square()
        expected = 0.5 * (3 - deviation * (rho @ power) / (deviation @ power))
        assert_close(self.growth(norm), expected)

    @pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
    def test_norms_that_standardize_each_channel_enlarge_the_same_gammas(self, norm):
        growth = self.growth(norm(2, eps=1e-14, affine=True, dtype=torch.float64))
        weight = self.gamma.square() / self.gamma.square().sum()
        rho = torch.tensor([[1, self.rho], [self.rho, 1]], dtype=torch.float64)
        assert_close(growth, 0.5 * (3 - rho @ weight))
        assert growth.min() > 1


class TestProposition1Part2:
    """‖Σ^{-1/2}x̃‖ > ‖x̃‖ for the exact root of a trace-normalized Σ."""

    def test_full_rank_covariance_enlarges_every_vector(self):
        sigma, x = covariances(300, 2 * CHANNELS, seed=0), normal(300, CHANNELS, seed=1)
        enlarged = applied(exact_inverse_sqrt(sigma), x).norm(dim=-1) / x.norm(dim=-1)
        assert enlarged.min() > 1 + ROUND_OFF

    def test_top_eigenvector_attains_the_first_bound_of_the_proof(self):
        sigma = covariances(1, 2 * CHANNELS, seed=2)[0]
        eigenvalues, basis = torch.linalg.eigh(sigma)
        top = exact_inverse_sqrt(sigma) @ basis[:, -1]
        assert_close(top.square().sum(), 1 / eigenvalues[-1])

    def test_equality_for_one_channel_and_for_zero(self):
        one = covariances(1, 3, seed=3, channels=1)[0]
        x = normal(1, seed=4)
        assert_close(exact_inverse_sqrt(one) @ x, x)
        sigma, zero = covariances(1, CHANNELS, seed=5)[0], torch.zeros(CHANNELS).double()
        assert (exact_inverse_sqrt(sigma) @ zero).norm() == 0

    def test_full_rank_correlation_is_not_enough(self):
        rho, gamma = correlations(1, seed=6)[0], normal(CHANNELS, seed=7)
        gamma[3] = 0
        assert torch.linalg.matrix_rank(rho) == CHANNELS
        root = exact_inverse_sqrt(scaled(rho, gamma))
        silent = torch.eye(CHANNELS, dtype=torch.float64)[3]
        assert (root @ silent).norm() < ROUND_OFF


class TestWhatHoldsForEveryStepCount:
    @any_covariance
    @any_steps
    def test_spectrum_lies_between_one_and_a_power_of_three_halves(self, sigma, steps):
        eigenvalues = torch.linalg.eigvalsh(F.newton_inverse_sqrt(sigma, steps))
        assert eigenvalues.min() >= 1 - ROUND_OFF
        assert eigenvalues.max() <= 1.5**steps + ROUND_OFF

    @any_covariance
    @any_steps
    def test_no_vector_and_no_diagonal_entry_shrinks(self, sigma, steps):
        inv_sqrt = F.newton_inverse_sqrt(sigma, steps)
        x = normal(len(sigma), CHANNELS, seed=0)
        assert (applied(inv_sqrt, x).norm(dim=-1) >= x.norm(dim=-1) * (1 - ROUND_OFF)).all()
        assert inv_sqrt.diagonal(dim1=-2, dim2=-1).min() >= 1 - ROUND_OFF

    @any_covariance
    @any_steps
    def test_no_channel_loses_variance(self, sigma, steps):
        inv_sqrt = F.newton_inverse_sqrt(sigma, steps)
        gained = (inv_sqrt @ sigma @ inv_sqrt - sigma).diagonal(dim1=-2, dim2=-1)
        assert gained.min() >= -ROUND_OFF

    @any_steps
    def test_bounds_are_attained(self, steps):
        gain = F.newton_inverse_sqrt(TRACE_ONE["one-channel"], steps)[0].diagonal()
        assert_close(gain[0].item(), 1.0)
        assert_close(gain[1:], torch.full_like(gain[1:], 1.5**steps))


class TestNewtonIteration:
    @any_covariance
    @pytest.mark.parametrize("steps", range(1, 6))
    def test_coupled_form_is_the_printed_iteration(self, sigma, steps):
        actual = F.newton_inverse_sqrt(sigma, steps)
        assert_close(actual, printed_newton(sigma, steps), rtol=1e-12, atol=1e-12)

    @any_covariance
    def test_size_of_the_covariance_does_not_matter(self, sigma):
        assert_close(F.newton_inverse_sqrt(1e-6 * sigma), F.newton_inverse_sqrt(sigma))

    @pytest.mark.parametrize(
        ("spectrum", "steps"),
        [(torch.eye(CHANNELS)[0], 9), (torch.logspace(0, -3, CHANNELS), 10)],
        ids=["rank-1", "condition-1e3"],
    )
    def test_only_the_printed_form_blows_up_in_float32(self, spectrum, steps):
        sigma = with_spectrum(spectrum.double(), seed=0).float()
        expected = spectral_newton(sigma, steps)
        assert relative_error(printed_newton(sigma, steps), expected) > 1
        assert relative_error(F.newton_inverse_sqrt(sigma, steps), expected) < 1e-4

    def test_three_steps_are_far_from_the_root_even_for_white_input(self):
        gain = F.newton_inverse_sqrt(TRACE_ONE["white"], 3)[0].diagonal()
        root = exact_inverse_sqrt(TRACE_ONE["white"])[0].diagonal()
        assert gain.tolist() == pytest.approx([2.865] * CHANNELS, abs=5e-4)
        assert root.tolist() == pytest.approx([4] * CHANNELS)

    def test_convergence_condition_fails_without_full_rank(self):
        eye = torch.eye(CHANNELS, dtype=torch.float64)
        full, deficient = TRACE_ONE["full-rank"], TRACE_ONE["rank-3"]
        assert torch.linalg.matrix_norm(eye - full, ord=2).max() < 1 - 1e-6
        assert_close(torch.linalg.matrix_norm(eye - deficient, ord=2), torch.ones(50).double())
        largest = torch.linalg.matrix_norm(F.newton_inverse_sqrt(deficient, 9), ord=2)
        assert_close(largest, torch.full_like(largest, 1.5**9))

    def test_zero_covariance_needs_the_ridge(self):
        zero = torch.zeros(1, CHANNELS, CHANNELS, dtype=torch.float64)
        assert F.newton_inverse_sqrt(zero).isnan().all()
        ones = torch.ones(CHANNELS, dtype=torch.float64)
        assert_close(F.decorrelation(zero, ones), F.newton_inverse_sqrt(TRACE_ONE["white"]))


class TestEquivalentGamma:
    def test_operator_acts_on_channels_and_not_on_gamma(self):
        gamma, beta = normal(CHANNELS, seed=0), normal(CHANNELS, seed=1)
        standardized = normal(2, CHANNELS, 3, 3, seed=2)
        inv_sqrt = F.newton_inverse_sqrt(scaled(correlations(1, seed=3)[0], gamma))
        mixed = F.mix(standardized, *F.coefficients(gamma, beta, inv_sqrt=inv_sqrt[None]))

        def in_channels(matrix: Tensor) -> Tensor:
            return torch.einsum("cd,ndhw->nchw", matrix, standardized)

        offset = (inv_sqrt @ beta)[:, None, None]
        correct = in_channels(inv_sqrt @ gamma.diag()) + offset
        printed = in_channels((inv_sqrt @ gamma).diag()) + offset
        assert_close(mixed, correct)
        assert relative_error(printed, correct) > 0.1

    def test_printed_form_is_right_where_all_channels_agree(self):
        gamma = normal(CHANNELS, seed=4)
        inv_sqrt = F.newton_inverse_sqrt(scaled(correlations(1, seed=5)[0], gamma))
        shared = torch.full_like(gamma, 0.7)
        assert_close((inv_sqrt @ gamma) * shared, inv_sqrt @ (gamma * shared))

    def test_printed_form_is_right_where_the_operator_is_diagonal(self):
        gamma, standardized = normal(CHANNELS, seed=6), normal(CHANNELS, seed=7)
        uncorrelated = torch.eye(CHANNELS, dtype=torch.float64)
        inv_sqrt = F.newton_inverse_sqrt(scaled(uncorrelated, gamma))
        assert_close(inv_sqrt, inv_sqrt.diagonal().diag())
        assert_close((inv_sqrt @ gamma) * standardized, inv_sqrt @ (gamma * standardized))


class TestJensenRelaxation:
    """[λΣ + (1−λ)Diag(v)]^{-1/2} ⪯ λΣ^{-1/2} + (1−λ)Diag(v)^{-1/2}, Eq. D_n-relax."""

    draws = 400
    sigma = covariances(draws, 2 * CHANNELS, seed=0)
    instance = torch.diag_embed(0.5 + uniform(draws, CHANNELS, seed=1))
    lam = uniform(draws, 1, 1, seed=2)

    def gap(self, inv_sqrt: Tensor) -> Tensor:
        """Relaxed operator minus exact operator."""
        exact = exact_inverse_sqrt(self.lam * self.sigma + (1 - self.lam) * self.instance)
        return self.lam * inv_sqrt + (1 - self.lam) * exact_inverse_sqrt(self.instance) - exact

    def test_holds_in_the_loewner_order_with_exact_roots(self):
        smallest = smallest_eigenvalue(self.gap(exact_inverse_sqrt(self.sigma)))
        assert smallest.min() >= -ROUND_OFF
        assert smallest.max() > 1e-3

    def test_does_not_hold_entry_by_entry(self):
        entries = self.gap(exact_inverse_sqrt(self.sigma)).amin((-2, -1))
        assert (entries < -1e-3).double().mean() > 0.9

    def test_can_fail_with_three_newton_steps_in_place_of_the_root(self):
        smallest = smallest_eigenvalue(self.gap(F.newton_inverse_sqrt(self.sigma, 3)))
        assert 0 < (smallest < -0.1).sum() < self.draws / 2


def density(gamma: float, beta: float) -> float:
    return math.exp(-((beta / gamma) ** 2) / 2) / math.sqrt(2 * math.pi)


def active_share(gamma: float, beta: float) -> float:
    """P(γz + β > 0) by erfc: 1 + erf cancels where β ≪ −|γ|."""
    return math.erfc(-beta / (math.sqrt(2) * abs(gamma))) / 2


def rectified_mean(gamma: float, beta: float) -> float:
    """E[y] of y = max(0, γz + β), Eq. limgamma1 and Eq. limgamma5."""
    return abs(gamma) * density(gamma, beta) + beta * active_share(gamma, beta)


def rectified_square(gamma: float, beta: float) -> float:
    """E[y²] of y = max(0, γz + β), Eq. limgamma3 and Eq. limgamma6."""
    power = gamma**2 + beta**2
    return abs(gamma) * beta * density(gamma, beta) + power * active_share(gamma, beta)


class TestRemark1:
    z = normal(1_000_000, seed=0)

    @pytest.mark.parametrize("beta", [-0.5, -0.2, 0.0, 0.3])
    @pytest.mark.parametrize("gamma", [-1.0, -0.3, -0.2, 0.2, 0.3, 1.0])
    def test_closed_forms_match_sampling(self, gamma, beta):
        y = (gamma * self.z + beta).relu()
        for sample, expected in (
            (y, rectified_mean(gamma, beta)),
            (y.square(), rectified_square(gamma, beta)),
        ):
            standard_error = sample.std() / math.sqrt(sample.numel())
            assert abs(sample.mean() - expected) < 4 * standard_error

    @pytest.mark.parametrize("sign", [-1, 1])
    @pytest.mark.parametrize("beta", [-0.2, 0.0, 0.3])
    def test_limit_of_small_gamma(self, sign, beta):
        gammas = [sign * 10.0**-power for power in range(1, 7)]
        left = max(beta, 0)
        means = [abs(rectified_mean(gamma, beta) - left) for gamma in gammas]
        squares = [abs(rectified_square(gamma, beta) - left**2) for gamma in gammas]
        assert all(mean <= abs(gamma) for mean, gamma in zip(means, gammas, strict=True))
        assert all(square <= 2 * gamma**2 for square, gamma in zip(squares, gammas, strict=True))

    def test_printed_limit_for_negative_gamma_has_the_wrong_sign_of_erf(self):
        def printed_square(gamma: float, beta: float) -> float:
            share = (1 + math.erf(beta / (math.sqrt(2) * gamma))) / 2
            return -gamma * beta * density(gamma, beta) + (gamma**2 + beta**2) * share

        assert rectified_square(-0.3, -0.2) == pytest.approx(0.0137, abs=5e-5)
        assert printed_square(-0.3, -0.2) == pytest.approx(0.0780, abs=5e-5)
        assert rectified_square(-1e-4, -0.2) == pytest.approx(0, abs=1e-7)
        assert printed_square(-1e-4, -0.2) == pytest.approx(0.04, abs=1e-7)

    def test_small_gamma_is_not_the_only_way_to_silence_a_channel(self):
        assert 0 < rectified_mean(0.5, -10) < 1e-88
        assert 0 < rectified_square(0.5, -10) < 1e-88

    def test_printed_erf_cancels_where_erfc_does_not(self):
        gamma, beta = 0.01, -0.2
        share = (1 + math.erf(beta / (math.sqrt(2) * gamma))) / 2
        printed = gamma * beta * density(gamma, beta) + (gamma**2 + beta**2) * share
        assert printed < 0 < rectified_square(gamma, beta)


class TestAppendixB:
    """Statistics of BN's output from the moments of its input."""

    x = 3 + normal(6, 2 * CHANNELS, 5, 4, seed=0) + 2 * normal(6, 2 * CHANNELS, 1, 1, seed=1)
    gamma = normal(2 * CHANNELS, seed=2)

    def batch_norm(self) -> nn.BatchNorm2d:
        norm = nn.BatchNorm2d(2 * CHANNELS, eps=1e-14, momentum=1, dtype=torch.float64)
        norm.weight.data.copy_(self.gamma)
        norm.bias.data.copy_(normal(2 * CHANNELS, seed=3))
        return norm

    def batch_mean_and_var(self) -> tuple[Tensor, Tensor]:
        """Eq. BN, from the instance moments alone."""
        mean, var, *_ = F.moments(self.x, CHANNELS)
        return mean.mean(0), var.mean(0) + mean.var(0, correction=0)

    def scale(self) -> Tensor:
        return self.gamma * self.batch_mean_and_var()[1].rsqrt()

    def test_instance_moments_are_biased_averages_over_pixels(self):
        mean, var, _, pixels, *_ = F.moments(self.x, CHANNELS)
        assert pixels == 20
        assert_close(mean, self.x.mean((2, 3)))
        assert_close(var, self.x.var((2, 3), correction=0))

    def test_batch_statistics_follow_from_instance_moments(self):
        mean, var = self.batch_mean_and_var()
        assert_close(mean, self.x.mean((0, 2, 3)))
        assert_close(var, self.x.var((0, 2, 3), correction=0))
        norm, count = self.batch_norm(), self.x.numel() // self.x.shape[1]
        norm(self.x)
        assert_close(mean, norm.running_mean)
        assert_close(var * count / (count - 1), norm.running_var)

    def test_input_of_instance_reweighting_is_the_variance_of_normalized_instances(self):
        var, scale = F.moments(self.x, CHANNELS).var, self.scale()
        expected = self.batch_norm()(self.x).var((2, 3), correction=0)
        assert_close(var * scale.square(), expected)
        assert_close(F.inverse_std(var, scale, eps=0), expected.mean().rsqrt())

    def test_covariance_of_normalized_features_is_correlation_times_gammas(self):
        cov, scale = F.moments(self.x, CHANNELS).cov, self.scale().view(2, CHANNELS)
        sigma = cov * scale[:, :, None] * scale[:, None, :]
        normalized = self.batch_norm()(self.x).transpose(0, 1).flatten(1)
        for group in range(2):
            channels = slice(group * CHANNELS, (group + 1) * CHANNELS)
            gamma = self.gamma[channels]
            assert_close(sigma[group], torch.cov(normalized[channels], correction=0))
            rho = torch.corrcoef(self.x.transpose(0, 1).flatten(1)[channels])
            assert_close(sigma[group], gamma[:, None] * gamma * rho)
            assert_close(trace(sigma[group]), gamma.square().sum())

    def test_size_of_gamma_moves_instance_reweighting_but_not_decorrelation(self):
        _, var, cov, *_ = F.moments(self.x, CHANNELS)
        scale = self.scale()
        assert_close(F.decorrelation(cov, scale / 10), F.decorrelation(cov, scale))
        assert_close(F.inverse_std(var, scale / 10, eps=0), 10 * F.inverse_std(var, scale, eps=0))

    @torch.no_grad()
    @pytest.mark.parametrize(("gamma", "expected"), [(1, 5.6), (0.18, 1.0)])
    def test_size_of_the_branches_of_a_fresh_layer_on_white_noise(self, gamma, expected):
        """Root mean square of W·x̃ over that of a_n ⊙ x̃, β = 0: mean of five seeds."""
        ratios = []
        for seed in range(5):
            torch.manual_seed(seed)
            gate = ChannelEquilibrium2d(64, dtype=torch.float64).ir.gate
            x = normal(32, 64, 14, 14, seed=seed)
            mean, var, cov, *_ = F.moments(x, CHANNELS)
            assert cov is not None
            batch_mean, batch_var = mean.mean(0), var.mean(0) + mean.var(0, correction=0)
            scale = gamma * batch_var.rsqrt()
            inv_sqrt = F.decorrelation(cov, scale)
            gain = F.instance_gain(var, scale, F.inverse_std(var, scale), gate)
            bd = F.mix(x, *F.coefficients(scale, -batch_mean * scale, inv_sqrt=inv_sqrt))
            ir = F.mix(x, *F.coefficients(scale, -batch_mean * scale, gain=gain))
            ratios.append(float(bd.square().mean().sqrt() / ir.square().mean().sqrt()))
        assert sum(ratios) / len(ratios) == pytest.approx(expected, rel=0.02)


class TestMovingAverage:
    @any_steps
    def test_average_keeps_the_spectrum_of_the_operator(self, steps):
        layer = BatchDecorrelation2d(
            CHANNELS, group_size=CHANNELS, newton_steps=steps, dtype=torch.float64
        )
        noise = normal(40, 4, CHANNELS, 3, 3, seed=0)
        degenerate = [torch.zeros_like(noise[0]), noise[0, :, :1].expand_as(noise[0])]
        averages = []
        for batch in [*degenerate, *noise]:
            layer(batch)
            averages.append(layer.running_inv_sqrt.clone())
        eigenvalues = torch.linalg.eigvalsh(torch.cat(averages))
        assert eigenvalues.min() >= 1 - ROUND_OFF
        assert eigenvalues.max() <= 1.5**steps + ROUND_OFF
        assert layer.num_batches_tracked == 42

    def test_first_batches_weigh_alike(self):
        layer = BatchDecorrelation2d(CHANNELS, momentum=0.2, dtype=torch.float64)
        ones = torch.ones(CHANNELS, dtype=torch.float64)
        operators = []
        for batch in normal(4, 4, CHANNELS, 3, 3, seed=2):
            layer(batch)
            operators.append(F.decorrelation(F.moments(batch, CHANNELS).cov, ones))
            assert_close(layer.running_inv_sqrt, torch.stack(operators).mean(0))

    def test_settled_layer_follows_the_printed_rule(self):
        layer = ChannelEquilibrium2d(CHANNELS, momentum=0.2, dtype=torch.float64)
        batches = normal(9, 4, CHANNELS, 3, 3, seed=1)
        for batch in batches[:8]:
            layer(batch)
        before = layer.bd.running_inv_sqrt.clone(), layer.ir.running_inv_std.clone()
        layer(batches[8])
        _, var, cov, *_ = F.moments(batches[8], CHANNELS)
        ones = torch.ones(CHANNELS, dtype=torch.float64)
        inv_sqrt, inv_std = F.decorrelation(cov, ones), F.inverse_std(var, ones)
        assert_close(layer.bd.running_inv_sqrt, 0.8 * before[0] + 0.2 * inv_sqrt)
        assert_close(layer.ir.running_inv_std, 0.8 * before[1] + 0.2 * inv_std)
