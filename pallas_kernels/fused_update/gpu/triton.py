"""The fused update as a Pallas kernel on the Triton backend.

What each program of the kernel does is in :mod:`.program`.
"""

import functools
import typing

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.fused_update.gpu.kernel import Kernel, prepare, shaped
from pallas_kernels.fused_update.gpu.program import run_program
from pallas_kernels.fused_update.gpu.sharing import Sharing
from pallas_kernels.fused_update.gpu.tiling import FlatTiling
from pallas_kernels.fused_update.gpu.triton_arrays import Arrays, load, store
from pallas_kernels.fused_update.spec import Call
from pallas_kernels.gpu.instructions import Instructions

_SIZE = Sharing(
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

max_leaves, groups, programs = _SIZE.max_leaves, _SIZE.groups, _SIZE.programs


def update(call: Call) -> list[jax.Array]:
    """The results of a call's kernel, of one leaf after the other."""
    kernel, written, args = prepare(_SIZE, call)
    return shaped(_call(kernel, written)(*args), call.shards)


@functools.lru_cache(maxsize=1024)
def _call(kernel: Kernel, written: tuple[jax.ShapeDtypeStruct, ...]):
    """The kernel as a function of its arrays.

    It is the same function for equal leaves, and when the same leaf is traced again, as
    JAX's transformations do; JAX then does not trace the kernel again.
    """
    specs: dict[str, typing.Any] = {}
    if kernel.numbers is not None and not kernel.interpret:
        # Of a block that is as large as its array or larger, which JAX 0.12 cuts off,
        # the array's size would be in the kernel's text. Offsets may be beyond it.
        block = pl.BlockSpec((1,), lambda _: (0,))
        specs = {
            "in_specs": [block] * kernel.arguments,
            "out_specs": [block] * kernel.results,
        }
    return pl.pallas_call(
        functools.partial(_program, kernel),
        grid=(kernel.programs,),
        out_shape=written,
        **specs,
        input_output_aliases={of: result for result, of in kernel.aliases.items()},
        # Left out, they would choose another backend.
        compiler_params=triton.CompilerParams(
            num_warps=_FLAT_WARPS if isinstance(kernel.tiling, FlatTiling) else _WARPS,
            num_stages=1,
        ),
        interpret=kernel.interpret,
        name=kernel.name,
    )


def _program(kernel: Kernel, *refs):
    run_program(
        kernel,
        pl.program_id(0),
        refs,
        Arrays.of(kernel.tiling),
        None if kernel.interpret else INSTRUCTIONS,
        load=load,
        store=functools.partial(store, kernel.interpret),
        mark=None if kernel.interpret else INSTRUCTIONS.opaque,
    )
