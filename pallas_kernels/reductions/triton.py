"""Reductions of many arrays as two Pallas kernels on the Triton backend.

In the first, each program reduces a piece of an array; it finds which by a tree of
branches. In the second, each program reduces what is left of one array.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.fused_update.memory import by_branches
from pallas_kernels.fused_update.triton_instructions import INSTRUCTIONS
from pallas_kernels.reductions.kinds import Kind

# 32 elements per thread: four or eight loads of 16 bytes are under way at once.
_PIECE, _WARPS = 8192, 8
_PARTS, _PARTS_WARPS = 1024, 4


def reduce(
    kind: Kind, factors: int, args: Sequence[jax.Array], *, interpret: bool = False
) -> jax.Array:
    """Each array reduced to a number.

    Args:
      kind: of the reduction.
      factors: how many of the arguments are a factor: 0 or 1.
      args: these, and the arrays.
      interpret: run the kernels' operations with XLA, on any platform.

    Returns:
      A vector of ``kind.dtype``.
    """
    factor, arrays = args[:factors], args[factors:]
    statics = _Statics(kind, factors, tuple(x.size for x in arrays), interpret)
    varying = max((jax.typeof(x).manual_axis_type for x in arrays), key=_variety)
    pieces, whole = _calls(statics, varying)
    parts = pieces(*factor, *(x.reshape(-1) for x in arrays))
    # Not one constant array, which custom_partitioning does not take. XLA makes it one.
    starts = [lax.full((1,), start, jnp.int32) for start in statics.starts]
    return whole(lax.concatenate(starts, 0), parts)


def _variety(axes) -> int:
    return len(axes.varying)


@dataclasses.dataclass(frozen=True)
class _Statics:
    """What the kernels are compiled for.

    Args:
      kind, factors, interpret: as in :func:`reduce`.
      sizes: elements of each array.
    """

    kind: Kind
    factors: int
    sizes: tuple[int, ...]
    interpret: bool

    @functools.cached_property
    def starts(self) -> list[int]:
        """The first program of each array, and at last how many there are."""
        counts = (math.ceil(size / _PIECE) for size in self.sizes)
        return [0, *itertools.accumulate(counts)]


@functools.lru_cache(maxsize=256)
def _calls(statics: _Statics, varying):
    """The two kernels, which JAX traces once."""
    name = f"reduce_{statics.kind.name}"

    def call(kernel, count: int, warps: int, name: str):
        return pl.pallas_call(
            kernel,
            grid=(count,),
            out_shape=jax.ShapeDtypeStruct(
                (count,), statics.kind.dtype, manual_axis_type=varying
            ),
            compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
            interpret=statics.interpret,
            name=name,
        )

    pieces, whole = (functools.partial(f, statics) for f in (_pieces, _whole))
    count = statics.starts[-1]
    return (
        call(pieces, count, _WARPS, f"{name}_of_pieces"),
        call(whole, len(statics.sizes), _PARTS_WARPS, name),
    )


def _pieces(statics: _Statics, *refs):
    kind, program = statics.kind, pl.program_id(0)
    factor = [ref[np.int32(0)] for ref in refs[: statics.factors]]
    *arrays, parts = refs[statics.factors :]

    def read(number: int) -> jax.Array:
        piece = program - jnp.int32(statics.starts[number])
        place = piece * jnp.int32(_PIECE) + lax.iota(jnp.int32, _PIECE)
        mask, ref = place < jnp.int32(statics.sizes[number]), arrays[number]
        zero = jnp.zeros((), ref.dtype)
        values = kind.read(triton.load(ref.at[place], mask=mask, other=zero), *factor)
        # Else LLVM would select addresses from all arrays' rather than branch.
        return values if statics.interpret else INSTRUCTIONS.opaque(values, number)

    values = by_branches(program, range(len(arrays)), read, starts=statics.starts)
    triton.store(parts.at[program], kind.reduce(values))


def _whole(statics: _Statics, starts, parts, results):
    kind, program = statics.kind, pl.program_id(0)
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
