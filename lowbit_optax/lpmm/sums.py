"""Add gradients to accumulators in place: a kernel decodes, adds and encodes.

``Launches`` runs these kernels like the kernels of updates. Small leaves share a
launch, layers stay stacked, and each device adds its own shards. Leaves that kernels do
not support are added with array operations.
"""

import dataclasses
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._jaxprs.compiling import not_folded
from lowbit_optax._jaxprs.elementwise import decode_scalar
from lowbit_optax._numerics.random_bits import (
    ACCUMULATOR_STREAM,
    Draws,
    DrawsToNearest,
    RandomBits,
)
from lowbit_optax._step import context, trees
from lowbit_optax._step.body import KEYS, MomentRows
from lowbit_optax._step.guard import Guard
from lowbit_optax._step.launches import Launches
from lowbit_optax._step.leaf import StoredLeaf
from lowbit_optax._step.moments import decoded, encoded
from lowbit_optax._step.plan import has_layers, needs_loop
from lowbit_optax._step.step import LeafStep
from lowbit_optax.formats import MomentFormat
from lowbit_optax.formats.block_quantized import QuantizedMoment
from pallas_kernels.fused_update import Leaf, Operand, Result, has_tiling
from pallas_kernels.platforms import Implementation

_FACTOR, _PROCEED = KEYS, KEYS + 1


@dataclasses.dataclass(frozen=True)
class SumBody:
    """A kernel body that computes rows of the new accumulator of a leaf.

    If accumulators have scales, this is a :class:`pallas_kernels.BlockBody`. The
    scalars are the keys of the leaf and the scalars of a guard.

    Args:
      rows: how the sum is stored.
    """

    rows: MomentRows
    kept: typing.ClassVar[int] = 1
    when: typing.ClassVar[int] = _PROCEED

    def arrays(self, leaf: StoredLeaf, part) -> Leaf:
        """Return the arrays that a kernel reads and writes for a leaf."""
        if self.rows.has_scales:
            blocks = self.rows.blocks
            scales = Operand(part.scales, block_size=blocks.block_size)
            stored = [Operand(part.codes, blocks.bits), scales]
        else:
            stored = [Operand(part)]
        results = tuple(
            Result(x.array.dtype, x.bits, n, x.block_size)
            for n, x in enumerate(stored, 1)
        )
        operands = Operand(leaf.grad), *stored
        return Leaf(operands, results, leaf.param.shape, sharding=leaf.sharding)

    def stored(self, arrays: Sequence):
        """Return the accumulator from the arrays that a kernel has written."""
        has_scales = self.rows.has_scales
        return QuantizedMoment(*arrays) if has_scales else arrays[0]

    @property
    def block_sizes(self) -> list[int]:
        """The block size of each maximum that determines the scales."""
        return [self.rows.blocks.block_size]

    def before(self, block_values):
        """Return the stored scales, prepared for decoding."""
        return tuple(map(self.rows.blocks.prepare, block_values))

    def statistics(self, values, scalars, index, before):
        """Return the arrays whose maxima per block determine the new scales."""
        del index
        total = self._sum(values, scalars, before)
        return [self.rows.blocks.magnitude_key(total)]

    def after(self, maxima, block_values):
        """Return ``(new scales, new scales prepared for encoding)``."""
        scales = [self.rows.blocks.scale_of(maxima[0], block_values[0])]
        return scales, self.before(scales)

    def __call__(self, values, scalars, index, before=(), after=()):
        """Return the new accumulator."""
        total = self._sum(values, scalars, before)
        random = RandomBits(scalars[0], scalars[1], index)
        draws = Draws(random, ACCUMULATOR_STREAM)
        prepared = after[0] if after else None
        return [self.rows.encoded(total, prepared, draws)]

    def _sum(self, values, scalars, before) -> jax.Array:
        grad, stored = values
        factor = decode_scalar(scalars[_FACTOR], np.dtype(np.float32))
        prepared = before[0] if before else None
        total = self.rows.decoded(stored, prepared)
        return grad.astype(jnp.float32) * factor + total


