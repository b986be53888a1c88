"""Sums over the last axis and over the axis before it, in one pass on GPUs.

XLA:TPU computes both sums in one pass, but XLA:GPU reads the array once for each. The
kernel uses Triton. Equal arrays share a launch, and the additions after it.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels.fused_update.gpu.instructions import by_branches
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

MOST_ARRAYS = 16
"""The number of arrays that a kernel may read. More would take longer to compile."""


def axis_sums(
    function: Callable,
    arrays: Sequence[jax.Array],
    table: jax.Array,
    implementation: Implementation = None,
) -> list[tuple[jax.Array, jax.Array]]:
    """Apply an elementwise function, and sum over the last axis and the axis before.

    On GPUs, a kernel reads the array once, and on a mesh, every device sums its own
    shard, so that only sums are exchanged. Kernels add in another order than XLA.

    Args:
      function: elementwise ``function(x, scalars)``, which returns float32. The scalars
        are the elements of the table.
      arrays: up to :data:`MOST_ARRAYS` arrays of the same shape and dtype, with two or
        more axes and fewer than 2^31 elements.
      table: uint32 vector.
      implementation: see :data:`pallas_kernels.platforms.Implementation`. There is no
        kernel for ``"mosaic"`` and ``"tpu"``, so XLA computes the sums.

    Returns:
      For each array, the sums over the last axis, and over the axis before it. These
      axes keep the length 1.

    >>> import jax.numpy as jnp
    >>> none = jnp.zeros(1, jnp.uint32)
    >>> ((rows, columns),) = axis_sums(lambda x, _: x * x, [jnp.ones((2, 3))], none)
    >>> rows.shape, columns.shape, float(rows[0, 0])
    ((2, 1), (1, 3), 3.0)
    """
    reference = functools.partial(_reference, function)

    over_mesh = functools.partial(_over_mesh, function)
    interpreted = functools.partial(over_mesh, interpret=True)
    on_gpus = for_one_platform(over_mesh, reference)
    sums = by_platform(
        implementation,
        reference,
        (table, *arrays),
        interpreted=transformable(interpreted, reference),
        cuda=None
        if launcher_name(implementation) == "mosaic"
        else transformable(on_gpus, reference),
    )
    return list(zip(sums[::2], sums[1::2], strict=True))


def _reference(
    function: Callable, table: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
    values = [function(x, list(table)) for x in arrays]
    return [jnp.sum(x, axis, keepdims=True) for x in values for axis in (-1, -2)]


def _over_mesh(
    function: Callable, table: jax.Array, *arrays: jax.Array, interpret: bool = False
) -> list[jax.Array]:
    """Returns the sums of shards, added over the devices that share a row or column."""
    kernel = functools.partial(_kernel, function, interpret)

    def local_of(arguments, mesh) -> Local:
        del mesh
        specs = [x.sharding.spec for x in arguments[1:]]
        added, outside = [], []
        for spec in specs:
            *outer, high, wide = axes_of(spec, rank)
            added += [wide, high]
            entries = [[*outer, high, ()], [*outer, (), wide]]
            outside += [P(*(names or None for names in each)) for each in entries]

        def local(table, *shards):
            sums: list = [None] * len(added)
            for spec in dict.fromkeys(specs):
                some = [i for i, other in enumerate(specs) if other == spec]
                found = kernel(table, *(shards[i] for i in some))
                for n, i in enumerate(some):
                    sums[2 * i : 2 * i + 2] = found[2 * n : 2 * n + 2]
            pairs = zip(sums, added, strict=True)
            return [lax.psum(each, names) if names else each for each, names in pairs]

        return local, [P(), *specs], outside

    rank, mesh = arrays[0].ndim, jax.typeof(arrays[0]).sharding.mesh
    if has_explicit_axes(mesh):
        like = [jax.typeof(x) for x in (table, *arrays)]
        return over_known_axes(local_of(like, mesh), [table, *arrays], mesh)
    before, after = ["t"], []
    for i in range(len(arrays)):
        outer = "".join(f"a{i}x{axis} " for axis in range(rank - 2))
        before.append(f"{outer}m{i} n{i}")
        after += [f"{outer}m{i} p{i}", f"{outer}q{i} n{i}"]
    rule = f"{', '.join(before)} -> {', '.join(after)}"
    return over_automatic_axes(kernel, local_of, [table, *arrays], rule)


def _kernel(
    function: Callable, interpret: bool, table: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
    """Returns the sums over both axes of each array on one device.

    Args:
      function, table, arrays: see :func:`axis_sums`.
      interpret: if True, XLA runs the operations of the kernel.
    """
    # Pallas would take a tenth of the import time of this package.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *outer, rows, columns = arrays[0].shape
    size, count = math.prod(outer), len(arrays)
    grid = count * size, pl.cdiv(rows, _ROWS), pl.cdiv(columns, _COLUMNS)
    varying = jax.typeof(arrays[0]).manual_axis_type
    of_rows, of_columns = pl.pallas_call(
        functools.partial(_program, function, (size, rows, columns)),
        grid=grid,
        # Whole tiles, so that stores need no mask.
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varying)
            for shape in (
                (grid[0], grid[1] * _ROWS, grid[2]),
                (grid[0], grid[1], grid[2] * _COLUMNS),
            )
        ],
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="axis_sums",
    )(table, *(x.reshape(size, rows, columns) for x in arrays))
    of_rows = jnp.sum(of_rows[:, :rows], 2)
    of_columns = jnp.sum(of_columns[:, :, :columns], 1)
    of_rows = of_rows.reshape(count, *outer, rows, 1)
    of_columns = of_columns.reshape(count, *outer, 1, columns)
    return [x for pair in zip(of_rows, of_columns, strict=True) for x in pair]


def _program(function: Callable, shape: tuple[int, int, int], table, *refs):
    """Sums the elements of one tile over its rows and over its columns.

    ``refs`` are references to the arrays, which have this shape, and to both results.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    matrix, high, wide = (pl.program_id(axis) for axis in range(3))
    *arrays, of_rows, of_columns = refs
    size = np.int32(shape[0])
    number, within = lax.div(matrix, size), lax.rem(matrix, size)
    scalars = [table[np.int32(i)] for i in range(table.size)]
    columns = wide * np.int32(_COLUMNS) + lax.iota(jnp.int32, _COLUMNS)
    total = jnp.zeros((_AT_ONCE, _COLUMNS), jnp.float32)
    for first in range(0, _ROWS, _AT_ONCE):
        rows = high * np.int32(_ROWS) + np.int32(first) + lax.iota(jnp.int32, _AT_ONCE)
        exists = (rows < np.int32(shape[1]))[:, None]
        exists &= (columns < np.int32(shape[2]))[None, :]
        place = within, rows[:, None], columns[None, :]

        def load(i: int, place=place, exists=exists):
            return triton.load(arrays[i].at[place], mask=exists)

        found = function(by_branches(number, range(len(arrays)), load), scalars)
        found = jnp.where(exists, found, jnp.float32(0))
        triton.store(of_rows.at[matrix, rows, wide], jnp.sum(found, 1))
        total += found
    triton.store(of_columns.at[matrix, high, columns], jnp.sum(total, 0))
