"""No step changes integers, booleans and PRNG keys. Complex leaves are trained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import (
    accumulate_gradients,
    convert,
    ema_of_params,
    from_master,
    host_shardings,
    lowbit,
    lowbit_adamw,
    lpmm,
    memory_report,
    with_loss_scale,
)
from lowbit_optax.block_scaling import block_scale
from lowbit_optax.loss_scaling import backoff_scale
from lowbit_optax.transformations.regularization import regularize
from tests.helpers.optimizers import assert_same_bits, spec_of

pytestmark = pytest.mark.standard_promotion

SCALING = backoff_scale(2.0**10)
ADAMW = lowbit_adamw(0.125, weight_decay=0.5)
PLAIN = optax.adamw(0.125, weight_decay=0.5)


def start():
    constants = {
        "count": jnp.arange(5),
        "large": jnp.full(3, 2**31 + 1, jnp.uint32),
        "flag": jnp.ones(2, bool),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(1), 3),
    }
    return constants | {"w": jnp.linspace(-1, 1, 64).reshape(8, 8)}


def without_keys(params):
    return {name: x for name, x in params.items() if "key" not in name}


def gradients(params):
    loss = lambda params: jnp.sum(params["w"].astype(jnp.float32) ** 2)
    return jax.grad(loss, allow_int=True)(params)


def assert_constant(moved, params):
    assert not np.array_equal(moved["w"], params["w"])
    for name in params.keys() - {"w"}:
        assert moved[name].dtype == params[name].dtype
        assert bool((moved[name] == params[name]).all()), name


@pytest.mark.parametrize(
    "tx",
    [
        ADAMW,
        lowbit_optax.kahan_sgd(0.125, momentum=0.5, weight_decay=0.5),
        lowbit(optax.chain(optax.clip_by_global_norm(1.0), PLAIN)),
        ema_of_params(0.5),
        accumulate_gradients(ADAMW, 2),
        with_loss_scale(optax.apply_if_finite(ADAMW, 3), SCALING),
        lowbit_optax.direct_updates(ADAMW),
    ],
    ids=["adamw", "kahan", "clipped", "ema", "sums", "skipping", "direct"],
)
def test_steps_keep_constants_and_the_types_of_the_state(tx):
    params, state = from_master(tx, start(), keep_float32=None)

    def step(run, _):
        return lowbit_optax.step(tx, *run, gradients(run[0])), None

    run = jax.jit(lambda run: jax.lax.scan(step, run, length=4)[0])
    moved, end = run((params, state))
    assert_constant(moved, params)
    assert spec_of(end) == spec_of(state)


def test_updates_keep_constants():
    tx = lowbit_adamw(0.125, weight_decay=0.5)
    params, state = from_master(tx, start(), keep_float32=None)
    updates, _ = tx.update(gradients(params), state, params)
    assert_constant(lowbit_optax.apply_updates(params, updates), params)
    params, updates = without_keys(params), without_keys(updates)
    assert_constant(optax.apply_updates(params, updates), params)


@pytest.mark.parametrize(
    "tx",
    [PLAIN, accumulate_gradients(PLAIN, 1), optax.MultiSteps(ADAMW, 1)],
    ids=["optax", "sums", "multi_steps"],
)
def test_steps_of_optax_keep_constants(tx):
    params = without_keys(start())
    ones = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    assert_constant(step(params, tx.init(params), ones)[0], params)


def test_conversion_and_host_memory_keep_constants():
    params, state = from_master(ADAMW, start(), keep_float32=None)
    to_host = host_shardings(ADAMW, params)
    on_host = jax.device_put(state, to_host)
    grads = jax.tree.map(lambda x: jnp.ones(x.shape), params)
    step = jax.jit(functools.partial(lowbit_optax.step, ADAMW), out_shardings=None)
    moved, state = step(params, on_host, grads)
    assert_constant(moved, params)
    kahan = lowbit_optax.kahan_adamw(0.125)
    for name, x in convert(moved, state, ADAMW, kahan)[0].items():
        assert x.dtype == moved[name].dtype
        assert (x == moved[name]).all()
    memory_report(ADAMW, params)


def test_conversion_from_optax_accepts_its_integer_moments():
    params = without_keys(start())
    both = PLAIN, ADAMW
    new, state = convert(params, PLAIN.init(params), *both, dtype=jnp.bfloat16)
    want = ADAMW.init(new)
    assert spec_of(state) == spec_of(want)
    assert_same_bits(state.inner_state[0], want.inner_state[0])


COMPLEX = jnp.array([1 + 2j, -3j, 0.5], jnp.complex64)


@pytest.mark.parametrize("inner", [lowbit(optax.sgd(0.5)), optax.sgd(0.5)])
def test_wrappers_train_complex_leaves(inner):
    params = {"w": jnp.ones((8, 8), jnp.bfloat16), "c": COMPLEX}
    grads = jax.tree.map(jnp.conj, params)

    def end(tx, *series):
        run, step = (params, tx.init(params)), functools.partial(lowbit_optax.step, tx)
        for grads in series:
            run = step(*run, grads)
        return run[0]["c"]

    got = end(accumulate_gradients(inner, 2), grads, grads)
    np.testing.assert_allclose(got, COMPLEX - COMPLEX.conj(), rtol=1e-6)
    scaled = with_loss_scale(inner, SCALING)
    got = end(scaled, jax.tree.map(lambda x: 2**10 * x, grads))
    np.testing.assert_allclose(got, COMPLEX - COMPLEX.conj() / 2, rtol=1e-6)
    bad = grads | {"c": COMPLEX.at[1].set(jnp.nan * 1j)}
    np.testing.assert_array_equal(end(scaled, bad), COMPLEX)


def test_averages_and_penalties_include_complex_leaves():
    run = {"c": COMPLEX}
    ema = ema_of_params(0.5, debias=False)
    got, _ = lowbit_optax.step(ema, run, ema.init(run), {"c": 3 * COMPLEX})
    np.testing.assert_allclose(got["c"], 2 * COMPLEX, rtol=1e-6)
    penalty = regularize(lambda params: jnp.sum(jnp.abs(params["c"]) ** 2))
    zeros = jax.tree.map(jnp.zeros_like, run)
    got, _ = penalty.update(zeros, penalty.init(run), run)
    decay = optax.add_decayed_weights(2.0)  # d|w|^2 is a decay of 2
    want, _ = decay.update(zeros, decay.init(run), run)
    np.testing.assert_allclose(got["c"], want["c"], rtol=1e-6)


FROZEN = {"base": "frozen", "lora": "trained"}


@pytest.mark.parametrize(
    "tx",
    [
        optax.partition({"frozen": optax.set_to_zero(), "trained": ADAMW}, FROZEN),
        optax.partition({"frozen": optax.set_to_zero(), "trained": PLAIN}, FROZEN),
        optax.masked(ADAMW, {"base": False, "lora": True}),
    ],
    ids=["partition", "optax", "masked"],
)
def test_quantised_weights_can_be_frozen(tx):
    w = jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)
    for base in (lpmm.quantize_params(w, min_size=0), block_scale(w, min_size=0)):
        params = {"base": base, "lora": jnp.zeros((8, 8), jnp.bfloat16)}
        loss = lambda params: jnp.sum(params["lora"].astype(jnp.float32))
        integers = jax.grad(loss, allow_int=True)(params)
        state = tx.init(params)
        for grads in (integers, integers | {"base": w}):
            moved, _ = jax.jit(functools.partial(lowbit_optax.step, tx))(
                params, state, grads
            )
            updates, _ = tx.update(grads, state, params)
            applied = lowbit_optax.apply_updates(params, updates)
            for new in (moved, applied):
                assert_same_bits(new["base"], base)
                assert not np.array_equal(new["lora"], params["lora"])


def test_optax_alone_cannot_train_quantised_weights():
    params = {"w": lpmm.quantize_params(jnp.ones((64, 32)), min_size=0)}
    tx = optax.sgd(1.0)
    with pytest.raises(TypeError, match=r"params\['w'\] is quantized"):
        lowbit_optax.step(tx, params, tx.init(params), {"w": jnp.ones((64, 32))})