@dataclasses.dataclass(frozen=True, eq=False)
class Sums(LeafStep):
    """The accumulators of a step's leaves, and the gradients to add to them.

    Args:
      leaves: the parameters with their gradients.
      seed, count, layer: see :class:`LeafStep`.
      parts: the accumulators, or None for leaves that do not change.
      formats: formats of the accumulators, or None for arrays of sums.
      guard: unscales gradients, and decides whether they are added.
    """

    parts: Sequence
    formats: Sequence[MomentFormat | None]
    guard: Guard

    def added(self, implementation: Implementation) -> list:
        """Return the new accumulators."""
        by_xla = implementation == "xla" or context.current().is_analysed
        bodies = {} if by_xla else self._bodies()
        leaves = {i: x.arrays(self.leaves[i], self.parts[i]) for i, x in bodies.items()}
        scalars = list(self.guard.scalars)
        launches = Launches(bodies, self, scalars, implementation)
        new = [
            part if i in bodies else self._added_by_xla(i)
            for i, part in enumerate(self.parts)
        ]
        for i, arrays in launches.run(leaves).items():
            new[i] = bodies[i].stored(arrays)
        return new

    def _bodies(self) -> dict[int, SumBody]:
        bodies = {}
        for i, (leaf, part) in enumerate(zip(self.leaves, self.parts, strict=True)):
            body = SumBody(MomentRows(self.formats[i]))
            if part is not None and _fits(leaf):
                arrays = body.arrays(leaf, part)
                if has_tiling(arrays.packed, arrays.block_sizes):
                    bodies[i] = body
        return bodies

    def _added_by_xla(self, number: int):
        part, format_ = self.parts[number], self.formats[number]
        if part is None:
            return None
        grad = context.layerwise(self.guard.unscaled)(self.leaves[number].wide_grad())
        draws = Draws(self.random[number], ACCUMULATOR_STREAM)
        total = self._decoded(number)
        new = encoded(grad.astype(total.dtype) + total, format_, draws)
        return self.guard.chosen(new, part)

    def decoded(self) -> list:
        """Return the float32 sums, or the zeros of leaves that do not change."""
        return list(map(self._decoded, range(len(self.leaves))))

    def _decoded(self, number: int):
        leaf, part = self.leaves[number], self.parts[number]
        format_ = self.formats[number]
        if part is None:
            return leaf.grad
        try:
            return decoded(part, format_, leaf.param.shape)
        except (AttributeError, ValueError) as error:
            raise ValueError(
                f"accumulate_gradients: the accumulator of params{leaf.name} must be "
                f"stored in {format_}; was the state created with another format?"
            ) from error

    def empty(self) -> list:
        """Return accumulators of zeros."""
        each = zip(self.leaves, self.parts, self.formats, strict=True)
        return [part if part is None else empty(x.param, f) for x, part, f in each]


def _fits(leaf: StoredLeaf) -> bool:
    """Return whether kernels support the size and the dtypes of a leaf."""
    param = leaf.param
    is_counted = not needs_loop(param.shape) or has_layers(leaf)
    is_narrow = max(param.dtype.itemsize, leaf.grad.dtype.itemsize) <= 4
    return is_counted and is_narrow and bool(param.shape and param.size)


def zeros(leaf) -> jax.Array:
    """Return float32 zeros with the shape and, for arrays, the sharding of a leaf.

    The zeros of complex leaves are complex.
    """
    if trees.is_quantized(leaf):
        return jnp.zeros(leaf.shape, jnp.float32)
    return jnp.zeros_like(leaf, jnp.float32 if trees.is_float(leaf) else None)


def empty(leaf, format_: MomentFormat | None):
    """Return the accumulator of a leaf before any gradient is added."""
    return encoded(not_folded(zeros(leaf)), format_, DrawsToNearest())
