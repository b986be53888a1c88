"""The linear symmetric code of quantised weights, as elementwise functions.

With B = 2^(k-1) - 1 and a step size delta per block,

    Q(x) = delta clip(SR(x / delta), -B, B),    delta >= max |x| / B

where SR is stochastic rounding. The field is the integer plus 2^(k-1). No number has
field 0, which stores NaN. Non-finite weights become NaN, so that the loss reveals them.

delta is rounded up to fewer significant bits (:func:`significant_bits`), for two
reasons:

- Every value ``c delta`` is exact in float32. Therefore, storing a value that was just
  read, with the same delta, does not change it on any backend.
- A delta with few significant bits seldom changes. If it changes, all weights of the
  block fall between the new steps and are rounded, which adds noise.

For the second reason, a delta is also kept while it fits (:func:`kept_delta`).
Therefore, a step with a zero update changes nothing.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._numerics.codes import (
    Code,
    MultiplyAdd,
    as_fields,
    bits_of,
    float_of,
    multiply_add,
    number_of,
    pattern_of,
)

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


_MAGNITUDES = Code(16, signed=True, limit=math.inf)
magnitude_key, magnitude_of = _MAGNITUDES.magnitude_key, _MAGNITUDES.magnitude_of
"""Return the keys of all finite weights, and convert the largest key to a magnitude."""


def largest_code(bits: int) -> int:
    """Return B, the largest integer of a code of ``bits`` bits."""
    return 2 ** (bits - 1) - 1


def significant_bits(bits: int) -> int:
    """Return the number of significant bits of delta, including the leading one.

    The worst choice would be about the number of bits of a code. The largest weight of
    a block would then fall between two codes. If it is rounded up, it becomes the
    largest code of a larger delta, and the next update exceeds it again. If delta and
    codes both have 4 bits, delta grows by a factor of 10,000 over 1000 normally
    distributed updates of 0.1 steps.

    For codes of 7 bits or more, 4 bits avoid this. delta seldom changes, and is at most
    1/8 larger than necessary. For shorter codes, delta has the largest number of bits
    that keeps products exact. It then follows the largest weight, which is always
    exactly a code.
    """
    return 24 - bits if bits <= 6 else 4


def delta_of(maximum: jax.Array, bits: int) -> jax.Array:
    """Return float32 step sizes for the largest magnitudes of blocks, or 0 for 0."""
    dropped = 24 - significant_bits(bits)
    largest = np.float32(np.finfo(np.float32).max / largest_code(bits))
    pattern = as_fields(maximum * np.float32(1 / largest_code(bits)))
    pattern = pattern + jnp.uint32((1 << dropped) - 1 - _TOLERANCE)
    # Limit delta, so that no product with a code overflows.
    pattern = jnp.minimum(pattern, jnp.uint32(largest.view(np.uint32)))
    pattern = pattern >> jnp.uint32(dropped) << jnp.uint32(dropped)
    delta = jnp.maximum(float_of(pattern), _SMALLEST_DELTA)
    return jnp.where(maximum > jnp.float32(0), delta, jnp.float32(0))


def kept_delta(maximum: jax.Array, old: jax.Array, bits: int) -> jax.Array:
    """Return the old step sizes of blocks where they fit, and new ones elsewhere.

    The old step size is kept if ``least delta <= maximum <= B delta``. With a new
    delta, the largest weight of a block is at least ``least`` steps, whether it is
    rounded up or down, and rounding does not reduce a weight of at least ``least``
    steps to less. Therefore, a block that was just stored keeps its delta.

    References:
      LPMM, section 5.2, "Dynamic quantization", computes a new delta in every step.
    """
    top = largest_code(bits)
    # Rounding up makes a new delta larger by at most one unit in its last place.
    coarsest = 1 + 2.0 ** (1 - significant_bits(bits))
    least = math.floor(top / coarsest * (1 - 2.0**-20))
    fits = (maximum >= old * np.float32(least)) & (maximum <= old * np.float32(top))
    return jnp.where(fits, old, delta_of(maximum, bits))


def prepare(delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return ``(delta, 1 / delta)`` for :func:`encode` and :func:`decode`."""
    return delta, jnp.float32(1) / jnp.maximum(delta, _SMALLEST_DELTA)


def encode(
    x: jax.Array,
    prepared: tuple[jax.Array, jax.Array],
    bits: int,
    words: jax.Array | None,
    multiply_add: MultiplyAdd = multiply_add,
) -> jax.Array:
    """Return the uint32 fields of float32 values.

    The arrays of ``prepared`` have the shape of x. The leading 23 bits of ``words`` are
    random. If ``words`` is None, values are rounded to nearest, with ties to even.
    """
    delta, inverse = prepared
    # float32 numbers near 1.5 * 2^23 are integers, so the sum rounds to nearest, with
    # ties to even, and its bit pattern counts the steps.
    middle = jnp.full(x.shape, _MIDDLE, jnp.float32)
    rounded = multiply_add(x, inverse, middle)
    code = bits_of(rounded)
    if words is not None:
        # The product and the difference are exact, even if the inverse is not.
        # Therefore, a multiple of delta has no remainder, and does not change.
        rest = multiply_add(middle - rounded, delta, x)
        # The remainder is at most half a step in either direction, so the code moves by
        # floor(rest / delta + u), with u uniform in [0, 1). The signed random number is
        # u - 1/2, and _FIRST is half a step above a multiple of 2^23.
        share = inverse * jnp.float32(2.0**RANDOM_BITS)
        share = bits_of(multiply_add(rest, share, middle))
        drawn = lax.bitcast_convert_type(words, jnp.int32) >> jnp.int32(_UNREAD)
        moves = (share + drawn) >> jnp.int32(RANDOM_BITS)
        code = code + (moves - jnp.int32(_FIRST >> RANDOM_BITS))
    top = largest_code(bits)
    code = jnp.minimum(code, jnp.int32(_FIRST + top))
    code = jnp.maximum(code, jnp.int32(_FIRST - top))
    code = code - jnp.int32(_FIRST - 2 ** (bits - 1))
    is_finite = jnp.abs(x) < jnp.float32(jnp.inf)
    return as_fields(jnp.where(is_finite, code, jnp.int32(0)))


def decode(
    fields: jax.Array, prepared: tuple[jax.Array, jax.Array], bits: int
) -> jax.Array:
    """Return the float32 values of fields; ``prepared`` is as in :func:`encode`."""
    delta, _ = prepared
    value = number_of(fields, 2 ** (bits - 1)) * delta
    # Put the selection between the product and later sums, so that XLA never contracts
    # them. A NaN constant would become an array that JAX moves out of a scan over
    # layers.
    return jnp.where(fields == jnp.uint32(0), value * jnp.float32(jnp.nan), value)
