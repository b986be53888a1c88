"""The arrangement of lanes in arrays for Mosaic GPU, and operations on such arrays.

``INSTRUCTIONS`` has rules for primitives that Pallas does not lower to Mosaic GPU, or
lowers badly.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as p

from pallas_kernels.fused_update.gpu import mosaic_registers as registers
from pallas_kernels.fused_update.gpu.instructions import Instructions
from pallas_kernels.layout import TILE_COLUMNS


def _multiply(x: jax.Array, y: jax.Array, **_) -> jax.Array:
    # LLVM would contract a product and a sum, which then round only once. It does not
    # contract products with an explicit rounding mode.
    if x.dtype == jnp.float32 and x.shape:
        return INSTRUCTIONS.assemble("mul.rn.f32 $0, $1, $2;", [x, y], jnp.float32)
    return x * y


def _power(x: jax.Array, y: int, **_) -> jax.Array:
    # Like XLA, multiply the repeated squares for which the exponent has a 1 bit.
    made, square, rest = None, x, abs(y)
    while rest:
        if rest & 1:
            made = square if made is None else _multiply(made, square)
        rest >>= 1
        square = _multiply(square, square) if rest else square
    made = jnp.ones_like(x) if made is None else made
    return made if y >= 0 else _divide(jnp.ones_like(x), made)


def _divide(x: jax.Array, y: jax.Array, **params) -> jax.Array:
    # A correctly rounded division would be a function call.
    if x.dtype == jnp.float32 and x.shape:
        return INSTRUCTIONS.assemble("div.full.f32 $0, $1, $2;", [x, y], jnp.float32)
    return p.div_p.bind(x, y, **params)


def _root(x: jax.Array, **params) -> jax.Array:
    if x.dtype == jnp.float32 and x.shape:
        return INSTRUCTIONS.assemble("sqrt.approx.f32 $0, $1;", [x], jnp.float32)
    return p.sqrt_p.bind(x, **params)


def _is_finite(x: jax.Array, **_) -> jax.Array:
    return jnp.abs(x) < jnp.full_like(x, jnp.inf)


def _not(x: jax.Array, **params) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x ^ jnp.full_like(x, True)
    return p.not_p.bind(x, **params)


def _convert(x: jax.Array, new_dtype, **params) -> jax.Array:
    if new_dtype == jnp.bool_ and x.dtype != jnp.bool_:
        return x != jnp.zeros_like(x)
    return p.convert_element_type_p.bind(x, new_dtype=new_dtype, **params)


def _select(which: jax.Array, *cases: jax.Array, **params) -> jax.Array:
    # If the chosen case is a scalar, Pallas treats the result as unsigned when it
    # compares, shifts or converts it.
    chosen = p.select_n_p.bind(which, *cases, **params)
    if not chosen.shape or not jnp.issubdtype(chosen.dtype, jnp.signedinteger):
        return chosen
    return registers.per_thread(lambda x: x, [chosen], chosen.shape, chosen.dtype)


def _called(primitive, *args, **params) -> jax.Array:
    """Compute a function of floats that MLIR provides but Pallas does not lower."""
    dtype, shape = args[0].dtype, args[0].shape
    if not jnp.issubdtype(dtype, jnp.floating) or not shape:
        return primitive.bind(*args, **params)

    def call(*arguments):
        columns = zip(*map(registers.elements, arguments), strict=True)
        function = registers.FUNCTIONS[primitive]
        return registers.register([function(*column) for column in columns])

    wide = [x.astype(jnp.float32) for x in args]
    return registers.per_thread(call, wide, shape, jnp.float32).astype(dtype)


INSTRUCTIONS = Instructions(
    registers.assembler,
    {
        p.mul_p: _multiply,
        p.square_p: lambda x, **_: _multiply(x, x),
        p.integer_pow_p: _power,
        p.div_p: _divide,
        p.sqrt_p: _root,
        p.is_finite_p: _is_finite,
        p.not_p: _not,
        p.select_n_p: _select,
        p.add_jaxvals_p: lambda x, y, **_: x + y,
        p.convert_element_type_p: _convert,
        **{f: functools.partial(_called, f) for f in registers.FUNCTIONS},
    },
)


@dataclasses.dataclass(frozen=True)
class Threads:
    """The arrangement of a program's lanes: each thread has four neighboring lanes.

    All arrays are arrays of lanes. If an array contains one value per block, all lanes
    of the block have this value. See :class:`.lanes.Arrangement`.

    Args:
      shape: ``[lanes]`` in a flat tiling, and ``[threads, 4]`` otherwise.
      tiles: number of tiles in a largest block.
      exchange: reference to shared memory with an int32 per warp, for blocks with more
        tiles than a warp has threads.
    """

    shape: tuple[int, ...]
    tiles: int
    exchange: typing.Any

    @property
    def instructions(self) -> Instructions:
        return INSTRUCTIONS

    @property
    def marks_branches(self) -> bool:
        return False

    def flat(self) -> jax.Array:
        return self._threads() * jnp.int32(TILE_COLUMNS) + self.columns()

    def blocks(self) -> jax.Array:
        return self._threads() >> jnp.int32(_bits(self.tiles))

    def parts(self, count: int) -> jax.Array:
        tile = self._threads() & jnp.int32(self.tiles - 1)
        return tile >> jnp.int32(_bits(self.tiles // count))

    def columns(self) -> jax.Array:
        return registers.per_thread(_columns, [], self.shape, jnp.int32)

    def carried(self, x: jax.Array) -> jax.Array:
        # The result of a loop must have the type of its input, but Pallas treats the
        # result of a select as unsigned.
        return registers.per_thread(lambda register: register, [x], self.shape, x.dtype)

    def spread(self, x: jax.Array) -> jax.Array:
        return x

    def over_parts(self, x: jax.Array) -> jax.Array:
        return x

    def expand(self, x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x, self.shape)

    def maxima(self, x: jax.Array, parts: int) -> jax.Array:
        threads = self.tiles // parts
        if threads <= registers.WARP:
            make = functools.partial(_maximum, threads)
            return registers.per_thread(make, [x], self.shape, jnp.int32)
        make, refs = _maximum_of_two_warps, [self.exchange]
        return registers.per_thread(make, [x], self.shape, jnp.int32, refs)

    def load(self, ref, access, leaf: int) -> jax.Array:
        make = functools.partial(registers.load_elements, _form(ref, access, leaf))
        place = access.offset, access.mask, access.layer
        return registers.per_thread(make, place, self.shape, ref.dtype, [ref])

    def store(self, ref, access, value, leaf: int) -> None:
        make = functools.partial(registers.store_elements, _form(ref, access, leaf))
        arrays = value, access.offset, access.mask, access.layer
        registers.per_thread(make, arrays, self.shape, None, [ref])

    def _threads(self) -> jax.Array:
        """Return the index of each lane's thread."""
        return registers.per_thread(_thread, [], self.shape, jnp.int32)


def _thread():
    return registers.register([registers.thread_number()] * registers.COLUMNS)


def _columns():
    return registers.register(list(map(registers.constant, range(registers.COLUMNS))))


def _bits(count: int) -> int:
    """Return the base-2 logarithm of a power of two."""
    return count.bit_length() - 1


def _maximum(threads: int, register):
    """Return the maximum over the elements of ``threads`` neighboring threads."""
    value = functools.reduce(registers.largest, registers.elements(register))
    distance = 1
    while distance < threads:
        value = registers.largest(value, registers.other_thread(value, distance))
        distance *= 2
    return registers.register([value] * registers.COLUMNS)


def _maximum_of_two_warps(pointer, register):
    """Return the maximum over the threads of two neighboring warps."""
    (value, *_) = registers.elements(_maximum(registers.WARP, register))
    other = registers.other_warp(pointer, value)
    return registers.register([registers.largest(value, other)] * registers.COLUMNS)


def _form(ref, access, leaf: int) -> registers.Form:
    # The leaf's index makes the instructions of each leaf unique. Otherwise, LLVM would
    # merge the loads of different leaves into one load with a selected address.
    return registers.Form(
        ref.dtype, access.width, access.tiles, ref.shape[-1], f"// leaf {leaf}"
    )
