"""Second moments as floats whose exponents count from that of the block.

:mod:`lowbit_optax._numerics.codes` explains what a code is and how all codes round.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics.codes import (
    ONE_EXPONENT,
    Code,
    as_fields,
    bits_of,
    float_of,
    multiply_add,
    pattern_of,
    rounding_offset,
)
from pallas_kernels import operations

# A compiler may compute a moment twice, for the scale and for the fields, and round it
# differently. No number so close above the largest must be rounded up to infinity.
_MARGIN = 16  # units in the last place


@dataclasses.dataclass(frozen=True)
class Float(Code):
    """Floats with m bits of mantissa, whose exponents count from that of the block.

    Without negative numbers, the patterns of float32 are integers in the order of the
    values, and the pattern is linear in x between numbers of m bits. A field is

        (pattern of x - pattern of the base) / 2^(23 - m)

    rounded, so that encoding and decoding are integer sums and shifts. The scale is the
    base, a number of m bits: the largest one with which the block is in range.

    The value of field 0 is the base, and not 0, unless the whole block is 0. With 8
    bits the base is about 2^-32 of the largest value. Numbers of the last steps
    before float32's infinity may become infinity.
    """

    @property
    def _mantissa(self) -> int:
        """The number m of the class's formula."""
        return {8: 3, 4: 1}[self.bits]

    @property
    def _dropped(self) -> int:
        return 23 - self._mantissa

    def scale_of_keys(self, keys):
        pattern = bits_of(self.magnitude_of(*keys))
        step = self._dropped if self.scale == "bfloat16" else 23
        span = self.largest_field << self._dropped
        largest = _rounded_up(pattern + jnp.int32(_MARGIN), self._dropped)
        # Field 0 of a block that is not zero stands for a normal number.
        largest = jnp.maximum(largest, jnp.int32(ONE_EXPONENT + span))
        first = largest - jnp.int32(span)
        if step > self._dropped:
            first = _rounded_up(first, step)
        # No field but infinity's stands for float32's infinity or more.
        last = pattern_of(math.inf) - (self.infinity_field << self._dropped)
        first = jnp.minimum(first, jnp.int32(last >> step << step))
        first = jnp.where(pattern == jnp.int32(0), jnp.int32(0), first)
        return float_layouts.from_bits(as_fields(first) >> jnp.uint32(16), jnp.bfloat16)

    def prepare(self, scale):
        """The base's pattern, int32, and the same as for infinity's field."""
        base = bits_of(scale)
        return base, base + jnp.int32(self.infinity_field << self._dropped)

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        base, _ = prepared
        infinity = jnp.int32(self.infinity_field << self._dropped)
        above = operations.pattern_above(x, base, infinity)
        # The field becomes the leading bits of a word.
        free = 32 - self.bits
        above = as_fields(above) << jnp.uint32(free - self._dropped)
        offset = lax.bitcast_convert_type(rounding_offset(free, words), jnp.uint32)
        return (above + offset) >> jnp.uint32(free)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        base, infinity = prepared
        above = fields << jnp.uint32(self._dropped)
        pattern = lax.bitcast_convert_type(above, jnp.int32) + base
        # For equality a compiler would compare the fields, which takes another shift.
        infinite = pattern >= infinity
        return jnp.where(infinite, jnp.float32(jnp.inf), float_of(pattern))


def _rounded_up(pattern: jax.Array, dropped: int) -> jax.Array:
    """int32 patterns without their low bits, rounded up."""
    pattern = pattern + jnp.int32((1 << dropped) - 1)
    return pattern & jnp.int32(-1 << dropped)
