"""The linear symmetric code of weights, as elementwise functions without packing.

With B = 2^(k-1) - 1 and a step size delta per block,

    Q(x) = delta clip(SR(x / delta), -B, B),    delta >= max |x| / B

where SR rounds stochastically, and the field is the integer plus 2^(k-1). The one
unused field, 0, stands for NaN. A weight that is not finite becomes NaN, so that the
loss shows it.

delta is rounded up to fewer significant bits (:func:`significant_bits`), for two
reasons:

- Every value ``c delta`` is exact in float32. So storing a value that was just read,
  with the same delta, changes nothing on any backend.
- A delta with few significant bits seldom changes. When it changes, every weight of the
  block falls between the new steps and is rounded, which is noise.

For the second reason a delta is also kept while it fits (:func:`kept_delta`). A step
without an update changes nothing.
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
"""How many leading bits of a random word rounding reads."""

_UNREAD = 32 - RANDOM_BITS

_MIDDLE = 1.5 * 2.0**23
_FIRST = pattern_of(_MIDDLE)

# A quotient that should be exactly a delta may come out larger, because the division
# rounds.
_TOLERANCE = 4  # units in the last place
# With a smaller delta a remainder of 2^-24 delta would be subnormal, and XLA may treat
# subnormal numbers as 0.
_SMALLEST_DELTA = np.float32(2.0**-100)


_MAGNITUDES = Code(16, signed=True, limit=math.inf)
magnitude_key, magnitude_of = _MAGNITUDES.magnitude_key, _MAGNITUDES.magnitude_of
"""The keys of all finite weights, and the magnitudes of the largest of them."""


def largest_code(bits: int) -> int:
    """B, the largest integer of a code of ``bits`` bits."""
    return 2 ** (bits - 1) - 1


def significant_bits(bits: int) -> int:
    """How many significant bits delta has, the leading one included.

    The worst choice would be about as many bits as a code has. Then the largest weight
    of a block comes to lie between two codes. Rounded up, it is the largest code of a
    larger delta, which the next update exceeds again, and delta grows without end: by a
    factor of 10,000 over 1000 updates by normal numbers of 0.1 steps, if delta and
    codes both have 4 bits.

    For codes of 7 bits or more, 4 bits are far enough from that. delta seldom changes,
    and is at most 1/8 larger than necessary. For shorter codes, delta has as many bits
    as keep the products exact. It then follows the largest weight, which is always
    exactly a code.

    Args:
      bits: k, the bits of a code.
    """
    return 24 - bits if bits <= 6 else 4


def delta_of(maximum: jax.Array, bits: int) -> jax.Array:
    """The step sizes of blocks with these largest finite magnitudes, float32.

    They are 0 for blocks of zeros.
    """
    dropped = 24 - significant_bits(bits)
    largest = np.float32(np.finfo(np.float32).max / largest_code(bits))
    pattern = as_fields(maximum * np.float32(1 / largest_code(bits)))
    pattern = pattern + jnp.uint32((1 << dropped) - 1 - _TOLERANCE)
    # Limited, so that no product of a code and delta overflows.
    pattern = jnp.minimum(pattern, jnp.uint32(largest.view(np.uint32)))
    pattern = pattern >> jnp.uint32(dropped) << jnp.uint32(dropped)
    delta = jnp.maximum(float_of(pattern), _SMALLEST_DELTA)
    return jnp.where(maximum > jnp.float32(0), delta, jnp.float32(0))


def kept_delta(maximum: jax.Array, old: jax.Array, bits: int) -> jax.Array:
    """The step size of each block that has one already.

    The old one is kept while ``least delta <= maximum <= B delta``, where ``least`` is
    a code that rounding cannot fall below: with a new delta the largest weight is at
    least ``least`` of them, rounded down or up; and a largest weight of at least
    ``least`` deltas is not rounded to less. So what was just stored keeps its delta.

    References:
      LPMM, section 5.2, "Dynamic quantization", takes a new one at every step.
    """
    top = largest_code(bits)
    # A new delta is larger than necessary by at most a unit of its last place.
    coarsest = 1 + 2.0 ** (1 - significant_bits(bits))
    least = math.floor(top / coarsest * (1 - 2.0**-20))
    fits = (maximum >= old * np.float32(least)) & (maximum <= old * np.float32(top))
    return jnp.where(fits, old, delta_of(maximum, bits))


def prepare(delta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(delta, 1 / delta)``, which :func:`encode` and :func:`decode` take."""
    return delta, jnp.float32(1) / jnp.maximum(delta, _SMALLEST_DELTA)


def encode(
    x: jax.Array,
    prepared: tuple[jax.Array, jax.Array],
    bits: int,
    words: jax.Array | None,
    multiply_add: MultiplyAdd = multiply_add,
) -> jax.Array:
    """The uint32 fields of float32 values, with prepared step sizes of their shape.

    The leading 23 bits of ``words`` are random; None rounds to nearest, ties to even.
    """
    delta, inverse = prepared
    # The float32 numbers near 1.5 * 2^23 are integers, so the sum rounds to nearest,
    # ties to even, and its pattern counts them.
    middle = jnp.full(x.shape, _MIDDLE, jnp.float32)
    rounded = multiply_add(x, inverse, middle)
    code = bits_of(rounded)
    if words is not None:
        # The product and the difference are exact, whatever the error of the inverse.
        # So a value that is a multiple of delta has no remainder and does not change.
        rest = multiply_add(middle - rounded, delta, x)
        # It is half a step at most, in either direction. It moves the code if a random
        # part of a step carries it, or fails to carry it, over a whole one. The part
        # is counted from its half, and by half a step the pattern is above a whole one.
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
    """The float32 values of fields; ``prepared`` as in :func:`encode`."""
    delta, _ = prepared
    value = number_of(fields, 2 ** (bits - 1)) * delta
    # Between the product and a sum, so that XLA contracts them on no device. A NaN
    # constant would become an array that JAX moves out of a scan over layers.
    return jnp.where(fields == jnp.uint32(0), value * jnp.float32(jnp.nan), value)
