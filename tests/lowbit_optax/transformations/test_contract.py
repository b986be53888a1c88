"""``lowbit`` and ``step`` work with optax's presets and wrappers or raise errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import lowbit, memory_report
from tests.helpers.optimizers import (
    apply,
    assert_same_bits,
    gradient_series,
    jitted,
    train,
    weights_only,
)

pytestmark = pytest.mark.standard_promotion

SHAPE = (128, 64)


def parameters(dtype=jnp.bfloat16):
    values = np.random.default_rng(0).standard_normal(SHAPE)
    return {"w": jnp.asarray(values, dtype), "b": jnp.ones(64)}


# Presets.


# The direct step.

OF_ONE = lowbit_optax.loss_scaling.static_scale(1.0)
DIRECT = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(8.0), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": True}),
    "partition": lambda tx: optax.partition({"a": tx}, {"w": "a", "b": "a"}),
    "loss scale inside": lambda tx: weights_only(
        lowbit_optax.with_loss_scale(optax.sgd(1.0), OF_ONE),
        lowbit_optax.extra_bits(16),
        min_size=0,
    ),
    "loss scale": lambda tx: lowbit_optax.with_loss_scale(tx, OF_ONE),
    "accumulated": lambda tx: lowbit_optax.accumulate_gradients(tx, 1),
}
WITH_DIFFERENCES = {
    "scale after": lambda tx: optax.chain(tx, optax.scale(1.0)),
    "multi steps": lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    "snapshot after": lambda tx: optax.chain(tx, optax.snapshot("u", optax.tree.norm)),
}


@pytest.mark.parametrize("name", DIRECT | WITH_DIFFERENCES)
def test_the_report_says_which_wrappers_keep_the_direct_step(name):
    wrap = (DIRECT | WITH_DIFFERENCES)[name]
    params = parameters()
    tx = wrap(lowbit_optax.kahan_adamw(1e-3))
    report = memory_report(tx, params)
    assert report.steps_directly == (name in DIRECT)

    series = gradient_series(params, 3)
    # Either way, the result equals update followed by apply_updates.
    assert_same_bits(
        train(tx, params, tx.init(params), series, lowbit_optax.step),
        train(tx, params, tx.init(params), series, apply),
    )


@pytest.mark.parametrize("name", DIRECT)
def test_a_direct_step_reaches_values_that_no_float32_difference_reaches(name):
    # A float32 difference has too few bits to lead from 1 to minus an odd multiple of
    # 2^-24. Only a master in the binade below its parameter can move there.
    below = 1 - jnp.arange(1, 65, dtype=jnp.float32) * 2.0**-16
    odd = (2 * jnp.arange(64, dtype=jnp.float32) + 3) * 2.0**-24
    exact = weights_only(optax.sgd(1.0), lowbit_optax.extra_bits(16), min_size=0)
    tx = DIRECT[name](exact)
    masters = {"w": below, "b": jnp.ones(2)}
    dtypes = {"w": jnp.bfloat16, "b": jnp.float32}
    params, state = lowbit_optax.from_master(tx, masters, dtypes)
    grads = {"w": below + odd, "b": jnp.zeros(2)}
    stepped, _ = lowbit_optax.step(tx, params, state, grads)
    np.testing.assert_array_equal(stepped["w"].astype(jnp.float32), -odd)
    added, _ = apply(tx, params, state, grads)
    assert (added["w"].astype(jnp.float32) != -odd).all()


# Errors.


def test_multi_steps_around_lpmm_is_refused_at_init():
    params = lowbit_optax.lpmm.quantize_params({"w": jnp.ones((64, 64))})
    tx = optax.MultiSteps(lowbit_optax.lpmm_sgd(0.1), 2)
    with pytest.raises(TypeError, match="accumulate_gradients"):
        tx.init(params)
    inside = lowbit(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation())
    inside.init(params)


def test_every_leaf_of_any_tree_may_be_a_quantized_tensor():
    params = lowbit_optax.lpmm.quantize_params({"w": jnp.ones((64, 64))}) | {
        "v": jnp.ones((64, 64), jnp.bfloat16)
    }
    tx = lowbit_optax.kahan_adamw(0.01)
    grads = {"w": jnp.ones((64, 64)), "v": jnp.ones((64, 64))}
    stepped = lowbit_optax.step(tx, params, tx.init(params), grads)
    assert_same_bits(apply(tx, params, tx.init(params), grads), stepped)
    assert float(stepped[0]["w"].dequantize().mean()) < 0.995


# Around optax's transformations.


def test_extra_arguments_reach_the_inner_transformation():
    inner = optax.chain(
        optax.sgd(1.0),
        optax.contrib.reduce_on_plateau(factor=0.5, patience=1, cooldown=0),
    )
    tx = weights_only(inner, lowbit_optax.extra_bits(8), min_size=0)
    start = jnp.full(64, 2.0, jnp.bfloat16)

    def run(tx, params, advance):
        advance, state = jitted(tx, advance), tx.init(params)
        for _ in range(3):  # no progress: the value stays 1
            params, state = advance(params, state, jnp.ones(64), value=jnp.float32(1))
        return np.asarray(params, np.float32)

    want = run(inner, start.astype(jnp.float32), apply)
    assert (want > 2 - 3).all()  # the plateau reduced the steps
    for advance in (apply, lowbit_optax.step):
        np.testing.assert_array_equal(run(tx, start, advance), want)


def test_apply_updates_matches_optax_for_arrays_that_optax_accepts():
    params = {
        "narrow": jnp.linspace(-2, 2, 64, dtype=jnp.bfloat16),
        "half": jnp.linspace(-2, 2, 64, dtype=jnp.float16),
        "wide": jnp.linspace(-2, 2, 64),
        "steps": jnp.arange(4),
        "none": None,
    }
    updates = dict.fromkeys(("narrow", "half", "wide"), jnp.linspace(0.003, 1, 64))
    updates |= {"steps": jnp.ones(4, jnp.int32), "none": None}
    got = lowbit_optax.apply_updates(params, updates)
    # optax would add the integers, but no step of this package trains them.
    want = optax.apply_updates(params, updates) | {"steps": params["steps"]}
    assert_same_bits(got, want)
    with jax.numpy_dtype_promotion("strict"):
        assert_same_bits(lowbit_optax.apply_updates(params, updates), got)
