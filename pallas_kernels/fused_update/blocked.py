"""The fused update on CPUs: array operations on one block of a leaf after the other.

XLA's CPU compiler gives each result of a step a loop of its own, and cannot overwrite
an array that another loop still reads. On whole leaves it therefore writes every result
to new memory, whose pages the system must clear, and copies it into its place
afterwards. Here a loop goes over blocks of :data:`BLOCK` elements: the results of a
block wait in a few MiB, which every turn uses again, until all of them are there.

The numbers are those of :mod:`pallas_kernels.fused_update.xla`, which computes a block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fused_update import xla
from pallas_kernels.fused_update.spec import BlockBody, Body, Leaf
from pallas_kernels.layout import layout_of
from pallas_kernels.platforms import transformable

BLOCK = 2**17
"""Elements of a block, roughly: a core's caches hold what is read and written."""


def update(
    body: Body | BlockBody,
    leaf: Leaf,
    scalars: Sequence[jax.Array],
    when: int | None = None,
) -> list[jax.Array]:
    """See :func:`pallas_kernels.fused_update.xla.update`; for leaves without layers.

    Args:
      body, leaf, when: as there.
      scalars: what the body takes as such. They may have any dtypes that it takes, so
        that the results have derivatives with respect to them.
    """

    def blocks(scalars, leaf):
        parts = _parts(leaf)
        seen = dataclasses.replace(leaf, shape=parts.shape)
        arrays = [o.array.reshape(seen.stored_shape(o)) for o in leaf.operands]

        def arguments(first, length):
            shape = (length, *parts.shape[1:])
            first = jnp.uint32(first) * jnp.uint32(math.prod(parts.shape[1:]))
            return scalars, xla.index_of(shape, parts.shape, first)

        skips = None if when is None else scalars[when] == jnp.uint32(0)
        new = over_parts(body, seen.with_arrays(arrays), parts, arguments, skips)
        return [
            x.reshape(leaf.stored_shape(result))
            for x, result in zip(new, leaf.results, strict=True)
        ]

    def whole(scalars, leaf):
        return xla.update(body, leaf, scalars, when=when)

    return transformable(blocks, whole)(list(scalars), leaf)


@dataclasses.dataclass(frozen=True)
class Parts:
    """How the first axis of a leaf is divided.

    Args:
      shape: of the leaf, or of a view of it.
      length: of a part along the first axis.
      last: the length of the last part where the others do not divide the axis; else 0.
    """

    shape: tuple[int, ...]
    length: int
    last: int = 0

    @property
    def count(self) -> int:
        """How many parts there are before the last one."""
        return (self.shape[0] - self.last) // self.length


