"""``sums_of_squares`` and ``largest_magnitudes`` of many arrays at once."""

import functools
import importlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import MAX_ELEMENTS
from pallas_kernels.platforms import (
    Implementation,
    check_implementation,
    is_elsewhere,
    launcher_name,
    refused_gpu,
)
from pallas_kernels.reductions import sharded
from pallas_kernels.reductions.kinds import LARGEST, SQUARES, Kind
from pallas_kernels.transforms import transformable

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
    if implementation in ("xla", "tpu") or not fits:
        return reference(*given, *arrays)

    def kernel(interpret: bool) -> Callable:
        reduce = _launcher(implementation, interpret).reduce
        local = functools.partial(reduce, kind, len(given), interpret=interpret)
        call = functools.partial(sharded.over_shards, local, kind, len(given))
        return transformable(lambda *args: call(args), reference)

    if implementation in ("triton", "mosaic"):
        return kernel(False)(*given, *arrays)
    default = kernel(True) if implementation == "pallas" else reference
    if is_elsewhere(arrays):
        return default(*given, *arrays)
    return lax.platform_dependent(*given, *arrays, cuda=kernel(False), default=default)


def _launcher(implementation: Implementation, interpret: bool):
    name = "triton" if interpret else launcher_name(implementation)
    # Imported where it is needed, see pallas_kernels.fused_update.launchers.
    return importlib.import_module(f"pallas_kernels.reductions.{name}")
