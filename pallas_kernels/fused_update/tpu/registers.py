"""Registers of a TPU kernel: which rows of a block they hold, and moves within them.

A reference of two axes has the rows of one matrix, of which a register holds one of
each of 8 neighbouring groups. One of three axes has matrices side by side, of which a
register holds one row of 8.
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
    """An index of so many rows at a distance from each other."""
    return pl.ds(first, size, stride=stride) if stride > 1 else pl.ds(first, size)


def part(ref: Ref, number: jax.Array, group: int) -> Ref:
    """A reference to the rows of a unit, whose groups have so many."""
    if len(ref.shape) == 2:
        return ref.at[rows_of(number, group), :]
    registers = jnp.int32(ref.shape[1] // SUBLANES)
    first = lax.div(number, registers) * jnp.int32(group)
    return ref.at[pl.ds(first, group), rows_of(lax.rem(number, registers), 1), :]


def rows_of(number: jax.Array, group: int):
    """An index of the rows of a unit, whose groups have so many."""
    rows = SUBLANES * group
    start = pl.multiple_of(number * jnp.int32(rows), rows)
    return pl.ds(start, rows)


def _register(ref: Ref, row: int, group: int):
    """An index of the register with a row of a unit's groups."""
    return (every(row, group), slice(None)) if len(ref.shape) == 2 else row


def load(ref: Ref, group: int) -> list[jax.Array]:
    """For each row of a group, a register with that row of 8 groups or matrices."""
    return [ref[_register(ref, row, group)] for row in range(group)]


def store(ref: Ref, rows: Iterable, group: int) -> None:
    """Write registers to the rows that :func:`load` reads them from, in its order."""
    for row, value in enumerate(rows):
        ref[_register(ref, row, group)] = whole(value)


def exchanged(
    registers: Sequence[jax.Array], source: Callable[[int, int], tuple[int, int]]
) -> list[jax.Array]:
    """As many registers, whose quarters of the lanes are others' quarters.

    Args:
      registers: of 32-bit elements.
      source: the number of a register and of its quarter, by those of a result.
    """
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)

    @functools.cache
    def moved(register: int, quarters: int) -> jax.Array:
        """A register, rotated by so many quarters."""
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
    """The elements of these lanes, for each of an array of two axes."""
    return jnp.take_along_axis(x, lanes, 1, mode="promise_in_bounds")
