"""TPU kernels compute blocks of ordinary numbers by shorter rules, others by all."""

from unittest import mock

import exact_steps
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from exact_steps import normal, trained
from jax import lax
from optimizers import assert_same_bits
from released import OPERATION_BY_OPERATION

from lowbit_optax import block_quantized, extra_bits
from pallas_kernels import operations
from pallas_kernels.fused_update.tpu import kernel as tpu
from pallas_kernels.fused_update.tpu.division import quotient
from pallas_kernels.fused_update.tpu.functions import Function
from pallas_kernels.fused_update.tpu.ordinary import (
    Checks,
    limit_of,
    rules_for_ordinary,
)
from pallas_kernels.fused_update.tpu.program import BlockProgram
from pallas_kernels.fused_update.tpu.rules import RULES
from pallas_kernels.fused_update.tpu.values import Constant, Field, Key, whole

pytestmark = pytest.mark.standard_promotion  # optax's

SHAPE = (8, 128)
U32, I32, F32 = jnp.uint32, jnp.int32, jnp.float32
EXTRAORDINARY = (np.nan, -np.nan, np.inf, -np.inf)


def full(number, dtype=F32):
    return jnp.full(SHAPE, number, dtype)


def with_one(number, place=(3, 77)):
    return full(1.5).at[place].set(number)


def run(function, *args, checks=None):
    """What a function gives for ordinary numbers, and where there are others."""
    checks = checks or Checks()
    like = [jax.ShapeDtypeStruct(SHAPE, U32 if isinstance(x, Field) else x.dtype)
            for x in args]  # fmt: skip
    rules = rules_for_ordinary(RULES, checks)
    return Function(function, *like)(*args, known={}, rules=rules), others(checks)


def others(checks, exists=None):
    total, bits = checks.found(exists)
    return ~np.isfinite(np.asarray(total)) | (np.asarray(bits) != 0)


# Rules for ordinary numbers.

ONE = 0x3F800000
RULED = {
    "no NaN": lambda x: jnp.where(jnp.isnan(x), F32(7), x),
    "pattern above": lambda x: operations.pattern_above(
        x, jnp.full(x.shape, ONE, I32), I32(9 << 23)
    ),
    "capped pattern": lambda x: operations.capped_pattern(
        lax.bitcast_convert_type(jnp.abs(x), I32), I32(ONE)
    ),
    "magnitude key": lambda x: operations.magnitude_key(
        lax.bitcast_convert_type(jnp.abs(x), I32), I32(99)
    ),
    "magnitude of key": lambda x: operations.magnitude_of_key(
        operations.magnitude_key(lax.bitcast_convert_type(jnp.abs(x), I32), I32(9)),
        I32(9),
    ),
    "arithmetic": lambda x: -(x * x + x) - x,
}


@pytest.mark.parametrize("name", RULED)
def test_rules_give_the_operations_numbers(name):
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    x[0, :3] = 0, -0.0, 2.0**-126
    got, other = run(RULED[name], jnp.asarray(x))
    want = RULED[name](jnp.asarray(x))
    assert whole(got).dtype == want.dtype
    assert np.asarray(whole(got)).tobytes() == np.asarray(want).tobytes()
    assert not other.any()


@pytest.mark.parametrize("number", EXTRAORDINARY)
def test_numbers_that_are_not_finite_are_found_where_a_nan_is_looked_for(number):
    _, other = run(RULED["no NaN"], with_one(number))
    np.testing.assert_array_equal(other, np.arange(1024).reshape(SHAPE) == 3 * 128 + 77)


def test_a_nan_that_reaches_what_is_checked_is_checked_there():
    def function(x, y):
        x = jnp.where(jnp.isnan(x), F32(0), x)
        total = x * F32(3) + y
        return jnp.where(jnp.isnan(total), F32(0), total)

    checks = Checks()
    _, other = run(function, with_one(np.nan), full(1), checks=checks)
    assert other[3, 77]
    assert len(checks._terms) == 1


