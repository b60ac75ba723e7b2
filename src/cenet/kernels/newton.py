"""Newton's iteration on one group, and its backward."""

import triton
import triton.language as tl

from cenet.kernels.tiles import small_dot


@triton.jit
def newton(sigma, iterates, inside, offsets, steps: tl.constexpr, K: tl.constexpr):
    """The coupled form of `functional.newton_inverse_sqrt`; every step is kept for backward."""
    place = tl.arange(0, sigma.shape[0])
    eye = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    y = sigma
    step = 1.5 * eye - 0.5 * y
    z = step
    for t in tl.static_range(steps):
        if t > 0:
            y = small_dot(y, step)
            step = 1.5 * eye - 0.5 * small_dot(z, y)
            z = small_dot(step, z)
        tl.store(iterates + (3 * t) * K * K + offsets, y, mask=inside)
        tl.store(iterates + (3 * t + 1) * K * K + offsets, step, mask=inside)
        tl.store(iterates + (3 * t + 2) * K * K + offsets, z, mask=inside)
    return z


@triton.jit
def newton_backward(grad, iterates, inside, offsets, steps: tl.constexpr, K: tl.constexpr):
    """Gradient of the first argument of `newton`, from that of its result."""
    grad_y = tl.zeros_like(grad)
    grad_step = tl.zeros_like(grad)
    grad_z = grad
    for back in tl.static_range(steps - 1):
        t = steps - 1 - back
        y = tl.load(iterates + (3 * t) * K * K + offsets, mask=inside, other=0.0)
        step = tl.load(iterates + (3 * t + 1) * K * K + offsets, mask=inside, other=0.0)
        y_before = tl.load(iterates + (3 * t - 3) * K * K + offsets, mask=inside, other=0.0)
        step_before = tl.load(iterates + (3 * t - 2) * K * K + offsets, mask=inside, other=0.0)
        z_before = tl.load(iterates + (3 * t - 1) * K * K + offsets, mask=inside, other=0.0)
        grad_step += small_dot(grad_z, tl.trans(z_before))
        grad_zy = -0.5 * grad_step
        grad_y += small_dot(tl.trans(z_before), grad_zy)
        grad_z = small_dot(tl.trans(step), grad_z) + small_dot(grad_zy, tl.trans(y))
        grad_step = small_dot(tl.trans(y_before), grad_y)
        grad_y = small_dot(grad_y, tl.trans(step_before))
    return grad_y - 0.5 * (grad_z + grad_step)
