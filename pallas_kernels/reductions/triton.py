"""Reductions of many arrays as two Pallas kernels on the Triton backend.

Each program finds its piece by a tree of branches.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.gpu.instructions import Instructions, by_branches
from pallas_kernels.reductions.pieces import PIECE, Pieces

# 32 elements per thread: four or eight loads of 16 bytes are under way at once.
_WARPS = 8
_PARTS, _PARTS_WARPS = 1024, 4

_INSTRUCTIONS = Instructions(triton.elementwise_inline_asm)


@functools.lru_cache(maxsize=256)
def kernels(pieces: Pieces):
    """The two kernels for these arrays, which JAX traces once.

    The first takes factors and arrays, and reduces each piece of an array to a number.
    The second takes each array's first piece and these numbers, and reduces them to one
    number for each array.
    """
    name = f"reduce_{pieces.kind.name}"

    def call(kernel, count: int, warps: int, name: str):
        return pl.pallas_call(
            functools.partial(kernel, pieces),
            grid=(count,),
            out_shape=pieces.results(count),
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
            interpret=pieces.interpret,
            name=name,
        )

    return (
        call(_pieces, pieces.starts[-1], _WARPS, f"{name}_of_pieces"),
        call(_whole, len(pieces.sizes), _PARTS_WARPS, name),
    )


def _pieces(pieces: Pieces, *refs):
    kind, program = pieces.kind, pl.program_id(0)
    factor = [ref[np.int32(0)] for ref in refs[: pieces.factors]]
    *arrays, parts = refs[pieces.factors :]

    def read(number: int) -> jax.Array:
        piece = program - jnp.int32(pieces.starts[number])
        place = piece * jnp.int32(PIECE) + lax.iota(jnp.int32, PIECE)
        mask, ref = place < jnp.int32(pieces.sizes[number]), arrays[number]
        zero = jnp.zeros((), ref.dtype)
        values = kind.read(triton.load(ref.at[place], mask=mask, other=zero), *factor)
        # Else LLVM would select addresses from all arrays' rather than branch.
        return values if pieces.interpret else _INSTRUCTIONS.opaque(values, number)

    values = by_branches(program, range(len(arrays)), read, starts=pieces.starts)
    triton.store(parts.at[program], kind.reduce(values))


def _whole(pieces: Pieces, starts, parts, results):
    kind, program = pieces.kind, pl.program_id(0)
    first, end = starts[program], starts[program + jnp.int32(1)]
    zero = jnp.zeros((), kind.dtype)

    def step(number, values):
        place = first + number * jnp.int32(_PARTS) + lax.iota(jnp.int32, _PARTS)
        more = triton.load(parts.at[place], mask=place < end, other=zero)
        return kind.combine(values, more)

    count = lax.div(end - first + jnp.int32(_PARTS - 1), jnp.int32(_PARTS))
    values = jnp.full(_PARTS, zero)
    values = lax.fori_loop(jnp.int32(0), count, step, values)
    triton.store(results.at[program], kind.reduce(values))
