"""Second moments as floats with few bits, relative to the exponent of the block."""

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
    pattern_of,
    rounding_offset,
)
from pallas_kernels import operations

# A compiler may compute a moment twice, for the scale and for the fields, with
# different rounding. A number slightly above the largest must not become infinity.
_MARGIN = 16  # units in the last place


@dataclasses.dataclass(frozen=True)
class Float(Code):
    """Floats with m mantissa bits, whose exponents are relative to the block.

    The float32 patterns of non-negative numbers are integers in the order of the
    numbers, and between two numbers of m bits the pattern is linear in x. A field is

        (pattern of x - pattern of the base) / 2^(23 - m)

    rounded to an integer, so encoding and decoding need only integer sums and shifts.
    The scale is the base: the largest number of m bits for which the whole block is in
    range.

    Field 0 decodes to the base and not to 0, unless the whole block is 0. With 8 bits,
    the base is about 2^-32 of the largest value. Numbers in the last steps below
    float32's infinity may become infinity.
    """

    @property
    def smallest_share(self):
        # Rounding the scale up can add a step of m bits.
        steps = 1 << (23 - self._dropped)
        return (1 + 1 / steps) * 2.0 ** -(self.largest_field // steps)

    @property
    def _dropped(self) -> int:
        """The number 23 - m, with m as in the docstring of the class."""
        mantissa = {8: 3, 4: 1}[self.bits]
        return 23 - mantissa

    def scale_of_key(self, key):
        pattern = bits_of(self.magnitude_of(key))
        span = self.largest_field << self._dropped
        largest = _rounded_up(pattern + jnp.int32(_MARGIN), self._dropped)
        # Unless the whole block is 0, field 0 must decode to a normal number.
        largest = jnp.maximum(largest, jnp.int32(ONE_EXPONENT + span))
        first = largest - jnp.int32(span)
        # Only the field of infinity may decode to float32's infinity.
        last = pattern_of(math.inf) - (self.infinity_field << self._dropped)
        first = jnp.minimum(first, jnp.int32(last >> self._dropped << self._dropped))
        first = jnp.where(pattern == jnp.int32(0), jnp.int32(0), first)
        return float_layouts.from_bits(as_fields(first) >> jnp.uint32(16), jnp.bfloat16)

    def prepare(self, scale):
        """Return the int32 patterns of the base and of the field of infinity."""
        base = bits_of(scale)
        return base, base + jnp.int32(self.infinity_field << self._dropped)

    def encode_fields(self, x, prepared, words):
        base, _ = prepared
        infinity = jnp.int32(self.infinity_field << self._dropped)
        above = operations.pattern_above(x, base, infinity)
        free = 32 - self.bits
        above = as_fields(above) << jnp.uint32(free - self._dropped)
        offset = lax.bitcast_convert_type(rounding_offset(free, words), jnp.uint32)
        return (above + offset) >> jnp.uint32(free)

    def decode_fields(self, fields, prepared):
        base, infinity = prepared
        above = fields << jnp.uint32(self._dropped)
        pattern = lax.bitcast_convert_type(above, jnp.int32) + base
        # A comparison of the fields for equality would need another shift.
        infinite = pattern >= infinity
        return jnp.where(infinite, jnp.float32(jnp.inf), float_of(pattern))


def _rounded_up(pattern: jax.Array, dropped: int) -> jax.Array:
    """Round int32 patterns up to multiples of ``2^dropped``."""
    pattern = pattern + jnp.int32((1 << dropped) - 1)
    return pattern & jnp.int32(-1 << dropped)
