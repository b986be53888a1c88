"""Mosaic GPU arrays as one register per thread, for code that Pallas cannot express.

For Mosaic GPU, Pallas has no masked loads and stores, no inline assembly and no
shuffles. Its ``inline_mgpu`` runs functions that emit MLIR, the compiler's intermediate
representation. This is the only module that emits MLIR. Each thread of a warpgroup
holds 4 neighboring elements of an array in one MLIR vector, which this module calls
*the register* of the array.

If the elements of a register are aligned neighbors in global memory, one instruction
loads or stores all of them (4 to 16 bytes). Otherwise, each element needs its own
instruction.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic
from jax.experimental.pallas import mosaic_gpu as pallas
from jax.extend.core import primitives as p
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jax.extend.mlir.dialects import math as functions

# JAX itself writes inline assembly for Mosaic with this dialect, and exports no other.
from jaxlib.mlir.dialects import gpu, llvm

THREADS = 128
"""Number of threads in a warpgroup, which runs one program."""

COLUMNS = 4
"""Number of elements in a register."""

WARP = 32
"""Number of threads in a warp. These threads can exchange values."""

FUNCTIONS = {
    p.cbrt_p: functions.cbrt,
    p.ceil_p: functions.ceil,
    p.expm1_p: functions.expm1,
    p.floor_p: functions.floor,
    p.log1p_p: functions.log1p,
    p.pow_p: functions.powf,
    p.tan_p: functions.tan,
}
"""MLIR functions for float32 primitives that Pallas does not lower."""


def layout(shape: tuple[int, ...]):
    """Return the layout of a 512-element array, with four neighbors per thread."""
    if math.prod(shape) != THREADS * COLUMNS:
        raise ValueError(f"layout: shape must have 512 elements, got {list(shape)}")
    return pallas.Layout.WG_STRIDED(shape, vec_size=COLUMNS)


def per_thread(
    function: Callable,
    arrays: Sequence[jax.Array | None],
    shape: tuple[int, ...],
    dtype,
    refs: Sequence = (),
) -> typing.Any:
    """Return an array whose registers are a function of other arrays' registers.

    Args:
      function: called with pointers to ``refs`` and with the arrays' registers; returns
        a register, or None if ``dtype`` is None.
      arrays: arrays with the shape ``shape``, or scalars. The function gets None for
        None.
      shape, dtype: shape and dtype of the result; ``dtype`` is None for no result.
      refs: references to flat arrays in global memory.
    """
    here = layout(shape)
    given, structure = jax.tree.flatten(list(arrays))
    given = [
        pallas.layout_cast(jnp.broadcast_to(jnp.asarray(x), shape), here) for x in given
    ]
    result = None
    if dtype is not None:
        result = pallas.ShapeDtypeStruct(shape, np.dtype(dtype), layout=here)
    kinds = (*[pallas.RefType()] * len(refs), *[here] * len(given))

    @pallas.inline_mgpu(arg_types=kinds, return_type=result)
    def run(_, *args):
        pointers = [mosaic.utils.memref_ptr(ref) for ref in args[: len(refs)]]
        registers = [x.registers.item() for x in args[len(refs) :]]
        made = function(*pointers, *structure.unflatten(registers))
        if dtype is None:
            return None
        holder = np.empty((1,), object)
        holder[0] = made
        return mosaic.FragmentedArray(
            _registers=holder,
            _layout=here.to_mgpu(),
            _is_signed=mosaic.utils.is_signed(dtype),
        )

    return run(*refs, *given)


def elements(register) -> list:
    """Return the elements of a register as a list of single values."""
    (count,) = ir.VectorType(register.type).shape
    at = [ir.DenseI64ArrayAttr.get([i]) for i in range(count)]
    return [
        vector.extract(register, dynamic_position=[], static_position=x) for x in at
    ]


def register(values: Sequence):
    """Return a register with these elements, which must have equal types."""
    kind = ir.VectorType.get((len(values),), values[0].type)
    made = llvm.mlir_undef(kind)
    for i, value in enumerate(values):
        at = ir.DenseI64ArrayAttr.get([i])
        made = vector.insert(value, made, dynamic_position=[], static_position=at)
    return made


def bits_type(bits: int):
    """Return the MLIR type of integers with ``bits`` bits, signed or unsigned."""
    return ir.IntegerType.get_signless(bits)


def constant(value: int, bits: int = 32):
    """Return an integer constant with ``bits`` bits."""
    kind = bits_type(bits)
    return arith.constant(kind, ir.IntegerAttr.get(kind, value))


def assembly(
    instructions: str,
    results: Sequence,
    args: Sequence,
    constraints: str,
    *,
    acts: bool = False,
) -> list:
    """Emit inline assembly, and return its results.

    Args:
      instructions: PTX.
      results: MLIR types of the results, in the order of ``$0``, ``$1``, ...
      args: values of the arguments.
      constraints: LLVM constraints.
      acts: whether the assembly has side effects.
    """
    if len(results) > 1:
        kind = llvm.StructType.get_literal(list(results))
    else:
        kind = results[0] if results else ir.Type.parse("!llvm.void")
    made = typing.cast(
        ir.Value,
        llvm.inline_asm(
            kind, args, instructions, constraints, has_side_effects=acts or not results
        ),
    )
    if len(results) > 1:
        return [llvm.extractvalue(each, made, [i]) for i, each in enumerate(results)]
    return [made] if results else []


def element_type(dtype):
    """Return the MLIR type of one element, such as ``bf16`` for ``jnp.bfloat16``."""
    return mosaic.utils.dtype_to_ir_type(np.dtype(dtype))


def bits_of(value) -> int:
    """Return the number of bits of a value that is not a vector."""
    return mosaic.utils.bitwidth(value.type)


def words(register, bits: int = 32) -> list:
    """Return a register as integers of ``bits`` bits, with first elements lowest."""
    (count,) = ir.VectorType(register.type).shape
    width = mosaic.utils.bitwidth(ir.VectorType(register.type).element_type)
    kind = ir.VectorType.get((count * width // bits,), bits_type(bits))
    return elements(vector.bitcast(kind, register))


def joined(values: Sequence, element):
    """Return a register of the type ``element``, made from elements or wider words."""
    held = register(values)
    kind = ir.VectorType.get((COLUMNS,), element)
    return held if held.type == kind else vector.bitcast(kind, held)


def thread_number():
    """Return the index of the thread in its warpgroup."""
    return arith.andi(_thread_of_block(), constant(THREADS - 1))


def _thread_of_block():
    """Return the index of the thread in its block of one or more warpgroups."""
    return arith.index_cast(bits_type(32), gpu.thread_id(gpu.Dimension.x))


def is_first_of(threads: int):
    """Return whether a thread is the first of ``threads`` (2^n) neighbors."""
    rest = arith.andi(thread_number(), constant(threads - 1))
    return arith.cmpi(arith.CmpIPredicate.eq, rest, constant(0))


def largest(a, b):
    """Return the larger of two signed integers."""
    return arith.maxsi(a, b)


def first_thread(value, threads: int):
    """Return the value of the first of ``threads`` neighbors in a warp."""
    kind, bits = bits_type(32), bits_of(value)
    lane = arith.andi(thread_number(), constant(-threads % WARP))
    wide = value if bits == 32 else arith.extui(kind, value)
    (found,) = assembly(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", [kind], [wide, lane], "=r,r,r"
    )
    return found if bits == 32 else arith.trunci(value.type, found)


def other_warp(pointer, value):
    """Return the value of the other warp in a pair of neighboring warps.

    Args:
      pointer: pointer to shared memory with an int32 per warp.
      value: a 32-bit value, equal in all threads of a warp.
    """
    warp = arith.shrui(_thread_of_block(), constant(5))
    other = arith.xori(warp, constant(1))
    llvm.store(value, address(pointer, warp, 32), alignment=4)
    mosaic.warpgroup_barrier()
    found = llvm.load(value.type, address(pointer, other, 32), alignment=4)
    # Every thread must have read before the next exchange writes.
    mosaic.warpgroup_barrier()
    return found


def other_thread(value, distance: int):
    """Return the int32 of the thread whose index differs in the bit ``distance``."""
    return mosaic.utils.shfl_bfly(value, distance)


def both(a, b):
    """Return the conjunction of two masks; ``a`` may be None for a true mask."""
    return b if a is None else arith.andi(a, b)


def widened(value):
    """Convert a non-negative integer to 64 bits."""
    return arith.extui(bits_type(64), value)


def product(value, factor: int):
    """Return the 64-bit product of a non-negative int32 and a constant."""
    return arith.muli(widened(value), constant(factor, 64))


def address(pointer, place, bits: int):
    """Return the address of an element of an array.

    Args:
      pointer: pointer to the array, or to the element at which to start counting.
      place: index of the element, an int or a value with 32 or 64 bits.
      bits: number of bits of an element.
    """
    flags, kind = llvm.GEPNoWrapFlags.none, bits_type(bits)
    places, constants = (
        ([], [place]) if isinstance(place, int) else ([place], [-(2**31)])
    )
    return llvm.getelementptr(pointer.type, pointer, places, constants, kind, flags)


def load(address, mask, bits: int, count: int, mark: str) -> list:
    """Load ``count`` words from global memory. They are 0 where the mask is False.

    Args:
      address: address of the first word.
      mask: a condition, or None to always load.
      bits: number of bits of a word: 8, 16 or 32.
      count: 1, 2 or 4.
      mark: comment to add to the assembly.
    """
    letter, many = _form(bits, count)
    places = _list(f"${i}" for i in range(count))
    guard = ""
    if mask is not None:
        zeros = (f"mov.b{max(bits, 16)} ${i}, 0; " for i in range(count))
        guard = "".join(zeros) + f"@${count + 1} "
    loaded = assembly(
        f"{guard}ld.global{many}.b{bits} {places}, [${count}]; {mark}",
        [bits_type(max(bits, 16))] * count,
        [address] if mask is None else [address, mask],
        ",".join([*[f"=&{letter}"] * count, *["l", "b"][: 1 + bool(guard)]]),
        acts=True,
    )
    return [arith.trunci(bits_type(bits), x) for x in loaded] if bits < 16 else loaded


def store(address, words: Sequence, mask, mark: str) -> None:
    """Store words to global memory if the mask is True. See :func:`load`."""
    bits, count = bits_of(words[0]), len(words)
    if bits < 16:
        words = [arith.extui(bits_type(16), x) for x in words]
    guard = "" if mask is None else f"@${count + 1} "
    letter, many = _form(bits, count)
    places = _list(f"${i + 1}" for i in range(count))
    assembly(
        f"{guard}st.global{many}.b{bits} [$0], {places}; {mark}",
        [],
        [address, *words, *([] if mask is None else [mask])],
        ",".join(["l", *[letter] * count, *(["b"] if guard else [])]),
    )


def _form(bits: int, count: int) -> tuple[str, str]:
    return "r" if bits == 32 else "h", f".v{count}" if count > 1 else ""


def _list(places) -> str:
    places = list(places)
    return places[0] if len(places) == 1 else "{" + ", ".join(places) + "}"


def assembler(
    instructions: str, *, args, constraints: str, pack: int, result_shape_dtypes
) -> list[jax.Array]:
    """Emit inline assembly with one result, for :class:`.Instructions`."""
    (like,) = result_shape_dtypes
    made = functools.partial(_assembled, instructions, constraints, like.dtype, pack)
    return [per_thread(made, args, like.shape, like.dtype)]


def _assembled(instructions: str, constraints: str, dtype, pack: int, *given):
    """Run assembly on ``pack`` elements of the registers at a time."""
    kinds = [each.strip() for each in constraints.split(",")]
    types = [_type_of(kind) for kind in kinds if kind.startswith("=")]
    columns = [_columns(x, pack) for x in given]
    made = []
    for i in range(COLUMNS // pack):
        args = [value for column in columns for value in column[i]]
        made += assembly(instructions, types, args, constraints)
    return joined(made, element_type(dtype))


def _columns(register, pack: int) -> list[list]:
    """Return the arguments of each piece of assembly; 16-bit pairs are one word."""
    values = elements(register)
    width = bits_of(values[0])
    if pack == 2 and width == 16:
        return [[pair] for pair in words(register)]
    return [values[i : i + pack] for i in range(0, len(values), pack)]


def _type_of(kind: str):
    """Return the MLIR type of a result with the LLVM constraint ``kind``."""
    integers = {"h": 16, "r": 32}
    letter = kind.removeprefix("=")
    return ir.F32Type.get() if letter == "f" else bits_type(integers[letter])


@dataclasses.dataclass(frozen=True)
class Form:
    """The static properties of an access, which determine its instructions.

    Args:
      dtype: dtype of the elements.
      width, tiles: see :class:`pallas_kernels.fused_update.gpu.program.Access`.
      layer_size: number of elements in a layer, if the array is a stack of layers.
      mark: comment to add to the instructions' assembly.
    """

    dtype: jnp.dtype
    width: int
    tiles: int | None
    layer_size: int
    mark: str

    @property
    def bits(self) -> int:
        return 8 * self.dtype.itemsize

    def places(
        self, pointer, offset, mask, layer
    ) -> list[tuple[typing.Any, typing.Any]]:
        """Return ``(address, mask)`` for each element of a register.

        The masks are None if the access has no mask.

        Args:
          pointer: pointer to the array.
          offset: register with the elements' offsets.
          mask, layer: registers with the mask and the layer, or None.
        """
        masks = [None] * COLUMNS if mask is None else elements(mask)
        if layer is not None:
            start = product(elements(layer)[0], self.layer_size)
            pointer = address(pointer, start, self.bits)
        offsets = elements(offset)
        if self.width == 1 and not self.tiles:
            # If an array is repeated along the last axis, elements have equal offsets.
            places = map(widened, offsets)
            addresses = [address(pointer, x, self.bits) for x in places]
            return list(zip(addresses, masks, strict=True))
        # A thread's elements are neighbors, but they are not always aligned.
        first = address(pointer, widened(offsets[0]), self.bits)
        return [
            (address(first, number, self.bits), mask)
            for number, mask in enumerate(masks)
        ]


def load_elements(form: Form, pointer, *place):
    """Load elements into a register. See :meth:`Form.places` for ``place``."""
    bits, places = form.bits, form.places(pointer, *place)
    if form.tiles:
        (address, mask), *_ = places
        # The block's first thread may overwrite the value, so it also loads it, and
        # then sends it to the other threads of its warp.
        together = min(form.tiles, WARP)
        if together > 1:
            mask = both(mask, is_first_of(together))
        (value,) = load(address, mask, bits, 1, form.mark)
        if together > 1:
            value = first_thread(value, together)
        values = [value] * COLUMNS
    elif form.width == COLUMNS:
        width = min(32, bits * COLUMNS)
        count = bits * COLUMNS // width
        values = load(*places[0], width, count, form.mark)
    else:
        values = [
            value for place in places for value in load(*place, bits, 1, form.mark)
        ]
    return joined(values, element_type(form.dtype))


def store_elements(form: Form, pointer, value, *place):
    """Store the elements of a register; see :func:`load_elements`."""
    bits, places = form.bits, form.places(pointer, *place)
    if form.tiles:
        ((address, mask), *_), (word, *_) = places, words(value, bits)
        if form.tiles > 1:
            mask = both(mask, is_first_of(form.tiles))
        store(address, [word], mask, form.mark)
    elif form.width == COLUMNS:
        address, mask = places[0]
        wide = words(value, min(32, bits * COLUMNS))
        store(address, wide, mask, form.mark)
    else:
        pairs = zip(places, words(value, bits), strict=True)
        for (address, mask), word in pairs:
            store(address, [word], mask, form.mark)
