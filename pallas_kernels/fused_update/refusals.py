"""Reasons why no kernel updates a leaf."""

import math
from collections.abc import Sequence

from pallas_kernels.fused_update import sharded
from pallas_kernels.fused_update.launchers import launcher_of
from pallas_kernels.fused_update.spec import BlockBody, Body, Leaf, has_tiling
from pallas_kernels.layout import MAX_ELEMENTS
from pallas_kernels.platforms import is_for_tpus, refused_gpu

PARTITIONED = (
    "XLA:TPU cannot partition kernels over a mesh with automatic axes; pass "
    "param_shardings, or make the axes explicit"
)


def gpu_refusal(leaves: Sequence[Leaf]) -> str | None:
    """Return why no GPU kernel updates these leaves, or None if one does."""
    refusal = refused_gpu()
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
    if sharded.is_partitioned(leaf) and is_for_tpus():
        return PARTITIONED
    return launcher_of("tpu").refusal(body, leaf, scalars)
