"""Find and report the leaves that XLA, not a kernel, updates on an accelerator.

:mod:`.backends` calls these functions with the :class:`.plan.KernelPlan` of a step, and
:func:`lowbit_optax.explain` lists the same leaves. For a large leaf, XLA creates
float32 arrays of its master and moments, which are the arrays that this package avoids.
"""

import functools
import math
import typing
import warnings
from collections.abc import Collection, Mapping

from lowbit_optax._step import trees
from lowbit_optax._step.kernels.plan import KernelPlan
from lowbit_optax.formats.block_quantized import BlockQuantized
from pallas_kernels.fused_update import sharded
from pallas_kernels.fused_update.refusals import PARTITIONED

_LARGE = 2**18
"""Leaves with fewer elements are not worth a warning."""


class Left(typing.NamedTuple):
    """A leaf that XLA updates.

    Args:
      leaf: its path, dtype and shape.
      reason: why no kernel updates it.
      size: the number of its elements.
      float32_bytes: size of its master and quantised moments in float32, in bytes.
    """

    leaf: str
    reason: str
    size: int
    float32_bytes: int


def left_to_xla(plan: KernelPlan, reasons: Mapping[int, str]) -> list[Left]:
    """Return a :class:`Left` for each leaf that XLA updates.

    ``reasons`` maps leaf indices to reasons. Leaves without packed or quantised arrays
    are omitted, because XLA updates them in one pass.
    """
    step, found = plan.traced.step, []
    for number, reason in sorted(reasons.items()):
        leaf = step.leaves[number]
        stored = [x.format for x in step.plan.storage if x and x.leaf == leaf.name]
        moments = [x for x in stored if isinstance(x, BlockQuantized)]
        is_quantized = trees.is_quantized(leaf.param)
        is_packed = leaf.format is not None and bool(leaf.format.width)
        if not (moments or is_quantized or is_packed):
            continue
        described, size = trees.describe(leaf.param), math.prod(leaf.param.shape)
        if is_quantized:
            described = (
                f"a {type(leaf.param).__name__} of shape {list(leaf.param.shape)}"
            )
        left = f"params{leaf.name}, {described}"
        found.append(Left(left, reason, size, 4 * size * (1 + len(moments))))
    return found


def perhaps_partitioned(plan: KernelPlan) -> dict[int, str]:
    """Return the leaves that XLA updates in programs for several devices.

    The result maps leaf indices to reasons. Under plain ``jax.jit``, the number of
    devices is known only during lowering.
    """
    return {
        i: PARTITIONED
        for i, leaf in plan.arrays(plan.traced.step).items()
        if i not in plan.tpu_refusals and sharded.is_partitioned(leaf) is None
    }


def warning_of(left: Collection[Left]) -> str | None:
    """Return a warning about leaves that XLA updates, or None if no leaf is large."""
    large = [x for x in left if x.size >= _LARGE]
    if not large:
        return None
    most, total = max(large, key=lambda x: x.size), sum(x.float32_bytes for x in large)
    others = f" and {len(large) - 1} more leaves" if len(large) > 1 else ""
    return (
        f"lowbit: no kernel updates {most.leaf}{others}: {most.reason}. XLA computes "
        "float32 arrays of their masters and moments, which takes several times as "
        f"long as a kernel and needs about {total / 2**20:.0f} MiB of temporary memory "
        "on all devices together. lowbit_optax.explain(tx, params) lists such leaves. "
        "To disable this warning, pass warn=False"
    )


@functools.cache
def warn_once(message: str) -> None:
    """Warn, unless this process has already issued the same warning."""
    warnings.warn(message, stacklevel=2)
