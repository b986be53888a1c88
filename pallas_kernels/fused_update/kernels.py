"""Update whole leaves, with a launcher's kernels on each device or with XLA."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import jax
from jax import lax

from pallas_kernels.fused_update import sharded, xla
from pallas_kernels.fused_update.launchers import launcher_of
from pallas_kernels.fused_update.spec import (
    BlockBody,
    Body,
    Call,
    Launcher,
    Leaf,
    Scalars,
    Shard,
)
from pallas_kernels.lowered import for_one_device, for_one_platform
from pallas_kernels.platforms import transformable

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
      body, room, interpret: see :class:`.spec.Call`.
      implementation: the implementation whose launcher is used.
    """
    is_for_tpus = implementation == "tpu"
    by_xla = functools.partial(reference, body)

    def over_groups(shared, shards: Sequence[Shard]) -> list[jax.Array]:
        scalars, layer, first = shared
        if first is not None:
            shards = [shard.after(first[0]) for shard in shards]
        launcher = launcher_of(implementation, interpret)
        return _over_groups(
            launcher, Call(body, shards, scalars, layer, room, interpret)
        )

    def over_shards(
        scalars: Scalars, layer, first, leaves: Sequence[Leaf]
    ) -> list[jax.Array]:
        # Kernels read only the table.
        shared = dataclasses.replace(scalars, values=()), layer, first
        if interpret and is_for_tpus and not _INTERPRETS_SHARDS:
            return over_groups(shared, [Shard(x, x.shape) for x in leaves])
        return sharded.over_shards(
            over_groups, shared, leaves, can_partition=not is_for_tpus
        )

    def where_kernels_run(*args) -> list[jax.Array]:
        """Runs kernels, or the reference in programs that cannot contain kernels."""
        if interpret:
            return over_shards(*args)
        *_, leaves = args
        if is_for_tpus and sharded.is_partitioned(leaves[0]) is None:
            return for_one_device(over_shards, by_xla)(*args)
        return for_one_platform(over_shards, by_xla)(*args)

    return transformable(where_kernels_run, by_xla)


def _over_groups(launcher: Launcher, call: Call) -> list[jax.Array]:
    """Runs one kernel for each group of a device's shards."""
    groups = launcher.groups(call.shards)
    if len(groups) == 1:
        return launcher.update(call)

    def update(group: Sequence[int]) -> list[jax.Array]:
        rows = [lax.slice(call.scalars.rows, [i], [i + 1]) for i in group]
        scalars = dataclasses.replace(call.scalars, rows=lax.concatenate(rows, 0))
        own = [call.shards[i] for i in group]
        return launcher.update(dataclasses.replace(call, shards=own, scalars=scalars))

    return [x for new in by_leaf(groups, map(update, groups)) for x in new]


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
      layer: see :class:`.spec.Call`.
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
