"""What is reduced: a function of elements, and how two of its values become one."""

import dataclasses
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Kind:
    """A reduction; of no elements it is 0.

    Args:
      name: of the reduction.
      dtype: of the values.
      read: the values of elements of any float dtype, and of the factor if there is
        one, a float32 array of one element or a scalar.
      combine: two values.
      reduce: an array of values to one.
      over_devices: one value of each device to one; takes names of mesh axes.
    """

    name: str
    dtype: typing.Any
    read: Callable[..., jax.Array]
    combine: Callable[[jax.Array, jax.Array], jax.Array]
    reduce: Callable[[jax.Array], jax.Array]
    over_devices: Callable


def _square(x: jax.Array, factor: jax.Array | None = None) -> jax.Array:
    x = x.astype(jnp.float32)
    if factor is not None:
        x = x * factor
    return x * x


def _pattern(x: jax.Array) -> jax.Array:
    """The pattern of the magnitude: as integers, infinity and then NaN are largest."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    return bits & jnp.int32(0x7FFFFFFF)


SQUARES = Kind("squares", jnp.float32, _square, jnp.add, jnp.sum, lax.psum)
LARGEST = Kind("largest", jnp.int32, _pattern, jnp.maximum, jnp.max, lax.pmax)
