"""Dettmers' dynamic exponent map; see :mod:`lowbit_optax._numerics.codes`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.codes import (
    RANDOM_BITS,
    MultiplyAdd,
    as_fields,
    bits_of,
    float_of,
    multiply_add,
    pattern_of,
    rounding_offset,
    shift_and_round,
    with_sign_of_field,
)
from lowbit_optax._numerics.in_units import InUnits
from pallas_kernels import operations


@dataclasses.dataclass(frozen=True)
class Dynamic(InUnits):
    """Dettmers' dynamic exponent map, computed by arithmetic instead of a table.

    The position i of the leading one bit of a magnitude k selects a decade, and the
    bits below it divide the decade linearly:

        10^(i - I) (0.1 + 0.9 (k + 1/2 - 2^i) / 2^i)

    where I is the highest i. Unsigned magnitudes start at 1 instead of 0, so k = 1
    stands for zero. This is the published map (``create_dynamic_map`` in bitsandbytes)
    without its value +1, which has no negative counterpart.
    """

    @property
    def largest_value(self):
        return float(self._published(self.largest_field + (not self.signed)))

    @property
    def smallest_value(self):
        return float(self._published(1 + (not self.signed)))

    @property
    def _decades(self) -> int:
        """I of the class's formula, the number of the highest decade."""
        return self.bits - 1 - self.signed

    def _published(self, k: int) -> float:
        """The value of magnitude k by the class's formula."""
        i = k.bit_length() - 1
        return 10.0 ** (i - self._decades) * (0.1 + 0.9 * ((k + 0.5) / 2**i - 1))

    @property
    def _lowest(self) -> int:
        """The magnitude of the smallest positive value."""
        return 2 - self.signed

    def _values(self, fields: jax.Array, multiply_add: MultiplyAdd) -> jax.Array:
        """The values of fields without a sign, times :attr:`_steps_of_one`."""
        # A power of two times k + 1/2. In the exponent, i is in the last bits, or i + 1
        # where k = 0 stands for zero.
        double = 1 + self.signed
        pattern = fields | jnp.uint32(0x4B000000 + (double << 23))
        half = 2.0 ** (double - 1)
        first = half * (2.0**24 - 1) - 2 * half * (not self.signed)
        number = float_of(pattern) - jnp.float32(first)
        pattern = as_fields(number)
        power = float_of(pattern & jnp.uint32(0x7F800000))
        # Of a decade's 10 2^i parts, the value has 9 (k + 1/2) - 8 2^i. It is exact.
        minus_eight = jnp.full_like(power, -8)
        parts = multiply_add(power, minus_eight, number * jnp.float32(9))
        return parts * operations.power_of_five(pattern >> jnp.uint32(23))

    @property
    def _steps_of_one(self) -> float:
        """How many of the parts in which :meth:`_values` counts are 1."""
        scale = 2.0 ** (1 + self.signed)
        return 10.0 ** (self._decades + 1) * scale / (1 if self.signed else 5)

    def _place(self, number: jax.Array, multiply_add: MultiplyAdd) -> jax.Array:
        """Where a number lies among the magnitudes, 2^11 + k for the value of k.

        Between two magnitudes it is linear. Within a decade that is the class's formula
        solved for k + 1/2, which is 2^i at its start. It is the least of all decades'
        lines, whose slopes fall. The values next to a power of ten are 1/6 of their
        distance below it and 5/6 above it; the formula alone would give each a half.
        """
        lines = []
        for i in range(self._lowest - 1, self._decades + 1):
            slope = 10.0 ** (self._decades - i) * 2.0**i / 0.9
            line = jnp.full_like(number, slope), jnp.full_like(number, 2.0**i * 8 / 9)
            lines.append(multiply_add(number, *line))
        place = functools.reduce(operations.smaller, lines)
        start = float_of(as_fields(place) & jnp.uint32(0x7F800000))
        above = place - start
        half = jnp.full_like(number, 0.5)
        edge = operations.smaller(operations.smaller(above, start - above), half)
        share = jnp.full_like(number, 2 / 3)
        # Near 2^11 a float32 has 12 fractional bits, as in Linear.
        zero = 2.0 ** (23 - RANDOM_BITS)
        place = multiply_add(edge - half, share, place) + jnp.float32(zero - 0.5)
        # Between zero and the smallest value, over several decades, it is linear too.
        smallest = jnp.float32(self.smallest_value)
        from_zero = multiply_add(
            number,
            jnp.full_like(number, 1 / self.smallest_value),
            jnp.full_like(number, zero + self._lowest - 1),
        )
        return jnp.where(number < smallest, from_zero, place)

    def encode_fields(self, x, prepared, words, multiply_add=multiply_add):
        _, inverse = prepared
        size = jnp.abs(x) if self.signed else x
        # In the order of patterns a NaN is above infinity.
        largest = jnp.int32(pattern_of(self.largest_value))
        pattern = jnp.minimum(bits_of(size * inverse), largest)
        if not self.signed:
            pattern = jnp.maximum(pattern, jnp.int32(0))
        fixed = bits_of(self._place(float_of(pattern), multiply_add))
        if not self.signed:
            first = pattern_of(2.0 ** (23 - RANDOM_BITS))
            k = shift_and_round(fixed, first, RANDOM_BITS, words) - jnp.int32(1)
            return self._unsigned_fields(x, k)
        # Shift the magnitude up until it is directly below the sign bit.
        free = 32 - self.bits
        fixed = fixed << jnp.int32(free - RANDOM_BITS)
        fixed = as_fields(fixed + rounding_offset(free, words))
        return (fixed | as_fields(x) & jnp.uint32(1 << 31)) >> jnp.uint32(free)

    def decode_fields(self, fields, prepared, multiply_add=multiply_add):
        unit = prepared[0] * jnp.float32(1 / self._steps_of_one)
        if not self.signed:
            values = self._values(fields, multiply_add)
            return self._infinite(fields, values) * unit
        magnitude = fields & jnp.uint32(2 ** (self.bits - 1) - 1)
        values = self._values(magnitude, multiply_add)
        return with_sign_of_field(values * unit, fields, self.bits)
