"""Quantised weights use unbiased codes, land exactly and train as with float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import lpmm_adam, lpmm_sgd
from lowbit_optax._numerics import linear_code
from lowbit_optax._numerics.codes import as_fields
from lowbit_optax.lpmm import QuantizedTensor, dequantize, value_and_grad
from tests.helpers.blocks import blocks_of
from tests.helpers.given_words import random_of
from tests.helpers.optimizers import assert_same_bits, initial, jitted
from tests.helpers.quantized_weights import quantizer, values_of

HALVES = jnp.bfloat16, jnp.float16
BITS = [4, 5, 8, 10, 12, 15, 16]
ROUNDINGS = pytest.mark.parametrize("rounding", ["nearest", "stochastic"])


def normal(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def quantize(x, bits=12, **options):
    return quantizer(bits, **{"min_size": 0} | options)(x)


def steps_of(tensor, shape):
    """Returns the step size (delta) of every element."""
    _, block = blocks_of(shape, tensor.block_size)
    return np.asarray(tensor.scales).view(np.float32)[block]


# Numbers.


@pytest.mark.parametrize("bits", [4, 8, 12])
def test_the_mean_over_all_random_words_is_the_value_itself(bits):
    # Try codes plus multiples of 1/256 of a step, with every leading byte of a word.
    top = linear_code.largest_code(bits)
    codes = np.unique(np.clip([-top, -top + 1, -3, -1, 0, 1, 2, top - 1], -top, top))
    x = (codes[:, None] + np.arange(256) / 256).reshape(-1, 1).astype(np.float32)
    x = np.clip(x, -top, top) * np.float32(2.0**-5)
    words = np.broadcast_to(np.arange(256, dtype=np.uint32) << 24, (len(x), 256))
    code = linear_code.QuantizedFields(bits, block_size=32)
    prepared = code.prepare(as_fields(jnp.full(words.shape, 2.0**-5)))
    wide = jnp.asarray(np.broadcast_to(x, words.shape))
    fields = code.encode(wide, prepared, random_of(jnp.asarray(words)))
    values = code.decode(fields, prepared)
    mean = np.asarray(values).astype(np.float64).mean(axis=1)
    np.testing.assert_array_equal(mean, x[:, 0].astype(np.float64))


@ROUNDINGS
@pytest.mark.parametrize("bits", BITS)
def test_an_error_is_below_a_step_and_to_nearest_half_of_one(bits, rounding):
    x = normal(100, 33)
    tensor = quantize(x, bits, block_size=64, rounding=rounding)
    delta = steps_of(tensor, x.shape)
    error = np.abs(np.asarray(values_of(tensor)) - x)
    # Also allow half a unit of float32, in which the difference is computed.
    limit = delta * (0.5 if rounding == "nearest" else 1.0)
    assert np.all(error <= limit * (1 + 2.0**-9))
    largest = np.abs(np.pad(x, ((0, 4), (0, 7)))).reshape(13, 8, 5, 8).max((1, 3))
    scales = np.asarray(tensor.scales).view(np.float32)
    top = linear_code.largest_code(bits)
    assert np.all(scales * top >= largest * (1 - 1e-6))
    assert np.all(scales * top <= largest * (1 + 2.0**-3 + 1e-6))


@ROUNDINGS
@pytest.mark.parametrize("bits", BITS)
def test_values_on_the_grid_stay_unchanged(bits, rounding):
    x = normal(96, 40, scale=np.float32(1e-3))
    x[:, 4] = 0
    # The largest value of every block has the largest code, so the step stays the same.
    x[::64] = linear_code.largest_code(bits) * np.float32(2.0**-9)
    first = quantize(x, bits, rounding="stochastic")
    again = quantize(values_of(first), bits, rounding=rounding, seed=5)
    assert_same_bits(again, first)


@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8, 12])
def test_updates_of_zero_mean_do_not_make_the_steps_grow(bits):
    # If the largest weight were rounded up, it would get the largest code of a larger
    # step, and the next update would exceed that code.
    params = quantize(normal(2048, 4), bits)
    start = jnp.asarray(steps_of(params, params.shape))
    tx = lpmm_sgd(1.0)

    def body(carry, i):
        draws = jax.random.normal(jax.random.key(i), params.shape)
        grads = jnp.float32(0.1) * start * draws
        return lowbit_optax.step(tx, carry[0], carry[1], grads), None

    run = jax.jit(lambda carry: jax.lax.scan(body, carry, jnp.arange(300)))
    (after, _), _ = run((params, initial(tx, params)))
    growth = steps_of(after, after.shape) / start
    moved = (values_of(after) - values_of(params)) / start
    assert float(growth.max()) < (6 if bits < 6 else 2)
    # The updates alone have a variance of 3, and rounding adds 0.08 for each update.
    assert float(moved.var()) < (100 if bits < 6 else 30)


@pytest.mark.parametrize("bits", [4, 16])
def test_extremes_of_float32(bits):
    largest = np.finfo(np.float32).max
    x = np.zeros((32, 4 * 32), np.float32)  # four blocks
    x[:2, 0] = largest, -largest
    x[:2, 32] = 1e-38, -1e-45
    x[:3, 64] = np.nan, np.inf, 7.0
    tensor = quantize(x, bits, rounding="stochastic")
    assert not steps_of(tensor, x.shape)[:, 96:].any()  # the block is zero
    got = values_of(tensor)
    x, got = x[:, ::32], np.asarray(got)[:, ::32]
    np.testing.assert_allclose(got[:2, 0], x[:2, 0], rtol=0.15)
    assert np.all(np.abs(got[:, 1]) < 1e-29)
    # Non-finite values stay visible and do not change their neighbours.
    assert np.isnan(got[:2, 2]).all()
    np.testing.assert_allclose(got[2:, 2], x[2:, 2], rtol=0.15)
    np.testing.assert_array_equal(got[:, 3], 0)


# Shapes.


SHORT = [(1,), (31,), (1, 1), (2, 1, 1)]
LONG = [(5000,), (64, 7), (65, 7), (3, 130), (3, 3, 20, 50)]


@pytest.mark.parametrize("bits", [5, 12])
@pytest.mark.parametrize("shape", SHORT + LONG, ids=str)
def test_any_shape_round_trips(shape, bits):
    x = normal(*shape)
    tensor = quantize(x, bits, block_size=64)
    assert tensor.shape == shape
    assert (tensor.ndim, tensor.size) == (len(shape), x.size)
    assert {leaf.dtype for leaf in jax.tree.leaves(tensor)} == {jnp.dtype(jnp.uint32)}
    values, *narrow = jax.jit(
        lambda tensor: [tensor.dequantize(dtype) for dtype in (jnp.float32, *HALVES)]
    )(tensor)
    assert values.shape == shape
    assert np.all(np.abs(values - x) <= steps_of(tensor, shape) * 0.502)
    for dtype, halves in zip(HALVES, narrow, strict=True):
        np.testing.assert_array_equal(halves, values.astype(dtype))


def test_small_and_integer_leaves_stay():
    params = {
        "small": jnp.ones(8, jnp.bfloat16),
        "scalar": jnp.float16(2),
        "step": jnp.int32(3),
        "empty": jnp.ones((0, 4)),
        "none": None,
        "large": jnp.ones((64, 64), jnp.bfloat16),
    }
    got = lowbit_optax.lpmm.quantize_params(params)
    assert isinstance(got["large"], QuantizedTensor)
    back = dequantize(got, jnp.bfloat16)
    np.testing.assert_array_equal(back["large"], params["large"])
    for tree in (got, back):
        assert tree["none"] is None
        assert tree["small"].dtype == tree["scalar"].dtype == jnp.float32
        assert tree["step"].dtype == jnp.int32


def test_a_slice_of_a_stack_is_a_tensor_of_one_layer():
    params = {"w": normal(32, 48, 64), "b": normal(32, 200)}
    tensor = quantize(params, 10, stacked=lambda path: True)
    whole = values_of(tensor)

    def body(_, layer):
        assert layer["w"].shape == (48, 64)
        assert layer["b"].shape == (200,)
        return None, dequantize(layer)

    _, by_scan = jax.lax.scan(body, None, tensor)
    assert_same_bits(by_scan, whole)
    assert_same_bits(jax.jit(jax.vmap(dequantize))(tensor), whole)
    first = jax.tree.map(lambda x: x[7], tensor)
    assert_same_bits(values_of(first), jax.tree.map(lambda x: x[7], whole))


# Landing.


def params_of(bits=12, seed=0):
    return quantize(
        {
            "stack": normal(3, 70, 40, seed=seed),
            "matrix": normal(128, 64, seed=seed + 1),
            "bias": jnp.asarray(normal(40)),
        },
        bits,
        min_size=1000,
    )


def gradients(count, scale=0.1):
    like = {"stack": (3, 70, 40), "matrix": (128, 64), "bias": (40,)}
    for i in range(count):
        yield {
            name: jnp.asarray(normal(*shape, seed=100 + i, scale=scale))
            for name, shape in like.items()
        }


@pytest.mark.parametrize("bits", [4, 5, 6, 7, 8, 12, 16])
def test_a_step_without_gradients_changes_nothing(bits):
    # The largest weight of a block can be anywhere below its step's largest code.
    x = normal(1024, 64) * np.exp(normal(1024, 1, seed=1, scale=3.0))
    params = quantize(x, bits, block_size=64, rounding="stochastic")
    tx = lpmm_sgd(1.0)
    state, step = initial(tx, params), jitted(tx, lowbit_optax.step)
    for seed in range(8):
        grads = 0.3 * normal(*x.shape, seed=seed) * values_of(params)
        params, state = step(params, state, grads)
        still, _ = step(params, state, jnp.zeros(x.shape))
        assert_same_bits(still, params)


def test_new_parameters_are_the_quantised_sum():
    params, tx = params_of(), lpmm_sgd(0.05, rounding="nearest")
    (grads,) = gradients(1)
    updates, _ = jax.jit(tx.update)(grads, initial(tx, params), params)
    landed = values_of(optax.apply_updates(params, updates))
    for name in ("stack", "matrix"):
        expected = values_of(params[name]) - jnp.float32(0.05) * grads[name]
        again = values_of(quantize(expected, 12))
        np.testing.assert_array_equal(landed[name], again)
    np.testing.assert_allclose(
        landed["bias"], params["bias"] - jnp.float32(0.05) * grads["bias"], rtol=1e-6
    )


# Training.


# Gradients of losses.


def test_a_loss_takes_arrays_and_its_gradients_have_their_shapes():
    params = params_of() | {"n": jnp.int32(2)}

    def loss_fn(p, factor):
        total = sum(jnp.sum(p[k].astype(jnp.float32) ** 2) for k in ("stack", "bias"))
        return factor * total, p["matrix"].dtype

    (value, dtype), grads = value_and_grad(loss_fn, jnp.bfloat16, has_aux=True)(
        params, jnp.float32(0.5)
    )
    arrays = values_of(params, jnp.bfloat16)
    assert dtype == jnp.bfloat16
    assert value == loss_fn(arrays, jnp.float32(0.5))[0]
    np.testing.assert_array_equal(grads["stack"], arrays["stack"])
    np.testing.assert_array_equal(grads["bias"], arrays["bias"])
    np.testing.assert_array_equal(grads["matrix"], jnp.zeros((128, 64), jnp.bfloat16))


LAYERS, WIDTH = 16, 64


def scanned(dequantize_layer):
    def loss_fn(params, x):
        @jax.checkpoint
        def body(x, layer):
            layer = dequantize_layer(layer)
            return jnp.tanh(x @ layer["w"] + layer["b"]), None

        x, _ = jax.lax.scan(body, x, params)
        return jnp.sum(x**2)

    return loss_fn


def stacked_params():
    params = {
        "w": normal(LAYERS, WIDTH, WIDTH, scale=1 / 8),
        "b": normal(LAYERS, WIDTH, scale=1 / 8),
    }
    return quantize(params, stacked=lambda path: True)


def test_layers_dequantised_in_a_scan_give_the_same_gradients():
    params, x = stacked_params(), jnp.asarray(normal(4, WIDTH))
    one = jax.jit(value_and_grad(scanned(lambda layer: layer)))(params, x)
    other = jax.jit(value_and_grad(scanned(dequantize), lazy=True))(params, x)
    assert other[1]["w"].shape == (LAYERS, WIDTH, WIDTH)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), one, other)
    assert float(jnp.abs(one[1]["b"]).min(axis=1).max()) > 0


@pytest.mark.standard_promotion
@pytest.mark.parametrize("nesterov", [False, True])
def test_adam_has_the_nesterov_momentum_of_optax(nesterov):
    weights, grads = {"w": jnp.ones((64, 64))}, {"w": jnp.full((64, 64), 0.5)}
    params = lowbit_optax.lpmm.quantize_params(weights, bits=16)
    tx = lpmm_adam(0.1, nesterov=nesterov)
    params, _ = lowbit_optax.step(tx, params, initial(tx, params), grads)
    theirs = optax.adam(0.1, nesterov=nesterov)
    updates, _ = theirs.update(grads, theirs.init(weights))
    np.testing.assert_allclose(values_of(params["w"]), 1 + updates["w"], atol=0.02)


# Bad input.


def test_a_gradient_that_is_not_finite_shows_in_its_weight_alone():
    params, tx = params_of(), lpmm_sgd(0.1)
    (grads,) = gradients(1)
    grads["matrix"] = grads["matrix"].at[3, 4].set(jnp.inf)
    after, _ = jitted(tx, lowbit_optax.step)(params, initial(tx, params), grads)
    values = np.asarray(values_of(after["matrix"]))
    assert np.isnan(values[3, 4])
    assert np.isfinite(values).sum() == values.size - 1