def _parts(leaf: Leaf) -> Parts:
    """The parts of a leaf; a single one if others would have another layout."""
    shape, is_plain = leaf.shape, not leaf.has_words_or_blocks
    if is_plain:
        size, columns = math.prod(shape), shape[-1]
        shape = (size // columns, columns) if columns <= BLOCK else (size,)
    parts = Parts(shape, *_lengths(shape, leaf.unit(0)))
    if is_plain and parts.last:
        # Elements may divide where rows do not.
        flat = (math.prod(shape),)
        return Parts(flat, *_lengths(flat, 1))
    lengths = shape[0], parts.length, parts.last
    axes = {layout_of((n, *shape[1:])).axis for n in lengths if n}
    return parts if is_plain or len(axes) == 1 else Parts(shape, shape[0])


def _lengths(shape: tuple[int, ...], unit: int) -> tuple[int, int]:
    """The length of parts, multiples of a unit, and of the last one if it differs."""
    rows, row = shape[0], math.prod(shape[1:])
    parts = max(1, round(rows * row / BLOCK))
    for count in range(parts, 2 * parts):
        if rows % (count * unit) == 0:
            return rows // count, 0
    length = max(BLOCK // (unit * row), 1) * unit
    if rows < 2 * length:
        return rows, 0
    # A remainder lengthens the last part: few rows may have another layout.
    return length, length + rows % length


def over_parts(
    body: Body | BlockBody,
    leaf: Leaf,
    parts: Parts,
    arguments: Callable,
    skips: jax.Array | None,
) -> list[jax.Array]:
    """The results of a leaf, part by part of its first axis.

    Args:
      body: of the update.
      leaf: its shape is that of the parts.
      parts: how it is divided.
      arguments: gives the body's scalars, and its index, from the first row of a part
        and the part's length in rows.
      skips: whether nothing is to be written; None for no.
    """
    dtypes = [x.dtype for x in leaf.arrays]
    leaf = leaf.with_arrays(list(map(_to_slice, leaf.arrays)))
    written = {
        place: leaf.arrays[place]
        if place < len(dtypes)
        else _to_slice(jnp.zeros(leaf.stored_shape(result), result.dtype))
        for place, result in zip(_places(leaf), leaf.results, strict=True)
    }
    part = _Part(body, leaf, dtypes, parts, arguments)

    def advance(number, written):
        return part.update(
            _in_parallel_loop(number, parts.count), parts.length, written
        )

    def finish(_, written):
        return part.update(parts.count, parts.last, written)

    turns = 1 if skips is None else 1 - skips.astype(jnp.int32)
    if parts.count > 1 or skips is not None:
        written = lax.fori_loop(0, turns * parts.count, advance, written)
    else:
        written = part.update(0, parts.length, written)
    if parts.last and skips is None:
        written = finish(0, written)
    elif parts.last:
        written = lax.fori_loop(0, turns, finish, written)
    # A view that XLA fuses with writing into it would be written to new memory.
    results = _barrier([written[place] for place in _places(leaf)])
    return [
        _from_slice(x, result.dtype)
        for x, result in zip(results, leaf.results, strict=True)
    ]


def _places(leaf: Leaf) -> list[int]:
    """Per result, the operand that it overwrites, or a number past all of them."""
    return [
        len(leaf.operands) + number if result.overwrites is None else result.overwrites
        for number, result in enumerate(leaf.results)
    ]


@dataclasses.dataclass(frozen=True)
class _Part:
    """The update of one part of a leaf.

    Args:
      body, leaf, parts, arguments: as of :func:`over_parts`; arrays are as
        :func:`_to_slice` gives them.
      dtypes: of the leaf's arrays.
    """

    body: Body | BlockBody
    leaf: Leaf
    dtypes: Sequence
    parts: Parts
    arguments: Callable

    def update(
        self, number: jax.Array | int, length: int, written: dict[int, jax.Array]
    ) -> dict[int, jax.Array]:
        """``written`` with the results of a part, by its number and length."""
        leaf, row = self.leaf, self.parts.shape[1:]
        part = dataclasses.replace(leaf, shape=(length, *row))
        whole = dataclasses.replace(leaf, shape=(self.parts.length, *row))

        def compute() -> list[jax.Array]:
            arrays = [
                lax.dynamic_slice_in_dim(
                    written.get(place, operand.array),
                    number * whole.stored_shape(operand)[0],
                    part.stored_shape(operand)[0],
                )
                for place, operand in enumerate(leaf.operands)
            ]
            arrays = list(map(_from_slice, arrays, self.dtypes))
            scalars, index = self.arguments(number * self.parts.length, length)
            apart = functools.partial(_apart, leaf.arrays[0])
            new = xla.update(
                self.body, part.with_arrays(arrays), scalars, index=index, barrier=apart
            )
            return list(map(_to_slice, new))

        shapes = [(part.stored_shape(x), x.dtype) for x in leaf.results]
        new = _unfused(compute, shapes, leaf.arrays[0])
        return {
            place: lax.dynamic_update_slice_in_dim(
                written[place], value, number * whole.stored_shape(result)[0], 0
            )
            for place, value, result in zip(
                _places(leaf), new, leaf.results, strict=True
            )
        }


DROPS_BARRIERS = jax.__version_info__ < (0, 11)
"""XLA:CPU of JAX 0.10 removes barriers before it fuses operations.

It also converts all of a narrow float array to float32 to slice it or to write to it,
in every turn of a loop.
"""


def _to_slice(x: jax.Array) -> jax.Array:
    """The array, or its bits, which XLA slices without converting them."""
    is_narrow = x.dtype.itemsize < 4 and jnp.issubdtype(x.dtype, jnp.floating)
    if not (DROPS_BARRIERS and is_narrow):
        return x
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _from_slice(x: jax.Array, dtype) -> jax.Array:
    """The inverse of :func:`_to_slice`."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _unfused(
    compute: Callable[[], list[jax.Array]],
    results: Sequence[tuple[tuple[int, ...], jnp.dtype]],
    array: jax.Array,
) -> list[jax.Array]:
    """The results of ``compute``, which XLA does not fuse with anything outside it.

    It is a branch that is always taken, as barriers do not suffice in JAX 0.10.

    Args:
      results: their shapes and dtypes.
      array: XLA cannot know that its first element is not below minus infinity.
    """
    first = array[(0,) * array.ndim].astype(jnp.float32)
    # Zeros from outside the branch would be copied in every turn.
    zeros = lambda: [_to_slice(jnp.zeros(*each)) for each in results]
    return lax.cond(first < -jnp.inf, zeros, compute)


def _apart(array: jax.Array, values: Sequence[jax.Array]) -> list[jax.Array]:
    """The values, computed before what uses them, and not once more within it."""
    if not DROPS_BARRIERS:
        return _barrier(values)
    values = list(values)
    bits = list(map(_to_slice, values))
    kept = _unfused(lambda: bits, [(x.shape, x.dtype) for x in values], array)
    return [_from_slice(x, y.dtype) for x, y in zip(kept, values, strict=True)]


def _barrier(values: Sequence[jax.Array]) -> list[jax.Array]:
    """The values, none of which is used before all are computed.

    So no part of a block is overwritten while it is read, and XLA need not copy it.
    """
    return list(lax.optimization_barrier(tuple(values)))


def _in_parallel_loop(number: jax.Array, count: int) -> jax.Array:
    """The same number, taken from a sort of itself and the count, which is larger.

    The sort changes no number; it keeps the loop parallel. XLA:CPU of JAX 0.12 compiles
    a loop into one function, which runs in one thread, but not a loop that contains a
    sort. XLA does not know that the number is the smaller one, and so cannot drop it.
    """
    return lax.sort(jnp.stack([number, jnp.asarray(count, number.dtype)]))[0]
