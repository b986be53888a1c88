"""With ``error_feedback``, a moment receives the rounding error of a weight.

With ``w' = a w + c m + ...`` and ``m' = b m + ...``, the sum ``w + c m / (a - b)`` of
weight and moment after a step is the same as without rounding.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import block_quantized, cast, lowbit, stochastic_rounding
from tests.helpers.optimizers import (
    assert_same_bits,
    gradient_series,
    initial,
    jitted,
    train,
)
from tests.helpers.released import assert_equal_steps

pytestmark = pytest.mark.standard_promotion

SHAPE = (64, 64)
SPACING = 2.0**-7  # between bfloat16 numbers from 1 to 2
# The weight decay is large enough to be visible.
ADAMW = functools.partial(optax.adamw, weight_decay=10.0)


def feeding(inner, field="mu", **options):
    options = {"moments": "float32"} | options
    return lowbit(inner, weights=stochastic_rounding(error_feedback=field), **options)


def start(dtype=jnp.bfloat16):
    return {"w": jnp.asarray(np.random.default_rng(0).normal(size=SHAPE), dtype)}


def trained(tx, params, series):
    return train(tx, params, initial(tx, params), series, lowbit_optax.step)


def moment_of(state, field):
    (found,) = optax.tree.get_all_with_path(state, field)
    return found[1]


INNER = {
    "adamw": (ADAMW(1e-3), "mu"),
    "schedule": (ADAMW(optax.cosine_decay_schedule(1e-3, 8)), "mu"),
    "clipped gradients": (
        optax.chain(optax.clip_by_global_norm(1.0), ADAMW(1e-3)),
        "mu",
    ),
    "injected": (optax.inject_hyperparams(ADAMW)(learning_rate=1e-3), "mu"),
    "nesterov": (optax.sgd(1e-2, momentum=0.9, nesterov=True), "trace"),
}


@pytest.mark.parametrize(("inner", "field"), INNER.values(), ids=INNER)
def test_weight_and_moment_add_up_to_what_they_are_without_rounding(inner, field):
    tx, params = feeding(inner, field), start()
    params, state = trained(tx, params, gradient_series(params, 2))
    (grads,) = gradient_series(params, 1)
    # Steps without rounding from a larger moment and from larger weights.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    before = state.inner_state
    larger = optax.tree.set(
        before, **{field: jax.tree.map(lambda x: x + 1, moment_of(before, field))}
    )
    updates, after = inner.update(grads, before, wide)
    more, _ = inner.update(grads, larger, wide)
    c = more["w"] - updates["w"]
    shifted, _ = inner.update(grads, before, jax.tree.map(lambda x: x + 1, wide))
    weight = c / (1 + shifted["w"] - updates["w"] - 0.9)
    want = wide["w"] + updates["w"] + weight * moment_of(after, field)["w"]
    new, state = lowbit_optax.step(tx, params, state, grads)
    assert np.mean(new["w"] != params["w"]) > 0.01
    got = new["w"].astype(jnp.float32) + weight * moment_of(state, field)["w"]
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5)
    lost = wide["w"] + updates["w"] - new["w"].astype(jnp.float32)
    assert np.max(np.abs(lost)) > 1e-3  # the sums above do not show this


@pytest.mark.parametrize("rate", [1e-4, 1e-6, 1e-7, 1e-8, 1e-9])
def test_tiny_learning_rates_move_weights_by_the_right_amount(rate):
    params, steps = jnp.ones((256, 256), jnp.bfloat16), 30
    tx = feeding(optax.sgd(rate, momentum=0.5), "trace")

    def body(carry, _):
        return lowbit_optax.step(tx, *carry, jnp.ones_like(carry[0])), None

    run = jax.jit(lambda carry: jax.lax.scan(body, carry, length=steps)[0])
    params, state = run((params, initial(tx, params)))
    # The trace contains the lost part and returns it if gradients become zero.
    held = rate * np.asarray(moment_of(state, "trace"), np.float64)
    moved = 1 - (np.asarray(params, np.float64) - held).mean()
    np.testing.assert_allclose(moved, 2 * rate * steps, rtol=1e-3)


def distances(weights, moments, dtype, rate=1e-3, steps=400):
    """Returns the weights' mean squared distance from the optimum after training."""
    random = np.random.default_rng(0)
    best = jnp.asarray(random.normal(size=SHAPE), jnp.float32)
    noise = jnp.asarray(random.normal(size=(steps, *SHAPE)), jnp.float32)
    tx = lowbit(optax.adam(rate), weights=weights, moments=moments)
    params, state = lowbit_optax.from_master(tx, best, dtype, None)

    def body(carry, noise):
        params, state = carry
        wide = params.astype(jnp.float32)
        new = lowbit_optax.step(tx, params, state, 8 * (wide - best) + noise)
        return new, jnp.mean((wide - best) ** 2)

    squares = jax.jit(lambda *x: jax.lax.scan(body, *x)[1])((params, state), noise)
    return float(squares[-100:].mean())


