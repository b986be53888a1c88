"""Words that fill their range evenly over the steps, for rounding.

Element i has ``i c + phase`` modulo 2^32, and each step adds the golden ratio of 2^32
to the phase: sequences of Weyl. As a threshold of rounding such a word is as often
below a number as a random one is, but the errors of many steps cancel.
"""

import jax
import jax.numpy as jnp

# Odd parts of 2^32, of which few multiples lie close together.
_OF_STEP, _OF_ELEMENT, _OF_MOMENT = 0x9E3779B9, 0xC13FA9A9, 0x91E10DA5


def phase_at(seed: jax.Array, step: jax.Array) -> jax.Array:
    """The phase of a step; all are uint32 scalars."""
    return seed * jnp.uint32(_OF_ELEMENT) + step * jnp.uint32(_OF_STEP)


def even_words(index: jax.Array, phase: jax.Array, number: int) -> jax.Array:
    """The words of a leaf's moment of a static number.

    >>> even_words(jnp.uint32([0, 1, 2]), jnp.uint32(5), 0).tolist()
    [5, 3242174894, 2189382487]
    """
    first = phase + jnp.uint32(number * _OF_MOMENT % 2**32)
    return index * jnp.uint32(_OF_ELEMENT) + first
