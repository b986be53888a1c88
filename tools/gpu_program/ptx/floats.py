"""Float arithmetic as PTX defines it, on float32 arrays."""

import numpy as np

from tools.gpu_program.ptx.bits import NAN, integers

_ROUND_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}

DIRECTIONS = ("rn", "rz", "rm")
"""Roundings of sums: to nearest, toward zero, down."""


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray, direction="rn") -> np.ndarray:
    """``a * b + c``, rounded once, in one of :data:`DIRECTIONS`.

    A product of float32 numbers is exact in float64. Its sum with ``c`` is rounded
    there to odd: to the one of the two neighbours of the exact sum whose last bit is 1.
    That bit then stands for all that was cut off. float64 has more than two bits below
    those of float32, subnormal ones included, so that rounding the result to float32
    meets a tie or a number of float32 only where the exact sum is one.

    >>> big = np.float32([1 + 2**-12])
    >>> fma(big, big, -np.float32([1 + 2**-11])) == 2**-24
    array([ True])
    """
    with np.errstate(all="ignore"):
        product = a.astype(np.float64) * b.astype(np.float64)
        return _rounded(_sum_to_odd(product, c), direction)


def total(a: np.ndarray, b: np.ndarray, direction: str) -> np.ndarray:
    """``a + b``, rounded in one of :data:`DIRECTIONS`.

    >>> total(np.float32([1]), np.float32([2**-24 * 1.5]), "rz") == 1
    array([ True])
    """
    with np.errstate(all="ignore"):
        if direction == "rn":
            return with_one_nan(a + b)
        return _rounded(_sum_to_odd(a.astype(np.float64), b), direction)


def _rounded(exact: np.ndarray, direction: str) -> np.ndarray:
    """Numbers of :func:`_sum_to_odd` as float32."""
    near = exact.astype(np.float32)
    if direction != "rn":
        target = np.float32(0 if direction == "rz" else -np.inf)
        magnitude = np.abs if direction == "rz" else np.positive
        beyond = magnitude(near.astype(np.float64)) > magnitude(exact)
        beyond &= np.isfinite(exact)
        near = np.where(beyond, np.nextafter(near, target), near)
    return with_one_nan(near)


def _sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A sum in float64, rounded to odd where it is not exact; see :func:`fma`."""
    b = b.astype(np.float64)
    rounded = a + b
    # Knuth's two-sum: what rounding the sum has cut off, exactly.
    part = rounded - a
    error = (a - (rounded - part)) + (b - part)
    pattern = rounded.view(np.int64)
    inexact = np.isfinite(rounded) & (error != 0) & (pattern & 1 == 0)
    away_from_zero = (error > 0) == (rounded > 0)
    odd = pattern + np.where(away_from_zero, 1, -1)
    return np.where(inexact, odd, pattern).view(np.float64)


def with_one_nan(x: np.ndarray) -> np.ndarray:
    """``x`` with the NaN that arithmetic gives in place of all others."""
    return np.where(np.isnan(x), NAN, x.view(np.uint32)).view(np.float32)


def flushed(x: np.ndarray) -> np.ndarray:
    """``x`` with zeros of the same sign in place of subnormal numbers."""
    subnormal = np.abs(x) < np.finfo(np.float32).tiny
    return np.where(subnormal, np.copysign(np.float32(0), x), x)


def by_float64(function, *inputs: np.ndarray) -> np.ndarray:
    """What float64 gives, rounded to float32: the stand-in for approximating units."""
    with np.errstate(all="ignore"):
        exact = function(*(x.astype(np.float64) for x in inputs))
        return with_one_nan(exact.astype(np.float32))


def larger(x: np.ndarray, y: np.ndarray, keep_nan: bool) -> np.ndarray:
    """The maximum, with 0 above -0.

    Args:
      x, y: numbers.
      keep_nan: whether one NaN makes the result one, or only two do.
    """
    return with_one_nan(-smaller(-x, -y, keep_nan))


def smaller(x: np.ndarray, y: np.ndarray, keep_nan: bool) -> np.ndarray:
    """The minimum, with -0 below 0; arguments as of :func:`larger`."""
    chosen = np.minimum(x, y) if keep_nan else np.fmin(x, y)
    equal = (x.view(np.uint32) | y.view(np.uint32)).view(np.float32)
    return with_one_nan(np.where(x == y, equal, chosen))


def to_integers(x: np.ndarray, rounding: str, kind: str) -> np.ndarray:
    """Floats as integers of 32 or fewer bits; NaNs are 0, others are clamped."""
    limits = np.iinfo(integers(kind))
    whole = _ROUND_TO_INTEGER[rounding](x.astype(np.float64))
    clamped = np.clip(np.nan_to_num(whole, nan=0.0), limits.min, limits.max)
    return clamped.astype(np.int64)


def rounded_to_integers(x: np.ndarray, rounding: str) -> np.ndarray:
    """Floats without their fractions, as floats."""
    return with_one_nan(_ROUND_TO_INTEGER[rounding](x))
