"""Second moments on a grid of powers of two, as fine as the range of a block allows.

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
    multiply_add,
    one_unless_zero,
    pattern_of,
)
from pallas_kernels import operations

# Steps are 2^19 to 2^26 in a float32's pattern: 1/16, 1/8, ... 8 octaves. A base on any
# of these grids has three zeros in its bfloat16, which say which step it is.
_FINEST = 19
_COARSEST = 26
_PLACE = 16
_STEPS = (_COARSEST - _FINEST) << _PLACE

_INFINITY = pattern_of(math.inf)

# log2(1 + t) is about t + 0.344 t (1 - t).
_BEND = 0.344


@dataclasses.dataclass(frozen=True)
class Nested(Code):
    """Numbers a step apart in the logarithm, where the block's range gives the step.

    The values of all blocks lie on nested grids

        2^(n k),    k = 1/16, 1/8, ... 8 octaves,    n an integer

    with numbers of m bits of mantissa in place of ``2^(n / 2^m)``. A block has the
    finest grid of which 2^bits - 2 neighbours cover its positive values. Since grids
    are nested, no value is rounded again when another value of its block moves; it is
    when the block takes a coarser grid. Zero and infinity have fields of their own.

    **Rounding** is in the logarithm, unlike that of other codes: a second moment that
    keeps the mean of its logarithm has the right ``E[g^2 / nu]``, and so updates of the
    right size. In the mean of nu the updates of a coarse grid would be too long.

    The scale is the smallest value of the block on its grid, with the number of the
    step in the last three bits of its mantissa; 0 for a block of zeros.
    """

    maxima = 2

    def keys(self, x):
        """Two keys: of the largest finite and of the smallest positive number."""
        pattern = bits_of(x)
        smallest = jnp.where(
            pattern > jnp.int32(0), jnp.int32(_INFINITY) - pattern, jnp.int32(0)
        )
        return self.magnitude_key(x), smallest

    def scale_of_keys(self, keys):
        key, smallest = keys
        largest = bits_of(self.magnitude_of(key))
        # From float32's smallest normal number on.
        high = jnp.maximum(largest - jnp.int32(ONE_EXPONENT), jnp.int32(0))
        low = jnp.int32(_INFINITY - ONE_EXPONENT) - jnp.maximum(smallest, jnp.int32(0))
        low = jnp.clip(low, jnp.int32(0), high)
        steps = jnp.int32(self.largest_field - 1)

        def on_grid(dropped: int) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Whether the block fits, its smallest value, and the step's number."""
            shift = jnp.int32(dropped)
            # A sum with less than a step cannot overflow: the step is below 2^27.
            below = high & jnp.int32((1 << dropped) - 1)
            top = (high >> shift) + jnp.minimum(below, jnp.int32(1))
            bottom = jnp.maximum(low >> shift, top - steps)
            number = jnp.full_like(high, (dropped - _FINEST) << _PLACE)
            return top - (low >> shift) <= steps, bottom << shift, number

        _, first, number = on_grid(_COARSEST)
        for dropped in range(_COARSEST - 1, _FINEST - 1, -1):
            fits, *finer = on_grid(dropped)
            first = jnp.where(fits, finer[0], first)
            number = jnp.where(fits, finer[1], number)
        pattern = first + number + jnp.int32(ONE_EXPONENT)
        pattern = jnp.where(largest > jnp.int32(0), pattern, jnp.int32(0))
        return float_layouts.from_bits(pattern >> jnp.int32(16), jnp.bfloat16)

    def prepare(self, scale):
        """The pattern of the base, int32, and the logarithm of the step's."""
        pattern = bits_of(scale)
        number = pattern & jnp.int32(_STEPS)
        return pattern - number, (number >> jnp.int32(_PLACE)) + jnp.int32(_FINEST)

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        base, dropped = prepared
        pattern = operations.ordered_pattern(x)
        above = jnp.minimum(pattern, jnp.int32(_INFINITY))
        above = as_fields(jnp.maximum(above, base) - base)
        shift = as_fields(dropped)
        above = above + _bend(above, shift)
        one = jnp.uint32(1)
        if words is None:
            offset = one << (shift - one)
        else:
            offset = words >> (jnp.uint32(32) - shift)
        fields = ((above + offset) >> shift) + one
        fields = jnp.minimum(fields, jnp.uint32(self.largest_field))
        fields = fields * as_fields(one_unless_zero(x))
        infinite = pattern >= jnp.int32(_INFINITY)
        return jnp.where(infinite, jnp.uint32(self.infinity_field), fields)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        base, dropped = prepared
        one = jnp.uint32(1)
        above = (jnp.maximum(fields, one) - one) << as_fields(dropped)
        # The last step may end above the largest number.
        pattern = jnp.minimum(above + as_fields(base), jnp.uint32(_INFINITY - 1))
        pattern = jnp.where(fields == jnp.uint32(0), jnp.uint32(0), pattern)
        infinite = fields == jnp.uint32(self.infinity_field)
        pattern = jnp.where(infinite, jnp.uint32(_INFINITY), pattern)
        return lax.bitcast_convert_type(pattern, jnp.float32)


def _bend(above: jax.Array, shift: jax.Array) -> jax.Array:
    """What a pattern lacks to a logarithm that is exact on the grid and at octaves.

    Between two numbers of a grid, the pattern is linear in x; of a step of more than
    an octave, between two octaves.
    """
    period = jnp.uint32(1) << jnp.minimum(shift, jnp.uint32(23))
    rest = lax.bitcast_convert_type(above & (period - jnp.uint32(1)), jnp.int32)
    left = lax.bitcast_convert_type(period, jnp.int32) - rest
    bend = rest.astype(jnp.float32) * left.astype(jnp.float32)
    bend = bend * jnp.float32(_BEND * 2.0**-23)
    return as_fields(bend.astype(jnp.int32))
