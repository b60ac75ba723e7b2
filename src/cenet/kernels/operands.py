"""What tensor cores take of x and of the map, and how exact that is.

In half precision x itself is exact, so products take it as it is, and the norm goes into the
matrix: M = (P + Diag(d)) · Diag(rstd). Only M is rounded. Its constant is that of the rounded
matrix, so that the error does not grow with the distance of x from 0.
"""

import triton
import triton.language as tl

from cenet.kernels.tiles import diagonal, dot, in_two_parts, round_to

# distance from 0, in standard deviations, at which x is shifted
FAR = tl.constexpr(16.0)
# entry of a matrix in float16: what is smaller by 28 binary digits is still normal
LARGEST = tl.constexpr(2.0**14)


@triton.jit
def shift_of(center, rstd, DTYPE: tl.constexpr, RAW: tl.constexpr):
    """What is subtracted from x before products, and what is left of the center.

    RAW x is exact as it is. Only if it is far from 0 for its spread, it is shifted, as products and
    constant would cancel; the difference is exact again, because x is near the shift.
    """
    if RAW:
        shift = tl.where(tl.abs(center) * rstd > FAR, center, 0.0)
        shift = round_to(shift, DTYPE).to(tl.float32)
        return shift, center - shift
    else:
        return center, tl.zeros_like(center)


@triton.jit
def operand_of(x, shift, DTYPE: tl.constexpr):
    """x − shift, which is what products take of a tile of x."""
    return round_to(x.to(tl.float32) - shift[None, :], DTYPE)


@triton.jit
def unit_of(matrix, DTYPE: tl.constexpr):
    """What a matrix is divided by before it is rounded, so that float16 holds it.

    A power of two: two blocks of channels round the same entry in the same way.
    """
    if tl.float16 == DTYPE:
        largest = tl.max(tl.max(tl.abs(matrix), 1), 0)
        power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        return tl.where(power > 0, power, 1.0) / LARGEST
    else:
        return 1.0


@triton.jit
def map_of_x(P, d, rstd, c, left, DTYPE: tl.constexpr, RAW: tl.constexpr, BC: tl.constexpr):
    """(P + Diag(d)) · (x − center) · rstd + c as a map of x − shift; left = center − shift.

    Its matrix in units, in two parts, the first good enough for values; the unit; the constant.
    """
    exact = (P + diagonal(d, BC)) * rstd[None, :]
    unit = unit_of(exact, DTYPE)
    matrix, rest = in_two_parts(exact / unit, DTYPE)
    if RAW:
        # of the rounded matrix: rounding it must not depend on how far from 0 x is
        c -= unit * tl.sum(matrix.to(tl.float32) * left[None, :], 1)
    return matrix, rest, unit, c


@triton.jit
def transform(operand, matrix, unit, c, DTYPE: tl.constexpr):
    """unit · matrix · operand + c, for the rows of a tile."""
    product = dot(operand, tl.trans(matrix))
    if tl.float16 == DTYPE:
        return product * unit + c[None, :]
    else:
        return product + c[None, :]


@triton.jit
def add_transposed(total, g, matrix, rest, unit, DTYPE: tl.constexpr):
    """total + unit · matrixᵀ · g, for the rows of a tile.

    In two parts: a gradient with a mean would show the rounding of the matrix.
    """
    if tl.float16 == DTYPE:
        product = dot(g, rest, dot(g, matrix))
        return total + unit * product
    elif tl.float32 == DTYPE:
        return dot(g, matrix, total)
    else:
        return dot(g, rest, dot(g, matrix, total))
