"""How a kernel takes arrays: as matrices, some of them transposed.

XLA:TPU stores some arrays transposed. A kernel takes them as they lie and transposes
each block in its own memory, since a copy of the array would move it twice more.
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

from pallas_kernels.fused_update.spec import Leaf, Shard, manual_axes, result_shapes
from pallas_kernels.fused_update.tpu.tiling import (
    LANES,
    SUBLANES,
    Tiling,
    lies_transposed,
)
from pallas_kernels.layout import block_shape, period


@dataclasses.dataclass(frozen=True)
class KernelArray:
    """An operand or a result of a kernel.

    Args:
      tiling: of the leaf.
      shape: of the leaf's array.
      dtype, bits, block_size: as of an :class:`.Operand` or a :class:`.Result`.
      is_stacked: whether it has layers, of which the kernel updates one.
      overwrites: as of a :class:`.Result`.
      varying: of a result, how it varies over the mesh of a ``jax.shard_map``.
    """

    tiling: Tiling
    shape: tuple[int, ...]
    dtype: np.dtype
    bits: int | None
    block_size: int | None
    is_stacked: bool
    overwrites: int | None = None
    varying: object = None

    @property
    def block(self) -> tuple[int, int]:
        """The shape of a program's block."""
        rows = self.tiling.block_rows
        if self.bits is not None:
            rows = rows * self.bits // 32
        elif self.block_size is not None:
            rows //= block_shape(self.block_size)[0]
        return rows, LANES

    @property
    def block_width(self) -> int:
        """Columns that share an element."""
        return 1 if self.block_size is None else block_shape(self.block_size)[1]

    @functools.cached_property
    def is_transposed(self) -> bool:
        """Whether a kernel takes it as XLA transposes it.

        Its blocks must then be whole tiles, or the array itself. Otherwise XLA copies
        the array, which is small.
        """
        rows = self.block[0]
        is_whole = self.tiling.grid[1] == 1 and rows == self.shape[-2]
        return (rows % LANES == 0 or is_whole) and lies_transposed(self.shape)

    @property
    def kernel_dtype(self) -> np.dtype:
        """Its dtype in a kernel: Mosaic loads no float16."""
        return np.dtype(np.uint16 if self.dtype == np.float16 else self.dtype)

    @property
    def is_narrow(self) -> bool:
        """Whether several rows of it are in a word."""
        is_plain = self.bits is None and self.block_size is None
        return is_plain and self.dtype.itemsize < 4

    @property
    def has_scratch_fields(self) -> bool:
        """Whether its fields lie in scratch memory during a program's loop."""
        return self.bits is not None and self.tiling.group % period(self.bits)[0] > 0

    def scratch_rows(self, interpret: bool) -> int:
        """Rows of scratch memory for its words, fields, or spread elements."""
        if self.block_size is not None:
            return self.tiling.units * SUBLANES * self.tiling.stacked_blocks
        if self.has_scratch_fields:
            return self.tiling.block_rows
        if self.is_narrow and interpret:
            return self.tiling.block_rows * self.dtype.itemsize // 4
        return 0

    def scratch(self, interpret: bool) -> list:
        """Scratch memory: for the block's transpose, and of :meth:`scratch_rows`."""
        scratch = []
        if self.is_transposed:
            scratch.append(pltpu.VMEM(self.block, self.kernel_dtype))
        rows = self.scratch_rows(interpret)
        if rows:
            scratch.append(pltpu.VMEM((rows, LANES), jnp.uint32))
        return scratch

    def spec(self) -> pl.BlockSpec:
        """Which block of it a program has."""
        matrices = self.tiling.matrices if self.is_stacked else 0

        def place(matrix, rows, columns, layer, *_):
            # Divided as int32, as the program's numbers are.
            first = layer[0] * jnp.int32(matrices) if matrices else jnp.int32(0)
            columns = lax.div(columns, jnp.int32(self.block_width))
            return first + matrix, *self._turned((rows, columns))

        return pl.BlockSpec((None, *self._turned(self.block)), place)

    def to_kernel(self, x: jax.Array, interpret: bool) -> jax.Array:
        """The leaf's array as a kernel takes it; XLA copies float16."""
        x = x.reshape(-1, *x.shape[-2:])
        if self.kernel_dtype != x.dtype:
            x = lax.bitcast_convert_type(x, self.kernel_dtype)
        if interpret:
            x = self._padded(x)
        return jnp.swapaxes(x, -1, -2) if self.is_transposed else x

    def from_kernel(self, x: jax.Array, interpret: bool) -> jax.Array:
        """The matrices that a kernel has written, in the leaf's dtype."""
        x = jnp.swapaxes(x, -1, -2) if self.is_transposed else x
        if interpret:
            x = x[:, : self.shape[-2], : self.shape[-1]]
        return x if x.dtype == self.dtype else lax.bitcast_convert_type(x, self.dtype)

    def output(self, interpret: bool) -> jax.ShapeDtypeStruct:
        """What a kernel writes."""
        matrix = self._padded_shape if interpret else self.shape[-2:]
        return jax.ShapeDtypeStruct(
            (math.prod(self.shape[:-2]), *self._turned(matrix)),
            self.kernel_dtype,
            manual_axis_type=self.varying,
        )

    def _turned(self, pair: tuple) -> tuple:
        return pair[::-1] if self.is_transposed else pair

    @property
    def _padded_shape(self) -> tuple[int, int]:
        """The shape of a matrix of whole blocks."""
        _, rows, columns = self.tiling.grid
        return rows * self.block[0], math.ceil(columns / self.block_width) * LANES

    def _padded(self, x: jax.Array) -> jax.Array:
        """Matrices of whole blocks, all bits set where there is nothing.

        Pallas' model of a TPU does not write blocks that reach beyond an array in the
        place of an operand.
        """
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        missing = zip(self._padded_shape, x.shape[-2:], strict=True)
        bits = jnp.pad(
            lax.bitcast_convert_type(x, unsigned),
            [(0, 0), *((0, padded - n) for padded, n in missing)],
            constant_values=unsigned.type(jnp.iinfo(unsigned).max),
        )
        return lax.bitcast_convert_type(bits, x.dtype)


