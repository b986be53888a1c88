"""Floating-point formats fp(e, m, b), emulated in float32.

Rounding is :mod:`lowbit_optax.precision.grid`'s; here is what the formats are, and
their bit patterns.

References:
  Lee, Sharma and Aiken 2023, "Training with Mixed-Precision Floating-Point
    Assignments".
"""

import dataclasses
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._numerics import float_layouts, rounding
from lowbit_optax.precision.grid import (
    INFINITY,
    MANTISSA,
    Grid,
    bits_of,
    magnitude_of,
    round_to_grid,
    smallest_normal_of,
    split,
)

_BIAS = 127
_SPECIALS = ("none", "nan", "ieee")
_OVERFLOW = ("saturate", "infinity")


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A floating-point format fp(e, m, b), and rounding to it.

    With bias B = 2^(e-1) - 1 + b, its numbers are, for mantissas f = 0 ... 2^m - 1,

        +-2^(E-B) (1 + f / 2^m),    E = 1 ... 2^e - 1    (normal)
        +-2^(1-B) f / 2^m                                (zero and subnormal)

    less those that ``specials`` takes away. All of them are float32's numbers.

    Args:
      exponent_bits: e, 2 to 8.
      mantissa_bits: m, 0 to 23.
      bias: b, what is added to the usual bias; larger is towards smaller numbers.
      specials: "none": every pattern is a number. "nan": all but the one of all ones,
        a NaN. "ieee": the top exponent means infinity and NaN. None is "none", or
        "ieee" where the top exponent is past float32's: fp(8, m).
      overflow: what values past the largest become: "saturate", the largest;
        "infinity", infinity, if the nearest number were there one more is past the
        largest. Emulated, that needs no infinity in the format. An infinity itself
        stays one in "ieee" formats, as one of their values, and with
        ``overflow="infinity"``; else it becomes the largest.
      subnormals: False leaves no number between zero and the smallest normal.

    Raises:
      TypeError: bits or bias are no integers.
      ValueError: out of these ranges, or numbers that float32 does not have.

    >>> import jax.numpy as jnp
    >>> forward = FloatFormat(4, 3, 4)
    >>> forward.largest, forward.smallest_normal, forward.smallest
    (30.0, 0.0009765625, 0.0001220703125)
    >>> forward.round(jnp.array([1.06, 1.07, 100.0, 0.00006]))
    Array([ 1.   ,  1.125, 30.   ,  0.   ], dtype=float32)
    >>> print(forward, FloatFormat(6, 9), FloatFormat.of(jnp.float8_e4m3fn))
    fp(4,3,4) fp(6,9) fp(4,3)+nan

    References:
      Lee, Sharma and Aiken 2023, section 2.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int = 0
    specials: str | None = None
    overflow: str = "saturate"
    subnormals: bool = True

    def __post_init__(self):
        for name in ("exponent_bits", "mantissa_bits", "bias"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise TypeError(f"{name} must be an integer, got {value!r}") from None
        if not 2 <= self.exponent_bits <= 8:
            raise ValueError(f"exponent_bits must be 2 to 8, got {self.exponent_bits}")
        if not 0 <= self.mantissa_bits <= 23:
            raise ValueError(f"mantissa_bits must be 0 to 23, got {self.mantissa_bits}")
        if self.specials is None:
            object.__setattr__(self, "specials", self._usual_specials)
        if self.specials not in _SPECIALS:
            raise ValueError(
                f'specials must be "none", "nan", "ieee" or None, got {self.specials!r}'
            )
        if self.overflow not in _OVERFLOW:
            raise ValueError(
                f'overflow must be "saturate" or "infinity", got {self.overflow!r}'
            )
        if self._smallest_exponent < 1 or self._largest_exponent > _BIAS:
            raise ValueError(
                f"the numbers of {self} must be float32's, of exponents "
                f"{1 - _BIAS} to {_BIAS}; got {1 - self._bias} to "
                f"{self._largest_exponent}"
            )

    @classmethod
    def of(cls, dtype: jax.typing.DTypeLike) -> "FloatFormat":
        """The format whose numbers are a dtype's; values past the largest saturate.

        Args:
          dtype: float32, bfloat16, float16, or a float8, float6 or float4 with a sign.

        Returns:
          The format; for a dtype in which minus zero is NaN (..fnuz), the one of the
          same numbers that has a minus zero and no NaN.

        Raises:
          TypeError: any other dtype.

        >>> FloatFormat.of("bfloat16") == FloatFormat(8, 7)
        True
        """
        for name, description in _DTYPES.items():
            if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).name == name:
                return cls(*description)
        raise TypeError(f"no format for {dtype}; accepted: {', '.join(_DTYPES)}")

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype whose numbers these are, or None.

        >>> FloatFormat(4, 3, 4).dtype
        dtype(float8_e4m3b11fnuz)
        """
        own = (self.exponent_bits, self.mantissa_bits, self.bias, self.specials)
        for name, description in _DTYPES.items():
            if self.subnormals and description == own:
                return jnp.dtype(name)
        return None

    @property
    def bits(self) -> int:
        """The width of a pattern: 1 + e + m."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def largest(self) -> float:
        """The largest finite number."""
        fraction = (self._largest_pattern & self._mantissa_mask) | self._hidden
        return math.ldexp(fraction, self._largest_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """2^(1-B)."""
        return math.ldexp(1.0, 1 - self._bias)

    @property
    def smallest(self) -> float:
        """The smallest number above zero."""
        if not self.subnormals:
            return self.smallest_normal
        return math.ldexp(1.0, 1 - self._bias - self.mantissa_bits)

    def round(self, x: jax.Array, random: jax.Array | None = None) -> jax.Array:
        """Round to numbers of the format, to nearest even or stochastically.

        Ties go to the even significand; with no mantissa bits, where none is even, to
        the larger magnitude.

        Args:
          x: float array, of at most 32 bits.
          random: uint32 of x's shape, random bits to round stochastically: up with
            probability (x - below) / (above - below), to a multiple of 2^-31; None
            rounds to nearest even. Past the largest number, ``overflow`` says what
            becomes of x and of x rounded up.

        Returns:
          Array like x; zeros keep their sign and NaN stays NaN, of the same payload in
          float32. A dtype of fewer numbers than the format's rounds once more.

        Raises:
          TypeError: x is no float array of at most 32 bits.
          ValueError: random is not uint32 of x's shape.
        """
        x = _checked(x)
        rounded, _ = round_to_grid(_widened(x), grid_of(self), random)
        if float_layouts.is_narrow(x.dtype):
            return rounding.round_nearest(rounded, x.dtype)
        return rounded.astype(x.dtype)

    def overflows(self, x: jax.Array) -> jax.Array:
        """Where values are past the largest number, before rounding.

        Args:
          x: float array, of at most 32 bits.

        Returns:
          bool of x's shape: ``|x| > largest``. Infinities are past it in every format,
          and so is NaN, which is no number of any.

        Raises:
          TypeError: x is no float array of at most 32 bits.
        """
        x = _widened(_checked(x))
        return magnitude_of(x) > grid_of(self).largest

    def encode(self, x: jax.Array) -> jax.Array:
        """The patterns of numbers of the format: sign, exponent, mantissa.

        Args:
          x: float array of :meth:`round`'s results; other values are cut off.

        Returns:
          uint8, uint16 or uint32, the smallest that has :attr:`bits`, which are the
          lowest. Values past the largest, and infinity where the format has none, are
          the largest; NaN, where the format has none, too. In an "ieee" format NaN
          keeps the leading bits of its payload.
        """
        x = _widened(_checked(x))
        m, grid = self.mantissa_bits, grid_of(self)
        magnitude = magnitude_of(x)
        exponent, significand = split(magnitude)
        deep = jnp.minimum(grid.drop + grid.smallest_exponent - exponent, 31)
        pattern = jnp.where(
            magnitude < smallest_normal_of(grid),
            significand >> deep,
            (magnitude >> grid.drop) - ((grid.smallest_exponent - 1) << np.uint32(m)),
        )
        pattern = jnp.where(
            magnitude > grid.largest, np.uint32(self._largest_pattern), pattern
        )
        nan = magnitude > np.uint32(INFINITY)
        if self.specials == "nan":
            pattern = jnp.where(nan, np.uint32(self._all_ones), pattern)
        elif self.specials == "ieee":
            infinity = np.uint32(self._largest_pattern + 1)
            payload = (magnitude >> grid.drop) & np.uint32(self._mantissa_mask)
            quiet = np.uint32(self._hidden >> 1)
            payload = jnp.where(payload == 0, quiet, payload)
            pattern = jnp.where(magnitude == np.uint32(INFINITY), infinity, pattern)
            if m:
                pattern = jnp.where(nan, infinity | payload, pattern)
        sign = bits_of(x) >> np.uint32(31)
        pattern = pattern | (sign << np.uint32(self.bits - 1))
        return pattern.astype(self._unsigned)

    def decode(self, patterns: jax.Array) -> jax.Array:
        """The values of patterns, the inverse of :meth:`encode`.

        Args:
          patterns: unsigned integers, of which the lowest :attr:`bits` are read.

        Returns:
          float32. Patterns between zero and the smallest normal are the subnormal
          numbers also where :meth:`round` never yields them.

        Raises:
          TypeError: patterns are no unsigned integers.
        """
        patterns = jnp.asarray(patterns)
        if not jnp.issubdtype(patterns.dtype, jnp.unsignedinteger):
            raise TypeError(
                f"patterns must be unsigned integers, got {patterns.dtype} "
                f"{patterns.shape}"
            )
        patterns = patterns.astype(jnp.uint32)
        grid = grid_of(self)
        sign = (patterns >> np.uint32(self.bits - 1)) << np.uint32(31)
        pattern = patterns & np.uint32(self._all_ones)
        base = (grid.smallest_exponent - np.uint32(1)) << np.uint32(MANTISSA)
        normal = (pattern << grid.drop) + base
        # A subnormal's leading bit is moved to the hidden one's place, unless it is
        # one of float32's subnormals.
        rise = grid.drop + grid.smallest_exponent - np.uint32(1)
        up = jnp.minimum(lax.clz(pattern) - np.uint32(31 - MANTISSA), rise)
        subnormal = (pattern << up) + ((rise - up) << np.uint32(MANTISSA))
        value = jnp.where(pattern < np.uint32(self._hidden), subnormal, normal)
        value = jnp.where(pattern == 0, np.uint32(0), value)
        if self.specials != "none":
            payload = (pattern & np.uint32(self._mantissa_mask)) << grid.drop
            special = np.uint32(INFINITY) | payload
            if self.specials == "nan":
                special = np.uint32(INFINITY | 1 << (MANTISSA - 1))
            value = jnp.where(
                pattern > np.uint32(self._largest_pattern), special, value
            )
        return lax.bitcast_convert_type(sign | value, jnp.float32)

    def __str__(self):
        numbers = [self.exponent_bits, self.mantissa_bits, self.bias or None]
        text = f"fp({','.join(str(n) for n in numbers if n is not None)})"
        if self.specials != self._usual_specials:
            text += f"+{self.specials}"
        if self.overflow != "saturate":
            text += f"+{self.overflow}"
        return text if self.subnormals else f"{text}-subnormals"

    @property
    def _usual_specials(self) -> str:
        return "ieee" if self.exponent_bits == 8 and self.bias == 0 else "none"

    @property
    def _bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1 + self.bias

    @property
    def _smallest_exponent(self) -> int:
        """Of the smallest normal, as float32 stores it."""
        return _BIAS + 1 - self._bias

    @property
    def _hidden(self) -> int:
        return 1 << self.mantissa_bits

    @property
    def _mantissa_mask(self) -> int:
        return self._hidden - 1

    @property
    def _all_ones(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def _largest_pattern(self) -> int:
        past = {"none": 0, "nan": 1, "ieee": self._hidden}
        return self._all_ones - past[self.specials]

    @property
    def _largest_exponent(self) -> int:
        return (self._largest_pattern >> self.mantissa_bits) - self._bias

    @property
    def _unsigned(self) -> np.dtype:
        return np.dtype(f"uint{max(8, 1 << (self.bits - 1).bit_length())}")


def grid_of(fmt: FloatFormat) -> Grid:
    """The integers that describe a format to :func:`round_to_grid`.

    Args:
      fmt: the format.

    Returns:
      Numpy uint32 scalars.
    """
    drop = MANTISSA - fmt.mantissa_bits
    largest = _pattern_of(fmt.largest)
    past = INFINITY if fmt.overflow == "infinity" else largest
    return Grid(
        *map(
            np.uint32,
            (
                drop,
                drop if fmt.subnormals else MANTISSA,
                fmt._smallest_exponent,
                _pattern_of(fmt.smallest),
                largest,
                past,
                INFINITY if fmt.specials == "ieee" else past,
            ),
        )
    )


FP32 = FloatFormat(8, 23)
"""float32 itself: rounding to it changes nothing."""

# The fnuz dtypes have one NaN, in the place of minus zero, and all other patterns are
# numbers.
_DESCRIPTIONS = {
    "float32": (8, 23, 0, "ieee"),
    "bfloat16": (8, 7, 0, "ieee"),
    "float16": (5, 10, 0, "ieee"),
    "float8_e5m2": (5, 2, 0, "ieee"),
    "float8_e5m2fnuz": (5, 2, 1, "none"),
    "float8_e4m3": (4, 3, 0, "ieee"),
    "float8_e4m3fn": (4, 3, 0, "nan"),
    "float8_e4m3fnuz": (4, 3, 1, "none"),
    "float8_e4m3b11fnuz": (4, 3, 4, "none"),
    "float8_e3m4": (3, 4, 0, "ieee"),
    "float6_e3m2fn": (3, 2, 0, "none"),
    "float6_e2m3fn": (2, 3, 0, "none"),
    "float4_e2m1fn": (2, 1, 0, "none"),
}
# JAX has not all of them in every version.
_DTYPES = {n: d for n, d in _DESCRIPTIONS.items() if hasattr(jnp, n)}


def _checked(x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise TypeError(
            f"x must be a float array of at most 32 bits, got {x.dtype} {x.shape}"
        )
    return x


def _widened(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.float32 else rounding.to_float32(x)


def _pattern_of(number: float) -> int:
    return int(np.float32(number).view(np.uint32))
