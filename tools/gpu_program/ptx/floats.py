"""Float arithmetic as PTX defines it, on float32 arrays."""

import numpy as np

from tools.gpu_program.ptx.bits import NAN, integers

_ROUND_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}

DIRECTIONS = ("rn", "rz", "rm")
"""Rounding modes of sums: to nearest, toward zero, and down."""


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, direction="rn") -> np.ndarray:
    """Return ``a * b + c``, rounded once in one of the :data:`DIRECTIONS`.

    A product of two float32 numbers is exact in float64. Its sum with ``c`` is rounded
    to odd: if the sum is not exact, it becomes the float64 neighbor whose last bit is
    1. float64 has more than two bits below the last bit of float32, even for subnormal
    numbers. Therefore, the float64 sum is a float32 number, or a tie between two of
    them, only if the exact sum is, and rounding it to float32 gives the correct result.

    >>> big = np.float32([1 + 2**-12])
    >>> fma(big, big, -np.float32([1 + 2**-11])) == 2**-24
    array([ True])
    """
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)
        return _rounded(_sum_to_odd(product, c), direction)


def total(a: np.ndarray, b: np.ndarray, direction: str) -> np.ndarray:
    """Return ``a + b``, rounded in one of the :data:`DIRECTIONS`.

    >>> total(np.float32([1]), np.float32([2**-24 * 1.5]), "rz") == 1
    array([ True])
    """
    with np.errstate(all="ignore"):
        if direction == "rn":
            return with_one_nan(a + b)
        return _rounded(_sum_to_odd(a.astype(np.float64), b), direction)


def _rounded(exact: np.ndarray, direction: str) -> np.ndarray:
    """Round the results of :func:`_sum_to_odd` to float32."""
    near = exact.astype(np.float32)
    if direction != "rn":
        target = np.float32(0 if direction == "rz" else -np.inf)
        magnitude = np.abs if direction == "rz" else np.positive
        beyond = magnitude(near.astype(np.float64)) > magnitude(exact)
        beyond &= np.isfinite(exact)
        near = np.where(beyond, np.nextafter(near, target), near)
    return with_one_nan(near)


def _sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the float64 sum. Inexact sums are rounded to odd; see :func:`fma`."""
    b = b.astype(np.float64)
    rounded = a + b
    # Knuth's two-sum computes the rounding error of the sum exactly.
    part = rounded - a
    error = (a - (rounded - part)) + (b - part)
    pattern = rounded.view(np.int64)
    inexact = np.isfinite(rounded) & (error != 0) & (pattern & 1 == 0)
    away_from_zero = (error > 0) == (rounded > 0)
    odd = pattern + np.where(away_from_zero, 1, -1)
    return np.where(inexact, odd, pattern).view(np.float64)


def with_one_nan(x: np.ndarray) -> np.ndarray:
    """Replace all NaNs in ``x`` with the NaN that arithmetic returns."""
    return np.where(np.isnan(x), NAN, x.view(np.uint32)).view(np.float32)


def flushed(x: np.ndarray) -> np.ndarray:
    """Replace subnormal numbers in ``x`` with zeros of the same sign."""
    subnormal = np.abs(x) < np.finfo(np.float32).tiny
    return np.where(subnormal, np.copysign(np.float32(0), x), x)


def by_float64(function, *inputs: np.ndarray) -> np.ndarray:
    """Compute a function in float64 and round to float32, for approximating units."""
    with np.errstate(all="ignore"):
        exact = function(*(x.astype(np.float64) for x in inputs))
        return with_one_nan(exact.astype(np.float32))


def larger(x: np.ndarray, y: np.ndarray, keep_nan: bool) -> np.ndarray:
    """Return the maximum, where 0 is larger than -0.

    Args:
      x: numbers.
      y: numbers.
      keep_nan: if True, the result is NaN if either number is NaN. If False, it is NaN
        only if both numbers are NaN.
    """
    return with_one_nan(-smaller(-x, -y, keep_nan))


def smaller(x: np.ndarray, y: np.ndarray, keep_nan: bool) -> np.ndarray:
    """Return the minimum, where -0 is smaller than 0. See :func:`larger`."""
    chosen = np.minimum(x, y) if keep_nan else np.fmin(x, y)
    equal = (x.view(np.uint32) | y.view(np.uint32)).view(np.float32)
    return with_one_nan(np.where(x == y, equal, chosen))


def to_integers(x: np.ndarray, rounding: str, kind: str) -> np.ndarray:
    """Convert floats to integers of at most 32 bits: clamp them, and map NaNs to 0."""
    limits = np.iinfo(integers(kind))
    whole = _ROUND_TO_INTEGER[rounding](x.astype(np.float64))
    clamped = np.clip(np.nan_to_num(whole, nan=0.0), limits.min, limits.max)
    return clamped.astype(np.int64)


def rounded_to_integers(x: np.ndarray, rounding: str) -> np.ndarray:
    """Round floats to integers, and return them as floats."""
    return with_one_nan(_ROUND_TO_INTEGER[rounding](x))
