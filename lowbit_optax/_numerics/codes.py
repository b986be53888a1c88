"""Codes: a float32 value as a k-bit field, relative to the scale of its block.

A code consists of elementwise functions on arrays of one common shape, so that whole
arrays on the XLA path and rows in a kernel run the same operations (sums, products,
shifts, comparisons, integer minima and maxima; only ``Sqrt`` takes a root)::

    keys(x) --> maximum over the block --> scale_of_keys --> scale, stored as bfloat16
    prepare(scale) --> once per block, what the next two take
    encode_fields(x, prepared, words) --> fields
    decode_fields(fields, prepared) --> x'

:mod:`lowbit_optax._numerics.in_units` is about the codes that count in units, and
:mod:`lowbit_optax._numerics.nested_code` about the one whose steps depend on the block.

**Rounding.** Let ``a <= x <= b`` be the neighbours of x among the code's values. The
result is b with probability ``(x - a) / (b - a)``, rounded to a multiple of 2^-12 or
less. So the mean is x to within 2^-12 of the step. With ``words`` None, the result is
the nearer neighbour.

**Zero** has a field of its own, which decodes to exactly 0 and is never rounded at
random. (In ``"float"`` it becomes the smallest positive value, unless the whole block
is 0.) The unsigned codes are for second moments, whose root divides an update. A second
moment that became 0 would let the update grow without bound, so a positive number never
rounds to zero in these codes: it becomes the smallest positive value instead.

**Values that are not finite.** Infinities and NaNs do not enter the scale, so the other
values of the block keep their precision. The unsigned codes have one field for them,
which decodes to infinity: as in float32, a second moment that has overflowed stays
infinite, and its parameter no longer moves. The signed codes store the largest value of
the block instead, from which the moment recovers. Magnitudes of 2^50 and more do not
enter the scale of a signed code either: a gradient g of 2^64, which overflows the
second moment, leaves ``(1 - b1) g`` in the first, 2^57 with b1 = 0.99, and all smaller
moments of the block would be lost beside it. A negative number in an unsigned code
becomes the smallest positive value.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RANDOM_BITS = 12
"""How many leading bits of a random word every rounding reads; some read more."""

ONE_EXPONENT = 1 << 23  # of a float32's pattern
_LARGEST_SCALED = 2.0**50  # of a signed code

Scale = typing.Literal["bfloat16", "power_of_two"]
Prepared = tuple[jax.Array, jax.Array]
MultiplyAdd = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c``. A kernel passes its own version, which is one instruction."""
    return a * b + c


