"""``fused_update``: the interface, its checks, and the choice of implementation."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fused_update import sharded, xla
from pallas_kernels.fused_update.launchers import Call, launcher, tpu_launcher
from pallas_kernels.fused_update.spec import (
    BlockBody,
    Body,
    Leaf,
    Operand,
    Result,
    has_tiling,
)
from pallas_kernels.layout import MAX_ELEMENTS, check_block_size, layout_of
from pallas_kernels.platforms import (
    Implementation,
    check_implementation,
    chooses_tpu_kernels,
    is_elsewhere,
    is_for_tpus,
    refused_gpu,
)
from pallas_kernels.transforms import transformable


def fused_update(
    body: Body | BlockBody,
    operands: Sequence[Operand],
    results: Sequence[Result],
    *,
    shape: tuple[int, ...] | None = None,
    scalars: jax.Array | None = None,
    values: Sequence[jax.Array] = (),
    row: jax.Array | int | None = None,
    layer: jax.Array | None = None,
    first: jax.Array | None = None,
    when: int | None = None,
    implementation: Implementation = None,
) -> list[jax.Array]:
    """Read a leaf's arrays, compute elementwise, and write the results in place.

    On a GPU or a TPU it is one kernel: it moves every byte once and needs no temporary
    memory.
    On a mesh it runs on every device's shards; nothing is communicated where shards
    are whole words and blocks (see :mod:`pallas_kernels.layout`; plain arrays: any).

    Args:
      body: what to compute, see :data:`pallas_kernels.fused_update.Body`, or
        :class:`pallas_kernels.fused_update.BlockBody` if an array is per block.
      operands: arrays to read.
      results: arrays to write; what overwrites an operand takes its place in memory
        when that is donated.
      shape: of the leaf, or of one layer; that of the first plain operand if None.
      scalars: uint32 vector for the body, or a table with one in each row.
      values: what the last scalars of every row are, in any dtypes that the body takes
        as well. Kernels read the words; derivatives are taken by the values.
      row: which row of the table; uint32 of shape [1], or a number.
      layer: int32 scalar. The operands that are overwritten are then stacks of leaves,
        ``[layers, *shape]``, of which this one is updated; the others are one layer's.
      first: uint32 scalar, the index of the leaf's first element, if it is a part of
        another leaf; 0 if None. Without ``layer``, which says where it is.
      when: number of a scalar that switches the update off: where it is 0, operands
        that are overwritten keep their values, and other results are undefined.
      implementation: see :data:`pallas_kernels.platforms.Implementation`. Kernels for
        TPUs take a part of all leaves (:func:`.tpu.accepts`), and the reference takes
        the others there.

    Returns:
      One array per result: of the leaf's shape, its ``packed_shape``, or the stack's.

    Raises:
      ValueError, TypeError: if arrays do not fit each other.

    >>> import jax.numpy as jnp
    >>> def sgd(values, scalars, index, multiply_add):
    ...     param, grad = values
    ...     return [multiply_add(jnp.full_like(grad, -0.5), grad, param)]
    >>> param, grad = jnp.ones((64, 8)), jnp.ones((64, 8))
    >>> (new,) = fused_update(
    ...     sgd, [Operand(param), Operand(grad)], [Result("float32", overwrites=0)]
    ... )
    >>> float(new[0, 0])
    0.5
    """
    if shape is None:
        plain = [o.array.shape for o in operands if o.bits is None]
        if not plain or layer is not None:
            raise ValueError(
                "fused_update: shape is needed for packed or stacked arrays"
            )
        shape = plain[0]
    leaf = Leaf(tuple(operands), tuple(results), tuple(shape), layer is not None)
    _check(leaf)
    if scalars is None:
        scalars = jnp.zeros((1,), jnp.uint32)
    if row is not None:
        row = jnp.asarray(row, jnp.uint32).reshape(1)
    if layer is not None:
        layer = jnp.asarray(layer, jnp.int32).reshape(1)
    if first is not None:
        first = jnp.asarray(first, jnp.uint32).reshape(1)
    places = row, layer, first
    given = [x for x in places if x is not None]

    def place(rest):
        rest = list(rest)
        return tuple(rest.pop(0) if x is not None else None for x in places)

    def reference(values, table, *args):
        row, layer, first = place(args[: len(given)])
        whole = leaf.with_arrays(args[len(given) :])
        within = None if first is None else (first[0], leaf.shape)
        own = xla.row_of(table, row, values)
        return xla.update(body, whole, own, layer, when, within)

    def kernel(launched, shards, shared, interpret):
        table, *rest = shared
        row, layer, first = place(rest)
        if first is not None:
            shards = [shard.after(first[0]) for shard in shards]
        return launched.update(
            Call(body, shards, table, row, layer, when=when, interpret=interpret)
        )

    shared = [scalars, *given]
    return _choose(implementation, kernel, reference, body, [leaf], values, shared)


def fused_update_many(
    body: Body | BlockBody,
    leaves: Sequence[Leaf],
    *,
    scalars: jax.Array,
    rows: jax.Array,
    values: Sequence[jax.Array] = (),
    when: int | None = None,
    implementation: Implementation = None,
) -> list[list[jax.Array]]:
    """:func:`fused_update` of many leaves in few kernels.

    Args:
      body: the same for all.
      leaves: with the same kinds of operands and results, none of them stacked. If
        anything is packed or per block, they are of one shape. In the order of their
        sizes, more of the kernels are equal.
      scalars: uint32 table.
      rows: uint32 vector, each leaf's row of the table.
      values, when: as in :func:`fused_update`.
      implementation: as in :func:`fused_update`.

    Returns:
      Each leaf's results.
    """
    _check_together(leaves)
    for leaf in leaves:
        _check(leaf)
    results, most = len(leaves[0].results), launcher(implementation).max_leaves(leaves)

    def kernel(launched, shards, shared, interpret):
        table, part_rows = shared
        call = Call(body, shards, table, part_rows, when=when, interpret=interpret)
        if launched.can_share(shards):
            return launched.update(call)
        return [
            x
            for shard, row in zip(shards, part_rows, strict=True)
            for x in launched.update(
                dataclasses.replace(call, shards=[shard], rows=row[None])
            )
        ]

    written: list = [None] * len(leaves)
    for part in _parts(len(leaves), most):
        some = leaves[part]

        def reference(values, table, part_rows, *arrays, some=some):
            own = [xla.row_of(table, row[None], values) for row in part_rows]
            return [
                x
                for leaf, row in zip(sharded.regroup(some, arrays), own, strict=True)
                for x in xla.update(body, leaf, row, when=when)
            ]

        shared = [scalars, rows[part]]
        new = _choose(implementation, kernel, reference, body, some, values, shared)
        written[part] = [new[i : i + results] for i in range(0, len(new), results)]
    return written


def _parts(leaves: int, most: int) -> list[slice]:
    """Parts of at most so many leaves, as equal as can be.

    Kernels over equally many leaves of equal sizes are traced and compiled once. So of
    leaves in the order of their sizes each part gets some of each.
    """
    count = math.ceil(leaves / most)
    return [slice(start, leaves, count) for start in range(count)]


def _check_together(leaves: Sequence[Leaf]) -> None:
    kinds = {
        (
            tuple((o.array.dtype, o.bits, o.block_size) for o in leaf.operands),
            leaf.results,
            leaf.shape if leaf.has_words_or_blocks else None,
        )
        for leaf in leaves
    }
    if len(kinds) > 1 or any(leaf.stacked for leaf in leaves):
        raise ValueError(
            "fused_update_many: leaves must have the same kinds of operands and "
            "results, and one shape if anything is packed or per block, and none of "
            "them may be stacked"
        )


def _choose(
    implementation: Implementation,
    kernel,
    reference,
    body: Body | BlockBody,
    leaves: Sequence[Leaf],
    values: Sequence[jax.Array],
    shared: list[jax.Array],
):
    """Run the kernel of the platform, or the reference.

    Args:
      implementation: as in :func:`fused_update`.
      kernel: of a launcher, shards, what they share, and whether it is interpreted.
      reference: of the values, and all arrays.
      body, leaves, values: of the update.
      shared: the table of scalars, and other arrays that all leaves share.
    """
    check_implementation("fused_update", implementation)
    refusal = _refusal(leaves)
    if implementation in ("pallas", "triton", "mosaic") and refusal:
        raise ValueError(f"fused_update: {refusal}")
    arrays = [*shared, *(x for leaf in leaves for x in leaf.arrays)]
    arguments = [list(values), *arrays]

    def by_kernel(name, interpret):
        run = functools.partial(
            kernel, launcher(name, interpret=interpret), interpret=interpret
        )
        call = lambda _, *args: sharded.over_shards(
            run, leaves, len(shared), args, can_partition=name != "tpu"
        )
        return transformable(call, reference)

    if implementation in ("triton", "mosaic"):
        return by_kernel(implementation, False)(*arguments)
    is_chosen = implementation in (None, "pallas") and chooses_tpu_kernels()
    on_tpus = implementation == "tpu" or is_chosen
    if on_tpus:
        scalars = shared[0].shape[-1]
        accepts = tpu_launcher().accepts
        on_tpus = all(accepts(body, leaf, scalars) for leaf in leaves)
    if implementation == "tpu" and on_tpus and not is_for_tpus():
        # Pallas' model of a TPU has side effects, for which JAX has no partitioning.
        def modelled(_, *args):
            given = sharded.regroup(leaves, args[len(shared) :])
            shards = [sharded.Shard(leaf, leaf.shape) for leaf in given]
            return kernel(tpu_launcher(), shards, list(args[: len(shared)]), True)

        return transformable(modelled, reference)(*arguments)
    if implementation == "tpu" and on_tpus:
        return by_kernel("tpu", False)(*arguments)
    if implementation in ("xla", "tpu") or (refusal and not on_tpus):
        return reference(*arguments)
    default = by_kernel("pallas", True) if implementation == "pallas" else reference
    if is_elsewhere(arrays):
        return default(*arguments)
    branches = {} if refusal else {"cuda": by_kernel(implementation, False)}
    if on_tpus:
        branches["tpu"] = by_kernel("tpu", False)
    return lax.platform_dependent(*arguments, default=default, **branches)


def _refusal(leaves: Sequence[Leaf]) -> str | None:
    """Why no kernel for GPUs updates these leaves, or None."""
    refusal = refused_gpu()
    if refusal is not None:
        return refusal
    size = max(math.prod(leaf.shape) for leaf in leaves)
    if not 0 < size <= MAX_ELEMENTS:
        return f"kernels take 1 to {MAX_ELEMENTS} elements, not {size}"
    for leaf in leaves:
        if not has_tiling(leaf.packed, leaf.block_sizes):
            return (
                f"kernels do not take fields of {list(leaf.packed)} bits with blocks "
                f"of {list(leaf.block_sizes)} elements; accepted are blocks of 32 or "
                "64, or multiples of 4 bits"
            )
    return None


def _check(leaf: Leaf) -> None:
    shape = leaf.shape
    if leaf.has_words_or_blocks and not shape:
        raise ValueError("fused_update: a scalar has no words and no blocks")
    for size in leaf.block_sizes:
        check_block_size("fused_update", size)
    if leaf.stacked and leaf.has_words_or_blocks:
        stack = (leaf.operands[min(leaf.overwritten)].array.shape[0], *shape)
        if layout_of(stack).axis != leaf.layout.axis:
            raise ValueError(
                f"fused_update: in a stack of shape {list(stack)} words and blocks lie "
                "across layers; accepted are layers of two axes or more, of which one "
                "divides well into 64 rows or more"
            )
    for number, operand in enumerate(leaf.operands):
        want, got = leaf.stored_shape(operand), operand.array.shape
        if leaf.stacked and number in leaf.overwritten:
            got = got[1:]
        if got != want:
            raise ValueError(
                f"fused_update: operand {number} has shape "
                f"{list(operand.array.shape)}; a leaf of shape {list(shape)} "
                f"needs {list(want)}" + (" for each layer" if leaf.stacked else "")
            )
        if operand.bits is not None and operand.array.dtype != jnp.uint32:
            raise TypeError(
                f"fused_update: operand {number} is packed, and {operand.array.dtype} "
                "instead of uint32"
            )
    for number, result in enumerate(leaf.results):
        if result.overwrites is None:
            continue
        operand = leaf.operands[result.overwrites]
        if (operand.array.dtype, operand.bits) != (result.dtype, result.bits):
            raise ValueError(
                f"fused_update: result {number} ({result.dtype}, bits {result.bits}) "
                f"cannot overwrite operand {result.overwrites} ({operand.array.dtype}, "
                f"bits {operand.bits})"
            )
