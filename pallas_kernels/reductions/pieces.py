"""What is reduced, and how arrays are divided among the programs of two kernels.

In the first kernel, each program reduces a piece of an array. In the second, each
program reduces the results of one array's pieces.
"""

import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Callable, Sequence

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

PIECE = 8192
"""Elements of a piece."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What the kernels are compiled for.

    Args:
      kind: of the reduction.
      factors: how many factors there are: 0 or 1.
      sizes: elements of each array.
      dtypes: of each array.
      varying: how the arrays vary over the mesh of a ``jax.shard_map``.
      interpret: run the kernels' operations with XLA, on any platform.
    """

    kind: Kind
    factors: int
    sizes: tuple[int, ...]
    dtypes: tuple[jnp.dtype, ...]
    varying: typing.Any
    interpret: bool = False

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first program of each array, and at last how many there are."""
        counts = (math.ceil(size / PIECE) for size in self.sizes)
        return [0, *itertools.accumulate(counts)]

    def results(self, count: int) -> jax.ShapeDtypeStruct:
        """A vector of so many reduced values."""
        return jax.ShapeDtypeStruct(
            (count,), self.kind.dtype, manual_axis_type=self.varying
        )


def reduce_by(
    kernels: Callable[[Pieces], tuple[Callable, Callable]],
    kind: Kind,
    factors: int,
    args: Sequence[jax.Array],
    *,
    interpret: bool = False,
) -> jax.Array:
    """Each array reduced to a number, as a vector of ``kind.dtype``.

    Args:
      kernels: a launcher's.
      kind: of the reduction.
      factors: how many of the arguments are a factor: 0 or 1.
      args: the factor, and the arrays.
      interpret: run the kernels' operations with XLA, on any platform.
    """
    factor, arrays = args[:factors], args[factors:]
    sizes, dtypes = tuple(x.size for x in arrays), tuple(x.dtype for x in arrays)
    types = (jax.typeof(x).manual_axis_type for x in arrays)
    varying = max(types, key=lambda axes: len(axes.varying))
    pieces = Pieces(kind, factors, sizes, dtypes, varying, interpret)
    of_pieces, of_arrays = kernels(pieces)
    parts = of_pieces(*factor, *(x.reshape(-1) for x in arrays))
    # Not one constant array, which custom_partitioning does not take. XLA makes it one.
    starts = [lax.full((1,), start, jnp.int32) for start in pieces.starts]
    return of_arrays(lax.concatenate(starts, 0), parts)
