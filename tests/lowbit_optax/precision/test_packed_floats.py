"""Packed weights of 10, 12 or 14 bits are stored compactly and restored exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import precision
from lowbit_optax.precision import FloatFormat
from tests.helpers.optimizers import assert_same_bits

ALL = jnp.arange(2**16, dtype=jnp.uint16).reshape(256, 256)
WEIGHTS = [FloatFormat(8, m) for m in range(1, 7)]
OTHERS = [
    FloatFormat(5, 6),
    FloatFormat(4, 3, 4),
    FloatFormat(8, 3, overflow="infinity"),
]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
@pytest.mark.parametrize("fmt", WEIGHTS + OTHERS, ids=str)
def test_all_patterns_of_16_bits_come_back_rounded(fmt, dtype):
    """Numbers of the format are therefore restored unchanged."""
    x = jax.lax.bitcast_convert_type(ALL, dtype)
    packed = precision.pack(x, fmt)
    assert packed.nbytes == x.size * fmt.bits / 8
    got = precision.unpack(packed)
    is_number = ~jnp.isnan(x)
    if fmt.specials == "ieee":
        np.testing.assert_array_equal(~jnp.isnan(got), is_number)
    assert_same_bits(*(jnp.where(is_number, y, 0) for y in (got, fmt.round(x))))


@pytest.mark.parametrize("shape", [(1,), (50,), (4096,), (7, 5), (24, 3, 40), (2, 65)])
def test_any_shape_comes_back(shape):
    fmt = FloatFormat(8, 5)
    normal = np.random.default_rng(0).normal(size=shape)
    x = fmt.round(jnp.asarray(normal, jnp.bfloat16))
    packed = precision.pack({"w": x}, fmt)
    assert packed["w"].shape == shape
    assert_same_bits(precision.unpack(packed), {"w": x})


def test_arrays_that_cannot_be_packed_stay_unchanged():
    tree = {
        "wide": jnp.ones((64, 64)),
        "short": jnp.ones((64, 64), jnp.float8_e5m2),
        "scalar": jnp.bfloat16(1.5),
        "count": jnp.int32(3),
        "empty": jnp.ones((0, 8), jnp.bfloat16),
        "key": jax.random.key(0),
        "nothing": None,
    }
    packed = precision.pack(tree, FloatFormat(8, 1))
    assert jax.tree.structure(packed) == jax.tree.structure(tree)
    assert_same_bits(precision.unpack(precision.pack(packed, FloatFormat(8, 1))), tree)


def test_training_continues_from_packed_weights_bit_for_bit():
    fmt = FloatFormat(8, 3)
    weights = lowbit_optax.kahan(float_format=fmt)
    tx = lowbit_optax.lowbit(optax.sgd(2.0**-6), weights=weights)
    normal = np.random.default_rng(0).normal(size=(9, 64, 64))
    params, *series = map(jnp.asarray, normal.astype(np.float32))
    params, state = lowbit_optax.from_master(tx, params, jnp.bfloat16, None)
    step = jax.jit(functools.partial(lowbit_optax.step, tx))

    @jax.jit
    def packed_step(params, residual, state, grads):
        state = state._replace(residual=precision.unpack(residual))
        params, state = lowbit_optax.step(tx, precision.unpack(params), state, grads)
        return *precision.pack((params, state.residual), fmt), state

    # No step has rounded the initial master, so run one step first.
    params, state = step(params, state, series[0])
    stored = precision.pack((params, state.residual), fmt)
    assert jax.tree.leaves(stored)[0].nbytes == 1.5 * params.size
    packed_state = state
    for grads in series:
        params, state = step(params, state, grads)
        *stored, packed_state = packed_step(*stored, packed_state, grads)
    assert_same_bits(precision.unpack(stored), [params, state.residual])


def test_a_layer_of_a_stack_is_unpacked_in_a_scan():
    stack = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64, 64)), jnp.bfloat16)
    stack = FloatFormat(8, 5).round(stack)
    packed = precision.pack(stack, FloatFormat(8, 5))
    body = lambda carry, layer: (carry, precision.unpack(layer))
    assert_same_bits(jax.lax.scan(body, 0, packed)[1], stack)


def test_words_of_another_axis_are_refused():
    packed = precision.pack(jnp.ones((64, 5), jnp.bfloat16), FloatFormat(8, 5))
    with pytest.raises(ValueError, match=r"words .* 14-bit fields"):
        precision.unpack(jax.tree.map(lambda words: words[:2], packed))
