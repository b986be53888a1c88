"""Sums over the last axis and over the axis before it, in one pass on GPUs.

XLA:TPU computes both sums in one pass, but XLA:GPU reads the array once for each. The
kernel uses Triton.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels.fused_update.shards import (
    Local,
    axes_of,
    has_explicit_axes,
    over_automatic_axes,
    over_known_axes,
)
from pallas_kernels.lowered import for_one_platform
from pallas_kernels.platforms import (
    Implementation,
    by_platform,
    launcher_name,
    transformable,
)

_ROWS, _COLUMNS, _AT_ONCE = 64, 512, 8
"""The size of a program's tile, and the number of rows that it loads at once."""

_WARPS = 4


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
    kernel = functools.partial(_kernel, function, interpret)

    def local_of(arguments, mesh) -> Local:
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
    if has_explicit_axes(mesh):
        local = local_of([jax.typeof(x)], mesh)
        return over_known_axes(local, [x, table], mesh)
    outer = "".join(f"a{axis} " for axis in range(x.ndim - 2))
    rule = f"{outer}m n, t -> {outer}m one, {outer}another n"
    return over_automatic_axes(kernel, local_of, [x, table], rule)


def _kernel(
    function: Callable, interpret: bool, x: jax.Array, table: jax.Array
) -> list[jax.Array]:
    """Returns the sums over both axes of an array on one device.

    Args:
      function, x, table: see :func:`axis_sums`.
      interpret: if True, XLA runs the operations of the kernel.
    """
    # Pallas would take a tenth of the import time of this package.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *outer, rows, columns = x.shape
    size = math.prod(outer)
    grid = size, pl.cdiv(rows, _ROWS), pl.cdiv(columns, _COLUMNS)
    varying = jax.typeof(x).manual_axis_type
    of_rows, of_columns = pl.pallas_call(
        functools.partial(_program, function, (rows, columns), table.size),
        grid=grid,
        # Whole tiles, so that stores need no mask.
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying)
            for shape in (
                (size, grid[1] * _ROWS, grid[2]),
                (size, grid[1], grid[2] * _COLUMNS),
            )
        ],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="axis_sums",
    )(x.reshape(size, rows, columns), table)
    of_rows = jnp.sum(of_rows[:, :rows], 2)
    of_columns = jnp.sum(of_columns[:, :, :columns], 1)
    return [
        of_rows.reshape(*outer, rows, 1),
        of_columns.reshape(*outer, 1, columns),
    ]


def _program(
    function: Callable,
    shape: tuple[int, int],
    count: int,
    x,
    table,
    of_rows,
    of_columns,
):
    """Sums the elements of one tile over its rows and over its columns."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    matrix, high, wide = (pl.program_id(axis) for axis in range(3))
    scalars = [table[np.int32(i)] for i in range(count)]
    columns = wide * np.int32(_COLUMNS) + lax.iota(jnp.int32, _COLUMNS)
    total = jnp.zeros((_AT_ONCE, _COLUMNS), jnp.float32)
    for first in range(0, _ROWS, _AT_ONCE):
        rows = high * np.int32(_ROWS) + np.int32(first) + lax.iota(jnp.int32, _AT_ONCE)
        exists = (rows < np.int32(shape[0]))[:, None]
        exists &= (columns < np.int32(shape[1]))[None, :]
        place = x.at[matrix, rows[:, None], columns[None, :]]
        found = function(triton.load(place, mask=exists), scalars)
        found = jnp.where(exists, found, jnp.float32(0))
        triton.store(of_rows.at[matrix, rows, wide], jnp.sum(found, 1))
        total += found
    triton.store(of_columns.at[matrix, high, columns], jnp.sum(total, 0))
