"""lowbit transformations inside optax's wrappers, and these wrappers inside lowbit."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import (
    ALIASES,
    apply,
    assert_same_bits,
    each,
    gradient_series,
    jitted,
    model_params,
    spec_of,
    train,
    weights_only,
)

import lowbit_optax
from lowbit_optax import extra_bits, lowbit, master_weights

pytestmark = pytest.mark.standard_promotion

PACKED = dict(weights=extra_bits(8), moments="float32", min_size=0)


def _trained(tx, params=None, series=None, advance=apply):
    params = model_params() if params is None else params
    series = gradient_series(params, 4) if series is None else series
    return train(tx, params, jax.jit(tx.init)(params), series, advance)


@each({name: ALIASES[name] for name in ("kahan_sgd", "sr_adamw", "extra_bits_adamw_8")})
def test_last_in_a_chain_it_trains_on_what_the_chain_made_of_the_gradients(optimizer):
    tx = optimizer()
    params = jnp.linspace(-2, 2, 64, dtype=jnp.bfloat16)
    signs = np.sign(np.random.default_rng(0).standard_normal((4, 64)))
    # Their norm is exactly 2, so that clipping to 0.5 divides by exactly 4.
    series = list(jnp.asarray(0.25 * signs, jnp.float32))
    clipped = _trained(optax.chain(optax.clip_by_global_norm(0.5), tx), params, series)
    want = _trained(tx, params, [grads / 4 for grads in series])
    assert_same_bits(clipped[0], want[0])
    assert_same_bits(clipped[1][1], want[1])


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


@each({name: ALIASES[name] for name in ("kahan_adamw", "sr_sgd", "extra_bits_sgd_8")})
def test_masked_trains_the_masked_leaves_and_keeps_the_others(optimizer):
    params = model_params()
    mask = {"kernel": True, "bias": False}
    # masked hands the other leaves' gradients through; freeze them as users do.
    tx = optax.chain(
        optax.masked(optimizer(), mask),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda m: not m, mask)),
    )
    moved, state = _trained(tx)
    alone = {"kernel": params["kernel"]}
    want, _ = _trained(
        optimizer(),
        alone,
        [{"kernel": g["kernel"]} for g in gradient_series(params, 4)],
    )
    assert_same_bits(moved, params | want)
    assert not np.array_equal(moved["kernel"], params["kernel"])
    masters = master_weights(moved, state)
    np.testing.assert_array_equal(masters["bias"], params["bias"].astype(jnp.float32))


def test_partition_puts_kahan_on_some_leaves_and_stochastic_rounding_on_others():
    params = model_params()
    labels = {"kernel": "stochastic", "bias": "kahan"}
    kahan_tx = lowbit_optax.kahan_adamw(0.01)
    stochastic_tx = lowbit_optax.sr_adamw(0.01)
    tx = optax.partition({"kahan": kahan_tx, "stochastic": stochastic_tx}, labels)
    moved, state = _trained(tx)

    series = gradient_series(params, 4)
    only = lambda tree, names: {name: tree[name] for name in names}
    apart = [
        _trained(part, only(params, names), [only(g, names) for g in series])
        for part, names in ((kahan_tx, ("bias",)), (stochastic_tx, ("kernel",)))
    ]
    assert_same_bits(moved, apart[0][0] | apart[1][0])
    want = master_weights(*apart[0]) | master_weights(*apart[1])
    assert_same_bits(master_weights(moved, state), want)
    assert spec_of(state) == spec_of(tx.init(params))


@each(ALIASES)
def test_multi_steps_takes_one_step_of_the_mean_gradient(optimizer):
    params = {"kernel": model_params()["kernel"]}
    tx = optax.MultiSteps(optimizer(), every_k_schedule=2)
    series = gradient_series(params, 4)
    state = tx.init(params)
    first, between = train(tx, params, state, series[:1])
    assert_same_bits(first, params)
    assert_same_bits(between.inner_opt_state, state.inner_opt_state)
    moved, state = train(tx, first, between, series[1:])

    # MultiSteps' running mean is acc + (grad - acc) / n, where acc starts from zero.
    means = [
        jax.tree.map(lambda a, b: a + (b - a) / 2, *pair)
        for pair in (series[:2], series[2:])
    ]
    want, alone = _trained(optimizer(), params, means)
    # XLA contracts multiply-adds differently around MultiSteps' selections.
    close = functools.partial(chex.assert_trees_all_close, rtol=2e-6, atol=2e-6)
    close(master_weights(moved, state), master_weights(want, alone))


def test_multi_steps_inside_accumulates_in_float32():
    inner = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=4)
    tx = weights_only(inner.gradient_transformation(), extra_bits(16), min_size=0)
    params = jnp.ones(64, jnp.bfloat16)
    series = [jnp.full(64, g, jnp.bfloat16) for g in (1.0, 2.0**-9, 2.0**-9, 2.0**-9)]
    moved, state = train(tx, params, tx.init(params), series)
    mean = np.float32(1 + 3 * 2.0**-9) / 4  # 1 + 2^-9 is 1 in bfloat16
    np.testing.assert_allclose(master_weights(moved, state), 1 - mean, rtol=1e-6)


def test_without_apply_if_finite_a_bad_gradient_does_what_it_does_in_optax():
    params = {"kernel": model_params()["kernel"]}
    grads = jax.tree.map(lambda p: jnp.zeros(p.shape).at[3, 4].set(np.nan), params)
    tx = lowbit(optax.sgd(0.1), **PACKED)
    moved, state = train(tx, params, tx.init(params), [grads])
    bad = np.isnan(np.asarray(master_weights(moved, state)["kernel"]))
    assert bad[3, 4]
    assert bad.sum() == 1
    assert np.isnan(np.asarray(moved["kernel"], np.float32))[3, 4]


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


def test_schedule_free_averages_float32_weights_inside():
    inner = optax.contrib.schedule_free_adamw(0.01, warmup_steps=2)
    tx = lowbit(inner, weights=extra_bits(16), min_size=0, moments="float32")
    params = {"kernel": model_params()["kernel"]}
    masters = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    series = gradient_series(params, 20)
    got, state = train(tx, params, tx.init(params), series)
    want, reference = train(inner, masters, inner.init(masters), series)
    chex.assert_trees_all_close(
        optax.contrib.schedule_free_eval_params(
            state.inner_state, master_weights(got, state)
        ),
        optax.contrib.schedule_free_eval_params(reference, want),
        rtol=1e-6,
    )
