"""The launcher that runs fused updates as Pallas kernels with Triton.

The code of the kernel is in :mod:`.program`.
"""

import functools
import typing

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.fused_update.gpu.kernel import Kernel, Sharing, prepare
from pallas_kernels.fused_update.gpu.program import run_program
from pallas_kernels.fused_update.gpu.tiling import FlatTiling
from pallas_kernels.fused_update.gpu.triton_arrays import INSTRUCTIONS, Arrays
from pallas_kernels.fused_update.spec import KernelCall, shaped

_SIZE = Sharing(
    # Four elements per thread are 16 bytes of float32 or of words, which one
    # instruction loads or stores.
    flat_width=512,
    flat_rows=4,
    # Many small leaves are vectors of a few hundred elements.
    small_width=1024,
    # Four lanes for each thread of two warps. Larger programs would leave more of a
    # multiprocessor's registers unused, and small leaves would have too few programs.
    lanes=64,
    # Blocks of two sizes need separate branches for their loads. LPMM's Adam takes 3
    # seconds to compile for one leaf, 6 seconds for 3 leaves and 14 seconds for 6.
    cost_of_two=2,
)
_FLAT_WARPS, _WARPS = 4, 2

parts, groups = _SIZE.parts, _SIZE.groups


def update(call: KernelCall) -> list[jax.Array]:
    """Run the kernel of a call, and return the results of one leaf after the other."""
    kernel, written, args = prepare(_SIZE, call)
    return shaped(_call(kernel, written)(*args), call.shards)


@functools.lru_cache(maxsize=1024)
def _call(kernel: Kernel, written: tuple[jax.ShapeDtypeStruct, ...]):
    """Return the kernel as a function of its arrays.

    The cache returns the same function for equal leaves, and when JAX's transformations
    trace a leaf again, so JAX traces the kernel only once.
    """
    specs: dict[str, typing.Any] = {}
    if kernel.numbers is not None and not kernel.interpret:
        # JAX 0.12 truncates a block at the end of its array, so the kernel's text would
        # depend on the array's size. A block of one element avoids this, and offsets
        # may go beyond it.
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
        # Without these parameters, Pallas would choose another backend.
        compiler_params=triton.CompilerParams(
            num_warps=_FLAT_WARPS if isinstance(kernel.tiling, FlatTiling) else _WARPS,
            num_stages=1,
        ),
        interpret=kernel.interpret,
        name=kernel.name,
    )


def _program(kernel: Kernel, *refs):
    tiling, shape = kernel.tiling, kernel.tiling.array_shape
    if tiling.tiles > 1:
        shape = shape[0] // tiling.tiles, tiling.tiles, shape[1]
    instructions = None if kernel.interpret else INSTRUCTIONS
    run_program(kernel, pl.program_id(0), refs, Arrays(shape, instructions))
