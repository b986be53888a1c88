"""Block-scaled float8 weights round, store and update as documented."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import lowbit
from lowbit_optax._numerics.random_bits import random_bits
from lowbit_optax.block_scaling import BlockScaledTensor, block_scale
from lowbit_optax.formats.block_scaled import BlockScaledWeights
from lowbit_optax.formats.extra_bits import ExtraBits
from tests.helpers.optimizers import (
    apply,
    assert_same_bits,
    initial,
    normal,
    train,
    weights_only,
)
from tests.helpers.patterns import assert_same, every, patterns_of

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
TINY = float(np.finfo(np.float32).smallest_normal)

scaled_rows = jax.jit(functools.partial(block_scale, axis=0, min_size=0))
"""Scales a matrix of 32 rows, in which every column is a block."""


def columns(*rows):
    """Returns one block per column with these leading values, followed by zeros."""
    rows = np.broadcast_arrays(*map(np.atleast_1d, rows))
    x = np.zeros((32, rows[0].size), np.float32)
    x[: len(rows)] = rows
    return jnp.asarray(x)


def tensor_of(codes, scales):
    """Builds a tensor from uint8 codes ``[32, blocks]`` and scales ``[1, blocks]``."""
    return BlockScaledTensor(jnp.asarray(codes), jnp.asarray(scales), -2)


# Values and codes.


def test_every_code_with_every_scale_is_their_product():
    codes, scales = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256))
    scales = scales.astype(np.uint8)
    with np.errstate(all="ignore"):
        want = codes.view(E4M3).astype(np.float64) * scales.view(E8M0).astype(float)
        want = want.astype(np.float32).reshape(-1)
    blocks = tensor_of(
        np.broadcast_to(codes.reshape(-1), (32, 2**16)), scales.reshape(1, -1)
    )
    got = np.asarray(blocks.dequantize())[0]
    is_normal = ~(np.abs(want) < TINY)
    assert_same(got[is_normal], want[is_normal])
    below = got[~is_normal]
    np.testing.assert_array_equal((below == 0) | (below == want[~is_normal]), True)


@pytest.mark.parametrize("largest", [0.0, 1.0, 448.0, 448.5, 3e38, 1e-30])
def test_every_bfloat16_is_rounded_to_the_nearest_code(largest):
    values = every(jnp.bfloat16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(values), np.abs(values), 0)
    block = np.maximum(finite, np.float32(largest)).astype(float)
    significand, exponent = np.frexp(block / 448)
    exponent = np.where(significand == 0.5, exponent - 1, exponent)
    exponent = np.maximum(np.where(block == 0, -96, exponent), -96)
    got = scaled_rows(columns(values, largest))
    np.testing.assert_array_equal(np.asarray(got.scales_e8m0)[0], exponent + 127)
    with np.errstate(all="ignore"):
        want = (values.astype(float) * 0.5**exponent).astype(E4M3)
    # XLA:CPU treats subnormal float32 numbers as 0.
    want = np.where(finite < TINY, np.copysign(0, want), want).astype(E4M3)
    is_number = np.isfinite(values)
    assert_same(np.asarray(got.codes)[0][is_number], want[is_number])
    assert np.all(np.isnan(np.asarray(got.codes)[0][~is_number].astype(float)))
    assert not np.any(np.isnan(np.asarray(got.codes)[1:].astype(float)))


# Residuals.


def joined(format_, codes, fields, scales):
    return jax.jit(format_.join)(tensor_of(codes, scales), fields)


@pytest.mark.parametrize(
    ("exponent", "rounding"),
    [
        (-96, "nearest"),
        (0, "nearest"),
        (119, "nearest"),
        (0, "toward_zero"),
        (0, "stochastic"),
    ],
)
def test_every_code_with_every_residual_is_stored_again_as_it_is(exponent, rounding):
    format_ = BlockScaledWeights(ExtraBits(7, rounding, packed=False), -2)
    width = format_.format.width
    codes, fields = np.meshgrid(np.arange(256), np.arange(2**width))
    ones = np.ones((31, codes.size), int)
    # The first row determines the scale.
    codes = np.concatenate([0x7E * ones[:1], codes.reshape(1, -1), 0 * ones[:30]])
    fields = np.concatenate([0 * ones[:1], fields.reshape(1, -1), 0 * ones[:30]])
    scales = np.full((1, codes.shape[1]), exponent + 127)
    masters = joined(
        format_,
        codes.astype(np.uint8),
        fields.astype(np.uint32),
        scales.astype(np.uint8),
    )
    random = random_bits(jnp.uint32(1), jnp.uint32(2), [3])[0]
    split = jax.jit(functools.partial(format_.split, dtype=None))
    param, residual = split(masters, random=random)
    again = jax.jit(format_.join)(param, residual)
    assert_same(again, masters)
    if rounding == "stochastic":
        return  # the code is chosen at random
    param, residual = split(again, random=random)
    assert_same_bits(split(masters, random=random), (param, residual))
    # Check only codes that rounding can return: nonzero and below 448.
    is_own = (codes[1] & 0x7F < 0x7E) & (codes[1] & 0x7F > 0)
    np.testing.assert_array_equal(
        np.asarray(param.codes_e4m3)[1][is_own], codes[1][is_own]
    )
    np.testing.assert_array_equal(np.asarray(residual)[1][is_own], fields[1][is_own])


# Steps.

FORMATS = {
    "8 extra bits": lowbit_optax.extra_bits(8),
    "toward zero": lowbit_optax.extra_bits(8, rounding="toward_zero"),
    "stochastic sums": lowbit_optax.extra_bits(12, sum_rounding="stochastic"),
    "stochastic": lowbit_optax.stochastic_rounding(),
    "error into trace": lowbit_optax.stochastic_rounding(error_feedback="trace"),
    "master copy": lowbit_optax.master_copy(),
    "nearest": lowbit_optax.nearest(),
}


@pytest.mark.parametrize("name", FORMATS)
def test_with_scales_of_1_it_trains_as_float8_arrays_do(name):
    tx = weights_only(optax.sgd(0.5, momentum=0.9), FORMATS[name], min_size=0)
    x, series = normal(0), [normal(seed).at[::32].set(0) for seed in (1, 2, 3)]
    x = x.at[::32].set(448.0)
    like = jax.eval_shape(functools.partial(block_scale, min_size=0), x)
    blocks, state = lowbit_optax.from_master(tx, x, like)
    plain, plain_state = lowbit_optax.from_master(tx, x, jnp.float8_e4m3fn, None)
    blocks, state = train(tx, blocks, state, series, lowbit_optax.step)
    plain, plain_state = train(tx, plain, plain_state, series, lowbit_optax.step)
    np.testing.assert_array_equal(blocks.scales_e8m0, 127)
    assert_same_bits(blocks.codes_e4m3, jnp.asarray(patterns_of(plain)))
    assert_same_bits(jax.tree.leaves(state), jax.tree.leaves(plain_state))


def model():
    """Returns a run with a matrix of two magnitudes and a float32 vector."""
    tx = lowbit(optax.adamw(0.05))
    size = jnp.where(jnp.arange(64) < 32, 1.0, 64.0)[:, None]
    params = {"w": normal(0) * size, "b": normal(1, (8,))}
    start = jax.jit(functools.partial(lowbit_optax.from_master, tx))
    return tx, *start(params, jax.eval_shape(block_scale, params))


def gradients(count):
    return [{"w": normal(i), "b": normal(i, (8,))} for i in range(10, 10 + count)]


@pytest.mark.standard_promotion
def test_updates_land_exactly_by_any_addition():
    tx, params, state = model()
    want = train(tx, params, state, gradients(3), lowbit_optax.step)
    assert not np.array_equal(want[0]["w"].scales_e8m0, params["w"].scales_e8m0)
    assert_same_bits(train(tx, params, state, gradients(3), apply), want)
    direct = lowbit_optax.direct_updates(tx)
    assert_same_bits(train(direct, params, state, gradients(3), apply), want)


@pytest.mark.standard_promotion
def test_masters_follow_float32():
    tx, params, state = model()
    masters = lowbit_optax.master_weights(params, state)
    plain = optax.adamw(0.05)
    want, _ = train(plain, masters, initial(plain, masters), gradients(5))
    got = lowbit_optax.master_weights(*train(tx, params, state, gradients(5)))
    moved = got["w"] - masters["w"]
    wanted = want["w"] - masters["w"]
    assert float(jnp.abs(wanted).mean()) > 0.1
    # The largest weights, about 200, have units of 2^-4.
    np.testing.assert_allclose(moved[:32], wanted[:32], atol=0.02)
    np.testing.assert_allclose(moved, wanted, atol=0.3)
    assert float(jnp.abs(jnp.mean(moved - wanted))) < 0.003


def test_a_nan_stays_where_it_is():
    tx = weights_only(optax.sgd(1.0), lowbit_optax.extra_bits(8), min_size=0)
    params = scaled_rows(normal(0, (32, 4)))
    grads = jnp.zeros((32, 4)).at[3, 0].set(jnp.nan).at[4, 1].set(jnp.inf)
    after, _ = train(tx, params, initial(tx, params), [grads], lowbit_optax.step)
    is_nan = np.isnan(np.asarray(after.dequantize()))
    np.testing.assert_array_equal(is_nan, ~np.isfinite(grads))
    np.testing.assert_array_equal(
        np.where(is_nan, 0, after.codes_e4m3), np.where(is_nan, 0, params.codes_e4m3)
    )


# Products.


def test_scaled_products_accept_codes_and_scales():
    x, w = block_scale(normal(0, (8, 64)), axis=-1, min_size=0), block_scale(normal(1))
    got = jax.lax.scaled_dot(
        x.codes,
        w.codes,
        lhs_scale=x.scales,
        rhs_scale=w.scales,
        preferred_element_type=jnp.float32,
    )
    want = np.asarray(x.dequantize(), float) @ np.asarray(w.dequantize(), float)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_leaves_stay_as_they_are_where_the_axis_is_none():
    params = {"conv": jnp.ones((3, 3, 5, 64)), "b": jnp.ones(64), "n": jnp.arange(64)}
    params |= {"w": jnp.ones((64, 64), jnp.bfloat16)}
    got = block_scale(params, axis=lambda path: None if "conv" in path else -1)
    assert got["w"].scales.shape == (64, 2)
    del got["w"], params["w"]
    assert_same_bits(got, params)
