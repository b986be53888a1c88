"""``sums_of_squares`` and ``largest_magnitudes`` of many arrays at once."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import by_platform, launcher_module, transformable
from pallas_kernels.layout import MAX_ELEMENTS
from pallas_kernels.platforms import (
    Implementation,
    check_implementation,
    refused_gpu,
)
from pallas_kernels.reductions import sharded
from pallas_kernels.reductions.kinds import LARGEST, SQUARES, Kind

_PACKAGE = "pallas_kernels.reductions"

MIN_ARRAYS = 8
"""For fewer arrays XLA's own reductions are hardly more kernels."""


def sums_of_squares(
    arrays: Sequence[jax.Array],
    factor: jax.Array | None = None,
    implementation: Implementation = None,
) -> jax.Array:
    """The sum of squares of each array.

    On a GPU it is two kernels, however many arrays there are, where XLA launches one or
    two for each. On a mesh every device sums its shards, and then sums are added.

    Args:
      arrays: of a float dtype of up to 32 bits, at least one.
      factor: float32 scalar, by which elements are multiplied before they are squared.
      implementation: as in :func:`pallas_kernels.fused_update`.

    Returns:
      A float32 vector, an element per array. The order of additions is not that of
      ``jnp.sum``; elements that are not finite make their sum not finite.

    >>> import jax.numpy as jnp
    >>> sums_of_squares([jnp.full(3, 2.0), jnp.ones((2, 2))])
    Array([12.,  4.], dtype=float32)
    """
    return _reduced(SQUARES, arrays, factor, implementation)


def largest_magnitudes(
    arrays: Sequence[jax.Array], implementation: Implementation = None
) -> jax.Array:
    """The largest magnitude in each array; of those with a NaN, NaN.

    Args:
      arrays: as for :func:`sums_of_squares`.
      implementation: likewise.

    Returns:
      A float32 vector, an element per array; 0 for an array without elements.

    >>> import jax.numpy as jnp
    >>> largest_magnitudes([jnp.array([-2.0, 1.0]), jnp.array([1.0, jnp.nan])])
    Array([ 2., nan], dtype=float32)
    """
    patterns = _reduced(LARGEST, arrays, None, implementation)
    return lax.bitcast_convert_type(patterns, jnp.float32)


def _reduced(kind: Kind, arrays, factor, implementation: Implementation) -> jax.Array:
    check_implementation("reductions", implementation)
    arrays = list(arrays)
    given = [] if factor is None else [jnp.asarray(factor, jnp.float32).reshape(1)]

    def reference(*args):
        own = args[len(given) :]
        return jnp.stack([kind.reduce(kind.read(x, *args[: len(given)])) for x in own])

    fits = all(0 < x.size <= MAX_ELEMENTS for x in arrays) and refused_gpu() is None

    def kernel(*args, interpret: bool = False) -> jax.Array:
        reduce = launcher_module(_PACKAGE, implementation, interpret).reduce
        local = functools.partial(reduce, kind, len(given), interpret=interpret)
        return sharded.over_shards(local, kind, len(given), args)

    return by_platform(
        implementation,
        reference,
        [*given, *arrays],
        interpreted=transformable(functools.partial(kernel, interpret=True), reference),
        cuda=transformable(kernel, reference) if fits else None,
    )
