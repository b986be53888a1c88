"""The launchers of kernels, for GPUs and for TPUs, and what one is asked to do.

They are found by their names when they are needed: none is imported here.
"""

import dataclasses
import importlib
import typing
from collections.abc import Sequence

import jax

from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.spec import BlockBody, Body, Leaf, Operand, Result
from pallas_kernels.platforms import launcher_name


@dataclasses.dataclass(frozen=True)
class Call:
    """What one kernel is asked to update: a leaf, a shard, a layer, or many leaves.

    Args:
      body: see :data:`pallas_kernels.fused_update.Body`.
      shards: the arrays on this device, of leaves that can share a kernel.
      table: uint32, rows of scalars; or one row, for one leaf.
      rows: uint32 vector, each leaf's row of the table.
      layer: int32 vector of one element, which layer of the stacks; for one leaf.
      when: as in :func:`pallas_kernels.fused_update`.
      interpret: run the kernel's operations with XLA, on any platform.
    """

    body: Body | BlockBody
    shards: Sequence[Shard]
    table: jax.Array
    rows: jax.Array | None = None
    layer: jax.Array | None = None
    when: int | None = None
    interpret: bool = False


class Launcher(typing.Protocol):
    """What a launcher's module defines, for one of Pallas' backends."""

    def max_leaves(self, leaves: Sequence[Leaf]) -> int:
        """How many of these leaves a kernel should update at most."""
        ...

    def can_share(self, shards: Sequence[Shard]) -> bool:
        """Whether these leaves, or shards of leaves, can share a kernel."""
        ...

    def update(self, call: Call) -> list[jax.Array]:
        """The results of a call's kernel, of one leaf after the other."""
        ...


def launcher(implementation: str | None, *, interpret: bool = False) -> Launcher:
    """The launcher of an implementation.

    Args:
      implementation: see :data:`pallas_kernels.platforms.Implementation`.
      interpret: whether XLA runs its operations, on any platform.
    """
    if implementation == "tpu":
        return typing.cast(Launcher, tpu_launcher())
    # XLA can run operations of Triton's kernels only.
    name = "triton" if interpret else launcher_name(implementation)
    # Imported where it is needed: older versions of JAX cannot import Mosaic's, and
    # Pallas takes a tenth of the time of importing this package.
    module = importlib.import_module(f"pallas_kernels.fused_update.gpu.{name}")
    return typing.cast(Launcher, module)


def tpu_launcher():
    """The module of the launcher for TPUs, which is imported where it is needed."""
    return importlib.import_module("pallas_kernels.fused_update.tpu")


def result_shapes(shard: Shard) -> list[tuple[int, ...]]:
    """The shapes of a shard's results, with which a launcher returns them."""
    leaf = shard.leaf
    return [
        _share(leaf.stored_shape(r), shard)
        if r.overwrites is None
        else leaf.operands[r.overwrites].array.shape
        for r in leaf.results
    ]


def _share(stored: tuple[int, ...], shard: Shard) -> tuple[int, ...]:
    """The shard's share of an array's shape."""
    return tuple(
        n * part // whole if whole else n
        for n, part, whole in zip(stored, shard.shape, shard.leaf.shape, strict=True)
    )


def manual_axes(result: Result, operands: Sequence[Operand]):
    """How a result varies over the mesh of a ``jax.shard_map``: as what it replaces."""
    if result.overwrites is not None:
        return jax.typeof(operands[result.overwrites].array).manual_axis_type
    types = [jax.typeof(o.array).manual_axis_type for o in operands]
    return max(types, key=lambda each: len(each.varying))
