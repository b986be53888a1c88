"""Reductions of many arrays as two Pallas kernels on the Mosaic GPU backend.

Each program is a warpgroup. By a tree of branches it finds the address of its array;
what reads the elements is then the same for all arrays of one dtype.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as pallas

from pallas_kernels.gpu import mosaic_registers as registers
from pallas_kernels.gpu.instructions import by_branches
from pallas_kernels.gpu.mosaic_access import Form, load
from pallas_kernels.reductions.pieces import PIECE, Kind, Pieces

_LANES = registers.THREADS * registers.COLUMNS
_WARPS = registers.THREADS // registers.WARP


@functools.lru_cache(maxsize=256)
def kernels(pieces: Pieces):
    """The two kernels for these arrays, which JAX traces once.

    The first takes factors and arrays, and reduces each piece of an array to a number.
    The second takes each array's first piece and these numbers, and reduces them to one
    number for each array.
    """
    name = f"reduce_{pieces.kind.name}"

    def call(kernel, count: int, name: str):
        return pallas.kernel(
            functools.partial(kernel, pieces),
            out_type=pieces.results(count),
            grid=(count,),
            grid_names=("program",),
            num_threads=1,
            thread_name="warpgroup",
            compiler_params=pallas.CompilerParams(
                # What threads exchange has barriers of its own.
                unsafe_no_auto_barriers=True,
                lowering_semantics=pallas.LoweringSemantics.Lane,
            ),
            scratch_types=[pallas.SMEM((_WARPS,), jnp.int32)],
            kernel_name=name,
        )

    return (
        call(_pieces, pieces.starts[-1], f"{name}_of_pieces"),
        call(_whole, len(pieces.sizes), name),
    )


def _pieces(pieces: Pieces, *refs):
    kind, program = pieces.kind, lax.axis_index("program")
    factor = [ref[0] for ref in refs[: pieces.factors]]
    *arrays, parts, exchange = refs[pieces.factors :]
    forms = [
        _form(dtype, registers.COLUMNS if size % registers.COLUMNS == 0 else 1)
        for dtype, size in zip(pieces.dtypes, pieces.sizes, strict=True)
    ]
    kinds = list(dict.fromkeys(forms))

    def choose(number: int):
        numbers = pieces.starts[number], pieces.sizes[number]
        return (
            *(
                _per_thread(
                    _half_of_address, [], jnp.int32, half, refs=[arrays[number]]
                )
                for half in range(2)
            ),
            *map(jnp.int32, numbers),
            jnp.int32(kinds.index(forms[number])),
        )

    low, high, start, size, form = by_branches(
        program, range(len(arrays)), choose, starts=pieces.starts
    )
    first = (program - start) * jnp.int32(PIECE)

    def read(number: int) -> jax.Array:
        values = _zeros(kind)
        for row in range(PIECE // _LANES):
            place = first + jnp.int32(row * _LANES) + _lanes()
            arguments = [low, high, place, place < size]
            x = _per_thread(_load, arguments, kinds[number].dtype, kinds[number])
            values = kind.combine(values, kind.read(x, *factor))
        return _carried(values)

    values = by_branches(form, range(len(kinds)), read)
    _store(kind, values, program, exchange, parts)


def _whole(pieces: Pieces, starts, parts, results, exchange):
    kind, program = pieces.kind, lax.axis_index("program")
    first, end = starts[program], starts[program + jnp.int32(1)]

    def step(number, values):
        place = first + number * jnp.int32(_LANES) + _lanes()
        arguments, form = [place, place < end], _form(kind.dtype, 1)
        more = _per_thread(load, arguments, kind.dtype, form, refs=[parts])
        return _carried(kind.combine(values, more))

    count = lax.div(end - first + jnp.int32(_LANES - 1), jnp.int32(_LANES))
    values = lax.fori_loop(jnp.int32(0), count, step, _zeros(kind))
    _store(kind, values, program, exchange, results)


def _form(dtype, width: int) -> Form:
    return Form(jnp.dtype(dtype), width, None, True, None, "")


def _per_thread(function, arrays, dtype, *statics, refs=()) -> jax.Array:
    """An array of registers that a function makes of statics, references and arrays."""
    make = functools.partial(function, *statics)
    return registers.per_thread(make, arrays, (_LANES,), dtype, refs)


def _half_of_address(half: int, pointer):
    return registers.register([registers.halves(pointer)[half]] * registers.COLUMNS)


def _load(form: Form, low, high, *place):
    halves = (registers.elements(x)[0] for x in (low, high))
    return load(form, registers.pointer(*halves), *place)


def _lanes() -> jax.Array:
    return _per_thread(_numbers, [], jnp.int32)


def _numbers():
    return registers.register(registers.lane_numbers())


def _zeros(kind: Kind) -> jax.Array:
    return _carried(jnp.zeros((_LANES,), kind.dtype))


def _carried(x: jax.Array) -> jax.Array:
    # Mosaic wants the same layout and sign of what comes in and goes out.
    return _per_thread(lambda register: register, [x], x.dtype)


def _store(kind: Kind, values: jax.Array, number, exchange, results) -> None:
    """Reduces the values of all lanes to one result."""
    make = functools.partial(_reduced_to, kind.name)
    registers.do_per_thread(make, [values, number], (_LANES,), [exchange, results])


def _reduced_to(name: str, exchange, results, held, number):
    combine = {"squares": registers.total, "largest": registers.largest}[name]
    value = functools.reduce(combine, registers.elements(held))
    for bit in range(registers.WARP.bit_length() - 1):
        value = combine(value, registers.other_thread(value, 1 << bit))
    for bit in range(_WARPS.bit_length() - 1):
        value = combine(value, registers.other_warp(exchange, value, 1 << bit))
    place = registers.widened(registers.elements(number)[0])
    address = registers.address(results, place, registers.bits_of(value))
    is_first = registers.is_first_of(registers.THREADS)
    registers.store(address, registers.words(registers.register([value])), is_first, "")
