"""Integer arrays as floating-point ones of the same bits, and back.

What a backward pass returns is floating-point; packed words and codes are not.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._step import trees

_CARRIERS = {4: jnp.float32, 2: jnp.bfloat16}


def carrier(dtype) -> jnp.dtype | None:
    """The floating-point dtype in which arrays of a dtype travel, if there is one."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize not in _CARRIERS:
        return None
    return jnp.dtype(_CARRIERS[dtype.itemsize])


def as_float(x: jax.Array) -> jax.Array:
    """An array's bits in its :func:`carrier`; floating-point arrays as they are."""
    if trees.is_float(x):
        return x
    return lax.bitcast_convert_type(x, carrier(x.dtype))


def from_float(x: jax.Array, dtype) -> jax.Array:
    """The array of a dtype that :func:`as_float` was given."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
