"""A code for second moments: logarithmic grids as fine as a block's range allows."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics.codes import (
    ONE_EXPONENT,
    Code,
    MultiplyAdd,
    Prepared,
    as_fields,
    bits_of,
    float_of,
    multiply_add,
    pattern_of,
)
from pallas_kernels import operations

# Steps are 2^19 to 2^23 in the bit pattern of a float32: 1/16, 1/8, ... 1 octave. In
# bfloat16, a base on any of these grids ends in three zero bits, which store the index
# of the step size instead.
_FINEST = 19
_COARSEST = 23
_PLACE = 16
_STEPS = 7 << _PLACE

_INFINITY = pattern_of(math.inf)
_OVERFLOW = -(2**31)

_NEAR = 2.0**23  # float32 numbers near it are integers

# log2(1 + t) is approximately t + 0.344 t (1 - t).
_BEND = 0.344


@dataclasses.dataclass(frozen=True)
class Nested(Code):
    """Numbers at equal logarithmic steps. The range of the block determines the step.

    The values of all blocks are on nested grids

        2^(n k),    k = 1/16, 1/8, 1/4, 1/2 or 1 octave,    n an integer

    where numbers with m mantissa bits replace ``2^(n / 2^m)``. A block uses the finest
    grid on which 2^bits - 2 neighbours cover its positive values. Because the grids are
    nested, a value is not rounded again when another value of its block changes, but
    only when the block changes to a coarser grid. Zero and infinity have their own
    fields.

    With 6 bits, the coarsest grid covers 61 octaves below the largest value. Smaller
    values become the smallest of these numbers, so that a weight whose second moment
    has decayed does not make the grid of its neighbours coarser.

    **Rounding** keeps the mean of the logarithm, unlike in other codes. Then ``E[g^2 /
    nu]`` is right, and so is the size of updates. If the mean of nu were kept, updates
    would be too large on a coarse grid. The thresholds fill the step evenly over time.
    With independent thresholds, values on a coarse grid would perform a random walk,
    whose variance, in octaves squared, is 0.7 times the step in octaves.

    The scale is the smallest value of the block on its grid, with the index of the step
    size in the last three bits of its mantissa. It is 0 for a block of zeros.
    """

    maxima = 2
    rounds_evenly = True

    def keys(self, x):
        """Return the keys of the largest finite and of the smallest positive number."""
        # The second key is negative for +0 and for negative numbers; only +0 overflows.
        return self.magnitude_key(x), jnp.int32(_OVERFLOW) - bits_of(x)

    def scale_of_keys(self, keys):
        key, smallest = keys
        largest = bits_of(self.magnitude_of(key))
        # Measure patterns relative to float32's smallest normal number.
        high = jnp.maximum(largest - jnp.int32(ONE_EXPONENT), jnp.int32(0))
        low = jnp.int32(_OVERFLOW) - jnp.maximum(smallest, jnp.int32(1))
        low = jnp.clip(low - jnp.int32(ONE_EXPONENT), jnp.int32(0), high)
        # The finest grid that fits is one of three. On the first grid, the block spans
        # 2^(bits - 1) to 2^bits steps. The last grid always fits.
        exponent = bits_of(_number((high - low) >> jnp.int32(8))) >> jnp.int32(23)
        dropped = exponent - jnp.int32(127 - 8 - 1 + self.bits)
        dropped = jnp.maximum(dropped, jnp.int32(_FINEST))
        is_long = _steps_between(low, high, dropped) > self._most_steps
        dropped = dropped + is_long.astype(jnp.int32)
        is_long = _steps_between(low, high, dropped) > self._most_steps
        dropped = jnp.minimum(dropped + is_long.astype(jnp.int32), jnp.int32(_COARSEST))
        top = _shifted_up(high, dropped)
        first = jnp.maximum(low >> dropped, top - self._most_steps) << dropped
        number = (dropped - jnp.int32(_FINEST)) << jnp.int32(_PLACE)
        pattern = first + number + jnp.int32(ONE_EXPONENT)
        pattern = jnp.where(largest > jnp.int32(0), pattern, jnp.int32(0))
        return float_layouts.from_bits(pattern >> jnp.int32(16), jnp.bfloat16)

    @property
    def _most_steps(self) -> jax.Array:
        return jnp.int32(self.largest_field - 1)

    def prepare(self, scale):
        """Return the pattern of the base minus one step, and the log2 of the step."""
        pattern = bits_of(scale)
        number = pattern & jnp.int32(_STEPS)
        dropped = (number >> jnp.int32(_PLACE)) + jnp.int32(_FINEST)
        return pattern - number - (jnp.int32(1) << dropped), dropped

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        zero, dropped = prepared
        shift, one = as_fields(dropped), jnp.uint32(1)
        step = one << shift
        base = zero + lax.bitcast_convert_type(step, jnp.int32)
        infinity = jnp.int32(_INFINITY)
        above = operations.pattern_above(x, base, infinity - base)
        # The bend is a number near 2^23, so its pattern is an integer.
        above = as_fields(above) + (step - jnp.uint32(pattern_of(_NEAR)))
        above = above + _bend(above, shift, multiply_add)
        if words is None:
            offset = one << (shift - one)
        else:
            offset = words >> (jnp.uint32(32) - shift)
        fields = (above + offset) >> shift
        fields = jnp.minimum(fields, jnp.uint32(self.largest_field))
        fields = jnp.where(bits_of(x) == jnp.int32(0), jnp.uint32(0), fields)
        infinite = operations.ordered_pattern(x) >= infinity
        return jnp.where(infinite, jnp.uint32(self.infinity_field), fields)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        value = float_of(_positive(fields, prepared, 0))
        infinite = fields == jnp.uint32(self.infinity_field)
        return jnp.where(infinite, jnp.float32(jnp.inf), value)

    def decode_radicand(self, fields, prepared, multiply_add=multiply_add):
        return float_of(_positive(fields, prepared, ONE_EXPONENT))


def _positive(fields: jax.Array, prepared: Prepared, of_zero: int) -> jax.Array:
    """Return the bit patterns of finite values, and ``of_zero`` for field 0."""
    zero, dropped = prepared
    # The last step may end above the largest finite number.
    pattern = (fields << as_fields(dropped)) + as_fields(zero)
    pattern = jnp.minimum(pattern, jnp.uint32(_INFINITY - 1))
    return jnp.where(fields == jnp.uint32(0), jnp.uint32(of_zero), pattern)


def _bend(above: jax.Array, shift: jax.Array, multiply_add: MultiplyAdd) -> jax.Array:
    """Return the correction from a pattern to a logarithm, plus the pattern of 2^23.

    The pattern is linear in x between two numbers of a grid. The correction is 0 on the
    grid.
    """
    period = jnp.uint32(1) << shift
    rest = _number(above & (period - jnp.uint32(1)))
    left = _number(period) - rest
    share = jnp.full_like(rest, _BEND * 2.0**-23)
    return as_fields(multiply_add(rest * left, share, jnp.full_like(rest, _NEAR)))


def _steps_between(low: jax.Array, high: jax.Array, dropped: jax.Array) -> jax.Array:
    """Return the number of whole steps of a grid that cover the range low to high."""
    return _shifted_up(high, dropped) - (low >> dropped)


def _shifted_up(x: jax.Array, dropped: jax.Array) -> jax.Array:
    """Return non-negative int32 divided by ``2^dropped``, rounded up."""
    below = (jnp.int32(1) << dropped) - jnp.int32(1)
    # The sum cannot overflow as an unsigned integer.
    total = as_fields(x) + as_fields(below)
    return lax.bitcast_convert_type(total >> as_fields(dropped), jnp.int32)


def _number(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32).astype(jnp.float32)