@dataclasses.dataclass(frozen=True)
class Code:
    """What all codes share. Subclasses define the values that fields stand for.

    A block's scale comes from the largest of its :meth:`magnitude_key`, unless a code
    needs other ``keys``.

    Args:
      bits: k, the bits of a field.
      signed: whether negative values have fields.
      scale: which scales there are: ``"bfloat16"``, any bfloat16, or
        ``"power_of_two"``.
      limit: numbers of this magnitude and more do not enter the scale; None takes 2^50
        in signed codes and infinity in others.
    """

    bits: int
    signed: bool
    scale: Scale = "bfloat16"
    limit: float | None = dataclasses.field(default=None, kw_only=True)

    rounds_evenly: typing.ClassVar[bool] = False
    """Whether its ``words`` fill their range evenly over the steps (`Draws.even`)."""

    maxima: typing.ClassVar[int] = 1
    """Of how many keys per element a block's scale needs the maxima."""

    is_linear_in_units: typing.ClassVar[bool] = False
    """Whether values are numbers times the unit of a block."""

    @property
    def largest_field(self) -> int:
        """The field of ``largest_value``; in signed codes, without the sign bit."""
        return 2 ** (self.bits - 1) - 1 if self.signed else 2**self.bits - 2

    @property
    def infinity_field(self) -> int:
        """The unsigned codes' field for values that are not finite."""
        return self.largest_field + 1

    @property
    def spare_field(self) -> int:
        """A field of a signed code that no number needs: that of negative zero."""
        return 2 ** (self.bits - 1)

    @property
    def _above(self) -> int:
        """How far the first pattern that does not enter the scale is below 2^31."""
        limit = _LARGEST_SCALED if self.signed else math.inf
        return 2**31 - pattern_of(limit if self.limit is None else self.limit)

    def magnitude_key(self, x: jax.Array) -> jax.Array:
        """Integers that are ordered as the finite magnitudes are.

        The maximum of the keys of a block gives its largest finite magnitude, by
        :meth:`magnitude_of`. Infinities, NaNs and magnitudes past the limit have
        negative keys: adding to the exponent overflows the integer, which takes fewer
        instructions than testing for them. In an unsigned code, negative numbers have
        keys below that of 0 as well.
        """
        pattern = bits_of(x)
        if self.signed:
            pattern = pattern & jnp.int32(0x7FFFFFFF)
        return pattern + jnp.int32(self._above)

    def magnitude_of(self, key: jax.Array) -> jax.Array:
        """The magnitude of a :meth:`magnitude_key`, float32; 0 for a negative key."""
        return float_of(jnp.maximum(key - jnp.int32(self._above), jnp.int32(0)))

    def keys(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """The keys whose maxima over a block determine its scale, ``maxima`` of them.

        They are int32 arrays of x's shape; below 0 they count as 0.
        """
        return (self.magnitude_key(x),)

    def scale_of_keys(self, keys: Sequence[jax.Array]) -> jax.Array:
        """The scales of blocks, bfloat16, from the maxima of their :meth:`keys`.

        They are rounded up, and 0 for blocks of zeros.
        """
        raise NotImplementedError

    def prepare(self, scale: jax.Array) -> Prepared:
        """What :meth:`encode_fields` and :meth:`decode_fields` take for a scale."""
        raise NotImplementedError

    def encode_fields(
        self,
        x: jax.Array,
        prepared: Prepared,
        words: jax.Array | None,
        multiply_add: MultiplyAdd = multiply_add,
    ) -> jax.Array:
        """Round values to fields.

        Args:
          x: float32.
          prepared: from :meth:`prepare`, of x's shape or broadcasting to it.
          words: uint32 of x's shape, uniformly random; at least the leading
            :data:`RANDOM_BITS` bits must not be used for anything else. None rounds to
            nearest.
          multiply_add: computes ``a * b + c`` of three arrays.

        Returns:
          uint32 fields of ``bits`` bits, of x's shape.
        """
        raise NotImplementedError

    def decode_fields(
        self,
        fields: jax.Array,
        prepared: Prepared,
        multiply_add: MultiplyAdd = multiply_add,
    ) -> jax.Array:
        """The float32 values of uint32 fields, the inverse of :meth:`encode_fields`."""
        raise NotImplementedError

    def decode_radicand(
        self, fields: jax.Array, prepared: Prepared, multiply_add=multiply_add
    ) -> jax.Array:
        """The positive numbers of :func:`radicand`, of the values of fields."""
        return radicand(self.decode_fields(fields, prepared, multiply_add))[0]


def radicand(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nearest numbers that are normal and positive, and which numbers are finite.

    >>> radicand(jnp.float32([0, 1, jnp.inf]))[0].tolist()
    [1.1754943508222875e-38, 1.0, 3.4028234663852886e+38]
    """
    ends = jnp.finfo(jnp.float32)
    positive = jnp.clip(x, jnp.float32(ends.tiny), jnp.float32(ends.max))
    return positive, x < jnp.float32(jnp.inf)


def bits_of(x: jax.Array) -> jax.Array:
    """The bit patterns of float32 numbers, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(pattern: jax.Array) -> jax.Array:
    """The float32 numbers that int32 or uint32 bit patterns stand for.

    >>> import jax.numpy as jnp
    >>> float(float_of(jnp.uint32(0x3F800000)))
    1.0
    """
    return lax.bitcast_convert_type(pattern, jnp.float32)


def pattern_of(x: float) -> int:
    """The float32 bit pattern of a number, as a Python int."""
    return int(np.float32(x).view(np.int32))


def one_unless_zero(x: jax.Array) -> jax.Array:
    """1 for every number except +0, int32; by its pattern, without a selection."""
    pattern = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(jnp.minimum(pattern, jnp.uint32(1)), jnp.int32)


def shift_and_round(
    pattern: jax.Array, first: int, dropped: int, words: jax.Array | None
) -> jax.Array:
    """``(pattern - first) / 2^dropped`` rounded to an integer, as int32.

    ``first`` is a multiple of ``2^dropped``; see :func:`rounding_offset`.
    """
    pattern = pattern + (rounding_offset(dropped, words) - jnp.int32(first))
    return pattern >> jnp.int32(dropped)


def rounding_offset(dropped: int, words: jax.Array | None) -> jax.Array:
    """What to add to integers before dropping ``dropped`` bits, so that it rounds them.

    At least RANDOM_BITS bits must be dropped; ``words`` as for
    :meth:`Code.encode_fields`. The result is int32, less than ``2^dropped``.
    """
    if words is None:
        return jnp.int32(1 << (dropped - 1))
    return lax.bitcast_convert_type(words >> jnp.uint32(32 - dropped), jnp.int32)


def rounding_thresholds(words: jax.Array | None) -> jax.Array:
    """Rounding thresholds between 0 and 1: the middles of 2^12 intervals at random.

    With ``words`` None, the threshold is 1/2.
    """
    if words is None:
        return jnp.float32(0.5)
    number = (words >> jnp.uint32(32 - RANDOM_BITS)).astype(jnp.int32)
    number = number.astype(jnp.float32) + jnp.float32(0.5)
    return number * jnp.float32(2.0**-RANDOM_BITS)


def number_of(fields: jax.Array, zero: int = 0) -> jax.Array:
    """uint32 fields below 2^23 less that of zero, as float32, without a conversion.

    The field becomes the mantissa of 2^23: the float 2^23 + field.
    """
    return float_of(fields | jnp.uint32(0x4B000000)) - jnp.float32(2.0**23 + zero)


def with_sign_of_field(magnitude: jax.Array, fields: jax.Array, bits: int) -> jax.Array:
    """float32 magnitudes with the signs that lead fields of so many bits."""
    sign = (fields >> jnp.uint32(bits - 1)) << jnp.uint32(31)
    return float_of(as_fields(magnitude) | sign)


def as_fields(numbers: jax.Array) -> jax.Array:
    """The patterns of 32-bit numbers as uint32; of non-negative integers, their values.

    >>> import jax.numpy as jnp
    >>> as_fields(jnp.int32(7)).dtype
    dtype('uint32')
    """
    return lax.bitcast_convert_type(numbers, jnp.uint32)
