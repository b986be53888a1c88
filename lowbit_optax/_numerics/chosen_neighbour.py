"""Random words that make stochastic rounding return a chosen neighbor.

Stochastic rounding returns the upper neighbor of x if the word, as a fraction, is at
least 1 - f. Here f is the distance from the lower neighbor to x, divided by the
spacing. If the word is the fraction ``1/2 + d / spacing`` instead of random, the result
is the neighbor that is nearer to x + d. If x + d is not between the two neighbors,
the result is the neighbor on the same side.
"""

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.codes import as_fields, float_of
from lowbit_optax._numerics.float_layouts import (
    BIAS,
    INFINITY,
    MANTISSA,
    SIGN,
    FloatLayout,
)


def words_toward(
    x: jax.Array, ahead: jax.Array, layout: FloatLayout, mantissa_bits: int
) -> jax.Array:
    """Return words that make rounding pick the neighbor nearer to ``x + ahead``.

    Args:
      x: float32 array.
      ahead: float32 array, called d in the module's docstring.
      layout: layout of the dtype to which x is rounded.
      mantissa_bits: number of mantissa bits that rounding keeps, at most the layout's.

    Returns:
      uint32 words with the shape of x. Only their leading 23 bits are used.

    >>> import jax.numpy as jnp
    >>> from lowbit_optax._numerics.float_layouts import layout_of
    >>> from lowbit_optax._numerics.rounding import round_stochastic
    >>> x, ahead = jnp.float32(1.03), jnp.float32([0.0, 0.03, 0.04, 5.0])
    >>> words = words_toward(x, ahead, layout_of(jnp.float8_e4m3fn), 3)
    >>> round_stochastic(jnp.full(4, x), jnp.float8_e4m3fn, words)
    Array([1, 1, 1.125, 1.125], dtype=float8_e4m3fn)
    """
    pattern = as_fields(x)
    # Below this exponent, the spacing is constant or its inverse overflows float32.
    least = max(layout.smallest_exponent, mantissa_bits + 1)
    exponent = jnp.maximum(
        pattern & jnp.uint32(INFINITY), jnp.uint32(least << MANTISSA)
    )
    inverse = float_of(jnp.uint32((2 * BIAS + mantissa_bits) << MANTISSA) - exponent)
    away = float_of(as_fields(ahead) ^ (pattern & jnp.uint32(SIGN)))
    # Store the fraction in the mantissa of a number from 1 to 2.
    fraction = jnp.float32(1.5) + away * inverse
    fraction = jnp.clip(fraction, jnp.float32(1), jnp.float32(2 - 2.0**-MANTISSA))
    return as_fields(fraction) << jnp.uint32(32 - MANTISSA)
