"""Integer arrays as floating-point ones with the same bits, and back.

A backward pass returns floating-point arrays only, while packed words and codes are
integers.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._step import trees

_CARRIERS = {4: jnp.float32, 2: jnp.bfloat16}


def carrier(dtype) -> jnp.dtype | None:
    """The float dtype that carries the bits of arrays of a dtype, if there is one."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.integer) or dtype.itemsize not in _CARRIERS:
        return None
    return jnp.dtype(_CARRIERS[dtype.itemsize])


def as_float(x: jax.Array) -> jax.Array:
    """An array's bits in its :func:`carrier`; a floating-point array as it is."""
    if trees.is_float(x):
        return x
    dtype = carrier(x.dtype)
    assert dtype is not None, "the analysis of layers lets no other dtypes pass"
    return lax.bitcast_convert_type(x, dtype)


def from_float(x: jax.Array, dtype) -> jax.Array:
    """The array of this dtype that :func:`as_float` was given."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
