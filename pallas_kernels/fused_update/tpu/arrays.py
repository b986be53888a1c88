"""The arrays of a kernel, which are views of a leaf's arrays as matrices.

XLA:TPU stores some arrays transposed. Copying such an array in HBM would move it two
more times. Instead, a kernel reads the array as it is, and transposes each block in
the kernel's own memory.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fused_update.spec import Shard, manual_axes, result_shapes
from pallas_kernels.fused_update.tpu.tiling import (
    LANES,
    REGISTER,
    SUBLANES,
    Tiling,
    lies_transposed,
)
from pallas_kernels.layout import block_shape, period


@dataclasses.dataclass(frozen=True)
class KernelArray:
    """An operand or a result of a kernel.

    Args:
      tiling: tiling of the leaf.
      interpret: whether Pallas simulates the kernel.
      shape: shape of the leaf's array.
      dtype, bits, block_size, overwrites: see :class:`.Operand` and :class:`.Result`.
      is_stacked: whether the array is a stack of layers.
      varying: how a result varies over the mesh of a ``jax.shard_map``.
    """

    tiling: Tiling
    interpret: bool
    shape: tuple[int, ...]
    dtype: np.dtype
    bits: int | None
    block_size: int | None
    is_stacked: bool
    overwrites: int | None = None
    varying: object = None

    @property
    def block(self) -> tuple[int, ...]:
        """Shape of a program's block: rows, matrices side by side if any, columns."""
        rows = self.tiling.block_rows
        if self.bits is not None:
            rows = rows * self.bits // 32
        elif self.block_size is not None:
            rows //= block_shape(self.block_size)[0]
            rows //= self.block_width if self.tiling.is_folded else 1
        aside = self.tiling.side_by_side
        return (rows, LANES) if aside is None else (rows, aside, LANES)

    @property
    def block_width(self) -> int:
        """Number of columns that share an element."""
        return 1 if self.block_size is None else block_shape(self.block_size)[1]

    @functools.cached_property
    def is_transposed(self) -> bool:
        """Whether a kernel reads the array transposed, as XLA stores it.

        Each block must consist of whole tiles or be the whole array. XLA copies other
        arrays, which are small.
        """
        if self.tiling.side_by_side is not None or self.tiling.is_folded:
            return False
        rows, axis = self.block[0], self.tiling.axis
        is_whole = self.tiling.grid[2] == 1 and rows == self.shape[axis]
        return (rows % LANES == 0 or is_whole) and lies_transposed(self.shape, axis)

    @property
    def kernel_dtype(self) -> np.dtype:
        """The array's dtype in a kernel. Mosaic cannot load float16."""
        return np.dtype(np.uint16 if self.dtype == np.float16 else self.dtype)

    @property
    def is_narrow(self) -> bool:
        """Whether a word contains elements of several rows."""
        is_plain = self.bits is None and self.block_size is None
        return is_plain and self.dtype.itemsize < 4

    @property
    def has_scratch_fields(self) -> bool:
        """Whether fields are unpacked into scratch memory during a program's loop."""
        return self.bits is not None and self.tiling.group % period(self.bits)[0] > 0

    @property
    def scratch_shape(self) -> tuple[int, ...] | None:
        """Shape of scratch memory for words, fields or repeated elements."""
        tiling = self.tiling
        if self.block_size is not None:
            return tiling.units * SUBLANES * tiling.stacked_blocks, LANES
        if self.has_scratch_fields:
            return (tiling.block_rows, *self.block[1:])
        if self.is_narrow and tiling.side_by_side is not None:
            return self.block
        if self.is_narrow and self.interpret:
            return tiling.block_rows * self.dtype.itemsize // 4, LANES
        return None

    def scratch(self) -> list:
        """Return scratch memory for the transpose and for :attr:`scratch_shape`."""
        scratch = []
        if self.is_transposed:
            scratch.append(pltpu.VMEM(self.block, self.kernel_dtype))
        if self.scratch_shape is not None:
            scratch.append(pltpu.VMEM(self.scratch_shape, jnp.uint32))
        return scratch

    def spec(self) -> pl.BlockSpec:
        """Return the block specification, which maps programs to blocks."""
        tiling = self.tiling
        matrices = tiling.matrices if self.is_stacked else 0
        has_aside = tiling.side_by_side is not None

        def place(matrix, aside, rows, columns, layer, *_):
            # Divide in int32, the dtype of program indices.
            first = layer[0] * jnp.int32(matrices) if matrices else jnp.int32(0)
            matrix = first + matrix
            columns = lax.div(columns, jnp.int32(self.block_width))
            if not has_aside:
                return matrix, *self._turned((rows, columns))
            outer = jnp.int32(self._view_shape[2])
            matrix, between = lax.div(matrix, outer), lax.rem(matrix, outer)
            return matrix, rows, between, aside, columns

        if not has_aside:
            return pl.BlockSpec((None, *self._turned(self.block)), place)
        rows, *last = self.block
        return pl.BlockSpec((None, rows, None, *last), place)

    def to_kernel(self, x: jax.Array) -> jax.Array:
        """Convert an array of the leaf for a kernel. XLA copies it if it is float16."""
        x = self._view(x)
        if self.kernel_dtype != x.dtype:
            x = lax.bitcast_convert_type(x, self.kernel_dtype)
        if self.interpret:
            x = self._padded(x)
        return jnp.swapaxes(x, -1, -2) if self.is_transposed else x

    def from_kernel(self, x: jax.Array) -> jax.Array:
        """Convert an array from a kernel to the shape and dtype of the leaf's array."""
        x = jnp.swapaxes(x, -1, -2) if self.is_transposed else x
        if self.interpret:
            x = x[:, : self._view_shape[1], ..., : self._view_shape[-1]]
        if x.dtype != self.dtype:
            x = lax.bitcast_convert_type(x, self.dtype)
        if self.tiling.is_folded:
            return x.reshape(-1)[: self.shape[-1]]
        axis, after = self.tiling.axis, self._after
        before = self.shape[:axis]
        if self._is_merged_transposed:
            x = jnp.swapaxes(x, -1, -2).reshape(*before, *after, x.shape[1])
            x = jnp.moveaxis(x, -1, axis)
        elif self._has_matrices:
            x = x.reshape(*before, *after[:-1], *x.shape[1:])
            x = jnp.moveaxis(x, -2, axis)
        return x.reshape(self.shape)

    def output(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the array that a kernel writes."""
        shape = self._padded_shape if self.interpret else self._view_shape
        return jax.ShapeDtypeStruct(
            (*shape[:-2], *self._turned(shape[-2:])),
            self.kernel_dtype,
            manual_axis_type=self.varying,
        )

    def _turned(self, pair: tuple) -> tuple:
        return pair[::-1] if self.is_transposed else pair

    def _view(self, x: jax.Array) -> jax.Array:
        """Returns the array as matrices, without a copy if possible."""
        if self.tiling.is_folded:
            x = jnp.pad(x, (0, math.prod(self._view_shape) - self.shape[-1]))
        elif self._is_merged_transposed:
            x = jnp.moveaxis(x, self.tiling.axis, -1)
            x = x.reshape(-1, math.prod(self._after), x.shape[-1])
            x = jnp.swapaxes(x, -1, -2)
        elif self._has_matrices:
            x = jnp.moveaxis(x, self.tiling.axis, -2)
        return x.reshape(self._view_shape)

    @property
    def _has_matrices(self) -> bool:
        """Whether the axes between rows and columns index separate matrices."""
        tiling = self.tiling
        is_other = tiling.is_folded or tiling.is_merged
        return not is_other and tiling.side_by_side is None

    @property
    def _is_merged_transposed(self) -> bool:
        """Whether XLA stores the columns of the leaf's merged matrix as rows."""
        tiling = self.tiling
        return tiling.is_merged and lies_transposed(self.shape, tiling.axis)

    @property
    def _after(self) -> tuple[int, ...]:
        """Lengths of the axes after the rows."""
        return self.shape[self.tiling.axis + 1 :]

    @property
    def _view_shape(self) -> tuple[int, ...]:
        if self.tiling.is_folded:
            return 1, math.ceil(self.shape[-1] / LANES), LANES
        axis = self.tiling.axis
        before, (*between, columns) = self.shape[:axis], self._after
        rows = self.shape[axis]
        if self.tiling.is_merged:
            return math.prod(before), rows, math.prod(self._after)
        if self.tiling.side_by_side is None:
            return math.prod((*before, *between)), rows, columns
        *outer, aside = between
        return math.prod(before), rows, math.prod(outer), aside, columns

    @property
    def _padded_shape(self) -> tuple[int, ...]:
        """Shape of the view, padded to whole blocks."""
        first, _, *between, _ = self._view_shape
        *_, rows, columns = self.tiling.grid
        width = math.ceil(columns / self.block_width) * LANES
        return first, rows * self.block[0], *between, width

    def _padded(self, x: jax.Array) -> jax.Array:
        """Pads a view to whole blocks, with all bits of the padding set.

        Pallas' TPU simulator does not write blocks that extend beyond an aliased array.
        """
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        missing = zip(self._padded_shape, x.shape, strict=True)
        bits = jnp.pad(
            lax.bitcast_convert_type(x, unsigned),
            [(0, padded - n) for padded, n in missing],
            constant_values=unsigned.type(jnp.iinfo(unsigned).max),
        )
        return lax.bitcast_convert_type(bits, x.dtype)


@dataclasses.dataclass(frozen=True)
class RepeatedArray(KernelArray):
    """An operand with one float32 element for each row, or for each column.

    A kernel reads it as a vector. It repeats an element of a row in all lanes, and an
    element of a column in all sublanes.
    """

    @property
    def is_of_rows(self) -> bool:
        """Whether it has one element for each row."""
        return self.shape[-1] == 1

    @property
    def block(self) -> tuple[int, ...]:
        return 1, self.tiling.block_rows if self.is_of_rows else LANES

    @functools.cached_property
    def is_transposed(self) -> bool:
        return False

    @property
    def scratch_shape(self) -> tuple[int, ...] | None:
        return (self.tiling.block_rows, LANES) if self.is_of_rows else REGISTER

    def spec(self) -> pl.BlockSpec:
        def place(matrix, aside, rows, columns, *_):
            del aside
            return matrix, jnp.int32(0), rows if self.is_of_rows else columns

        return pl.BlockSpec((None, *self.block), place)

    @property
    def _view_shape(self) -> tuple[int, ...]:
        return self.tiling.matrices, 1, math.prod(self.shape[-2:])

    @property
    def _padded_shape(self) -> tuple[int, ...]:
        *_, rows, columns = self.tiling.grid
        length = (rows if self.is_of_rows else columns) * self.block[1]
        return self.tiling.matrices, 1, length


def kernel_arrays(
    shard: Shard, tiling: Tiling, interpret: bool
) -> tuple[tuple[KernelArray, ...], tuple[KernelArray, ...]]:
    """Return the operands and the results of a shard's kernel."""
    leaf = shard.leaf
    operands = tuple(
        (RepeatedArray if o.repeated else KernelArray)(
            tiling,
            interpret,
            o.array.shape,
            o.array.dtype,
            o.bits,
            o.block_size,
            is_stacked=n in leaf.in_stacks,
        )
        for n, o in enumerate(leaf.operands)
    )
    results = tuple(
        KernelArray(
            tiling,
            interpret,
            shape,
            r.dtype,
            r.bits,
            r.block_size,
            is_stacked=r.overwrites in leaf.in_stacks,
            overwrites=r.overwrites,
            varying=manual_axes(r, leaf.operands),
        )
        for r, shape in zip(leaf.results, result_shapes(shard), strict=True)
    )
    return operands, results
