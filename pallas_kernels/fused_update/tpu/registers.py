"""Load and store registers, and move the lanes within them.

If a reference has two axes, it refers to one matrix, and a register contains one row of
each of 8 neighboring groups. If it has three axes, it refers to matrices side by side,
and a register contains one row of 8 matrices.
"""

import functools
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fused_update.tpu.tiling import LANES, SUBLANES
from pallas_kernels.fused_update.tpu.values import whole
from pallas_kernels.layout import FOLD

Ref = typing.Any

QUARTERS = LANES // FOLD


def every(first: int, stride: int, size: int = SUBLANES):
    """Return an index that selects ``size`` rows, with ``stride`` as the step."""
    return pl.ds(first, size, stride=stride) if stride > 1 else pl.ds(first, size)


def part(ref: Ref, number: jax.Array, group: int) -> Ref:
    """Return a reference to the rows of a unit that has ``group`` rows per group."""
    if len(ref.shape) == 2:
        return ref.at[rows_of(number, group), :]
    registers = jnp.int32(ref.shape[1] // SUBLANES)
    first = lax.div(number, registers) * jnp.int32(group)
    return ref.at[pl.ds(first, group), rows_of(lax.rem(number, registers), 1), :]


def rows_of(number: jax.Array, group: int):
    """Return an index that selects the rows of 8 groups with ``group`` rows each."""
    rows = SUBLANES * group
    start = pl.multiple_of(number * jnp.int32(rows), rows)
    return pl.ds(start, rows)


def _register(ref: Ref, row: int, group: int):
    """Returns an index that selects the register with one row of a unit's groups."""
    return (every(row, group), slice(None)) if len(ref.shape) == 2 else row


def load(ref: Ref, group: int) -> list[jax.Array]:
    """Return registers; register r contains row r of each of 8 groups or matrices."""
    return [ref[_register(ref, row, group)] for row in range(group)]


def store(ref: Ref, rows: Iterable, group: int) -> None:
    """Write registers in the order in which :func:`load` reads them."""
    for row, value in enumerate(rows):
        ref[_register(ref, row, group)] = whole(value)


def in_steps(count: int, step: int, function: Callable[[jax.Array], None]) -> None:
    """Call a function with the int32 numbers 0, ``step``, ... below ``count``."""

    def call(number, _):
        function(number)
        return number + jnp.int32(step), None

    # With 64-bit types enabled, a fori_loop would count in int64.
    lax.scan(call, jnp.int32(0), length=count // step)


def exchanged(
    registers: Sequence[jax.Array], source: Callable[[int, int], tuple[int, int]]
) -> list[jax.Array]:
    """Return registers that are composed of quarters of the lanes of other registers.

    Args:
      registers: registers with 32-bit elements.
      source: a function from the indices of a new register and quarter to the indices
        of the old register and quarter.
    """
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

    @functools.cache
    def moved(register: int, quarters: int) -> jax.Array:
        """Returns a register, rotated by a number of quarters."""
        x = registers[register]
        return pltpu.roll(x, jnp.int32(quarters * FOLD), 1) if quarters else x

    results = []
    for number in range(len(registers)):
        parts = []
        for place in range(QUARTERS):
            register, old = source(number, place)
            parts.append(moved(register, (place - old) % QUARTERS))
        result = parts[-1]
        for place in reversed(range(QUARTERS - 1)):
            if parts[place] is not parts[place + 1]:
                is_before = lane < jnp.int32((place + 1) * FOLD)
                result = jnp.where(is_before, parts[place], result)
        results.append(result)
    return results


def permuted(x: jax.Array, lanes: jax.Array) -> jax.Array:
    """Return, for each row, the elements in the lanes that ``lanes`` contains."""
    return jnp.take_along_axis(x, lanes, 1, mode="promise_in_bounds")
