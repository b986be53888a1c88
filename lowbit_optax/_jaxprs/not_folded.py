"""``not_folded`` stops XLA from evaluating constants during compilation."""

import jax
import jax.numpy as jnp
from jax.core import Tracer


def not_folded(x):
    """Hide the values of a traced float array from XLA's constant folding.

    Otherwise, XLA would compute the codes of zeros during compilation, one element at a
    time, which takes nine seconds for a matrix of 1024 x 1024 and prints a warning. The
    function needs no additional memory.
    """
    if not (isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.floating)):
        return x
    is_taken = jax.lax.optimization_barrier(jnp.asarray(True))
    return jnp.where(is_taken, x, jnp.ones_like(x))
