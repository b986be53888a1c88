"""Codes store a float32 value as a k-bit field, relative to the scale of its block.

A code is a set of elementwise functions on arrays of one common shape. XLA applies them
to whole arrays and kernels to rows, so both run the same operations (sums, products,
shifts, comparisons, integer minima and maxima; only ``Sqrt`` needs a square root)::

    magnitude_key(x) --> maximum over the block --> scale_of_key --> scale, in bfloat16
    prepare(scale) --> prepared, once per block
    encode_fields(x, prepared, words) --> fields
    decode_fields(fields, prepared) --> x'

:mod:`lowbit_optax._numerics.in_units` contains the codes whose values are multiples of
a unit.

**Rounding.** Let ``a <= x <= b`` be the neighbors of x among the values of the code.
The result is b with probability ``(x - a) / (b - a)``, rounded to a multiple of 2^-12
or of a smaller power of two. Therefore, the mean is x to within 2^-12 of a step. If
``words`` is None, the result is the nearer neighbor.

**Zero** has its own field, which decodes to exactly 0, and is never rounded randomly.
(In ``"float"``, zero becomes the smallest positive value unless the whole block is 0.)
Unsigned codes store second moments, and updates are divided by their square roots. If a
positive second moment became 0, its update could grow without bound. Therefore,
unsigned codes round small positive numbers up to the smallest positive value.

**Non-finite values.** Infinities and NaNs do not affect the scale, so the other values
of the block keep their precision. Unsigned codes have one field for both, which decodes
to infinity. As in float32, a second moment that has overflowed stays infinite, and its
parameter stops changing. Signed codes store the largest value of the block instead, so
that the moment can recover. In signed codes, magnitudes of 2^50 and more do not affect
the scale either. For example, a gradient g of 2^64 overflows the second moment, and
adds ``(1 - b1) g``, or 2^57 for b1 = 0.99, to the first moment. With a scale for such a
value, the block would lose all smaller moments. A negative number in an unsigned code
becomes the smallest positive value.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RANDOM_BITS = 12
"""Number of leading bits of a random word that every rounding reads. Some read more."""

ONE_EXPONENT = 1 << 23  # adds 1 to the exponent of a float32 pattern
_LARGEST_SCALED = 2.0**50  # in signed codes

Prepared = Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class Code:
    """Base class of all codes. Subclasses define the values of the fields.

    The scale of a block is computed from the largest :meth:`magnitude_key` of the
    block.

    Args:
      bits: k, number of bits of a field.
      signed: whether the code can store negative values.
      limit: magnitudes at or above this number do not affect the scale. None means 2^50
        in signed codes and infinity in unsigned codes.
    """

    bits: int
    signed: bool
    limit: float | None = dataclasses.field(default=None, kw_only=True)

    scale: typing.ClassVar[str] = "bfloat16"
    """The allowed scales: any bfloat16 number, or only each ``"power_of_two"``."""

    @property
    def largest_field(self) -> int:
        """Field of ``largest_value``, without the sign bit in signed codes."""
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 2

    @property
    def smallest_share(self) -> float:
        """Smallest positive value of a field, relative to the largest value."""
        raise NotImplementedError

    @property
    def infinity_field(self) -> int:
        """Field of infinities and NaNs in unsigned codes."""
        return self.largest_field + 1

    @property
    def spare_field(self) -> int:
        """Field of negative zero, which no number needs in a signed code."""
        return 2 ** (self.bits - 1)

    @property
    def _above(self) -> int:
        """2^31 minus the smallest pattern that does not affect the scale."""
        limit = _LARGEST_SCALED if self.signed else math.inf
        return 2**31 - pattern_of(limit if self.limit is None else self.limit)

    def magnitude_key(self, x: jax.Array) -> jax.Array:
        """Return int32 keys that sort like the finite magnitudes.

        :meth:`magnitude_of` converts the largest key of a block to the block's largest
        finite magnitude. Infinities, NaNs and magnitudes at or above the limit have
        negative keys, because the addition to their exponents overflows. This needs
        fewer instructions than a comparison. In unsigned codes, the keys of negative
        numbers are also below the key of 0.
        """
        pattern = bits_of(x)
        if self.signed:
            pattern = pattern & jnp.int32(0x7FFFFFFF)
        return pattern + jnp.int32(self._above)

    def magnitude_of(self, key: jax.Array) -> jax.Array:
        """Return the float32 magnitude for a magnitude key, or 0 for a negative key."""
        return float_of(jnp.maximum(key - jnp.int32(self._above), jnp.int32(0)))

    def scale_of_key(self, key: jax.Array) -> jax.Array:
        """Return the bfloat16 scales of blocks from their largest magnitude keys.

        Scales are rounded up. The scale of a block of zeros is 0.
        """
        raise NotImplementedError

    def prepare(self, scale: jax.Array) -> Prepared:
        """Return the values that encoding and decoding need for a scale."""
        raise NotImplementedError

    def encode_fields(
        self, x: jax.Array, prepared: Prepared, words: jax.Array | None
    ) -> jax.Array:
        """Round values, and return their fields.

        Args:
          x: float32.
          prepared: result of :meth:`prepare`, which must broadcast to the shape of x.
          words: uniformly random uint32 words with the shape of x. Nothing else may
            use their leading :data:`RANDOM_BITS` bits. If None, values are rounded to
            nearest.

        Returns:
          uint32 fields of ``bits`` bits, with the shape of x.
        """
        raise NotImplementedError

    def decode_fields(self, fields: jax.Array, prepared: Prepared) -> jax.Array:
        """Return the float32 values of uint32 fields; inverts :meth:`encode_fields`."""
        raise NotImplementedError


def bits_of(x: jax.Array) -> jax.Array:
    """Return the bit patterns of float32 numbers as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(pattern: jax.Array) -> jax.Array:
    """Return the float32 numbers that have these int32 or uint32 bit patterns.

    >>> import jax.numpy as jnp
    >>> float(float_of(jnp.uint32(0x3F800000)))
    1.0
    """
    return lax.bitcast_convert_type(pattern, jnp.float32)


