"""Measure gradients, to decide whether a step is skipped.

``with_loss_scale`` measures all gradients at once. :mod:`lowbit_optax.release` measures
a few at a time. Both create a :class:`.Guard` from the result.
"""

import typing

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._step import trees


class Sizes(typing.NamedTuple):
    """The size of some gradients after division by the loss scale.

    Args:
      finite: bool scalar, whether all of them are finite.
      largest: float32 scalar, max |g| if all are finite.
    """

    finite: jax.Array
    largest: jax.Array

    @classmethod
    def of(cls, grads, factor: jax.Array) -> "Sizes":
        """Return the sizes of gradients times ``factor``, which may overflow."""
        arrays = [x for x in jax.tree.leaves(grads) if trees.is_inexact(x) and x.size]
        if not arrays:
            return cls(jnp.bool_(True), jnp.float32(0))
        largest = jnp.stack([_largest_magnitude(x) for x in arrays])
        largest = _of_all_shards(largest, factor)
        scaled = largest * factor
        finite = jnp.all(jnp.isfinite(jnp.stack([largest, scaled])))
        return cls(finite, jnp.max(scaled))


def _of_all_shards(largest: jax.Array, factor: jax.Array) -> jax.Array:
    """Return the largest of all shards of the user's ``jax.shard_map``.

    All shards must decide alike, unless each of them has a loss scale of its own.
    """
    patterns = lax.bitcast_convert_type(largest, jnp.uint32)
    own = jax.typeof(factor).manual_axis_type.varying
    for axis in jax.sharding.get_abstract_mesh().manual_axes:
        if axis not in own:
            patterns = lax.pmax(patterns, axis)
    return lax.bitcast_convert_type(patterns, jnp.float32)


def _largest_magnitude(x: jax.Array) -> jax.Array:
    """Return the largest ``|x|`` as float32, or NaN if an element is NaN.

    The maximum is computed over bit patterns, because on some backends a maximum of
    floats ignores NaNs. The bit pattern of a NaN is larger than the pattern of any
    number.
    """
    wide = jnp.abs(x.astype(jnp.float32) if is_narrow(x.dtype) else x)
    patterns = lax.bitcast_convert_type(wide, f"uint{8 * wide.dtype.itemsize}")
    largest = lax.bitcast_convert_type(jnp.max(patterns), wide.dtype)
    return largest.astype(jnp.float32)
