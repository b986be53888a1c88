"""Inline assembly in kernels of Mosaic GPU, and what else they need of it."""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as p
from jax.extend.mlir import ir

from pallas_kernels.gpu import mosaic_registers as registers
from pallas_kernels.gpu.instructions import Instructions


def assembler(
    instructions: str, *, args, constraints: str, pack: int, result_shape_dtypes
) -> list[jax.Array]:
    """See :class:`.instructions.Instructions`; there is one result."""
    (like,) = result_shape_dtypes
    made = functools.partial(_assembled, instructions, constraints, like.dtype, pack)
    return [registers.per_thread(made, args, like.shape, like.dtype)]


def _multiply(x: jax.Array, y: jax.Array, **_) -> jax.Array:
    # LLVM would contract a product and a sum, which round once then. It leaves
    # products alone that say how they round.
    if x.dtype == jnp.float32 and x.shape:
        return INSTRUCTIONS.assemble("mul.rn.f32 $0, $1, $2;", [x, y], jnp.float32)
    return x * y


def _power(x: jax.Array, y: int, **_) -> jax.Array:
    # Like XLA: a product of the repeated squares that are in the exponent.
    made, square, rest = None, x, abs(y)
    while rest:
        if rest & 1:
            made = square if made is None else _multiply(made, square)
        rest >>= 1
        square = _multiply(square, square) if rest else square
    made = jnp.ones_like(x) if made is None else made
    return made if y >= 0 else _divide(jnp.ones_like(x), made)


def _divide(x: jax.Array, y: jax.Array, **params) -> jax.Array:
    # Correctly rounded ones are a call.
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


def _called(primitive, *args, **params) -> jax.Array:
    """A function of floats that Pallas does not lower, and the compiler knows."""
    dtype, shape = args[0].dtype, args[0].shape
    if not jnp.issubdtype(dtype, jnp.floating) or not shape:
        return primitive.bind(*args, **params)

    def call(*arguments):
        columns = zip(*map(registers.elements, arguments), strict=True)
        function = registers.FUNCTIONS[primitive]
        return registers.register([function(*column) for column in columns])

    wide = [x.astype(jnp.float32) for x in args]
    return registers.per_thread(call, wide, shape, jnp.float32).astype(dtype)


def _assembled(instructions: str, constraints: str, dtype, pack: int, *given):
    """A register, assembled from ``pack`` elements of others at a time."""
    kinds = [each.strip() for each in constraints.split(",")]
    count = sum(kind.startswith("=") for kind in kinds)
    element = registers.element_type(dtype)
    columns = [_columns(x, pack) for x in given]
    made = []
    for i in range(registers.COLUMNS // pack):
        args = [value for column in columns for value in column[i]]
        types = [_type_of(kind) for kind in kinds[:count]]
        made += registers.assembly(instructions, types, args, constraints)
    return registers.joined(made, element)


def _columns(register, pack: int) -> list[list]:
    """The arguments of each piece of assembly: of 16 bits, pairs in one register."""
    values = registers.elements(register)
    width = registers.bits_of(values[0])
    if pack == 2 and width == 16:
        return [[pair] for pair in registers.words(register)]
    return [values[i : i + pack] for i in range(0, len(values), pack)]


def _type_of(kind: str):
    """The type of a result with this constraint."""
    letter = kind.removeprefix("=")
    if letter == "f":
        return ir.F32Type.get()
    bits = 16 if letter == "h" else 32
    return registers.bits_type(bits)


INSTRUCTIONS = Instructions(
    assembler,
    {
        p.mul_p: _multiply,
        p.square_p: lambda x, **_: _multiply(x, x),
        p.integer_pow_p: _power,
        p.div_p: _divide,
        p.sqrt_p: _root,
        p.is_finite_p: _is_finite,
        p.not_p: _not,
        p.add_jaxvals_p: lambda x, y, **_: x + y,
        p.convert_element_type_p: _convert,
        **{f: functools.partial(_called, f) for f in registers.FUNCTIONS},
    },
)