def pattern_of(x: float) -> int:
    """Return the float32 bit pattern of a number as a Python int."""
    return int(np.float32(x).view(np.int32))


def one_unless_zero(x: jax.Array) -> jax.Array:
    """Return int32 0 for +0 and 1 for all other numbers, without a selection."""
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(jnp.minimum(pattern, jnp.uint32(1)), jnp.int32)


def shift_and_round(
    pattern: jax.Array, first: int, dropped: int, words: jax.Array | None
) -> jax.Array:
    """Return ``(pattern - first) / 2^dropped`` rounded to an integer, as int32.

    ``first`` must be a multiple of ``2^dropped``; see :func:`rounding_offset`.
    """
    pattern = pattern + (rounding_offset(dropped, words) - jnp.int32(first))
    return pattern >> jnp.int32(dropped)


def rounding_offset(dropped: int, words: jax.Array | None) -> jax.Array:
    """Return the offset to add, so that dropping the last ``dropped`` bits rounds.

    ``dropped`` must be at least RANDOM_BITS. ``words`` is as in
    :meth:`Code.encode_fields`. The result is int32 and less than ``2^dropped``.
    """
    if words is None:
        return jnp.int32(1 << (dropped - 1))
    return lax.bitcast_convert_type(words >> jnp.uint32(32 - dropped), jnp.int32)


def rounding_thresholds(words: jax.Array | None) -> jax.Array:
    """Return ``(n + 1/2) / 2^12`` for random n below 2^12, or 1/2 without ``words``."""
    if words is None:
        return jnp.float32(0.5)
    number = (words >> jnp.uint32(32 - RANDOM_BITS)).astype(jnp.int32)
    number = number.astype(jnp.float32) + jnp.float32(0.5)
    return number * jnp.float32(2.0**-RANDOM_BITS)


def number_of(fields: jax.Array, zero: int = 0) -> jax.Array:
    """Return ``fields - zero`` as float32, without a conversion, for fields below 2^23.

    The field becomes the mantissa of the float 2^23 + field.
    """
    return float_of(fields | jnp.uint32(0x4B000000)) - jnp.float32(2.0**23 + zero)


def with_sign_of_field(magnitude: jax.Array, fields: jax.Array, bits: int) -> jax.Array:
    """Return float32 magnitudes with the signs in the leading bits of k-bit fields."""
    sign = (fields >> jnp.uint32(bits - 1)) << jnp.uint32(31)
    return float_of(as_fields(magnitude) | sign)


def as_fields(numbers: jax.Array) -> jax.Array:
    """Return the bit patterns of 32-bit numbers as uint32.

    >>> import jax.numpy as jnp
    >>> as_fields(jnp.int32(7)).dtype
    dtype('uint32')
    """
    return lax.bitcast_convert_type(numbers, jnp.uint32)
