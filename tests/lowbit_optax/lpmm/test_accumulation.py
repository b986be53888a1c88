"""Gradients are summed in few bits and applied in one update every N calls."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import lowbit_optax
from lowbit_optax import accumulate_gradients, block_quantized, lpmm_sgd
from lowbit_optax._step.state import is_blank
from lowbit_optax.lpmm.accumulation import PAPER_ACCUMULATORS
from tests.helpers.optimizers import assert_same_bits

SHAPE = (128, 64)


def grads_of(count, shape=SHAPE):
    random = np.random.default_rng(0)
    return jnp.asarray(random.normal(size=(count, *shape)), jnp.float32)


WITHIN = {
    "lowbit": lambda tx: tx,
    "clip": lambda tx: optax.chain(optax.clip_by_global_norm(0.5), tx),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False, "n": False}),
    "momentum before": lambda tx: optax.chain(optax.trace(0.5), tx),
    "snapshot after": lambda tx: optax.chain(
        tx, optax.snapshot("norm", lambda x: jnp.float32(jnp.linalg.norm(x["w"])))
    ),
}
# Tolerances of the cases that keep sums or parameter differences in bfloat16.
ROUNDED = {"momentum before": 2**-9, "snapshot after": 0.08}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("name", WITHIN)
def test_every_third_step_is_one_with_the_sum(name, implementation):
    low = lowbit_optax.lowbit(
        optax.sgd(0.5, 0.9),
        moments={"trace": lowbit_optax.block_quantized(8)},
        implementation=implementation,
    )
    if name in ("masked", "snapshot after") and implementation == "pallas":
        pytest.skip("an integer has no kernel")
    inner = WITHIN[name](low)
    # Sums kept in float32 are exact.
    tx = accumulate_gradients(inner, 3, min_size=10**9)
    params = {"w": jnp.ones(SHAPE, jnp.bfloat16), "b": jnp.ones(7)}
    if name == "masked":
        params["n"] = jnp.int32(1)
    grads = (grads_of(7) / 4).astype(jnp.bfloat16)

    def gradient(i):
        tree = {"w": grads[i], "b": grads[i, 0, :7].astype(jnp.float32)}
        return tree | {"n": jnp.int32(0)} if "n" in params else tree

    def summed(first):
        total = lambda *xs: sum(x.astype(jnp.float32) for x in xs)
        return jax.tree.map(total, *(gradient(first + i) for i in range(3)))

    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    plain = jax.jit(functools.partial(lowbit_optax.step, inner))
    got, state = params, tx.init(params)
    want, inner_state = params, inner.init(params)
    for i in range(7):
        last = got, state.inner_state
        got, state = step(got, state, gradient(i))
        if i % 3 < 2:
            assert_same_bits((got, state.inner_state), last)
            continue
        want, inner_state = plain(want, inner_state, summed(i - 2))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            # Two programs may fuse different products, which changes the last bits.
            a, b = np.float32(a), np.float32(b)
            np.testing.assert_allclose(a, b, rtol=2**-7, atol=ROUNDED.get(name, 0))
        assert not any(np.any(x) for x in jax.tree.leaves(state.accumulators))
    assert (int(state.mini_step), int(state.count)) == (1, 7)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("how", ["branches", "xla", "pallas"])
@pytest.mark.parametrize("microbatch", [0, 1])
def test_a_microbatch_that_overflows_is_skipped(microbatch, how):
    devices = 1 if how == "branches" else 8  # one CPU uses branches
    low = lowbit_optax.lowbit(
        optax.sgd(0.5, 0.9), implementation=None if how == "branches" else how
    )
    tx = accumulate_gradients(low, 2)
    scaled = lowbit_optax.with_loss_scale(
        tx, lowbit_optax.loss_scaling.backoff_scale(2.0**10)
    )
    params, grads = jnp.ones(SHAPE, jnp.bfloat16), grads_of(2).astype(jnp.bfloat16)
    with jax.set_mesh(jax.make_mesh((devices,), ("x",), (AxisType.Auto,))):
        step, plain = (
            jax.jit(functools.partial(lowbit_optax.step, x)) for x in (scaled, tx)
        )
        got, state = params, scaled.init(params)
        want, expected = params, tx.init(params)
        for i, grad in enumerate(grads):
            if i == microbatch:
                bad = grad.at[3, 4].set(jnp.inf)
                kept, after = step(got, state, bad)
                assert_same_bits(kept, got)
                assert_same_bits(after.inner_state, state.inner_state)
                state = after
            scale = lowbit_optax.loss_scaling.current_loss_scale(state)
            got, state = step(got, state, grad * scale.astype(grad.dtype))
            want, expected = plain(want, expected, grad)
    assert (int(state.inner_state.mini_step), int(state.inner_state.count)) == (0, 2)
    assert (np.float32(got) != 1).mean() > 0.9
    # Two programs may fuse different products, which changes the codes of a few sums.
    assert np.mean(np.asarray(got) != np.asarray(want)) < 0.01


FORMATS = {
    "the paper's": PAPER_ACCUMULATORS,
    "companded": block_quantized(8),
    "dynamic": block_quantized(8, code="dynamic", rounding="nearest"),
    "4 bits": block_quantized(4, code="linear"),
    "bfloat16": lowbit_optax.cast(jnp.bfloat16),
    "float32": block_quantized(8),
}


@functools.cache
def summed(format_, inner):
    """Returns a function from three gradients to the last call's updates and state."""
    min_size = 10**9 if format_ == "float32" else None
    tx = accumulate_gradients(inner, 3, FORMATS[format_], min_size=min_size)

    def run(grads):
        state = tx.init(jnp.ones(SHAPE))
        for grad in grads:
            updates, state = tx.update(grad, state)
        return updates, state

    return jax.jit(run)


