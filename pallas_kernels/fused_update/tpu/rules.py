"""Rules that evaluate a body with the 32-bit operations of TPU kernels.

A TPU's vector registers contain 32-bit elements, and arithmetic on other types is
missing or slow. Therefore, values of 8 and 16 bits are kept in the upper bits of 32-bit
words. A word with a bfloat16 in its upper bits is already the bit pattern of the equal
float32, so widening it is free, and shifts by 16 before or after widening are free too.

On some generations of TPUs, quotients or roots use :mod:`.division`.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core
from jax.extend.core import primitives as p

from pallas_kernels import operations
from pallas_kernels.fused_update.tpu.division import quotient, reciprocal, root
from pallas_kernels.fused_update.tpu.values import (
    Field,
    Lazy,
    Narrow,
    Sum,
    XorShifted,
    whole,
)

_UNSIGNED = tuple(map(jnp.dtype, (jnp.uint8, jnp.uint16)))
_FLOATS = tuple(
    map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2))
)
_NARROW = (*_FLOATS, *_UNSIGNED)
_INTEGERS = tuple(map(jnp.dtype, (jnp.int32, jnp.uint32)))
DTYPES = frozenset((*_NARROW, *_INTEGERS, jnp.dtype(jnp.float32), jnp.dtype(jnp.bool_)))
"""The dtypes of values that kernels support."""

_CONVERSIONS = {
    *((x, jnp.dtype(jnp.float32)) for x in _FLOATS),
    *((x, y) for x in _UNSIGNED for y in _INTEGERS),
    *((x, y) for x in _INTEGERS for y in _UNSIGNED),
}
_PRIMITIVES = frozenset(
    (
        p.add_p, p.add_jaxvals_p, p.sub_p, p.mul_p, p.div_p, p.neg_p, p.abs_p, p.sign_p,
        p.square_p, p.max_p, p.min_p, p.clamp_p, p.sqrt_p, p.rsqrt_p, p.exp_p, p.log_p,
        p.tanh_p, p.logistic_p, p.integer_pow_p, p.and_p, p.or_p, p.xor_p, p.not_p,
        p.shift_left_p, p.shift_right_logical_p, p.shift_right_arithmetic_p,
        p.eq_p, p.ne_p, p.lt_p, p.le_p, p.gt_p, p.ge_p, p.select_n_p, p.is_finite_p,
        p.bitcast_convert_type_p, p.convert_element_type_p, p.broadcast_in_dim_p,
        p.stop_gradient_p, p.copy_p,
    )
)  # fmt: skip
# Operations that move values of 8 and 16 bits without arithmetic.
_OF_NARROW = (p.convert_element_type_p, p.bitcast_convert_type_p, p.select_n_p)


def unsupported(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Yield the operations of a jaxpr that TPU kernels do not support."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is p.jit_p:
            yield from unsupported(eqn.params["jaxpr"].jaxpr)
        elif not _is_supported(eqn):
            operands = ", ".join(x.aval.str_short() for x in eqn.invars)
            yield f"{eqn.primitive} of {operands}"


def _is_supported(eqn) -> bool:
    atoms = (*eqn.invars, *eqn.outvars)
    if eqn.primitive not in _PRIMITIVES or not {x.aval.dtype for x in atoms} <= DTYPES:
        return False
    narrow = [x for x in atoms if x.aval.dtype in _NARROW]
    if not narrow:
        return True
    constants = (isinstance(x, core.Literal) or not x.aval.shape for x in narrow)
    if eqn.primitive not in _OF_NARROW or any(constants):
        return False
    if eqn.primitive is not p.convert_element_type_p:
        return True
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    return old == new or (old, jnp.dtype(new)) in _CONVERSIONS


def _convert(eqn, x):
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if old == new:
        return x
    if isinstance(x, Narrow):
        if old in _FLOATS:
            return x.as_float32()
        return dataclasses.replace(x.lowest(), is_signed=new == jnp.int32)
    if new in _UNSIGNED:
        width = 8 * new.itemsize
        if isinstance(x, Field) and x.is_upper(width):
            return Narrow(x.word, jnp.dtype(new))
        array = whole(x)
        if old == jnp.int32:
            array = lax.bitcast_convert_type(array, jnp.uint32)
        return Narrow(array << jnp.uint32(32 - width), jnp.dtype(new))
    return _reinterpreted(eqn, x)


def _bitcast(eqn, x):
    if isinstance(x, Narrow):
        return Narrow(x.word, jnp.dtype(eqn.params["new_dtype"]))
    return _reinterpreted(eqn, x)


def _reinterpreted(eqn, x):
    """Converts an integer array between int32 and uint32."""
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if {old, new} != set(_INTEGERS):
        return NotImplemented
    if isinstance(x, Field):
        return dataclasses.replace(x, is_signed=new == jnp.int32)
    if not eqn.outvars[0].aval.shape:
        return NotImplemented
    return lax.bitcast_convert_type(whole(x), new)


def _by_number(rule: Callable) -> Callable:
    """Makes a rule from a function of a uint32 array and an integer constant."""

    @functools.wraps(rule)
    def of_equation(eqn, x, y):
        number = _number_of(y)
        if number is None or not _is_array(eqn, jnp.uint32):
            return NotImplemented
        return rule(x, number)

    return of_equation


@_by_number
def _shift_left(x, places):
    if isinstance(x, XorShifted):
        x = x.array
    if isinstance(x, Field) and x.place + places < 32:
        return dataclasses.replace(x, place=x.place + places)
    if isinstance(x, Lazy) or not 0 < places < 32:
        return NotImplemented
    return Field(x, 0, 32 - places, places)


@_by_number
def _shift_right(x, places):
    if isinstance(x, XorShifted) and places + x.shift >= 32:
        return Field(x.word, places, 32 - places)
    if not isinstance(x, Field):
        return Field(whole(x), places, 32 - places) if 0 < places < 32 else x
    if x.place == 0 and places < x.width:
        return Field(x.word, x.shift + places, x.width - places)
    if 0 < places <= x.place and x.place + x.width == 32:
        return dataclasses.replace(x, place=x.place - places)
    return NotImplemented


@_by_number
def _and(x, mask):
    if not mask or mask & (mask + 1):
        return NotImplemented
    width = mask.bit_length()
    if not isinstance(x, Field):
        return Field(whole(x), 0, width)
    if x.place == 0:
        return Field(x.word, x.shift, min(x.width, width))
    return NotImplemented


def _xor(eqn, x, y):
    """Combines a word and its right shift; see :class:`.values.XorShifted`."""
    if not isinstance(y, Field) or y.word is not x or y.place or y.shift + y.width < 32:
        return NotImplemented
    return XorShifted(x ^ y.value(), x, y.shift)


def _shift_right_signed(eqn, x, places):
    places = _number_of(places)
    extended = None
    if isinstance(x, Field) and x.is_signed and places is not None:
        extended = x.sign_extended(places)
    return NotImplemented if extended is None else extended


def _add(eqn, x, y):
    if not isinstance(x, Sum) or isinstance(y, Lazy) or jnp.shape(y):
        return NotImplemented
    return dataclasses.replace(x, scalar=x.scalar + y)


def _sub(eqn, x, y):
    """Subtracts constants, so that a shift by the result is a shift by a constant."""
    x, y = _number_of(x), _number_of(y)
    if x is None or y is None or eqn.outvars[0].aval.dtype != jnp.uint32:
        return NotImplemented
    return np.uint32((x - y) % 2**32)


def _select(eqn, which, *cases):
    if any(isinstance(x, Narrow) for x in cases):
        words = [x.word for x in cases]
        return Narrow(lax.select_n(which, *words), cases[0].dtype)
    if not _is_array(eqn, jnp.uint32):
        return NotImplemented
    return _selected(which, *map(whole, cases))


def _selected(which, *words) -> jax.Array:
    """Selects words after reinterpreting them as floats.

    Versions of libtpu before 0.0.52 cannot compile the minimum or maximum of unsigned
    integers, and some create one from a comparison and a selection of the same words.
    """
    floats = [lax.bitcast_convert_type(word, jnp.float32) for word in words]
    return lax.bitcast_convert_type(lax.select_n(which, *floats), jnp.uint32)


def _unless(is_outside: Callable) -> Callable:
    """Makes a rule for the minimum or maximum of words from a comparison function."""

    def of_equation(eqn, x, y):
        if not _is_array(eqn, jnp.uint32):
            return NotImplemented
        x, y = jnp.broadcast_arrays(whole(x), whole(y))
        return _selected(is_outside(x, y), x, y)

    return of_equation


_max, _min = _unless(operator.lt), _unless(operator.gt)


def _clamp(eqn, least, x, most):
    x = _max(eqn, x, least)
    return x if x is NotImplemented else _min(eqn, x, most)


def _broadcast(eqn, x):
    if isinstance(x, Narrow | Lazy) or eqn.invars[0].aval.shape:
        return x
    return NotImplemented


def _div(eqn, x, y):
    if not _is_array(eqn, jnp.float32):
        return NotImplemented
    y = jnp.broadcast_to(y, eqn.outvars[0].aval.shape)
    return quotient(x, y, reciprocal(y, approx=True))


def _sqrt(eqn, x):
    return root(x) if _is_array(eqn, jnp.float32) else NotImplemented


def _pattern_above(x, base, most) -> jax.Array:
    """Computes :func:`.operations.pattern_above` with operations on floats.

    Only floats have a maximum in one instruction. Comparisons with NaN are false. If
    the maximum returns a negative zero, ``base`` is 0, and the result has only its sign
    bit set.
    """
    base = whole(base)
    as_float = functools.partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
    last = as_float(base + most)
    x = jnp.maximum(jnp.where(x < last, x, last), as_float(base))
    return lax.bitcast_convert_type(x, jnp.int32) - base


def _number_of(x) -> int | None:
    """Returns an input as an int if it is a constant scalar, and None otherwise."""
    if isinstance(x, np.generic | int) and not isinstance(x, bool):
        return int(x)
    if isinstance(x, np.ndarray) and not x.shape:
        return int(x)
    return None


def _is_array(eqn, dtype) -> bool:
    aval = eqn.outvars[0].aval
    return bool(aval.shape) and aval.dtype == dtype


RULES: Mapping = {
    p.convert_element_type_p: _convert,
    p.bitcast_convert_type_p: _bitcast,
    p.shift_left_p: _shift_left,
    p.shift_right_logical_p: _shift_right,
    p.shift_right_arithmetic_p: _shift_right_signed,
    p.and_p: _and,
    p.xor_p: _xor,
    p.add_p: _add,
    p.sub_p: _sub,
    p.add_jaxvals_p: _add,
    p.max_p: _max,
    p.min_p: _min,
    p.clamp_p: _clamp,
    p.select_n_p: _select,
    p.broadcast_in_dim_p: _broadcast,
    p.copy_p: lambda eqn, x: x,
    p.stop_gradient_p: lambda eqn, x: x,
    operations.pattern_above: _pattern_above,
}
"""Rules for primitives and for :data:`.operations.OPERATIONS`. A rule for a primitive
is a function of an equation and its inputs, and may return NotImplemented. A rule for
an operation is a function of the inputs."""


def by_itself(eqn, *inputs) -> jax.Array:
    """Return the result of an equation that has no rule."""
    params = eqn.primitive.get_bind_params(eqn.params)
    return eqn.primitive.bind(*map(whole, inputs), **params)


def rules_for(generation: int | None) -> Mapping:
    """Return the rules for a TPU generation; None means that it is unknown."""
    if generation is None:
        return RULES
    # On v6e and newer, reciprocal and reciprocal root are one instruction each.
    return {**RULES, **({p.div_p: _div} if generation <= 5 else {p.sqrt_p: _sqrt})}


def generation_of_target() -> int | None:
    """Return the TPU generation that the program is for, or None if it is unknown."""
    try:
        return pltpu.get_tpu_info().generation
    except ValueError:
        return None
