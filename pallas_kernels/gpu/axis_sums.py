"""The kernel of :mod:`pallas_kernels.axis_sums`, with Triton."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

_ROWS, _COLUMNS, _AT_ONCE = 64, 512, 8
"""The size of a program's tile, and the number of rows that it loads at once."""

_WARPS = 4


def kernel(
    function: Callable, interpret: bool, x: jax.Array, table: jax.Array
) -> list[jax.Array]:
    """Return the sums over both axes of an array on one device.

    Args:
      function, x, table: see :func:`pallas_kernels.axis_sums.axis_sums`.
      interpret: if True, XLA runs the operations of the kernel.
    """
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
