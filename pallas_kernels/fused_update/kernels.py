"""Update whole leaves, with a launcher's kernels on each device or with XLA."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

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


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Updates leaves with a launcher's kernels, on the shards of every device.

    With ``interpret=True``, Pallas simulates TPU kernels. The simulation has side
    effects, so JAX cannot partition it.

    Args:
      body, room, interpret: see :class:`.spec.Call`.
      implementation: the implementation whose launcher is used.
    """

    body: Body | BlockBody
    room: tuple[int, int]
    implementation: str | None
    interpret: bool

    @property
    def transformable(self) -> Callable:
        """The update as a function with the derivatives of the reference."""
        return transformable(self._where_kernels_run, self._reference)

    @property
    def _is_for_tpus(self) -> bool:
        return self.implementation == "tpu"

    @property
    def _reference(self) -> Callable:
        return functools.partial(reference, self.body)

    def _where_kernels_run(self, *args) -> list[jax.Array]:
        """Runs kernels, or the reference in programs that cannot contain kernels."""
        if self.interpret:
            return self._over_shards(*args)
        *_, leaves = args
        is_perhaps_partitioned = sharded.is_partitioned(leaves[0]) is None
        if self._is_for_tpus and is_perhaps_partitioned:
            return for_one_device(self._over_shards, self._reference)(*args)
        return for_one_platform(self._over_shards, self._reference)(*args)

    def _over_shards(
        self, scalars: Scalars, layer, first, leaves: Sequence[Leaf]
    ) -> list[jax.Array]:
        """Runs kernels on the shards of whole leaves."""
        # Kernels read only the table.
        shared = dataclasses.replace(scalars, values=()), layer, first
        if self.interpret and self._is_for_tpus and not _INTERPRETS_SHARDS:
            return self._over_groups(shared, [Shard(x, x.shape) for x in leaves])
        return sharded.over_shards(
            self._over_groups, shared, leaves, can_partition=not self._is_for_tpus
        )

    def _over_groups(self, shared, shards: Sequence[Shard]) -> list[jax.Array]:
        """Runs one kernel for each group of a device's shards."""
        launcher: Launcher = launcher_of(self.implementation, self.interpret)
        scalars, layer, first = shared
        if first is not None:
            shards = [shard.after(first[0]) for shard in shards]
        call = Call(self.body, shards, scalars, layer, self.room, self.interpret)
        groups = launcher.groups(shards)
        if len(groups) == 1:
            return launcher.update(call)
        written: list = [None] * len(shards)
        for group in groups:
            own = [shards[i] for i in group]
            rows = [lax.slice(scalars.rows, [i], [i + 1]) for i in group]
            given = dataclasses.replace(scalars, rows=lax.concatenate(rows, 0))
            new = launcher.update(dataclasses.replace(call, shards=own, scalars=given))
            count = len(own[0].leaf.results)
            for n, i in enumerate(group):
                written[i] = new[n * count :][:count]
        return [x for new in written for x in new]


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
            body,
            leaf,
            xla.row_of(scalars, row),
            layer,
            scalars.when,
            index,
        )
    ]
