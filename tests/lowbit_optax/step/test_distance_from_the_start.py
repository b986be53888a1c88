"""Optimizers that measure their distance from the start reject rounded weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import lowbit_optax
from lowbit_optax import extra_bits, from_master, kahan, lowbit, master_copy

pytestmark = pytest.mark.standard_promotion

MEASURING = {
    "dog": (lambda: contrib.dog(1.0), "DoGState.init_params"),
    "dowg": (lambda: contrib.dowg(1.0), "DoWGState.init_params"),
    "prodigy": (lambda: contrib.prodigy(1.0), "ProdigyState.params0"),
    "mechanize": (lambda: contrib.mechanize(optax.sgd(1.0)), "MechanicState.x0"),
    "within a chain": (
        lambda: optax.chain(optax.clip(1.0), contrib.dog(1.0)), "DoGState.init_params"
    ),
}  # fmt: skip
measuring = pytest.mark.parametrize(
    ("inner", "field"), MEASURING.values(), ids=MEASURING
)

SHAPE = (64, 64)
TARGET = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)


def _weights():
    return jnp.asarray(np.random.default_rng(0).standard_normal(SHAPE), jnp.float32)


def _loss(params):
    # The minimum is far away, so that the first steps of these optimizers are tiny.
    return jnp.mean(jnp.abs(params["w"].astype(jnp.float32) - 1e3 * TARGET))


def _states(tx, params, state, steps=12):
    """Returns the states after each step, stacked."""

    def body(carry, _):
        carry = lowbit_optax.step(tx, *carry, jax.grad(_loss)(carry[0]))
        return carry, carry[1]

    return jax.jit(lambda *run: jax.lax.scan(body, run, length=steps)[1])(params, state)


def _estimates(state) -> jax.Array:
    """Returns the optimizer's estimates of step sizes or distances at each step."""
    names = ("max_dist", "estim_sq_dist", "estim_lr", "s")
    return next(
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if path and getattr(path[-1], "name", None) in names
    )


@measuring
def test_rounded_weights_raise_an_error_with_a_remedy(inner, field):
    params = {"w": _weights().astype(jnp.bfloat16)}
    for weights in (None, extra_bits(15)):
        tx = lowbit(inner(), weights=weights)
        with pytest.raises(ValueError, match=rf"params\['w'\].*exactly.*\({field}\)"):
            jax.eval_shape(tx.init, params)
    for weights in (kahan(), lowbit_optax.stochastic_rounding()):
        with pytest.raises(ValueError, match=r"weights=.*extra_bits\(\)"):
            jax.eval_shape(lowbit(inner(), weights=weights).init, params)


@measuring
def test_exact_weights_are_accepted(inner, field):
    del field
    params = {"w": _weights().astype(jnp.bfloat16)}
    for weights in (extra_bits(), extra_bits(16), master_copy()):
        jax.eval_shape(lowbit(inner(), weights=weights).init, params)


@pytest.mark.parametrize("name", ["dog", "prodigy", "mechanize"])
def test_exact_weights_give_float32s_estimates(name):
    inner, master = MEASURING[name][0], {"w": _weights()}
    want = _estimates(_states(inner(), master, inner().init(master)))
    tx = lowbit(inner(), weights=extra_bits(), moments="float32", min_size=0)
    got = _estimates(_states(tx, *from_master(tx, master, jnp.bfloat16, None)))
    np.testing.assert_allclose(got, want, rtol=1e-3)


def test_leaves_that_are_float32_or_small_or_of_another_optimizer_are_accepted():
    bfloat16 = lambda *shape: jnp.ones(shape, jnp.bfloat16)
    init = lambda inner, params: jax.eval_shape(lowbit(inner).init, params)
    init(contrib.dog(1.0), {"w": _weights(), "small": bfloat16(8)})
    parted = optax.partition(
        {"dog": contrib.dog(1.0), "adamw": optax.adamw(1e-3)},
        {"w": "dog", "wide": "adamw"},
    )
    init(parted, {"w": _weights(), "wide": bfloat16(*SHAPE)})


def test_d_adaptation_reads_no_distance():
    inner = contrib.dadapt_adamw(1.0)
    master = {"w": _weights()}
    want = _estimates(_states(inner, master, inner.init(master)))
    tx = lowbit(inner, min_size=0)
    got = _estimates(_states(tx, *from_master(tx, master, jnp.bfloat16, None)))
    np.testing.assert_allclose(got, want, rtol=0.05)


def test_a_run_can_leave_but_not_enter_rounded_weights():
    exact = lowbit(contrib.dog(1.0), weights=extra_bits())
    run = from_master(exact, {"w": _weights()}, jnp.bfloat16, None)
    convert = functools.partial(lowbit_optax.convert, *run, exact)
    assert convert(contrib.dog(1.0))[0]["w"].dtype == jnp.float32
    with pytest.raises(ValueError, match=r"params\['w'\].*exactly"):
        convert(lowbit(contrib.dog(1.0)))


def test_parameters_and_a_state_that_keeps_them_can_both_be_donated():
    tx = lowbit(contrib.dog(1.0), weights=extra_bits())
    master = {"w": _weights(), "bias": jnp.ones(8)}
    for init in (tx.init, jax.jit(tx.init)):
        params, _ = from_master(tx, master, jnp.bfloat16)
        step = jax.jit(functools.partial(lowbit_optax.step, tx), donate_argnums=(0, 1))
        params, _ = step(params, init(params), master)
        assert (params["bias"] < 1).all()
        master = {"w": _weights(), "bias": jnp.ones(8)}