def test_a_nan_that_does_not_reach_it_is_checked_by_itself():
    def function(x, y):
        x = jnp.where(jnp.isnan(x), F32(0), x)
        larger = jnp.maximum(lax.bitcast_convert_type(x, I32), I32(0))
        total = larger.astype(F32) + y
        return jnp.where(jnp.isnan(total), F32(0), total)

    _, other = run(function, with_one(np.nan), full(1))
    assert other[3, 77]


@pytest.mark.parametrize(("width", "first"), [(4, 0), (8, 0), (6, 0), (6, 4), (6, 2)])
def test_the_last_field_is_found_in_every_place_of_a_word_and_no_other_one(
    width, first
):
    last, shifts = (1 << width) - 1, range(first, 33 - width, width)
    words = np.random.default_rng(0).integers(0, 2**32, SHAPE, np.uint32)
    words[0], words[1] = 2**32 - 1, sum(last - 1 << shift for shift in shifts)
    checks, found = Checks(), np.zeros(SHAPE, bool)
    for shift in shifts:
        field, is_last = Field(jnp.asarray(words), shift, width), words >> shift & last
        is_last = is_last == last
        equal, other = run(lambda x: x == U32(last), field)
        assert equal == Constant(False, SHAPE)
        np.testing.assert_array_equal(other, is_last)
        differs, _ = run(lambda x: x != U32(last), field, checks=checks)
        assert differs == Constant(True, SHAPE)
        found |= is_last
    np.testing.assert_array_equal(others(checks), found)


def test_other_fields_are_compared():
    words = jnp.asarray(np.arange(1024, dtype=np.uint32).reshape(SHAPE))
    got, other = run(lambda x: x == U32(254), Field(words, 0, 8))
    np.testing.assert_array_equal(got, words % 256 == 254)
    assert not other.any()


def test_fields_that_an_encoding_gave_are_not_the_last():
    def function(x, field):
        field = operations.unless_infinite(x, field, U32(63))
        return field != U32(63), field << U32(2)

    (differs, shifted), other = run(function, full(1), full(5, U32))
    assert differs == Constant(True, SHAPE)
    np.testing.assert_array_equal(whole(shifted), full(20, U32))
    assert not other.any()


def test_keys_past_the_limit_are_found():
    key = Key(full(1), 2**31 - (127 + 50 << 23))
    assert limit_of(key) == 2.0**50
    for number in (2.0**50, np.inf, np.nan):
        checks = Checks()
        checks.below(with_one(number), 2.0**50)
        assert others(checks)[3, 77]
    checks = Checks()
    checks.below(full(2.0**50 * (1 - 2.0**-20)), 2.0**50)
    assert not others(checks).any()
    assert limit_of(Key(full(1), 2**31 - 0x7F800000)) == 2.0**100


def test_a_quotient_by_zero_is_found():
    assert np.isnan(quotient(F32(1), F32(0), F32(np.inf), is_ordinary=True))


def test_elements_that_do_not_exist_are_not_checked():
    here = jnp.arange(128) < jnp.full((8, 1), 77)
    checks = Checks()
    checks.at(here)
    checks.finite(with_one(np.nan))
    assert not others(checks).any()
    checks = Checks()
    checks.no_last_field(Field(full(0xFF, U32), 0, 8))
    assert not others(checks, jnp.zeros(SHAPE, bool)).any()
    assert others(checks).all()


# Kernels.

SHAPE_OF_LEAF = (152, 200)
MOMENTS = {
    "eight bits": block_quantized(8),
    "linear": block_quantized(8, code="linear"),
    "blocks of 128": block_quantized(8, block_size=128),
    "low": "low",
}
of_every_kind = pytest.mark.parametrize("moments", MOMENTS.values(), ids=MOMENTS)


