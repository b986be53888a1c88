"""Scalars of up to 32 bits as words of one table, which a kernel reads."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def encode_scalars(values: Sequence[jax.Array]) -> jax.Array:
    """Scalars of up to 32 bits as one uint32 vector."""
    return jnp.stack([_to_word(jnp.asarray(x)) for x in values])


def plain_scalars(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Scalars as they are, which have derivatives, as words do not; bools as words."""
    return [_to_word(x) if x.dtype == bool else x for x in map(jnp.asarray, values)]


def decode_scalar(word: jax.Array, dtype: np.dtype) -> jax.Array:
    """A scalar back from its word, the inverse of :func:`encode_scalars`.

    What :func:`plain_scalars` left as it is stays so.
    """
    if word.dtype == dtype:
        return word
    if dtype == jnp.bool_:
        return word != jnp.uint32(0)
    if dtype.itemsize == 4:
        return lax.bitcast_convert_type(word, dtype)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(word.astype(unsigned), dtype)


def _to_word(x: jax.Array) -> jax.Array:
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
