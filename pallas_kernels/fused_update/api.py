"""Define ``fused_update``, and choose how leaves are updated.

The *reference* (:mod:`.xla`) updates whole leaves with XLA and defines the results. A
*launcher* updates the shards of each device with kernels. The kernels have the
derivatives and the batching of the reference.
"""

import dataclasses
import functools
import importlib
import math
import typing
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from pallas_kernels.fused_update import shards, xla
from pallas_kernels.fused_update.gpu.kernel import kind_of_leaf
from pallas_kernels.fused_update.spec import (
    MAX_ELEMENTS_OF_SMALL_LEAF,
    BlockBody,
    Body,
    KernelCall,
    Launcher,
    Leaf,
    Operand,
    Result,
    Scalars,
    Shard,
    has_tiling,
)
from pallas_kernels.layout import MAX_ELEMENTS, check_block_size, layout_of
from pallas_kernels.lowered import for_one_device, for_one_platform
from pallas_kernels.platforms import (
    Implementation,
    by_platform,
    check_implementation,
    is_for_tpus,
    launcher_name,
    refused_gpu,
    target_gpu,
    transformable,
)


def fused_update(
    body: Body | BlockBody,
    operands: Sequence[Operand],
    results: Sequence[Result],
    *,
    shape: tuple[int, ...] | None = None,
    scalars: jax.Array | Scalars | None = None,
    layer: jax.Array | None = None,
    first: jax.Array | None = None,
    sharding: NamedSharding | None = None,
    implementation: Implementation = None,
) -> list[jax.Array]:
    """Read a leaf's arrays, compute elementwise, and write the results in place.

    On a GPU or a TPU, the update is one kernel, which moves every byte once and needs
    no temporary memory. On a mesh, every device updates its own shards. This needs no
    communication if the shards of packed arrays and of arrays per block consist of
    whole words and blocks; see :mod:`pallas_kernels.layout`.

    Args:
      body: elementwise function, see :data:`pallas_kernels.fused_update.Body`. If an
        array has one element per block, it must be a
        :class:`pallas_kernels.fused_update.BlockBody`.
      operands: arrays to read.
      results: arrays to write. A result that overwrites an operand reuses its memory if
        the operand is donated.
      shape: shape of the leaf, or of one layer. If None, the shape of the first plain
        operand.
      scalars: uint32 vector for the body, or :class:`Scalars`.
      layer: int32 scalar, the index of the layer to update. If given, the operands
        that are overwritten are stacks ``[layers, *shape]``, and all other operands
        belong to this layer.
      first: uint32 scalar. If the leaf is a part of another leaf, the index of its
        first element in that leaf; 0 if None. Do not pass it together with ``layer``.
      sharding: sharding of the leaf, or of the layer, on a mesh with automatic axes, if
        it is known. TPU kernels need it on such a mesh.
      implementation: see :data:`pallas_kernels.platforms.Implementation`. TPU kernels
        do not support all leaves; the reference updates the rest.

    Returns:
      One array per result. Its shape is the shape of the leaf, of the leaf's words or
      blocks, or of the stack.

    Raises:
      ValueError, TypeError: if an array has a wrong shape, dtype or width, if
        ``implementation`` is unknown, or if it needs a kernel that does not exist.

    >>> import jax.numpy as jnp
    >>> def sgd(values, scalars, index):
    ...     param, grad = values
    ...     return [param - 0.5 * grad]
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
                "fused_update: shape must be given if arrays are packed or stacked"
            )
        shape = plain[0]
    is_stacked = layer is not None
    leaf = Leaf(tuple(operands), tuple(results), tuple(shape), is_stacked, sharding)
    if not isinstance(scalars, Scalars):
        scalars = Scalars(jnp.zeros((1,), jnp.uint32) if scalars is None else scalars)
    (new,) = fused_update_many(
        body,
        [leaf],
        scalars=scalars,
        layer=layer,
        first=first,
        implementation=implementation,
    )
    return new


def fused_update_many(
    body: Body | BlockBody,
    leaves: Sequence[Leaf],
    *,
    scalars: Scalars,
    layer: jax.Array | None = None,
    first: jax.Array | None = None,
    implementation: Implementation = None,
) -> list[list[jax.Array]]:
    """Run :func:`fused_update` on one leaf, or on many leaves with few kernels.

    Args:
      body: the body that updates all leaves.
      leaves: a leaf, or leaves with the same kinds of operands and results, and without
        stacks. Leaves with the same :func:`sharing_kind` share kernels. Sort leaves by
        size, so that more kernels are equal and need to be compiled only once.
      scalars: table of scalars, and the row of each leaf.
      layer, first: see :func:`fused_update`; None for several leaves.
      implementation: see :func:`fused_update`.

    Returns:
      A list of results for each leaf.

    Raises:
      ValueError, TypeError: as in :func:`fused_update`, or if leaves differ in kind.
    """
    if len(leaves) > 1:
        _check_same_kinds(leaves)
    for leaf in leaves:
        _check(leaf)
    if len(leaves) == 1:
        scalars = dataclasses.replace(scalars, rows=_vector(scalars.rows, jnp.uint32))
        layer, first = _vector(layer, jnp.int32), _vector(first, jnp.uint32)
        return [_update(body, leaves, implementation, scalars, layer, first)]
    launcher: Launcher = launcher_of(implementation)
    parts, written = launcher.parts(leaves), []
    for numbers, room in parts:
        some = [leaves[i] for i in numbers]
        own = dataclasses.replace(scalars, rows=scalars.rows[np.array(numbers)])
        written.append(_update_once(body, some, implementation, own, room=room))
    return by_leaf([numbers for numbers, _ in parts], written)


def sharing_kind(leaf: Leaf, implementation: Implementation = None) -> typing.Hashable:
    """Return a key that is equal for leaves that can share a kernel.

    Args:
      leaf: a whole leaf. Its operands and results are not part of the key.
      implementation: see :func:`fused_update`.
    """
    is_for_gpus = implementation not in (None, "tpu") or target_gpu() is not None
    if is_for_gpus and not is_for_tpus():
        return kind_of_leaf(leaf)
    size = math.prod(leaf.shape)
    is_small = not leaf.has_words_or_blocks and size <= MAX_ELEMENTS_OF_SMALL_LEAF
    return None if is_small else leaf.shape


def _vector(number, dtype) -> jax.Array | None:
    return None if number is None else jnp.asarray(number, dtype).reshape(1)


def _check_same_kinds(leaves: Sequence[Leaf]) -> None:
    kinds = {
        (leaf.with_arrays([x.dtype for x in leaf.arrays]).operands, leaf.results)
        for leaf in leaves
    }
    if len(kinds) > 1 or any(leaf.stacked for leaf in leaves):
        raise ValueError(
            "fused_update_many: leaves must have the same kinds of operands and "
            "results, and must not be stacked"
        )


def _update(
    body: Body | BlockBody,
    leaves: Sequence[Leaf],
    implementation: Implementation,
    scalars: Scalars,
    layer: jax.Array | None = None,
    first: jax.Array | None = None,
    room: tuple[int, int] = (1, 1),
) -> list[jax.Array]:
    """Returns the results of all leaves in one list; see :func:`fused_update`."""
    check_implementation("fused_update", implementation)
    refusal = gpu_refusal(leaves, implementation)
    if implementation in ("pallas", "triton", "mosaic") and refusal:
        raise ValueError(f"fused_update: {refusal}")
    is_for_tpu = is_for_tpus(shards.mesh_of(leaves[0]))
    is_chosen = implementation in (None, "pallas") and is_for_tpu
    on_tpus = implementation == "tpu" or is_chosen
    if on_tpus:
        columns = scalars.table.shape[-1]
        on_tpus = not any(tpu_refusal(body, leaf, columns) for leaf in leaves)

    by_kernels = functools.partial(kernels, body, room)
    arguments = scalars, layer, first, list(leaves)
    if implementation == "tpu" and on_tpus:
        return by_kernels("tpu", interpret=not is_for_tpu)(*arguments)
    return by_platform(
        implementation,
        functools.partial(reference, body),
        arguments,
        interpreted=by_kernels("pallas", interpret=True),
        cuda=None if refusal else by_kernels(implementation),
        tpu=by_kernels("tpu") if on_tpus else None,
    )


# Kernels over equal leaves are traced and lowered once.
_update_once = jax.jit(_update, static_argnames=("body", "implementation", "room"))


def _check(leaf: Leaf) -> None:
    shape = leaf.shape
    if leaf.has_words_or_blocks and not shape:
        raise ValueError(
            "fused_update: shape must have rank 1 or more if an array is packed or per "
            "block, got ()"
        )
    if not leaf.has_words_or_blocks and any(o.repeated for o in leaf.operands):
        raise ValueError(
            "fused_update: an operand may be repeated only if another array of the "
            "leaf is packed or per block"
        )
    for size in leaf.block_sizes:
        check_block_size("fused_update", size)
    if leaf.stacked and leaf.has_words_or_blocks:
        stack = (leaf.operands[min(leaf.overwritten)].array.shape[0], *shape)
        if layout_of(stack).axis != leaf.layout.axis:
            raise ValueError(
                "fused_update: words and blocks must not cross layers, got a stack of "
                f"shape {list(stack)}; use layers with at least 64 elements along an "
                "axis before the last one"
            )
    for number, operand in enumerate(leaf.operands):
        want, got = leaf.stored_shape(operand), operand.array.shape
        if leaf.stacked and number in leaf.overwritten:
            got = got[1:]
        if got != want:
            raise ValueError(
                f"fused_update: operand {number} has shape "
                f"{list(operand.array.shape)}, but a leaf of shape {list(shape)} "
                f"needs {list(want)}" + (" for each layer" if leaf.stacked else "")
            )
        if operand.bits is not None and operand.array.dtype != jnp.uint32:
            raise TypeError(
                f"fused_update: operand {number} is packed, so its dtype must be "
                f"uint32, got {operand.array.dtype}"
            )
    for number, result in enumerate(leaf.results):
        if result.overwrites is None:
            continue
        operand = leaf.operands[result.overwrites]
        if (operand.array.dtype, operand.bits) != (result.dtype, result.bits):
            raise ValueError(
                f"fused_update: result {number} ({result.dtype}, bits {result.bits}) "
                f"cannot overwrite operand {result.overwrites} ({operand.array.dtype}, "
                f"bits {operand.bits}); dtypes and bits must match"
            )


PARTITIONED = (
    "XLA:TPU cannot partition kernels over a mesh with automatic axes; pass "
    "param_shardings, or make the axes explicit"
)


def gpu_refusal(
    leaves: Sequence[Leaf], implementation: Implementation = None
) -> str | None:
    """Return why no GPU kernel updates these leaves, or None if one does."""
    refusal = refused_gpu(implementation)
    if refusal is not None:
        return refusal
    size = max(math.prod(leaf.shape) for leaf in leaves)
    if not 0 < size <= MAX_ELEMENTS:
        return f"kernels need 1 to {MAX_ELEMENTS} elements, got {size}"
    for leaf in leaves:
        if not has_tiling(leaf.packed, leaf.block_sizes):
            return (
                f"kernels do not support fields of {list(leaf.packed)} bits with "
                f"blocks of {list(leaf.block_sizes)} elements; use blocks of 32 or 64 "
                "elements, or widths that are multiples of 4 bits"
            )
    return None


def tpu_refusal(body: Body | BlockBody, leaf: Leaf, scalars: int) -> str | None:
    """Return why no TPU kernel updates a leaf, or None if one does.

    The result is also None if JAX finds out only during lowering whether XLA partitions
    the program. A kernel then updates the leaf only in programs for one device.

    Args:
      body, leaf, scalars: see :func:`.tpu.kernel.refusal`.
    """
    if shards.is_partitioned(leaf) and is_for_tpus():
        return PARTITIONED
    return launcher_of("tpu").refusal(body, leaf, scalars)


def launcher_of(implementation: str | None, interpret: bool = False) -> typing.Any:
    """Return the module of a launcher, which implements :class:`.spec.Launcher`.

    The module is imported on first use, because older versions of JAX cannot import
    Mosaic GPU, and Pallas would take a tenth of this package's import time.

    Args:
      implementation: see :data:`pallas_kernels.platforms.Implementation`.
      interpret: if True, kernels run as ordinary operations on any platform. GPU
        kernels then always use Triton, because JAX cannot interpret Mosaic GPU.
    """
    if implementation == "tpu":
        name = "tpu.kernel"
    else:
        name = f"gpu.{'triton' if interpret else launcher_name(implementation)}"
    return importlib.import_module(f"pallas_kernels.fused_update.{name}")


# In older versions of JAX, interpreted kernels on several devices can deadlock.
_INTERPRETS_SHARDS = jax.__version_info__ >= (0, 11)


def kernels(
    body: Body | BlockBody,
    room: tuple[int, int],
    implementation: str | None,
    interpret: bool = False,
) -> Callable:
    """Return a function that updates leaves with kernels, on the shards of each device.

    The function has the arguments of :func:`reference` after ``body``, and the same
    derivatives.

    With ``interpret=True``, Pallas simulates TPU kernels. The simulation has side
    effects, so JAX cannot partition it.

    Args:
      body, room, interpret: see :class:`.spec.KernelCall`.
      implementation: the implementation whose launcher is used.
    """
    is_for_tpus = implementation == "tpu"
    by_xla = functools.partial(reference, body)

    def over_groups(shared, local: Sequence[Shard]) -> list[jax.Array]:
        """Runs one kernel for each group of a device's shards."""
        scalars, layer, first = shared
        if first is not None:
            local = [shard.after(first[0]) for shard in local]
        launcher: Launcher = launcher_of(implementation, interpret)
        groups, written = launcher.groups(local), []
        for group in groups:
            own = scalars
            if len(groups) > 1:
                rows = [lax.slice(scalars.rows, [i], [i + 1]) for i in group]
                own = dataclasses.replace(scalars, rows=lax.concatenate(rows, 0))
            some = [local[i] for i in group]
            call = KernelCall(body, some, own, layer, room, interpret)
            written.append(launcher.update(call))
        return [x for new in by_leaf(groups, written) for x in new]

    def over_shards(
        scalars: Scalars, layer, first, leaves: Sequence[Leaf]
    ) -> list[jax.Array]:
        # Kernels read only the table.
        shared = dataclasses.replace(scalars, values=()), layer, first
        if interpret and is_for_tpus and not _INTERPRETS_SHARDS:
            return over_groups(shared, [Shard(x, x.shape) for x in leaves])
        return shards.over_shards(
            over_groups, shared, leaves, can_partition=not is_for_tpus
        )

    def where_kernels_run(*args) -> list[jax.Array]:
        """Runs kernels, or the reference in programs that cannot contain kernels."""
        if interpret:
            return over_shards(*args)
        *_, leaves = args
        if is_for_tpus and shards.is_partitioned(leaves[0]) is None:
            return for_one_device(over_shards, by_xla)(*args)
        return for_one_platform(over_shards, by_xla)(*args)

    return transformable(where_kernels_run, by_xla)


