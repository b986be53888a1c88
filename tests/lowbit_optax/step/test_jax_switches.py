"""JAX's debugging switches find no mistakes in this package."""

import functools
import inspect

import jax
import jax.export
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from lowbit_optax import block_quantized, cast, extra_bits, release
from tests.helpers.exact_steps import apply_any
from tests.helpers.optimizers import ALL_FORMATS, adamw, assert_same_bits, normal

pytestmark = pytest.mark.standard_promotion

PARAMS = {
    "kernel": normal(0, (64, 64), jnp.bfloat16),
    "other": normal(1, (64, 96), jnp.bfloat16),
    "bias": normal(2, (40,), jnp.bfloat16),
    "scale": normal(3, (64,)),
}
GRADS = jax.tree.map(lambda x: 0.1 * x, PARAMS)
MOMENTS = {
    "8 bits": block_quantized(8),
    "4 bits": block_quantized(4, code="linear"),
    "bfloat16": cast(jnp.bfloat16),
}
LOWBIT = adamw(0.01, extra_bits(8), block_quantized(8))
TRANSFORMATIONS = {
    **{name: adamw(0.01, weights) for name, weights in ALL_FORMATS.items()},
    **{name: adamw(0.01, extra_bits(8), x) for name, x in MOMENTS.items()},
    "global norm": optax.chain(optax.clip_by_global_norm(1.0), LOWBIT),
    "loss scale": lowbit_optax.with_loss_scale(
        LOWBIT, lowbit_optax.loss_scaling.backoff_scale()
    ),
    "accumulated": lowbit_optax.accumulate_gradients(LOWBIT, 2, min_size=0),
}
SWITCHES = {
    "rank promotion": functools.partial(jax.numpy_rank_promotion, "raise"),
    "leaks": jax.checking_leaks,
}


def loss(params, x):
    return sum(jnp.sum(jnp.sin(x * leaf)) for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
@pytest.mark.parametrize("tx", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS)
def test_debugging_switches_find_no_mistakes(tx, switch):
    with switch():
        state = jax.jit(tx.init).eval_shape(PARAMS)
        run = PARAMS, state, GRADS
        jax.jit(functools.partial(lowbit_optax.step, tx)).trace(*run)
        jax.jit(functools.partial(apply_any, tx)).trace(*run)
        if "loss_scale" in getattr(state, "_fields", ()):
            return
        released = release.value_and_update(loss, tx)
        jax.jit(released).trace(PARAMS, state, jnp.float32(1))


@pytest.mark.parametrize("make", [lowbit_optax.kahan_adamw, lowbit_optax.lowbit_muon])
def test_injected_hyperparameters_do_not_leak(make):
    static = {"ns_steps"} & inspect.signature(make).parameters.keys()
    inject = optax.inject_hyperparams(make, static, hyperparam_dtype=jnp.float32)
    tx = inject(0.01)
    params = {"w": jnp.ones((8, 8), jnp.bfloat16)}
    with jax.checking_leaks():
        state = jax.eval_shape(tx.init, params)
        step = functools.partial(lowbit_optax.step, tx)
        jax.eval_shape(step, params, state, params)
        run = lowbit_optax.from_master(tx, params)
        lowbit_optax.convert(*run, tx, make(0.01))


@pytest.mark.parametrize("switch", [jax.debug_nans, jax.debug_infs])
def test_a_step_without_jit_computes_only_numbers(switch):
    weights = lowbit_optax.stochastic_rounding(error_feedback="mu")
    params, grads = PARAMS["kernel"], GRADS["kernel"]
    for rates in (0.0, 0.01), (0.01, 0.0):  # of the first and of later steps
        tx = adamw(optax.linear_schedule(*rates, 1), weights, block_quantized(8))
        run = params, tx.init(params)
        with switch(True):
            for _ in range(2):
                run = lowbit_optax.step(tx, *run, grads)


@pytest.mark.parametrize("name", ["8 bits", "accumulated"])
def test_a_step_is_exported_for_several_platforms(name):
    tx, platforms = TRANSFORMATIONS[name], ["cpu", "cuda", "tpu"]
    run = PARAMS, jax.jit(tx.init)(PARAMS), GRADS
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    exported = jax.export.export(step, platforms=platforms)(*run)
    assert_same_bits(exported.call(*run), step(*run))
