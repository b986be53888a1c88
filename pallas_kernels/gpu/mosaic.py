"""Rules for primitives that Pallas does not lower to Mosaic GPU, or lowers badly."""

import functools

import jax
import jax.numpy as jnp
from jax.extend.core import primitives as p

from pallas_kernels.gpu import mosaic_registers as registers
from pallas_kernels.gpu.instructions import Instructions


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