def by_leaf(
    groups: Sequence[Sequence[int]], results: Iterable[Sequence[jax.Array]]
) -> list[list[jax.Array]]:
    """Return a list of results for each leaf.

    Args:
      groups: the indices of the leaves in each group, which together are all leaves.
      results: for each group, the results of all its leaves in one list.
    """
    written = {}
    for group, new in zip(groups, results, strict=True):
        count = len(new) // len(group)
        written |= {i: new[n * count :][:count] for n, i in enumerate(group)}
    return [written[i] for i in range(len(written))]


def reference(
    body: Body | BlockBody, scalars: Scalars, layer, first, leaves: Sequence[Leaf]
) -> list[jax.Array]:
    """Update whole leaves with array operations, whose results kernels must match.

    Args:
      body: body of the update.
      scalars: table of scalars, and the row of each leaf.
      layer: see :class:`.spec.KernelCall`.
      first: array with the index of the leaf's first element; None if it is 0.
      leaves: leaves with the same shape.

    Returns:
      The results of all leaves in one list.
    """
    rows = [scalars.rows] if len(leaves) == 1 else [r[None] for r in scalars.rows]
    shape = leaves[0].shape
    index = None if first is None else xla.index_of(shape, shape, first[0])
    return [
        x
        for leaf, row in zip(leaves, rows, strict=True)
        for x in xla.update(
            body, leaf, xla.row_of(scalars, row), layer, scalars.when, index
        )
    ]
