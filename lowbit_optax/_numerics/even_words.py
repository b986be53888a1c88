"""Rounding words that fill their range evenly over successive steps.

Element i has the word ``i c + phase`` modulo 2^32, and each step adds 2^32 times the
golden ratio to the phase (a Weyl sequence). As thresholds for rounding, these words
have the same mean as random words, but the errors of successive steps cancel.
"""

import jax
import jax.numpy as jnp

# Odd numbers that, as fractions of 2^32, have few multiples close together.
_OF_STEP, _OF_ELEMENT, _OF_MOMENT = 0x9E3779B9, 0xC13FA9A9, 0x91E10DA5


def phase_at(seed: jax.Array, step: jax.Array) -> jax.Array:
    """Return the phase of a step. Seed, step and phase are uint32 scalars."""
    return seed * jnp.uint32(_OF_ELEMENT) + step * jnp.uint32(_OF_STEP)


def even_words(index: jax.Array, phase: jax.Array, number: int) -> jax.Array:
    """Return the words for the moment of a leaf with the static index ``number``.

    >>> even_words(jnp.uint32([0, 1, 2]), jnp.uint32(5), 0).tolist()
    [5, 3242174894, 2189382487]
    """
    first = phase + jnp.uint32(number * _OF_MOMENT % 2**32)
    return index * jnp.uint32(_OF_ELEMENT) + first
