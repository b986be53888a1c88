"""Store optimizer state as floats, which JAX can return as cotangents."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_FLOATS = {1: jnp.float8_e4m3fn, 2: jnp.float16, 4: jnp.float32, 8: jnp.float64}
"""For each size in bytes, a float dtype that XLA copies without changing NaNs.

XLA may copy bfloat16 and float8_e5m2 as wider floats on a CPU, which changes NaNs."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FloatState:
    """A state whose integers are stored as floats with the same bits.

    Args:
      floats: a tree with the structure of the state.
      dtypes: the dtype of each leaf of the state, or a random key's implementation.
    """

    floats: typing.Any
    dtypes: tuple = dataclasses.field(metadata={"static": True})


def as_floats(state) -> FloatState:
    """Convert optimizer state to floats, so that ``jax.grad`` accepts it.

    JAX has no cotangents for integers, so each integer becomes a float with the same
    bits. Booleans and integers with fewer than 8 bits become int8 first, and random
    keys become their data. Floats do not change.

    Args:
      state: a tree of arrays.

    Returns:
      A pytree, which :func:`as_state` converts back.

    >>> import jax.numpy as jnp
    >>> found = as_floats({"count": jnp.int32(3), "mu": jnp.ones(2)})
    >>> found.floats["count"].dtype
    dtype('float32')
    >>> as_state(found)["count"]
    Array(3, dtype=int32)
    """
    dtypes = (
        jax.random.key_impl(x) if _is_key(x) else x.dtype
        for x in jax.tree.leaves(state)
    )
    return FloatState(jax.tree.map(_to_float, state), tuple(dtypes))


def as_state(floats: FloatState):
    """Convert floats from :func:`as_floats` back to the state.

    Args:
      floats: the result of :func:`as_floats`, or a gradient with respect to it.
    """
    leaves, structure = jax.tree.flatten(floats.floats)
    pairs = zip(leaves, floats.dtypes, strict=True)
    return structure.unflatten(_from_float(x, dtype) for x, dtype in pairs)


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.extended)


def _to_float(x):
    if _is_key(x):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if x.dtype == jnp.bool_ or jnp.iinfo(x.dtype).bits < 8:
        x = x.astype(jnp.int8)
    return lax.bitcast_convert_type(x, _FLOATS[x.dtype.itemsize])


def _from_float(x, dtype):
    if not isinstance(dtype, np.dtype):
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        return jax.random.wrap_key_data(bits, impl=dtype)
    if x.dtype == dtype:
        return x
    if dtype == jnp.bool_ or jnp.iinfo(dtype).bits < 8:
        return lax.bitcast_convert_type(x, jnp.int8).astype(dtype)
    return lax.bitcast_convert_type(x, dtype)
