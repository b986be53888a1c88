"""Find and report the leaves that XLA, not a kernel, updates on an accelerator.

:mod:`.run` calls these functions with the :class:`.plan.KernelPlan` of a step, and
:func:`lowbit_optax.explain` lists the same leaves. For a large leaf, XLA creates
float32 arrays of its master and moments, which are the arrays that this package avoids.
"""

import functools
import math
import warnings
from collections.abc import Mapping

from lowbit_optax._step import trees
from lowbit_optax._step.kernels.plan import KernelPlan
from pallas_kernels.fused_update import sharded
from pallas_kernels.fused_update.refusals import PARTITIONED

_LARGE = 2**18
"""Leaves with fewer elements are not worth a warning."""


def warning_of(plan: KernelPlan, reasons: Mapping[int, str]) -> str | None:
    """Return a warning about large leaves that XLA updates, or None if there are none.

    ``reasons`` maps leaf indices to reasons. Leaves without packed or quantized arrays
    do not count, because XLA updates them in one pass.
    """
    step, sizes, float32_bytes = plan.traced.step, {}, 0
    for number in sorted(reasons):
        leaf = step.leaves[number]
        moments = step.plan.quantized[leaf.name]
        is_packed = leaf.format is not None and bool(leaf.format.width)
        is_in_few_bits = bool(moments) or is_packed or trees.is_quantized(leaf.param)
        size = math.prod(leaf.param.shape)
        if is_in_few_bits and size >= _LARGE:
            sizes[number] = size
            # The master and the quantized moments in float32.
            float32_bytes += 4 * size * (1 + len(moments))
    if not sizes:
        return None
    largest = max(sizes, key=sizes.__getitem__)
    param = step.leaves[largest].param
    described = trees.describe(param)
    if trees.is_quantized(param):
        described = f"a {type(param).__name__} of shape {list(param.shape)}"
    others = f" and {len(sizes) - 1} more leaves" if len(sizes) > 1 else ""
    return (
        f"lowbit: no kernel updates params{step.leaves[largest].name}, "
        f"{described}{others}: {reasons[largest]}. XLA computes float32 arrays of "
        "their masters and moments, which takes several times as long as a kernel and "
        f"needs about {float32_bytes / 2**20:.0f} MiB of temporary memory on all "
        "devices together. lowbit_optax.explain(tx, params) lists such leaves. To "
        "disable this warning, pass warn=False"
    )


def perhaps_partitioned(plan: KernelPlan) -> dict[int, str]:
    """Return the leaves that XLA updates in programs for several devices.

    The result maps leaf indices to reasons. Under plain ``jax.jit``, the number of
    devices is known only during lowering.
    """
    return {
        i: PARTITIONED
        for i, leaf in plan.arrays().items()
        if i not in plan.tpu_refusals and sharded.is_partitioned(leaf) is None
    }


@functools.cache
def warn_once(message: str) -> None:
    """Warn, unless this process has already issued the same warning."""
    warnings.warn(message, stacklevel=2)
