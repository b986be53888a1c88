"""Floating-point formats fp(e, m, b), emulated in float32.

This module defines the formats. :mod:`lowbit_optax._numerics.grid` rounds to them and
converts their bit patterns.

References:
  Lee, Sharma and Aiken 2023, "Training with Mixed-Precision Floating-Point
    Assignments".
"""

import dataclasses
import math
import operator
import typing

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics import rounding
from lowbit_optax._numerics.float_layouts import (
    BIAS,
    INFINITY,
    MANTISSA,
    FloatLayout,
    Specials,
    magnitude_of,
)
from lowbit_optax._numerics.grid import Grid, decode, encode, round_to_grid

Overflow = typing.Literal["saturate", "infinity"]


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """A floating-point format fp(e, m, b).

    With bias B = 2^(e-1) - 1 + b and mantissas f = 0 ... 2^m - 1, the numbers are

        +-2^(E-B) (1 + f / 2^m),    E = 1 ... 2^e - 1    (normal)
        +-2^(1-B) f / 2^m                                (zero and subnormal)

    except the numbers whose patterns ``specials`` reserves. float32 must contain all
    numbers of the format.

    Args:
      exponent_bits: e, from 2 to 8.
      mantissa_bits: m, from 0 to 23.
      bias: b, added to the usual bias. A larger bias gives smaller numbers.
      specials: patterns that are not finite numbers. "none": no pattern. "nan": the
        pattern of all ones is NaN. "ieee": the largest exponent is reserved for
        infinity and NaN. None means "ieee" for fp(8, m), because the largest exponent
        would exceed float32's, and "none" for other formats.
      overflow: result for values that round past the largest number: "saturate" gives
        the largest number, and "infinity" gives infinity. Because the format is
        emulated, it needs no pattern for infinity. Infinity itself stays infinity in
        "ieee" formats and with "infinity"; otherwise it becomes the largest number.
      subnormals: if False, there are no numbers between zero and the smallest normal
        one.

    Raises:
      TypeError: if bits or bias are not integers.
      ValueError: if bits or bias are out of range, or float32 lacks one of the numbers.

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
    specials: Specials | None = None
    overflow: Overflow = "saturate"
    subnormals: bool = True

    def __post_init__(self):
        for name in ("exponent_bits", "mantissa_bits", "bias"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise TypeError(
                    f"FloatFormat: {name} must be an integer, got {value!r}"
                ) from None
        for name, low, high in (("exponent_bits", 2, 8), ("mantissa_bits", 0, 23)):
            bits = getattr(self, name)
            if not low <= bits <= high:
                raise ValueError(
                    f"FloatFormat: {name} must be {low} to {high}, got {bits}"
                )
        if self.specials is None:
            object.__setattr__(self, "specials", self._usual_specials)
        if self.specials not in typing.get_args(Specials):
            raise ValueError(
                'FloatFormat: specials must be "none", "nan", "ieee" or None, got '
                f"{self.specials!r}"
            )
        if self.overflow not in typing.get_args(Overflow):
            raise ValueError(
                'FloatFormat: overflow must be "saturate" or "infinity", got '
                f"{self.overflow!r}"
            )
        first, last = 1 - self._layout.bias, self._largest_exponent
        if first < 1 - BIAS or last > BIAS:
            raise ValueError(
                f"FloatFormat: exponents must be in float32's range, {1 - BIAS} to "
                f"{BIAS}, but {self} has exponents from {first} to {last}"
            )

    @classmethod
    def of(cls, dtype: jax.typing.DTypeLike) -> "FloatFormat":
        """Return the format with the numbers of a dtype; overflow saturates.

        Args:
          dtype: float32, bfloat16, float16, or a signed float8, float6 or float4 dtype.

        Returns:
          The format. The fnuz dtypes have a NaN instead of a minus zero. The formats of
          these dtypes have a minus zero and no NaN.

        Raises:
          TypeError: for any other dtype.

        >>> FloatFormat.of("bfloat16") == FloatFormat(8, 7)
        True
        """
        for name, description in _DTYPES.items():
            if jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).name == name:
                return cls(*description)
        raise TypeError(
            f"FloatFormat.of: dtype must be one of {', '.join(_DTYPES)}, got {dtype}"
        )

    def has_all_of(self, dtype: jax.typing.DTypeLike) -> bool:
        """Return whether the format has infinity, NaN and every number of a dtype.

        >>> FP32.has_all_of("float16"), FloatFormat.of("float16").has_all_of("bfloat16")
        (True, False)
        """
        has_all = self.specials == "ieee" and np.dtype(dtype).name in _DTYPES
        return has_all and self.subnormals and self.contains(FloatFormat.of(dtype))

    def contains(self, other: "FloatFormat") -> bool:
        """Return whether the format has all finite numbers of another."""
        return (
            self.mantissa_bits >= other.mantissa_bits
            and self.smallest <= other.smallest
            and self.largest >= other.largest
        )

    @property
    def dtype(self) -> np.dtype | None:
        """The dtype with the same numbers, or None if there is none.

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
        """Number of bits of a pattern: 1 + e + m."""
        return self._layout.width

    @property
    def largest(self) -> float:
        """Largest finite number."""
        hidden = self._layout.hidden
        fraction = (self._layout.special - 1) % hidden + hidden
        return math.ldexp(fraction, self._largest_exponent - self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """Smallest normal number, 2^(1-B)."""
        return math.ldexp(1.0, 1 - self._layout.bias)

    @property
    def smallest(self) -> float:
        """Smallest positive number."""
        if not self.subnormals:
            return self.smallest_normal
        return math.ldexp(self.smallest_normal, -self.mantissa_bits)

    def round(self, x: jax.Array, random: jax.Array | None = None) -> jax.Array:
        """Round values to numbers of the format, to nearest even or stochastically.

        Ties go to the even significand, or to the larger magnitude if there are no
        mantissa bits.

        Args:
          x: float array of at most 32 bits.
          random: uint32 random bits with the shape of x, for stochastic rounding. A
            value is rounded up with probability (x - below) / (above - below), rounded
            to a multiple of 2^-31. If None, round to nearest even. ``overflow`` decides
            the result for values that are, or are rounded, past the largest number.

        Returns:
          Array with the shape and dtype of x, rounded again if the dtype lacks numbers
          of the format. Zeros keep their sign. NaN stays NaN, and keeps its payload in
          float32.

        Raises:
          TypeError: if x is not a float array of at most 32 bits.
          ValueError: if random is not uint32 with the shape of x.
        """
        x = _checked(x)
        rounded, _ = round_to_grid(rounding.to_float32(x), grid_of(self), random)
        return rounding.narrow_or_cast(rounded, x.dtype)

    def overflows(self, x: jax.Array) -> jax.Array:
        """Return which values exceed the largest number before they are rounded.

        Args:
          x: float array of at most 32 bits.

        Returns:
          bool array with the shape of x: ``|x| > largest``. True for infinities and
          NaN.

        Raises:
          TypeError: if x is not a float array of at most 32 bits.
        """
        x = rounding.to_float32(_checked(x))
        return magnitude_of(x) > grid_of(self).largest

    def encode(self, x: jax.Array) -> jax.Array:
        """Return the bit patterns of numbers: sign, exponent and mantissa.

        Args:
          x: float array, a result of :meth:`round`. Other values are truncated.

        Returns:
          uint8, uint16 or uint32, the smallest that has :attr:`bits` bits. The pattern
          is in the lowest bits. Values past the largest number become the largest
          number, and so do infinity and NaN if the format lacks them. In an "ieee"
          format, NaN keeps the leading bits of its payload.
        """
        return traced_once(encode, self._layout)(_checked(x))

    def decode(self, patterns: jax.Array) -> jax.Array:
        """Return the values of bit patterns; inverts :meth:`encode`.

        Args:
          patterns: unsigned integers. Only the lowest :attr:`bits` bits are read.

        Returns:
          float32. Patterns below the smallest normal number decode to subnormal
          numbers, even if ``subnormals`` is False.

        Raises:
          TypeError: if patterns are not unsigned integers.
        """
        patterns = jnp.asarray(patterns)
        if not jnp.issubdtype(patterns.dtype, jnp.unsignedinteger):
            raise TypeError(
                "FloatFormat.decode: patterns must be unsigned integers, got "
                f"{patterns.dtype} {patterns.shape}"
            )
        return traced_once(decode, self._layout)(patterns)

    def __str__(self):
        numbers = [self.exponent_bits, self.mantissa_bits, self.bias or None]
        text = f"fp({','.join(str(n) for n in numbers if n is not None)})"
        if self.specials != self._usual_specials:
            text += f"+{self.specials}"
        if self.overflow != "saturate":
            text += f"+{self.overflow}"
        return text if self.subnormals else f"{text}-subnormals"

    @property
    def _usual_specials(self) -> Specials:
        return "ieee" if self.exponent_bits == 8 and self.bias == 0 else "none"

    @property
    def _layout(self) -> FloatLayout:
        bias = 2 ** (self.exponent_bits - 1) - 1 + self.bias
        specials = self.specials or self._usual_specials
        return FloatLayout(self.exponent_bits, self.mantissa_bits, bias, specials)

    @property
    def _largest_exponent(self) -> int:
        layout = self._layout
        return (layout.special - 1 >> self.mantissa_bits) - layout.bias


def grid_of(fmt: FloatFormat) -> Grid:
    """Return the numpy scalars that describe a format to :func:`round_to_grid`."""
    drop = MANTISSA - fmt.mantissa_bits
    numbers = np.array([fmt.smallest, fmt.largest], np.float32)
    smallest, largest = map(int, numbers.view(np.uint32))
    past = INFINITY if fmt.overflow == "infinity" else largest
    return Grid(
        drop=np.uint32(drop),
        drop_below=np.uint32(drop if fmt.subnormals else MANTISSA),
        smallest_exponent=np.uint32(fmt._layout.smallest_exponent),
        smallest=np.uint32(smallest),
        largest=np.uint32(largest),
        past=np.uint32(past),
        infinite=np.uint32(INFINITY if fmt.specials == "ieee" else past),
    )


FP32 = FloatFormat(8, 23)
"""float32 as a format. Rounding to it changes nothing."""

# The fnuz dtypes have one NaN, in the pattern of minus zero. All other patterns are
# numbers, so specials is "none".
_DTYPES: dict[str, tuple[int, int, int, Specials]] = {
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


def _checked(x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise TypeError(
            "FloatFormat: x must be a float array of at most 32 bits, got "
            f"{x.dtype} {x.shape}"
        )
    return x
