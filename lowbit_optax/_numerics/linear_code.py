"""The linear symmetric code of quantized weights, as elementwise functions.

With B = 2^(k-1) - 1 and a step size delta per block,

    Q(x) = delta clip(SR(x / delta), -B, B),    delta >= max |x| / B

where SR is stochastic rounding. The field is the integer plus 2^(k-1). No number has
field 0, which stores NaN. Non-finite weights become NaN, so that the loss reveals them.

delta is rounded up to fewer significant bits (see
:attr:`QuantizedFields.significant_bits`), for two reasons:

- Every value ``c delta`` is exact in float32. Therefore, storing a value that was just
  read, with the same delta, does not change it on any backend.
- A delta with few significant bits seldom changes. If it changes, all weights of the
  block fall between the new steps and are rounded, which adds noise.

For the second reason, a delta is also kept while it fits
(:meth:`QuantizedFields.scale_of`). Therefore, a step with a zero update changes
nothing.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._numerics.codes import (
    Code,
    Prepared,
    as_fields,
    bits_of,
    float_of,
    number_of,
    pattern_of,
)
from lowbit_optax._numerics.float_layouts import SIGN
from lowbit_optax._numerics.random_bits import PARAM_STREAM, RandomBits
from lowbit_optax._numerics.rounding import where_known, words_of_share
from pallas_kernels.layout import Layout, repeat_blocks
from pallas_kernels.operations import multiply_add

RANDOM_BITS = 23
"""Number of leading bits of a random word that rounding reads."""

_UNREAD = 32 - RANDOM_BITS

_MIDDLE = 1.5 * 2.0**23
_FIRST = pattern_of(_MIDDLE)

# Because the division rounds, a quotient that should be exactly a delta may be larger.
_TOLERANCE = 4  # units in the last place
# With a smaller delta, a remainder of 2^-24 delta would be subnormal, and XLA may flush
# subnormal numbers to 0.
_SMALLEST_DELTA = np.float32(2.0**-100)

_MAGNITUDES = Code(16, signed=True, limit=math.inf)  # its keys sort all finite weights


def largest_code(bits: int) -> int:
    """Return B, the largest integer of a code of ``bits`` bits."""
    return 2 ** (bits - 1) - 1


@dataclasses.dataclass(frozen=True)
class QuantizedFields:
    """Elementwise functions between values and the fields of a QuantizedTensor::

        magnitude_key(x) --> maximum over the block --> scale_of(maximum, old scale)
        prepare(scale) --> prepared, once per block, for encode and decode

    Args:
      bits, block_size: see :class:`.QuantizedTensor`.
      rounding: how :meth:`encode` rounds.
    """

    bits: int
    block_size: int
    rounding: typing.Literal["nearest", "stochastic"] = "stochastic"

    @property
    def significant_bits(self) -> int:
        """The number of significant bits of delta, including the leading one.

        The worst choice would be about the number of bits of a code. The largest weight
        of a block would then fall between two codes. If it is rounded up, it becomes
        the largest code of a larger delta, and the next update exceeds it again. If
        delta and codes both have 4 bits, delta grows by a factor of 10,000 over 1000
        normally distributed updates of 0.1 steps.

        For codes of 7 bits or more, 4 bits avoid this. delta seldom changes, and is at
        most 1/8 larger than necessary. For shorter codes, delta has the largest number
        of bits that keeps products exact. It then follows the largest weight, which is
        always exactly a code.
        """
        return 24 - self.bits if self.bits <= 6 else 4

    def magnitude_key(self, x: jax.Array) -> jax.Array:
        """Return integers whose maximum over a block determines its scale."""
        return _MAGNITUDES.magnitude_key(x)

    def scale_of(self, key: jax.Array, old: jax.Array | None = None) -> jax.Array:
        """Return the scales for maxima of keys: uint32 bit patterns of deltas.

        An old delta is kept if ``least delta <= maximum <= B delta``. With a new delta,
        the largest weight of a block is at least ``least`` steps, whether it is rounded
        up or down, and rounding does not reduce a weight of at least ``least`` steps to
        less. Therefore, a block that was just stored keeps its delta.

        References:
          LPMM, section 5.2, "Dynamic quantization", computes a new delta in every step.
        """
        maximum = _MAGNITUDES.magnitude_of(key)
        if old is None:
            return as_fields(self._new_delta(maximum))
        delta, top = float_of(old), largest_code(self.bits)
        # Rounding up makes a new delta larger by at most one unit in its last place.
        coarsest = 1 + 2.0 ** (1 - self.significant_bits)
        least = np.float32(math.floor(top / coarsest * (1 - 2.0**-20)))
        fits = (maximum >= delta * least) & (maximum <= delta * np.float32(top))
        return as_fields(jnp.where(fits, delta, self._new_delta(maximum)))

    def _new_delta(self, maximum: jax.Array) -> jax.Array:
        """Return the delta for the largest magnitude of a block, or 0 for 0."""
        dropped, top = 24 - self.significant_bits, largest_code(self.bits)
        largest = np.float32(np.finfo(np.float32).max / top)
        pattern = as_fields(maximum * np.float32(1 / top))
        pattern = pattern + jnp.uint32((1 << dropped) - 1 - _TOLERANCE)
        # Limit delta, so that no product with a code overflows.
        pattern = jnp.minimum(pattern, jnp.uint32(largest.view(np.uint32)))
        pattern = pattern >> jnp.uint32(dropped) << jnp.uint32(dropped)
        delta = jnp.maximum(float_of(pattern), _SMALLEST_DELTA)
        return jnp.where(maximum > jnp.float32(0), delta, jnp.float32(0))

    def prepare(self, scale: jax.Array) -> Prepared:
        """Return ``(delta, 1 / delta)``, with which the other methods compute."""
        delta = float_of(scale)
        return delta, jnp.float32(1) / jnp.maximum(delta, _SMALLEST_DELTA)

    def prepare_values(self, scales: jax.Array, layout: Layout) -> Prepared:
        """Return the prepared scales, repeated for every value of their blocks."""
        prepared = self.prepare(scales)
        return [repeat_blocks(x, layout, self.block_size) for x in prepared]

    def encode(
        self,
        x: jax.Array,
        prepared: Prepared,
        random: RandomBits | None,
        ahead: jax.Array | None = None,
    ) -> jax.Array:
        """Round float32 values to uint32 fields.

        The arrays of ``prepared`` have the shape of x. If ``random`` is None, values
        are rounded to nearest, with ties to even. If ``ahead`` is given, values where
        it is neither 0 nor NaN are rounded to the neighbor that is nearer to
        ``x + ahead``.
        """
        delta, inverse = prepared
        words = None
        if random is not None and self.rounding == "stochastic":
            words = random.words(x.shape, PARAM_STREAM)
        if ahead is not None:
            others = jnp.zeros(x.shape, jnp.uint32) if words is None else words
            # Its leading bit is inverted, because the words below are signed.
            toward = words_of_share(ahead * inverse) ^ jnp.uint32(SIGN)
            words = where_known(toward, ahead, others)
        # float32 numbers near 1.5 * 2^23 are integers, so the sum rounds to nearest,
        # with ties to even, and its bit pattern counts the steps.
        middle = jnp.full(x.shape, _MIDDLE, jnp.float32)
        rounded = multiply_add(x, inverse, middle)
        code = bits_of(rounded)
        if words is not None:
            # The product and the difference are exact, even if the inverse is not.
            # Therefore, a multiple of delta has no remainder, and does not change.
            rest = multiply_add(middle - rounded, delta, x)
            # The remainder is at most half a step in either direction, so the code
            # moves by floor(rest / delta + u), with u uniform in [0, 1). The signed
            # random number is u - 1/2, and _FIRST is half a step above a multiple of
            # 2^23.
            share = inverse * jnp.float32(2.0**RANDOM_BITS)
            share = bits_of(multiply_add(rest, share, middle))
            drawn = lax.bitcast_convert_type(words, jnp.int32) >> jnp.int32(_UNREAD)
            moves = (share + drawn) >> jnp.int32(RANDOM_BITS)
            code = code + (moves - jnp.int32(_FIRST >> RANDOM_BITS))
        top = largest_code(self.bits)
        code = jnp.minimum(code, jnp.int32(_FIRST + top))
        code = jnp.maximum(code, jnp.int32(_FIRST - top))
        code = code - jnp.int32(_FIRST - 2 ** (self.bits - 1))
        is_finite = jnp.abs(x) < jnp.float32(jnp.inf)
        return as_fields(jnp.where(is_finite, code, jnp.int32(0)))

    def decode(self, fields: jax.Array, prepared: Prepared) -> jax.Array:
        """Return the float32 values of fields."""
        delta, _ = prepared
        value = number_of(fields, 2 ** (self.bits - 1)) * delta
        # Put the selection between the product and later sums, so that XLA never
        # contracts them. A NaN constant would become an array that JAX moves out of a
        # scan over layers.
        is_nan = fields == jnp.uint32(0)
        return jnp.where(is_nan, value * jnp.float32(jnp.nan), value)