@pytest.mark.parametrize("moments", ["float32", block_quantized(8)], ids=str)
def test_error_feedback_removes_most_of_the_noise_of_stochastic_rounding(moments):
    exact = distances(lowbit_optax.master_copy(), moments, jnp.float32)
    plain = distances(stochastic_rounding(), moments, jnp.bfloat16)
    fed = distances(stochastic_rounding(error_feedback="mu"), moments, jnp.bfloat16)
    assert plain > 1.05 * exact
    assert fed - exact < 0.5 * (plain - exact)


def jumping(rates):
    return lambda count: jnp.asarray(rates, jnp.float32)[count]


@pytest.mark.parametrize("low", [0.0, 1e-5])
def test_a_jump_of_the_learning_rate_does_not_disturb_weights(low):
    inner = optax.adam(jumping([1e-5] * 20 + [low] * 2 + [1e-3] * 30))
    between = np.random.default_rng(0).uniform(1, 2, SHAPE)
    params = {"w": jnp.asarray(between, jnp.bfloat16)}
    series = 52 * gradient_series(params, 1)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)

    got, _ = trained(feeding(inner), params, series)
    want, _ = trained(lowbit(inner, moments="float32"), wide, series)
    # The bound is in spacings. The difference is 2.5 if the moment is not shortened.
    assert np.max(np.abs(got["w"].astype(jnp.float32) - want["w"])) * 2.0**7 < 1.5


def test_where_there_were_no_gradients_the_moment_stays_zero():
    """The moment's unit is 1 / eps there, which no code of few bits can store."""
    tx, params = feeding(ADAMW(1e-3)), start()
    series = [{"w": x["w"].at[:8].set(0)} for x in gradient_series(params, 3)]
    new, state = trained(tx, params, series)
    mu = moment_of(state, "mu")["w"]
    assert not np.any(mu[:8])
    assert np.all(mu[8:] != 0)
    # Only weight decay moves these rows, and its rounding is unbiased.
    moved = np.asarray(new["w"] - params["w"], np.float64)[:8]
    wanted = (0.99**3 - 1) * np.asarray(params["w"], np.float64)[:8]
    assert abs(np.vdot(moved, wanted) / np.vdot(wanted, wanted) - 1) < 0.02


@pytest.mark.parametrize(
    ("inner", "scale", "bad"),
    [
        (optax.apply_if_finite(ADAMW(1e-3), 5), None, np.nan),
        (ADAMW(1e-3), lowbit_optax.loss_scaling.static_scale(2.0), np.inf),
    ],
    ids=["apply_if_finite", "loss scale"],
)
def test_a_step_that_is_skipped_changes_nothing(inner, scale, bad):
    # Codes may change, because the moment that is kept is encoded again.
    moments = cast(jnp.bfloat16) if scale is None else block_quantized(8)
    tx, params = feeding(inner, moments=moments), start()
    if scale is not None:
        tx = lowbit_optax.with_loss_scale(tx, scale)
    params, state = trained(tx, params, gradient_series(params, 3))
    grads = jax.tree.map(lambda x: jnp.full_like(x, bad), params)
    for _ in range(2):
        new, after = jitted(tx, lowbit_optax.step)(params, state, grads)
        assert_same_bits(new, params)
        assert_same_bits(moment_of(after, "mu"), moment_of(state, "mu"))
        params, state = new, after


def test_released_steps_are_the_same():
    def loss_fn(params, x):
        body = lambda x, w: (jnp.tanh(x @ w.astype(jnp.float32)), None)
        return jnp.mean(jax.lax.scan(body, x, params["w"])[0] ** 2)

    weights = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64, 64)) / 8)
    params = {"w": weights.astype(jnp.bfloat16)}
    tx = feeding(optax.sgd(2.0**-4, momentum=0.5), "trace", moments=block_quantized(8))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 64)), jnp.float32)
    assert_equal_steps(loss_fn, tx, params, [(x,), (-x,)], in_loop=["['w']"])


@pytest.mark.parametrize("ratio", [0.9, 0.99])
def test_errors_return_to_the_weight_while_the_rate_falls(ratio):
    """After one gradient, the moment moves the weight by ten times its rate."""
    rate = lambda count: jnp.float32(ratio) ** count.astype(jnp.float32)
    tx = lowbit_optax.sr_sgd(
        rate, 0.9, error_feedback="trace", moments="float32", warn=False
    )
    random = np.random.default_rng(0)
    start = jnp.asarray(random.uniform(1, 1.99, 4096), jnp.bfloat16)
    grads = jnp.asarray(random.standard_normal(4096) * SPACING, jnp.float32)
    scales = jnp.zeros(300).at[0].set(1.0)
    step = lambda run, x: (lowbit_optax.step(tx, *run, x * grads), None)
    run = jax.jit(lambda run: jax.lax.scan(step, run, scales)[0])
    params, _ = run((start, tx.init(start)))
    exact = start.astype(jnp.float32) - grads / (1 - 0.9 * ratio)
    errors = (params.astype(jnp.float32) - exact) / SPACING
    assert abs(jnp.mean(errors * jnp.sign(grads))) < 0.03
    assert jnp.sqrt(jnp.mean(errors**2)) < 0.31  # 0.289 for rounding to nearest
