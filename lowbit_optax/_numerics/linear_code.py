"""The linear symmetric code of weights: elementwise functions, no packing.

With B = 2^(k-1) - 1 and a step delta for every group,

    Q(x) = delta clip(SR(x / delta), -B, B),    delta >= max |x| / B

and the field is the integer plus 2^(k-1). Field 0 is left over: it is NaN, which is
what becomes of a weight that is not finite, so that the loss shows it.

delta is rounded up to fewer significant bits, see :func:`significant_bits`, so that

- every value ``c delta`` is a float32 exactly: writing what was read, with the same
  delta, changes nothing on any backend;
- of few significant bits, it seldom changes: a delta that does makes every weight of
  its group fall between the new steps and be rounded, noise even without an update.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

RANDOM_BITS = 24
"""Leading bits of a random word that rounding reads."""

# A quotient that is a delta exactly may come out larger by its own rounding.
_TOLERANCE = 4  # units in the last place
# No smaller, or a remainder of 2^-24 delta would be subnormal, which XLA takes for 0.
_LEAST = np.float32(2.0**-100)


def largest_code(bits: int) -> int:
    """B, of k bits."""
    return 2 ** (bits - 1) - 1


def significant_bits(bits: int) -> int:
    """Of delta, its leading one included, for codes of so many bits.

    Worst are about as many as a code has. The group's largest weight then comes to lie
    between two codes; rounded up, it is the largest code of a larger delta, which the
    next update exceeds, and delta grows without end: over 1000 updates by normal
    numbers of 0.1 steps, 10,000 times with 4 bits of both.

    From 7 bits on, 4 are far enough from that, and delta seldom changes; it is at most
    1/8 larger than need be. A shorter code has as many as leave products exact. delta
    then moves with the largest weight, which is always a code.
    """
    return 24 - bits if bits <= 6 else 4


def delta_of(maximum: jax.Array, bits: int) -> jax.Array:
    """The steps of groups.

    Args:
      maximum: float32, the largest finite magnitude of each group.
      bits: k, 4 to 16.

    Returns:
      float32 of the same shape; 0 for groups of zeros.
    """
    dropped = 24 - significant_bits(bits)
    largest = np.float32(np.finfo(np.float32).max / largest_code(bits))
    pattern = lax.bitcast_convert_type(
        maximum * np.float32(1 / largest_code(bits)), jnp.uint32
    )
    pattern = pattern + jnp.uint32((1 << dropped) - 1 - _TOLERANCE)
    # So that no code times delta overflows.
    pattern = jnp.minimum(pattern, jnp.uint32(largest.view(np.uint32)))
    pattern = pattern >> jnp.uint32(dropped) << jnp.uint32(dropped)
    delta = jnp.maximum(lax.bitcast_convert_type(pattern, jnp.float32), _LEAST)
    return jnp.where(maximum > jnp.float32(0), delta, jnp.float32(0))


def encode(
    x: jax.Array, delta: jax.Array, bits: int, words: jax.Array | None
) -> jax.Array:
    """The fields of values.

    Args:
      x: float32.
      delta: float32, of x's shape, from :func:`delta_of`.
      bits: k, 4 to 16.
      words: uint32 of x's shape, of which the leading 24 bits are random; None to round
        to nearest, ties to even.

    Returns:
      uint32 fields below 2^k.
    """
    delta = jnp.maximum(delta, _LEAST)
    inverse = jnp.float32(1) / delta
    is_finite = jnp.abs(x) < jnp.float32(jnp.inf)
    x = jnp.where(is_finite, x, jnp.float32(0))
    code = lax.round(x * inverse, lax.RoundingMethod.TO_NEAREST_EVEN)
    if words is not None:
        # The product and the difference are exact, whatever the inverse's error: a
        # value on the grid has no rest and stays.
        rest = x - code * delta
        share = jnp.abs(rest) * inverse * jnp.float32(2.0**RANDOM_BITS)
        drawn = words >> jnp.uint32(32 - RANDOM_BITS)
        moves = share > lax.bitcast_convert_type(drawn, jnp.int32).astype(jnp.float32)
        code = jnp.where(moves, code + jnp.sign(rest), code)
    top = jnp.float32(largest_code(bits))
    code = jnp.clip(code, -top, top).astype(jnp.int32) + jnp.int32(2 ** (bits - 1))
    return lax.bitcast_convert_type(
        jnp.where(is_finite, code, jnp.int32(0)), jnp.uint32
    )


def decode(fields: jax.Array, delta: jax.Array, bits: int) -> jax.Array:
    """The float32 values of fields; ``delta`` as in :func:`encode`."""
    code = lax.bitcast_convert_type(fields, jnp.int32) - jnp.int32(2 ** (bits - 1))
    value = code.astype(jnp.float32) * delta
    # A NaN of its own would be an array that JAX moves out of a scan over layers.
    return jnp.where(fields == jnp.uint32(0), value * jnp.float32(jnp.nan), value)
