"""Every rule that TPU kernels use to evaluate a body gives the operation's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from pallas_kernels import operations
from pallas_kernels.fused_update.tpu.evaluation import (
    RULES,
    Evaluation,
    Function,
    Narrow,
    Sum,
    quotient,
    root,
    rules_for,
    whole,
)

SPECIAL = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1, -3, 1e-30, 2.5e30])
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2)
U32 = jnp.uint32
NARROW = (*FLOATS, jnp.uint8, jnp.uint16)
WORDS = np.random.default_rng(0).integers(0, 2**32, (8, 128), np.uint32)


def evaluated(function, *args):
    """The result of a function with the rules; values of 8 and 16 bits are words."""
    like = [jax.typeof(x) for x in args]
    result = Function(function, *like)(Evaluation({}, RULES), *map(as_word, args))
    if not isinstance(result, Narrow):
        return whole(result)
    bits = np.asarray(result.word) >> (32 - result.width)
    return bits.astype(f"uint{result.width}").view(result.dtype)


def as_word(x):
    width = 8 * x.dtype.itemsize
    if width == 32:
        return x
    bits = np.asarray(x).view(f"uint{width}").astype(np.uint32)
    return Narrow(jnp.asarray(bits << (32 - width)), x.dtype)


def every(dtype):
    """All patterns of a narrow dtype, repeated."""
    width = 8 * jnp.dtype(dtype).itemsize
    bits = np.arange(2**16).reshape(-1, 128) % 2**width
    return jnp.asarray(bits.astype(f"uint{width}").view(dtype))


def assert_same(got, want):
    assert got.dtype == want.dtype
    got, is_nan = jnp.asarray(got), np.asarray(want != want)
    np.testing.assert_array_equal(got != got, is_nan)
    got, want = (np.asarray(x)[~is_nan].tobytes() for x in (got, want))
    assert got == want


def by_shifts(left, right):
    return lambda x: (x << U32(left)) >> U32(right)


def signed(left, right):
    return lambda x: (x << U32(left)).astype(jnp.int32) >> jnp.int32(right)


OF_WORDS = {
    **{f"<< {n}": lambda x, n=n: x << U32(n) for n in (0, 1, 31)},
    **{f">> {n}": lambda x, n=n: x >> U32(n) for n in (0, 1, 31)},
    **{f"& {n}": lambda x, n=n: x & U32(n) for n in (0, 1, 0xFF, 0xF0, 2**32 - 1)},
    "<< >>": by_shifts(20, 8),
    "<< >> to the lowest": by_shifts(8, 24),
    ">> >>": lambda x: x >> U32(3) >> U32(20),
    ">> & <<": lambda x: (x >> U32(3) & U32(0x1F)) << U32(7),
    "<< <<": lambda x: x << U32(3) << U32(20),
    "<< << beyond": lambda x: x << U32(20) << U32(20),
    "& &": lambda x: x & U32(0xFFF) & U32(0xF),
    "& >>": lambda x: (x & U32(0xFFF)) >> U32(4),
    "<< &": lambda x: x << U32(4) & U32(0xFF),
    "signed byte": signed(24, 24),
    "signed byte with zeros below": signed(24, 8),
    "int32 and back": lambda x: (x >> U32(4)).astype(jnp.int32).astype(U32),
    "bits as int32": lambda x: lax.bitcast_convert_type(x & U32(7), jnp.int32),
    "byte": lambda x: (x >> U32(24)).astype(jnp.uint8),
    "half": lambda x: x.astype(jnp.int32).astype(jnp.uint16),
    "a difference of constants": lambda x: x >> (U32(32) - U32(7)),
    "xor with itself shifted": lambda x: x ^ x >> U32(16),
    "xor with itself shifted >> 16": lambda x: (x ^ x >> U32(16)) >> U32(16),
    "xor with itself shifted >> 15": lambda x: (x ^ x >> U32(16)) >> U32(15),
    "xor with itself shifted << 8": lambda x: (x ^ x >> U32(16)) << U32(8),
    "a scalar among arrays": lambda x: jnp.where(x > U32(3), x, U32(3)),
    "a maximum": lambda x: jnp.maximum(x, x[::-1]),
    "a minimum with a scalar": lambda x: jnp.minimum(x, U32(2**31)),
    "a mask among masks": lambda x: jnp.where(
        jnp.where(x > U32(2**30), x > x[::-1], x < U32(99)), x, U32(7)
    ),
    "limited": lambda x: lax.clamp(U32(3), x, U32(2**31 + 1)),
    "copied": lambda x: lax.stop_gradient(jnp.copy(x)),
}


@pytest.mark.parametrize("name", OF_WORDS)
def test_rules_for_words_give_the_operations_numbers(name):
    words = jnp.asarray(WORDS)
    assert_same(evaluated(OF_WORDS[name], words), OF_WORDS[name](words))


def bits(x):
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


OF_NARROW = {
    "converted": lambda x: x.astype(jnp.float32 if x.dtype in FLOATS else U32),
    "bits": bits,
    "bits as int32": lambda x: bits(x).astype(jnp.int32),
    "upper bits": lambda x: bits(x).astype(U32) << U32(32 - 8 * x.dtype.itemsize),
    "there and back": lambda x: bits(x).astype(U32).astype(bits(x).dtype),
    "selected": lambda x: jnp.where(bits(x).astype(U32) > U32(99), x, x),
}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", OF_NARROW)
def test_rules_for_narrow_dtypes_give_the_operations_numbers(name, dtype):
    x, function = every(dtype), OF_NARROW[name]
    assert_same(evaluated(function, x), function(x))


def test_a_selection_has_the_numbers_of_both_cases():
    x, y = every(jnp.bfloat16), every(jnp.bfloat16)[::-1]
    select = lambda x, y: jnp.where(bits(x).astype(U32) > U32(2**15), x, y)
    assert_same(evaluated(select, x, y), select(x, y))


def test_scalars_are_added_to_a_sum_before_the_array():
    words, scalar = jnp.asarray(WORDS), U32(2**31)
    add = Function(lambda x, y: x + y, words, scalar)
    total = add(Evaluation({}, RULES), Sum(words, U32(5), 7), scalar)
    assert isinstance(total, Sum)
    np.testing.assert_array_equal(whole(total), words + U32(12 + 2**31))


def test_patterns_above_another_are_those_of_the_operation():
    base, most = jnp.int32(0x3F800000), jnp.int32(0x00FFFFFF)
    x = jnp.resize(jnp.asarray(SPECIAL), (8, 128))
    above = lambda x: operations.pattern_above(x, jnp.full(x.shape, base), most)
    np.testing.assert_array_equal(evaluated(above, x), above(x))


def test_every_rule_has_a_case():
    functions = [(f, jnp.asarray(WORDS)) for f in OF_WORDS.values()]
    functions += [(f, every(dtype)) for f in OF_NARROW.values() for dtype in NARROW]
    functions += [(lambda x: x + x, jnp.asarray(WORDS))]
    found = {primitives.add_jaxvals_p, operations.pattern_above}
    for function, x in functions:
        found |= operations_in(jax.make_jaxpr(function)(x).jaxpr)
    assert RULES.keys() <= found


def operations_in(jaxpr):
    """The primitives and operations of a jaxpr, and of those that it calls."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(operations.operation_of(eqn))
        if "jaxpr" in eqn.params:
            found |= operations_in(eqn.params["jaxpr"].jaxpr)
    return found


def test_quotients_are_those_of_jax_to_a_unit_in_the_last_place():
    x, y = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    with np.errstate(all="ignore"):
        want, inverse = x / y, np.float32(1) / y * np.float32(1 + 2.0**-13)
    got = quotient(jnp.asarray(x), jnp.asarray(y), jnp.asarray(inverse))
    is_normal = ~(np.abs(want) < 2.0**-126) | (x == 0)
    np.testing.assert_allclose(got[is_normal], want[is_normal], rtol=2.0**-22)


def test_roots_are_those_of_jax_to_a_unit_in_the_last_place():
    x = np.append(SPECIAL, np.float32([2.0**-126, np.finfo(np.float32).max]))
    with np.errstate(all="ignore"):
        want = np.sqrt(x)
    np.testing.assert_allclose(root(jnp.asarray(x)), want, rtol=2.0**-22)


def test_without_a_generation_roots_and_quotients_are_jaxs():
    assert rules_for(None) is RULES
    assert not {lax.div_p, lax.sqrt_p} & RULES.keys()
    assert evaluated(jnp.sqrt, jnp.full((8, 128), 2.0))[0, 0] == np.sqrt(np.float32(2))
