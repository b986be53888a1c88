"""Sums that are rounded stochastically to float32, so that their mean is exact.

float32 loses updates below 2^-25 of the weight, and rounds updates that are not much
larger. The error of the sum is known exactly (Dekker's Fast2Sum). The result is the
next float32 in the direction of the error, with the probability that keeps the mean:

    s = fl(w + u)        e = u - fl(s - w)
    s' = next float32 after s in the direction of e   with probability |e| / ulp
         s                                            otherwise

where ulp is the distance between the two numbers. If e points to zero, this is the
spacing below s, which is smaller for powers of two, such as weights of exactly 1.

References:
  Dekker 1971, "A floating-point technique for extending the available precision".
"""

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics.codes import bits_of, float_of
from lowbit_optax._numerics.float_layouts import INFINITY, MANTISSA

_RANDOM_BITS = 16
_UNUSED = MANTISSA - _RANDOM_BITS


def stochastic_sum(w: jax.Array, u: jax.Array, words: jax.Array) -> jax.Array:
    """Return ``w + u`` rounded to one of two neighboring float32 numbers.

    Args:
      w: float32.
      u: float32. The mean is exact if ``|u| <= |w|``, and otherwise to 2^-24 of u.
      words: uint32 with random bits in the lowest 16 bits. The probability is rounded
        to a multiple of 2^-16.

    Returns:
      float32 with the shape of w. Infinities and NaNs are the same as in the sum.

    >>> import jax.numpy as jnp
    >>> w, u = jnp.float32(1.0), jnp.float32(2.0**-25)  # a quarter of the step upwards
    >>> words = jnp.arange(2**16, dtype=jnp.uint32)
    >>> sums = stochastic_sum(w, u, words)
    >>> float(jnp.mean(sums > w)), float(jnp.max(sums) - w)
    (0.25, 1.1920928955078125e-07)
    """
    total = w + u
    error = u - (total - w)
    pattern = bits_of(total)
    # -1 if the error points to zero, otherwise 0.
    to_zero = (bits_of(error) ^ pattern) >> jnp.int32(31)
    towards = pattern + to_zero
    binade = towards & jnp.int32(INFINITY)
    # Compare the error and the random number as mantissas with the exponent of the
    # smaller neighbor, where one step is one unit in the last place.
    share = jnp.abs(error) * jnp.float32(2.0**MANTISSA) + float_of(binade)
    words = lax.bitcast_convert_type(words, jnp.int32) << jnp.int32(_UNUSED)
    # Use the midpoints of 2^16 intervals.
    drawn = (words & jnp.int32(2**MANTISSA - 2**_UNUSED)) | binade
    drawn = drawn | jnp.int32(2 ** (_UNUSED - 1))
    # If the sum overflows float32, its error is infinite.
    moves = (bits_of(share) > drawn) & (bits_of(share) < jnp.int32(INFINITY))
    neighbour = towards + to_zero + jnp.int32(1)
    return float_of(jnp.where(moves, neighbour, pattern))
