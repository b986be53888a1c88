"""With ``error_feedback``, a moment receives the rounding errors of codes.

``step/test_error_feedback.py`` tests the same for weights in narrow dtypes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import block_quantized, factored_adamw, lowbit
from lowbit_optax._numerics.linear_code import largest_code
from lowbit_optax.formats import quantized_weights
from tests.helpers import released
from tests.helpers.optimizers import (
    apply,
    assert_same_bits,
    gradient_series,
    initial,
    normal,
    train,
)
from tests.helpers.quantized_weights import quantised, quantizer

pytestmark = pytest.mark.standard_promotion


def deltas(weight):
    return np.asarray(weight.scales).view(np.float32)


def feeding(field, **options):
    return quantized_weights(error_feedback=field, **options)


@pytest.mark.parametrize("bits", [8, 6, 4])
def test_steps_follow_the_formula_in_numpy(bits):
    """Hyperparameters and step sizes are powers of two, so every sum is exact."""
    params = quantised((64, 64), bits, 2048)["kernel"]
    delta, top = deltas(params)[0, 0], largest_code(bits)
    rate, decay = 2.0**-2, 0.5
    tx = lowbit(optax.sgd(rate, decay), weights=feeding("trace"), moments="float32")
    weights = np.asarray(params.dequantize(), np.float64)
    trace = np.zeros_like(weights)
    state = initial(tx, params)
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    largest = np.abs(weights) == weights.max()
    for seed in range(4):
        # Up to two spacings towards 0. The largest weights keep their step size.
        size = np.random.default_rng(seed).integers(1, 2**10, weights.shape) * 2.0**-7
        size = np.where(largest, 0, size * delta)
        grads = jnp.asarray(np.sign(weights) * size, jnp.float32)
        params, state = step(params, state, grads)
        trace = decay * trace + np.asarray(grads, np.float64)
        master = weights - rate * trace
        reach = -rate * decay / (1 - decay)
        units, target = master / delta, (master + reach * trace) / delta
        codes = np.clip(np.floor(target + 0.5), np.floor(units), np.ceil(units))
        weights = delta * np.clip(codes, -top, top)
        # As documented, a moment of 0 stays 0, and then weights are rounded at random.
        fed = trace != 0
        trace += np.where(fed, (master - weights) / reach, 0)
        got = np.asarray(params.dequantize())
        np.testing.assert_array_equal(got[fed], weights[fed])
        weights = np.where(fed, weights, got)
        np.testing.assert_array_equal(state.inner_state[0].trace, trace)
        assert (deltas(params) == delta).all()
    assert np.mean(codes != np.floor(units + 0.5)) > 0.01  # the target matters


FOUR, EIGHT = block_quantized(4), block_quantized(8)
STEPS, STEP = 400, 0.01  # the weights move by 4 spacings


@functools.cache
def drift(bits, weights, mu):
    """Steps of a hundredth of a spacing, in directions that do not change.

    Returns the movement relative to float32's, and the root mean square of the
    weights' distance from float32's, in spacings.
    """
    x = normal(0, (256, 128))
    params = quantizer(bits, block_size=128)(x)
    size = float(deltas(params).mean())
    divided = lowbit_optax.scale_by_factored_adam()
    inner = optax.chain(divided, optax.scale_by_learning_rate(STEP * size))
    tx = lowbit(inner, weights=weights, moments={"mu": mu} if mu else "float32")
    grads = jnp.sign(normal(1, x.shape))
    start = params.dequantize()

    def body(run, _):
        (params, state), (plain, own) = run
        updates, own = inner.update(grads, own)
        plain = optax.apply_updates(plain, updates)
        return (lowbit_optax.step(tx, params, state, grads), (plain, own)), None

    runs = (params, tx.init(params)), (start, inner.init(start))
    run = jax.jit(lambda runs: jax.lax.scan(body, runs, length=STEPS)[0])
    (params, _), (plain, _) = run(runs)
    got, want = params.dequantize() - start, plain - start
    moved = jnp.vdot(got, want) / jnp.vdot(want, want)
    return float(moved), float(jnp.sqrt(jnp.mean((got - want) ** 2))) / size


# The error in spacings; rounding to nearest has 0.29. With 4 bits, step sizes follow
# the largest weight of each block, and all weights of a block are rounded again.
SURVIVES = {"float32": (None, 0.5), "8 bits": (EIGHT, 0.56), "4 bits": (FOUR, 0.76)}


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize(("mu", "most"), SURVIVES.values(), ids=SURVIVES)
def test_small_updates_are_not_lost_and_the_moment_returns_errors(mu, most, bits):
    moved, error = drift(bits, feeding("mu"), mu)
    assert abs(moved - 1) < 0.08
    assert error < most


def test_without_feedback_small_updates_are_lost_or_drown_in_noise():
    moved, _ = drift(8, quantized_weights(rounding="nearest"), None)
    assert moved < 0.01
    moved, error = drift(8, quantized_weights(), None)
    assert abs(moved - 1) < 0.08
    assert error > 1.8  # sqrt(400 * 0.01) spacings


def test_four_bits_of_mu_add_less_noise_than_the_weights_had_without_feedback():
    """The moment returns errors with an error of its own."""
    _, wide = drift(8, feeding("mu"), None)
    _, eight = drift(8, feeding("mu"), EIGHT)
    _, four = drift(8, feeding("mu"), FOUR)
    _, without = drift(8, quantized_weights(), FOUR)
    assert wide < eight < four < 0.4 * without
    assert four > 1.3 * wide


FACTORED = functools.partial(
    factored_adamw, 1e-3, bits=0, min_dim_size_to_factor=64, min_size=0
)


def test_an_alias_with_feedback_feeds_errors_of_codes():
    params = quantizer(8, block_size=64)({"w": normal(0)})
    inner = lowbit_optax.scale_by_factored_adam(min_dim_size_to_factor=64)
    moments = {"mu": FOUR, "nu": EIGHT}
    inner = optax.chain(
        inner, optax.add_decayed_weights(1e-4), optax.scale_by_learning_rate(1e-3)
    )
    tx = lowbit(inner, weights=feeding("mu"), moments=moments, min_size=0)
    series = gradient_series({"w": normal(0)}, 3)
    advance = lowbit_optax.step
    both = FACTORED(), tx
    got, want = (train(x, params, initial(x, params), series, advance) for x in both)
    assert_same_bits(got, want)


def test_updates_that_are_added_give_the_same_weights():
    params = quantizer(8, block_size=64)({"w": normal(0)})
    series, tx = gradient_series({"w": normal(0)}, 3), FACTORED()
    by = (lowbit_optax.step, apply)
    got, want = (train(tx, params, initial(tx, params), series, x) for x in by)
    assert_same_bits(got, want)


def test_block_scaled_weights_take_the_same_format():
    params = lowbit_optax.block_scaling.block_scale({"w": normal(0)})
    inner, series = optax.adam(1e-3), gradient_series({"w": normal(0)}, 3)
    both = feeding("mu"), lowbit_optax.stochastic_rounding(error_feedback="mu")
    txs = [lowbit(inner, weights=x, moments="float32", min_size=0) for x in both]
    advance = lowbit_optax.step
    got, want = (train(x, params, initial(x, params), series, advance) for x in txs)
    assert_same_bits(got, want)


def test_a_skipped_step_changes_no_code():
    tx = lowbit_optax.with_loss_scale(
        lowbit(optax.adam(1e-3), weights=feeding("mu"), moments=EIGHT),
        lowbit_optax.loss_scaling.static_scale(2.0),
    )
    params = quantizer(8, block_size=64)({"w": normal(0)})
    series = gradient_series({"w": normal(0)}, 2)
    params, state = train(tx, params, initial(tx, params), series, lowbit_optax.step)
    bad = [{"w": jnp.full((64, 64), jnp.inf)}]
    new, after = train(tx, params, state, bad, lowbit_optax.step)
    assert_same_bits(new, params)
    mu = lambda state: optax.tree.get(state, "mu")
    assert_same_bits(mu(after), mu(state))


def test_released_steps_are_the_same():
    def loss_fn(params, x):
        def body(x, w):
            return jnp.tanh(x @ lowbit_optax.lpmm.dequantize(w, jnp.float32)), None

        x, _ = jax.lax.scan(body, x, params["layers"])
        return released.head_loss(params, x)

    inner = optax.sgd(released.RATE, momentum=0.5)
    tx = lowbit(inner, weights=feeding("trace"), moments=EIGHT)
    layers = quantizer(8, block_size=64)(released.weights(3))
    params = {"layers": layers, "head": released.normal(64)}
    batches = released.batches(3)

    def step(params, state, x):
        differentiate = lowbit_optax.lpmm.value_and_grad(loss_fn, lazy=True)
        loss, grads = differentiate(params, x)
        return loss, *lowbit_optax.step(tx, params, state, grads)

    found = released.updated_in_loop(loss_fn, tx, params, *batches[0])
    assert found == released.SIMPLE_IN_LOOP
    want = released.run(step, tx, params, batches)
    got = released.run(
        lowbit_optax.release.value_and_update(loss_fn, tx), tx, params, batches
    )
    assert_same_bits(got, want)
