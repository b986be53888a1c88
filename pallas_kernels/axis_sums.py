"""Sums over the last axis and over the axis before it, in one pass on GPUs.

XLA:TPU computes both sums in one pass, but XLA:GPU reads the array once for each.
"""

import functools
import importlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import shards
from pallas_kernels.lowered import for_one_platform
from pallas_kernels.platforms import (
    Implementation,
    by_platform,
    launcher_name,
    transformable,
)
from pallas_kernels.shards import axes_of


def axis_sums(
    function: Callable,
    x: jax.Array,
    table: jax.Array,
    implementation: Implementation = None,
) -> tuple[jax.Array, jax.Array]:
    """Apply an elementwise function, and sum over the last axis and the axis before.

    On GPUs, a kernel reads the array once, and on a mesh, every device sums its own
    shard, so that only sums are exchanged. Kernels add in another order than XLA.

    Args:
      function: elementwise ``function(x, scalars)``, which returns float32. The scalars
        are the elements of the table.
      x: an array with two or more axes and fewer than 2^31 elements.
      table: uint32 vector.
      implementation: see :data:`pallas_kernels.platforms.Implementation`. There is no
        kernel for ``"mosaic"`` and ``"tpu"``, so XLA computes the sums.

    Returns:
      The sums over the last axis, and over the axis before it. These axes keep the
      length 1.

    >>> import jax.numpy as jnp
    >>> none = jnp.zeros(1, jnp.uint32)
    >>> rows, columns = axis_sums(lambda x, _: x * x, jnp.ones((2, 3)), none)
    >>> rows.shape, columns.shape, float(rows[0, 0])
    ((2, 1), (1, 3), 3.0)
    """
    reference = functools.partial(_reference, function)

    over_mesh = functools.partial(_over_mesh, function)
    interpreted = functools.partial(over_mesh, interpret=True)
    on_gpus = for_one_platform(over_mesh, reference)
    return by_platform(
        implementation,
        reference,
        (x, table),
        interpreted=transformable(interpreted, reference),
        cuda=None
        if launcher_name(implementation) == "mosaic"
        else transformable(on_gpus, reference),
    )


def _reference(function: Callable, x: jax.Array, table: jax.Array) -> list[jax.Array]:
    values = function(x, list(table))
    return [jnp.sum(values, axis, keepdims=True) for axis in (-1, -2)]


def _over_mesh(
    function: Callable, x: jax.Array, table: jax.Array, interpret: bool = False
) -> list[jax.Array]:
    """Returns the sums of shards, added over the devices that share a row or column."""
    # Pallas would take a tenth of the import time of this package.
    launcher = importlib.import_module("pallas_kernels.gpu.axis_sums")
    kernel = functools.partial(launcher.kernel, function, interpret)

    def local_of(arguments, mesh) -> shards.Local:
        del mesh
        spec = arguments[0].sharding.spec
        *outer, high, wide = axes_of(spec, len(arguments[0].shape))

        def local(*args):
            pairs = zip(kernel(*args), (wide, high), strict=True)
            return [lax.psum(each, names) if names else each for each, names in pairs]

        entries = [[*outer, high, ()], [*outer, (), wide]]
        outside = [P(*(names or None for names in each)) for each in entries]
        return local, [spec, P()], outside

    mesh = jax.typeof(x).sharding.mesh
    if shards.has_explicit_axes(mesh):
        local = local_of([jax.typeof(x)], mesh)
        return shards.over_known_axes(local, [x, table], mesh)
    outer = "".join(f"a{axis} " for axis in range(x.ndim - 2))
    rule = f"{outer}m n, t -> {outer}m one, {outer}another n"
    return shards.over_automatic_axes(kernel, local_of, [x, table], rule)
