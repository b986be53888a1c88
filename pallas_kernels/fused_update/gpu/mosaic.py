"""The launcher that runs fused updates as Pallas kernels with Mosaic GPU.

It supports Hopper and Blackwell GPUs. The code of the kernel is in :mod:`.program`.
"""

import functools
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as pallas

from pallas_kernels.fused_update.gpu.kernel import Kernel, Sharing, prepare
from pallas_kernels.fused_update.gpu.mosaic_arrays import Threads
from pallas_kernels.fused_update.gpu.mosaic_registers import WARP
from pallas_kernels.fused_update.gpu.program import run_program
from pallas_kernels.fused_update.gpu.tiling import FlatTiling
from pallas_kernels.fused_update.spec import BlockBody, KernelCall, shaped
from pallas_kernels.layout import TILE_COLUMNS
from pallas_kernels.lowered import with_plain_types

# A program is a warpgroup: 128 threads with four lanes each.
_SIZE = Sharing(flat_width=512, flat_rows=4, small_width=512, lanes=128)

# With fewer programs, each program is a block and gets its own multiprocessor.
_FEW_PROGRAMS = 528

# A thread needs at most 128 registers if each of its elements keeps at most this many
# values until the maxima are known.
_MAX_WAITING = 2

_WARPS_OF_A_WARPGROUP = 4

parts, groups = _SIZE.parts, _SIZE.groups


def update(call: KernelCall) -> list[jax.Array]:
    """See :func:`.triton.update`. Mosaic GPU kernels do not support ``interpret``."""
    if call.interpret:
        raise NotImplementedError("Mosaic GPU kernels can only run on CUDA devices")
    kernel, written, args = prepare(_SIZE, call)
    return shaped(_call(kernel, written, args), call.shards)


def _call(kernel: Kernel, written, args: Sequence[jax.Array]) -> list:
    """Run the kernel and return its results, some of which overwrite operands."""
    overwritten = kernel.aliases
    warpgroups = 1 if kernel.programs < _FEW_PROGRAMS else _warpgroups(kernel)
    new = [x for i, x in enumerate(written) if i not in overwritten]
    call = pallas.kernel(
        functools.partial(_program, kernel, warpgroups),
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in new),
        grid=(math.ceil(kernel.programs / warpgroups),),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=pallas.CompilerParams(
            # No thread reads an element that another thread writes.
            unsafe_no_auto_barriers=True,
            lowering_semantics=pallas.LoweringSemantics.Lane,
        ),
        scratch_types=[pallas.SMEM((_WARPS_OF_A_WARPGROUP * warpgroups,), jnp.int32)]
        if kernel.tiling.tiles > WARP
        else [],
        kernel_name=kernel.name,
    )

    def run(*args) -> list:
        arrays = {number: args[number] for number in overwritten.values()}
        # References to new results need initial values, but the kernel never reads
        # them.
        blank = {i: jnp.zeros(x.shape, x.dtype) for i, x in enumerate(new)}

        def in_place(refs) -> None:
            given, results = refs
            made = call(*(given.get(i, x) for i, x in enumerate(args)))
            for i, x in enumerate(made):
                results[i][...] = x

        # JAX can partition a function with run_state, but not one with jax.new_ref.
        arrays, made = pl.run_state(in_place)((arrays, blank))
        rest = (made[i] for i in range(len(new)))
        return [
            arrays[overwritten[i]] if i in overwritten else next(rest)
            for i in range(len(written))
        ]

    return with_plain_types(run, written, args)


def _warpgroups(kernel: Kernel) -> int:
    """Return the number of programs in a block of threads.

    The compiler assumes that a multiprocessor runs one block, so it does not economize
    on registers: it allocates 217 per thread in a kernel that needs 128. In a block of
    512 threads, a thread cannot have more than 128, and 16 warps share a
    multiprocessor. Kernels that need more registers use blocks of 256 threads.
    """
    tiling = kernel.tiling
    if isinstance(tiling, FlatTiling) or not tiling.block_sizes:
        return 4
    has_masks = tiling.width < TILE_COLUMNS or tiling.rows % tiling.step_rows
    has_long_codes = tiling.tiles > 1 or not set(tiling.packed) <= {8}
    keeps_many = typing.cast(BlockBody, kernel.body).kept > _MAX_WAITING
    return 2 if has_masks or has_long_codes or keeps_many else 4


def _program(kernel: Kernel, warpgroups: int, *refs):
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    program = block * jnp.int32(warpgroups) + warpgroup
    arguments, rest = refs[: kernel.arguments], iter(refs[kernel.arguments :])
    results = [
        arguments[kernel.aliases[i]] if i in kernel.aliases else next(rest)
        for i in range(kernel.results)
    ]
    # If the kernel has shared memory, its reference follows the results.
    arrangement = Threads(
        kernel.tiling.array_shape, kernel.tiling.tiles, next(rest, None)
    )

    def unless_beyond(work):
        if kernel.programs % warpgroups:
            jax.lax.cond(program < jnp.int32(kernel.programs), work, lambda: None)
        else:
            work()

    run_program(kernel, program, [*arguments, *results], arrangement, unless_beyond)