SUM = optax.identity()
GUARDED = optax.apply_if_finite(optax.sgd(0.1), 3)


@pytest.mark.parametrize("format_", FORMATS)
def test_non_finite_values_reach_the_inner_transformation(format_):
    grads = np.array(grads_of(3))
    grads[:, :, 9] = 0.0
    for when, bad in itertools.product(range(3), (np.nan, np.inf, -np.inf)):
        spoilt = grads.copy()
        spoilt[when, 3, 4] = bad
        total, _ = summed(format_, SUM)(spoilt)
        # As with MultiSteps, only the sums of these elements become non-finite.
        np.testing.assert_array_equal(np.isfinite(total), np.isfinite(spoilt.sum(0)))
    updates, state = summed(format_, GUARDED)(spoilt)
    assert not updates.any()
    assert int(state.inner_state.total_notfinite) == 1


@pytest.mark.parametrize("route", ["step", "update"])
def test_outside_of_jit_only_the_first_steps_compile(route, caplog):
    params = lowbit_optax.lpmm.quantize_params({"w": jnp.ones(SHAPE)})
    tx = accumulate_gradients(lpmm_sgd(0.1, 0.9), 2)
    state, grads = tx.init(params), {"w": grads_of(1)[0]}

    def step(params, state):
        if route == "step":
            return lowbit_optax.step(tx, params, state, grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(jax.make_mesh((1,), ("x",), (AxisType.Auto,))):  # branches
        for _ in range(4):  # the second pair adds to a nonzero momentum
            params, state = step(params, state)
        with jax.log_compiles():
            for _ in range(4):
                params, state = step(params, state)
    assert not [x for x in caplog.messages if x.startswith("Compiling")]
    assert int(state.inner_state.count) == 4


def test_no_gradient_is_kept_in_full_precision():
    tx = accumulate_gradients(optax.sgd(0.1), 4)
    params = {"w": jnp.ones((2048, 64)), "b": jnp.ones(64), "n": jnp.int32(1)}
    codes, scales = tx.init(params).accumulators
    assert codes["w"].nbytes + scales["w"].nbytes == 2048 * 64 + 64 * 2
    assert codes["b"].dtype == jnp.float32
    assert all(map(is_blank, (scales["b"], codes["n"], scales["n"])))


def test_float64_gradients_add_up():
    tx = lowbit_optax.accumulate_gradients(optax.sgd(0.5), 2, min_size=0)
    with jax.enable_x64(True):
        params = jnp.linspace(-1, 1, 64, dtype=jnp.float64).reshape(8, 8)
        state, first = tx.init(params), params
        for _ in range(2):
            params, state = lowbit_optax.step(tx, params, state, jnp.ones_like(params))
        assert params.dtype == jnp.float64
        # Each sum is within a step of its code of 7 bits and a sign.
        np.testing.assert_allclose(params, first - 1, atol=2**-6)


@pytest.mark.standard_promotion
def test_the_inner_state_may_contain_a_random_key():
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    tx = accumulate_gradients(optax.chain(noise, optax.sgd(0.1)), 2)
    params = {"w": jnp.ones(4)}
    state = tx.init(params)
    for _ in range(2):
        params, state = lowbit_optax.step(tx, params, state, {"w": jnp.ones(4)})
    assert (params["w"] != 0.9).all()
