"""lowbit transformations inside optax's wrappers, and these wrappers inside lowbit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import (
    apply,
    assert_same_bits,
    gradient_series,
    jitted,
    model_params,
    weights_only,
)

import lowbit_optax
from lowbit_optax import extra_bits, lowbit, master_weights

pytestmark = pytest.mark.standard_promotion

PACKED = dict(weights=extra_bits(8), moments="float32", min_size=0)


def test_a_chain_inside_sees_float32_gradients_and_masters():
    seen = []

    def record(updates, params):
        seen.append((updates, params))
        return updates

    tx = weights_only(
        optax.chain(optax.stateless(record), optax.sgd(0.1, 0.9)), extra_bits(16)
    )
    params = model_params()
    grads = gradient_series(params, 1, jnp.bfloat16)[0]
    params, state = lowbit_optax.step(tx, params, tx.init(params), grads)
    lowbit_optax.step(tx, params, state, grads)
    updates, masters = seen[-1]
    assert_same_bits(updates, jax.tree.map(lambda g: g.astype(jnp.float32), grads))
    assert_same_bits(masters, master_weights(params, state))
    assert not np.array_equal(masters["kernel"], params["kernel"].astype(jnp.float32))


def test_extra_arguments_reach_the_inner_transformation():
    inner = optax.chain(
        optax.sgd(1.0),
        optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0),
    )
    tx = lowbit(inner, **PACKED)
    start = jnp.full(64, 2.0, jnp.bfloat16)

    def run(tx, params, advance):
        advance, state = jitted(tx, advance), tx.init(params)
        for _ in range(3):  # no progress: the value stays 1
            params, state = advance(params, state, jnp.ones(64), value=jnp.float32(1))
        return np.asarray(params, np.float32)

    want = run(inner, start.astype(jnp.float32), apply)
    assert (want > 2 - 3).all()  # the plateau made the steps smaller
    for advance in (apply, lowbit_optax.step):
        np.testing.assert_array_equal(run(tx, start, advance), want)


def test_apply_updates_is_optaxs_for_arrays_that_optax_takes():
    params = {
        "narrow": jnp.linspace(-2, 2, 64, dtype=jnp.bfloat16),
        "half": jnp.linspace(-2, 2, 64, dtype=jnp.float16),
        "wide": jnp.linspace(-2, 2, 64),
        "steps": jnp.arange(4),
        "none": None,
    }
    updates = {
        "narrow": jnp.linspace(0.003, 1, 64),
        "half": jnp.linspace(0.003, 1, 64),
        "wide": jnp.linspace(0.003, 1, 64),
        "steps": jnp.ones(4, jnp.int32),
        "none": None,
    }
    got = lowbit_optax.apply_updates(params, updates)
    assert_same_bits(got, optax.apply_updates(params, updates))
    with jax.numpy_dtype_promotion("strict"):
        assert_same_bits(lowbit_optax.apply_updates(params, updates), got)