def kernel_arrays(
    shard: Shard, tiling: Tiling
) -> tuple[tuple[KernelArray, ...], tuple[KernelArray, ...]]:
    """The operands and the results of a part's kernel."""
    leaf = shard.leaf
    stacked = leaf.overwritten if leaf.stacked else ()
    operands = tuple(
        KernelArray(
            tiling, o.array.shape, o.array.dtype, o.bits, o.block_size, n in stacked
        )
        for n, o in enumerate(leaf.operands)
    )
    results = tuple(
        KernelArray(
            tiling,
            shape,
            r.dtype,
            r.bits,
            r.block_size,
            r.overwrites in stacked,
            r.overwrites,
            manual_axes(r, leaf.operands),
        )
        for r, shape in zip(leaf.results, result_shapes(shard), strict=True)
    )
    return operands, results


def merged_shape(
    leaf: Leaf, shard: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[int, ...]:
    """The shape with all axes after the rows as one, if blocks need it and none is cut.

    That keeps the order of elements, words and blocks. XLA:TPU copies the arrays, which
    is less than what it does with blocks itself, but more than what it does with words
    alone.

    Args:
      leaf: whose rows may not be next to the columns.
      shard: the shape of its part.
      shape: of the part, of the leaf, or of one of its arrays.
    """
    widths = [block_shape(size)[1] for size in leaf.block_sizes]
    if not widths or leaf.layout.axis > -3 or shard[-1] % max(widths):
        return shape
    after = leaf.layout.axis + 1
    return (*shape[:after], math.prod(shape[after:]))


def merged_axes(shard: Shard) -> Shard:
    """A part with all axes after the rows as one, see :func:`merged_shape`."""
    leaf = shard.leaf
    merged = functools.partial(merged_shape, leaf, shard.shape)
    arrays = [x.reshape(merged(x.shape)) for x in leaf.arrays]
    whole = dataclasses.replace(leaf.with_arrays(arrays), shape=merged(leaf.shape))
    return Shard(whole, merged(shard.shape), shard.base)
