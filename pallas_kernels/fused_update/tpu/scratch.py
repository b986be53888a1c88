"""The scratch memory of a TPU kernel's programs: what there is, and what it is for."""

import typing
from collections.abc import Sequence

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.fused_update.spec import Operand, Result
from pallas_kernels.fused_update.tpu.arrays import held_as
from pallas_kernels.fused_update.tpu.program import Arrays
from pallas_kernels.fused_update.tpu.tiling import LANES, SUBLANES, Tiling
from pallas_kernels.layout import is_unrolled


def scratch_of(
    tiling: Tiling,
    operands: Sequence[Operand],
    results: Sequence[Result],
    transposed: Sequence[bool],
) -> list:
    """Blocks that are transposed, and the scratch memory of :class:`.Arrays`.

    Args:
      tiling, operands, results: of the kernel; the operands with dtypes.
      transposed: of the operands and then of the results, which are transposed.
    """
    likes = [*operands, *results]
    turned = [
        pltpu.VMEM((tiling.stored_rows(x), LANES), held_as(_dtype(x)))
        for x, yes in zip(likes, transposed, strict=True)
        if yes
    ]
    rows, groups = tiling.block_rows, tiling.units * SUBLANES
    words = [rows * _dtype(x).itemsize // 4 for x in likes if _is_narrow(x)]
    fields = [rows for x in likes if _has_fields(x)]
    blocks = [groups for x in likes if x.block_size is not None]
    word = lambda rows: pltpu.VMEM((rows, LANES), jnp.uint32)
    return [*turned, *(word(rows) for rows in (*words, *fields, *blocks))]


def arrays_of(
    operands: Sequence[Operand],
    results: Sequence[Result],
    transposed: Sequence[bool],
    refs: Sequence,
) -> tuple[Arrays, list]:
    """The references of a program: of operands, of results, and to scratch memory.

    Returns:
      ``(arrays, turned)``: of each array that is transposed, ``turned`` has what it is,
      its block, and the scratch memory that stands for it in ``arrays``.
    """
    refs = list(refs)
    both = [(x, refs.pop(0)) for x in (*operands, *results)]
    turned = []
    for number, (like, ref) in enumerate(both):
        if transposed[number]:
            turned.append((like, ref, refs.pop(0)))
            both[number] = like, turned[-1][-1]
    count = len(operands)
    given: dict[str, typing.Any] = {"operand": both[:count], "result": both[count:]}
    plain = [
        ((of, number), like)
        for of, some in given.items()
        for number, (like, _) in enumerate(x for x in some if x[0].block_size is None)
    ]
    words = {place: refs.pop(0) for place, like in plain if _is_narrow(like)}
    fields = {place: refs.pop(0) for place, like in plain if _has_fields(like)}
    spread = [refs.pop(0) for o in operands if o.block_size is not None]
    arrays = Arrays(given["operand"], given["result"], words, fields, spread, refs)
    return arrays, turned


def _dtype(like: Operand | Result):
    return like.array.dtype if isinstance(like, Operand) else like.dtype


def _is_narrow(like: Operand | Result) -> bool:
    """Whether several rows of it are in a word."""
    is_plain = like.bits is None and like.block_size is None
    return is_plain and _dtype(like).itemsize < 4


def _has_fields(like: Operand | Result) -> bool:
    """Whether packed fields of it are unpacked before a program's loop."""
    return like.bits is not None and not is_unrolled(like.bits)
