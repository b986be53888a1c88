"""``not_folded``: constants that XLA does not compute with while it compiles."""

import jax
import jax.numpy as jnp
from jax.core import Tracer


def not_folded(x):
    """A traced float array that XLA takes for unknown, at no cost in memory.

    It would compute the codes of zeros while it compiles, an element at a time: nine
    seconds for a matrix of 1024 x 1024, and a warning.
    """
    if not (isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.floating)):
        return x
    is_taken = jax.lax.optimization_barrier(jnp.asarray(True))
    return jnp.where(is_taken, x, jnp.ones_like(x))
