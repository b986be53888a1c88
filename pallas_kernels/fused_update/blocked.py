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

MIN_ELEMENTS = 2**20
"""Smaller leaves are updated at once: blocks would gain little."""


def accepts(leaf: Leaf) -> bool:
    """Whether a leaf is large and has equal parts, one after the other in memory."""
    return not leaf.stacked and _parts(leaf) is not None


def update(
    body: Body | BlockBody,
    leaf: Leaf,
    scalars: Sequence[jax.Array],
    when: int | None = None,
) -> list[jax.Array]:
    """See :func:`pallas_kernels.fused_update.xla.update`; for leaves that are accepted.

    Args:
      body, leaf, when: as there.
      scalars: what the body takes as such. They may have any dtypes that it takes, so
        that the results have derivatives with respect to them.
    """

    def blocks(scalars, leaf):
        return _update(body, leaf, scalars, when)

    def whole(scalars, leaf):
        return xla.update(body, leaf, scalars, when=when)

    return transformable(blocks, whole)(list(scalars), leaf)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """How the first axis of a leaf is divided.

    Args:
      shape: of the leaf, or of a view of it.
      length: of a part along the first axis.
      last: the length of the last part where the others do not divide the axis; else 0.
    """

    shape: tuple[int, ...]
    length: int
    last: int

    @property
    def count(self) -> int:
        """How many parts there are before the last one."""
        return (self.shape[0] - self.last) // self.length


def _parts(leaf: Leaf) -> _Parts | None:
    """The parts of a leaf; None if it is small, or parts would have another layout."""
    size = math.prod(leaf.shape)
    if size < MIN_ELEMENTS:
        return None
    shape, is_plain = leaf.shape, not leaf.has_words_or_blocks
    if is_plain:
        columns = shape[-1]
        shape = (size // columns, columns) if columns <= BLOCK else (size,)
    unit, inner = leaf.unit(0), size // shape[0]
    length = max(BLOCK // (unit * inner), 1) * unit
    if shape[0] < 2 * length:
        return None
    # A remainder lengthens the last part: few rows may have another layout.
    rest = shape[0] % length
    last = length + rest if rest else 0
    axes = {layout_of((n, *shape[1:])).axis for n in (shape[0], length, last) if n}
    return _Parts(shape, length, last) if is_plain or len(axes) == 1 else None


def _update(
    body: Body | BlockBody, leaf: Leaf, scalars: Sequence[jax.Array], when: int | None
) -> list[jax.Array]:
    parts = _parts(leaf)
    assert parts is not None, "only leaves that blocked.py accepts"
    seen = dataclasses.replace(leaf, shape=parts.shape)
    given = [o.array.reshape(seen.stored_shape(o)) for o in leaf.operands]
    seen = seen.with_arrays(given)
    places = _places(seen)
    written = {
        place: given[place]
        if place < len(given)
        else jnp.zeros(seen.stored_shape(result), result.dtype)
        for place, result in zip(places, leaf.results, strict=True)
    }
    step = functools.partial(_part, body, seen, scalars, parts)

    def advance(number, written):
        return step(_not_hoisted(number, parts.count), parts.length, written)

    def finish(_, written):
        return step(parts.count, parts.last, written)

    if when is None:
        written = lax.fori_loop(0, parts.count, advance, written)
        written = finish(0, written) if parts.last else written
    else:
        turns = (scalars[when] != jnp.uint32(0)).astype(jnp.int32)
        written = lax.fori_loop(0, turns * parts.count, advance, written)
        if parts.last:
            written = lax.fori_loop(0, turns, finish, written)
    # A view that XLA fuses with writing into it would be written to new memory.
    results = _barrier([written[place] for place in places])
    return [
        x.reshape(leaf.stored_shape(result))
        for x, result in zip(results, leaf.results, strict=True)
    ]


def _places(leaf: Leaf) -> list[int]:
    """Per result, the operand that it overwrites, or a number past all of them."""
    return [
        len(leaf.operands) + number if result.overwrites is None else result.overwrites
        for number, result in enumerate(leaf.results)
    ]


def _part(
    body: Body | BlockBody,
    leaf: Leaf,
    scalars: Sequence[jax.Array],
    parts: _Parts,
    number: jax.Array | int,
    length: int,
    written: dict[int, jax.Array],
) -> dict[int, jax.Array]:
    """``written`` with the results of one part of the leaf.

    Args:
      number: of the part.
      length: along the first axis.
    """
    part = dataclasses.replace(leaf, shape=(length, *parts.shape[1:]))
    whole = dataclasses.replace(leaf, shape=(parts.length, *parts.shape[1:]))
    first = jnp.uint32(number) * jnp.uint32(math.prod(whole.shape))

    def compute() -> list[jax.Array]:
        arrays = [
            lax.dynamic_slice_in_dim(
                written.get(place, operand.array),
                number * whole.stored_shape(operand)[0],
                part.stored_shape(operand)[0],
            )
            for place, operand in enumerate(leaf.operands)
        ]
        return xla.update(
            body,
            part.with_arrays(arrays),
            scalars,
            within=(first, parts.shape),
            barrier=_barrier,
        )

    new = _unfused(compute, leaf.arrays[0])
    return {
        place: lax.dynamic_update_slice_in_dim(
            written[place], value, number * whole.stored_shape(result)[0], 0
        )
        for place, value, result in zip(_places(leaf), new, leaf.results, strict=True)
    }


def _unfused(
    compute: Callable[[], list[jax.Array]], array: jax.Array
) -> list[jax.Array]:
    """The results of ``compute``, which XLA does not fuse with anything outside it.

    It is a branch that is always taken. Barriers do not suffice: XLA:CPU of JAX 0.10
    removes them before it fuses operations. To slice a bfloat16 array it also converts
    all of it to float32, before the loop unless the slice is in a branch.

    Args:
      array: XLA cannot know that its first element is not below minus infinity.
    """
    first = array[(0,) * array.ndim].astype(jnp.float32)
    zeros = lambda: [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(compute)]
    return lax.cond(first < -jnp.inf, zeros, compute)


def _barrier(values: Sequence[jax.Array]) -> list[jax.Array]:
    """The values, none of which is used before all are computed.

    So no part of a block is overwritten while it is read, and XLA need not copy it.
    """
    return list(lax.optimization_barrier(tuple(values)))


def _not_hoisted(number: jax.Array, count: int) -> jax.Array:
    """The number, less than the count, by way of an operation that XLA sorts by.

    XLA:CPU of JAX 0.12 compiles a loop into a single function, which runs in one
    thread, unless there is something in it that such a function cannot call.
    """
    return lax.sort(jnp.stack([number, jnp.asarray(count, number.dtype)]))[0]
