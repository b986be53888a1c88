"""The fused update as a Pallas kernel on the Triton backend.

What each program of the kernel does is in :mod:`.program`. Loads and stores have
offsets and masks of their own: a BlockSpec's have no masks on Triton's backend, and a
ragged tail would be written out of bounds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.fused_update.gpu.kernel import (
    Kernel,
    ProgramSize,
    Tiling,
    launch,
)
from pallas_kernels.fused_update.gpu.operands import Access
from pallas_kernels.fused_update.gpu.program import run_program
from pallas_kernels.fused_update.spec import Call
from pallas_kernels.gpu.instructions import Instructions
from pallas_kernels.layout import TILE_COLUMNS

_SIZE = ProgramSize(
    # Four elements per thread: 16 bytes of float32 or of words, which is what one
    # instruction moves.
    flat_width=512,
    flat_rows=4,
    # Many small leaves are vectors of some hundred elements.
    small_width=1024,
    # One per thread of two warps. Twice as many would fill a multiprocessor's registers
    # less well, and small leaves would have too few programs.
    lanes=64,
    # They are loaded by branches of their own: LPMM's Adam takes 3 seconds to compile
    # for one leaf, 6 for 3 and 14 for 6.
    cost_of_two=2,
)
_FLAT_WARPS, _WARPS = 4, 2

INSTRUCTIONS = Instructions(triton.elementwise_inline_asm)

max_leaves, can_share = _SIZE.max_leaves, _SIZE.can_share


def update(call: Call) -> list[jax.Array]:
    """The results of a call's kernel, of one leaf after the other."""
    return launch(_SIZE, call, lambda kernel, out, args: _call(kernel, out)(*args))


@functools.lru_cache(maxsize=1024)
def _call(kernel: Kernel, out: tuple[jax.ShapeDtypeStruct, ...]):
    """The kernel as a function of its arrays.

    It is the same function for equal leaves, and when the same leaf is traced again, as
    JAX's transformations do; JAX then does not trace the kernel again.
    """
    tiling = kernel.tiling
    return pl.pallas_call(
        functools.partial(_program, kernel),
        grid=(kernel.leaves * tiling.programs,),
        out_shape=out,
        input_output_aliases={of: result for result, of in kernel.aliases.items()},
        # Left out, they would choose another backend.
        compiler_params=triton.CompilerParams(
            num_warps=_FLAT_WARPS if tiling.is_flat else _WARPS, num_stages=1
        ),
        interpret=kernel.interpret,
        name=kernel.name,
    )


def _program(kernel: Kernel, *refs):
    run_program(
        kernel,
        pl.program_id(0),
        refs,
        ByBlocks(kernel.tiling),
        None if kernel.interpret else INSTRUCTIONS,
        load=_load,
        store=functools.partial(_store, kernel.interpret),
        mark=None if kernel.interpret else INSTRUCTIONS.opaque,
    )


@dataclasses.dataclass(frozen=True)
class ByBlocks:
    """Arrays ``[lanes, 4]``, or ``[blocks, tiles, 4]`` where blocks have several tiles.

    Arrays of blocks are ``[blocks]``, and of parts ``[blocks, parts]`` where they are
    not whole blocks.
    """

    tiling: Tiling

    @property
    def shape(self) -> tuple[int, ...]:
        """See :class:`.lanes.Arrangement`, as of the other methods."""
        tiling = self.tiling
        if tiling.is_flat:
            return (tiling.row_stride,)
        if tiling.tiles == 1:
            return (tiling.program.lanes, TILE_COLUMNS)
        return (tiling.blocks_at_once, tiling.tiles, TILE_COLUMNS)

    def flat(self) -> jax.Array:
        return lax.iota(jnp.int32, self.tiling.row_stride)

    def blocks(self) -> jax.Array:
        return lax.iota(jnp.int32, self.tiling.blocks_at_once)

    def parts(self, count: int) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, (1, count), 1)

    def columns(self) -> jax.Array:
        return lax.broadcasted_iota(jnp.int32, self.shape, len(self.shape) - 1)

    def carried(self, x: jax.Array) -> jax.Array:
        return x

    def spread(self, x: jax.Array) -> jax.Array:
        if not x.ndim:
            return x
        return x.reshape(*x.shape, *[1] * (len(self.shape) - x.ndim))

    def over_parts(self, x: jax.Array) -> jax.Array:
        return x[:, None] if x.ndim else x

    def expand(self, x: jax.Array) -> jax.Array:
        shape = self.shape
        has_parts = x.ndim == 2 < len(shape)
        if has_parts and x.shape[1] not in (1, self.tiling.tiles):
            runs = (*x.shape, self.tiling.tiles // x.shape[1], shape[-1])
            return jnp.broadcast_to(x[:, :, None, None], runs).reshape(shape)
        return jnp.broadcast_to(self.spread(x), shape)

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        x = jnp.max(x, axis=-1)
        if x.ndim == 1 or parts == self.tiling.tiles:
            return x
        if parts > 1:
            x = x.reshape(x.shape[0], parts, -1)
        return jnp.max(x, axis=-1)


def _place(ref, access: Access):
    return ref.at[
        access.offset if access.layer is None else (access.layer, access.offset)
    ]


def _load(ref, access: Access, _: int) -> jax.Array:
    return triton.load(_place(ref, access), mask=access.mask)


def _store(interpret: bool, ref, access: Access, value: jax.Array, _: int) -> None:
    if interpret:
        access, value = _existing(access, value)
    triton.store(_place(ref, access), value, mask=access.mask)


def _existing(access: Access, value: jax.Array) -> tuple[Access, jax.Array]:
    """The same store, where elements that do not exist are the first that does.

    Interpreted, a store writes what it has read where the mask is off. There it would
    undo what others write to the same place: elements beyond the end of a row have the
    offsets of the next.
    """
    if access.mask is None:
        return access, value
    mask = jnp.broadcast_to(access.mask, value.shape)
    offset = jnp.broadcast_to(access.offset, value.shape)
    place = jnp.argmax(mask.reshape(-1))
    first = lambda x: jnp.broadcast_to(x.reshape(-1)[place], x.shape)
    value, offset = (jnp.where(mask, x, first(x)) for x in (value, offset))
    return dataclasses.replace(access, offset=offset, mask=first(mask)), value