def gradients(numbers):
    """Of two steps, with some numbers at their places in the first."""
    random = np.random.default_rng(0)
    first, second = np.float32(2.0) ** random.integers(-12, 3, (2, *SHAPE_OF_LEAF))
    for place, number in numbers.items():
        first[place] = number
    return [{"kernel": jnp.asarray(x)} for x in (first, second)]


def train(name, grads, moments, kernel=None):
    jax.clear_caches()  # what is patched would not be traced again
    tpu._call.cache_clear()
    options = {
        "inner": optax.adamw(
            2.0**-9, b1=0.5, b2=0.75, eps=2.0**-20, weight_decay=2.0**-7
        ),
        "weights": extra_bits(8),
        "moments": moments,
        "min_size": 0,
    }
    params = {"kernel": normal(SHAPE_OF_LEAF) if kernel is None else kernel}
    # In loops of several operations XLA may contract other products in each program.
    with mock.patch.object(exact_steps, "QUICK", OPERATION_BY_OPERATION):
        return trained(name, params, grads, **options)


def by_the_first_loop(*args):
    """Parameters and state without the loop for numbers that are not ordinary."""
    with mock.patch.object(BlockProgram, "_units", return_value=None):
        return train("tpu", *args)


def by_all_the_rules(*args):
    """Parameters and state as if no block had ordinary numbers alone."""
    found = Checks.found

    def every(self, exists):
        total, bits = found(self, exists)
        return total * F32(np.nan), bits

    with mock.patch.object(Checks, "found", every):
        return train("tpu", *args)


@pytest.mark.slow_to_compile
@of_every_kind
def test_blocks_of_ordinary_numbers_are_computed_once(moments):
    args = gradients({}), moments
    assert_same_bits(by_the_first_loop(*args), by_all_the_rules(*args))


@pytest.mark.slow_to_compile
def test_blocks_of_zeros_are_ordinary():
    args = gradients(dict.fromkeys(np.ndindex(64, 200), 0)), block_quantized(8)
    assert_same_bits(by_the_first_loop(*args), by_all_the_rules(*args))


NUMBERS = {
    (5, 6): np.nan,
    (70, 131): -np.inf,
    (100, 3): 2.0**51,
    (120, 150): 2.0**62,
    (151, 199): 2.0**127,
}


@pytest.mark.slow_to_compile
@of_every_kind
def test_other_blocks_are_computed_by_all_the_rules(moments):
    args = gradients(NUMBERS), moments
    assert_same_bits(train("tpu", *args), by_all_the_rules(*args))


@pytest.mark.slow_to_compile
@pytest.mark.parametrize("shape", [SHAPE_OF_LEAF, (256, 256)])
def test_other_blocks_have_the_bits_of_xla(monkeypatch, shape):
    # What lies beyond the edges of a ragged leaf may have blocks computed again anyway.
    monkeypatch.setitem(globals(), "SHAPE_OF_LEAF", shape)
    # In a second step products are not exact.
    args = gradients(NUMBERS)[:1], block_quantized(8)
    assert_same_bits(train("tpu", *args), train("xla", *args))


@pytest.mark.slow_to_compile
def test_the_first_loop_alone_would_be_wrong():
    args = gradients({(70, 131): np.inf})[:1], block_quantized(8)
    got, want = by_the_first_loop(*args), by_all_the_rules(*args)
    with pytest.raises(AssertionError):
        assert_same_bits(got, want)


@pytest.mark.slow_to_compile
def test_weights_that_are_not_finite_are_computed_by_all_the_rules():
    kernel = normal(SHAPE_OF_LEAF).at[5, 6].set(np.inf).at[77, 100].set(np.nan)
    args = gradients({}), block_quantized(8), kernel
    got = train("tpu", *args)
    assert_same_bits(got, by_all_the_rules(*args))
    assert jnp.isnan(got[0]["kernel"][77, 100])
