"""The codes whose values are fixed numbers times a unit.

``unit`` is exactly ``scale * 2^-q``. Measured in units, the fields of a code stand for
fixed numbers (for ``Linear``, integers), the largest of which is ``largest_value``. The
scale is the smallest bfloat16 (or power of two) for which ``largest_value * unit`` is
at least the largest magnitude in the block. What is prepared is ``(unit, 1 / unit)``.

:mod:`lowbit_optax._numerics.codes` explains what a code is and how all codes round.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics.codes import (
    Code,
    as_fields,
    float_of,
    one_unless_zero,
)

# A quotient that should be exactly a scale may come out this much larger, because the
# division rounds. If it were then rounded up to the next scale, the scale of a constant
# moment would creep upwards.
_TOLERANCE = 4  # units in the last place
_LARGEST_BFLOAT16 = 0x7F7F0000


@dataclasses.dataclass(frozen=True)
class InUnits(Code):
    """A code whose values are numbers times the unit of a block."""

    is_linear_in_units: typing.ClassVar[bool] = True

    @property
    def largest_value(self) -> float:
        """The largest number that a field stands for, in units."""
        return float(self.largest_field)

    @property
    def smallest_value(self) -> float:
        """The smallest positive number that a field stands for, in units."""
        return 1.0

    @property
    def _exponent(self) -> int:
        """The number q of the module's docstring."""
        return math.ceil(math.log2(self.largest_value))

    def scale_of_keys(self, keys):
        factor = np.float32(2.0**self._exponent / self.largest_value)
        pattern = as_fields(self.magnitude_of(*keys) * factor)
        dropped = 16 if self.scale == "bfloat16" else 23
        pattern = pattern + jnp.uint32((1 << dropped) - 1 - _TOLERANCE)
        largest = _LARGEST_BFLOAT16 >> dropped << dropped
        pattern = pattern >> jnp.uint32(dropped) << jnp.uint32(dropped)
        pattern = jnp.minimum(pattern, jnp.uint32(largest))
        return float_layouts.from_bits(pattern >> jnp.uint32(16), jnp.bfloat16)

    def prepare(self, scale):
        # With a smaller scale the smallest value would be subnormal, and XLA may treat
        # subnormal numbers as 0.
        least = 2.0 ** (-126 + self._exponent) / min(self.smallest_value, 1.0)
        scale = jnp.maximum(scale, jnp.float32(least))
        unit = scale * jnp.float32(2.0**-self._exponent)
        if self.scale == "power_of_two":
            # 2^-e has exponent field 127 - e: exact, and no division.
            return unit, float_of(jnp.uint32(0x7F000000) - as_fields(unit))
        return unit, jnp.float32(1) / unit

    def times(self, prepared, factor):
        unit, inverse = prepared
        return unit * jnp.float32(factor), inverse

    def _infinite(self, fields: jax.Array, number: jax.Array) -> jax.Array:
        """The numbers, and infinity where an unsigned field stands for it."""
        is_infinite = fields == jnp.uint32(self.infinity_field)
        return jnp.where(is_infinite, jnp.float32(jnp.inf), number)

    def _unsigned_fields(self, x: jax.Array, fields: jax.Array) -> jax.Array:
        """The fields of x, so that a positive one is not 0's, nor infinity a number's.

        A NaN becomes infinity too.
        """
        fields = jnp.maximum(fields, one_unless_zero(x))
        finite = x < jnp.float32(jnp.inf)
        return as_fields(jnp.where(finite, fields, jnp.int32(self.infinity_field)))
