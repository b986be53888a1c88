"""How arrays are divided into pieces, of which two kernels make one number per array.

In the first, each program reduces a piece of an array. In the second, each program
reduces what is left of one array.
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

from pallas_kernels.reductions.kinds import Kind

PIECE = 8192
"""Elements of a piece."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What the kernels are compiled for.

    Args:
      kind: of the reduction.
      factors: how many of the arguments are a factor: 0 or 1.
      sizes: elements of each array.
      dtypes: of each array.
      interpret: run the kernels' operations with XLA, on any platform.
    """

    kind: Kind
    factors: int
    sizes: tuple[int, ...]
    dtypes: tuple[jnp.dtype, ...]
    interpret: bool = False

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first program of each array, and at last how many there are."""
        counts = (math.ceil(size / PIECE) for size in self.sizes)
        return [0, *itertools.accumulate(counts)]


Kernels = Callable[[Pieces, typing.Any], tuple[Callable, Callable]]
"""The two kernels over pieces, for the mesh axes over which they vary."""


def reduce_by(
    kernels: Kernels,
    kind: Kind,
    factors: int,
    args: Sequence[jax.Array],
    *,
    interpret: bool = False,
) -> jax.Array:
    """Each array reduced to a number.

    Args:
      kernels: a launcher's.
      kind: of the reduction.
      factors: how many of the arguments are a factor: 0 or 1.
      args: these, and the arrays.
      interpret: run the kernels' operations with XLA, on any platform.

    Returns:
      A vector of ``kind.dtype``.
    """
    factor, arrays = args[:factors], args[factors:]
    sizes, dtypes = tuple(x.size for x in arrays), tuple(x.dtype for x in arrays)
    pieces = Pieces(kind, factors, sizes, dtypes, interpret)
    varying = max((jax.typeof(x).manual_axis_type for x in arrays), key=_variety)
    of_pieces, of_arrays = kernels(pieces, varying)
    parts = of_pieces(*factor, *(x.reshape(-1) for x in arrays))
    # Not one constant array, which custom_partitioning does not take. XLA makes it one.
    starts = [lax.full((1,), start, jnp.int32) for start in pieces.starts]
    return of_arrays(lax.concatenate(starts, 0), parts)


def _variety(axes) -> int:
    return len(axes.varying)
