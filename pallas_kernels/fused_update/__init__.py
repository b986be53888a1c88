"""Fused updates: read the arrays of a leaf, compute elementwise, and write in place.

The caller describes an update with a *body*, an elementwise function, and with the
*operands* that it reads and the *results* that it writes (:mod:`.spec`). Operands and
results may be plain arrays, packed words of k-bit fields, or arrays with one element
per block, such as scales. :func:`fused_update` then runs one kernel per leaf:

1. :mod:`.api` checks the arrays and chooses kernels or the *reference* (:mod:`.xla`),
   which updates whole arrays with XLA and defines the results. Kernels have the
   derivatives and the batching of the reference.
2. :mod:`.shards` finds the part of the leaf on each device, its *shard*, and calls the
   *launcher* on it. A launcher is a module for one Pallas backend: ``gpu.triton``,
   ``gpu.mosaic`` or ``tpu.kernel``.
3. The launcher runs a Pallas kernel with a grid over tiles of the leaf. Results that
   overwrite operands are aliased to them. Each program of the grid loads a tile,
   unpacks the fields, calls the body on registers, and packs and stores the results.
   For a body with blocks, it also computes maxima over the blocks of the tile.

:func:`fused_update_many` updates many small leaves with few kernels. On CPUs,
``lowbit_optax`` calls :mod:`.cpu`.
"""

from pallas_kernels.fused_update.api import (
    fused_update,
    fused_update_many,
    sharing_kind,
)
from pallas_kernels.fused_update.spec import (
    MAX_ELEMENTS_OF_SMALL_LEAF,
    BlockBody,
    Body,
    Leaf,
    Operand,
    Result,
    Scalars,
    has_tiling,
)
from pallas_kernels.layout import MAX_ELEMENTS

__all__ = [
    "MAX_ELEMENTS",
    "MAX_ELEMENTS_OF_SMALL_LEAF",
    "BlockBody",
    "Body",
    "Leaf",
    "Operand",
    "Result",
    "Scalars",
    "fused_update",
    "fused_update_many",
    "has_tiling",
    "sharing_kind",
]
