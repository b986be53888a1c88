"""Which leaves of a step XLA updates on an accelerator, and why no kernel does.

A large one costs what the package is there to save: XLA makes float32 arrays of its
master and moments.
"""

import functools
import math
import typing
import warnings
from collections.abc import Collection, Mapping

from lowbit_optax._step import trees
from lowbit_optax._step.kernels.plan import KernelPlan
from lowbit_optax.formats.base import BlockMomentFormat
from pallas_kernels.fused_update import sharded
from pallas_kernels.fused_update.refusals import PARTITIONED

_LARGE = 2**18
"""Leaves of fewer elements are not worth a warning."""


class Left(typing.NamedTuple):
    """A leaf that XLA updates.

    Args:
      leaf: its path, dtype and shape.
      reason: why no kernel updates it.
      size: its elements.
      float32_bytes: of its master and of the moments that are stored in fewer bits.
    """

    leaf: str
    reason: str
    size: int
    float32_bytes: int


def left_to_xla(plan: KernelPlan, reasons: Mapping[int, str]) -> dict[str, Left]:
    """By path, the leaves that XLA updates for these reasons, by number.

    Not among them are leaves of which nothing is packed or quantised, which XLA updates
    in one pass.
    """
    step, found = plan.traced.step, {}
    for number, reason in sorted(reasons.items()):
        leaf = step.leaves[number]
        stored = [x.format for x in step.plan.storage if x and x.leaf == leaf.name]
        moments = [x for x in stored if isinstance(x, BlockMomentFormat)]
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
        found[leaf.name] = Left(left, reason, size, 4 * size * (1 + len(moments)))
    return found


def perhaps_partitioned(plan: KernelPlan) -> dict[int, str]:
    """The reasons of leaves that XLA updates if the program is for several devices.

    Only the lowering knows for how many a program under plain ``jax.jit`` is.
    """
    return {
        i: PARTITIONED
        for i, leaf in plan.arrays(plan.traced.step).items()
        if i not in plan.tpu_refusals and sharded.is_partitioned(leaf) is None
    }


def warning_of(left: Collection[Left]) -> str | None:
    """What is said of leaves that XLA updates; None if none of them is large."""
    large = [x for x in left if x.size >= _LARGE]
    if not large:
        return None
    most, total = max(large, key=lambda x: x.size), sum(x.float32_bytes for x in large)
    others = f" and {len(large) - 1} more leaves" if len(large) > 1 else ""
    return (
        f"lowbit: no kernel updates {most.leaf}{others}: {most.reason}. XLA makes "
        "float32 arrays of their masters and moments, which takes a multiple of a "
        f"kernel's time, and about {total / 2**20:.0f} MiB of temporary memory on all "
        "devices together. lowbit_optax.explain(tx, params) lists such leaves; "
        "warn=False turns this warning off"
    )


@functools.cache
def warn_once(message: str) -> None:
    """Warn, unless the same was said before in this process."""
    warnings.warn(message, stacklevel=2)
