"""Why no kernel updates a leaf."""

import math
from collections.abc import Sequence

from pallas_kernels.fused_update import sharded
from pallas_kernels.fused_update.launchers import launcher_of
from pallas_kernels.fused_update.spec import BlockBody, Body, Leaf, has_tiling
from pallas_kernels.layout import MAX_ELEMENTS
from pallas_kernels.platforms import is_for_tpus, refused_gpu

PARTITIONED = (
    "XLA:TPU cannot partition kernels over a mesh of automatic axes; say where "
    "parameters lie by param_shardings, or make the axes explicit"
)


def gpu_refusal(leaves: Sequence[Leaf]) -> str | None:
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


def tpu_refusal(body: Body | BlockBody, leaf: Leaf, scalars: int) -> str | None:
    """Why no kernel for TPUs updates a leaf; None if one does.

    Where only the lowering knows whether XLA has to partition the program, a kernel
    updates the leaf in a program for one device.

    Args:
      body, leaf, scalars: as of :func:`.tpu.kernel.refusal`.
    """
    if sharded.is_partitioned(leaf) and is_for_tpus():
        return PARTITIONED
    return launcher_of("tpu").refusal(body, leaf, scalars)
