"""Random words that a test chooses."""

import dataclasses

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.random_bits import RandomBits


@dataclasses.dataclass(frozen=True)
class Given(RandomBits):
    """A source of random words that returns the given words for all streams."""

    given: jax.Array | None = None

    def words(self, shape, stream=0):
        return self.given


def random_of(words):
    """Random bits that consist of these words."""
    return Given(jnp.uint32(0), jnp.uint32(0), given=words)
