"""An average of the weights in few bits follows the float32 average."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import ema_of_params, extra_bits, kahan, master_weights
from tests.helpers.optimizers import assert_same_bits

SHAPE = (64, 64)
STEPS = 12_000

FORMATS = {
    "nearest": lowbit_optax.nearest(),
    "stochastic_rounding": lowbit_optax.stochastic_rounding(),
    "kahan": kahan(),
    "extra_bits 8": None,
    "extra_bits 16": extra_bits(),
    "float32": lowbit_optax.master_copy(),
}


def normal(seed, shape=SHAPE):
    random = np.random.default_rng(seed)
    return jnp.asarray(random.standard_normal(shape) / 16, jnp.float32)


def averages(txs, weight, steps, first):
    """Returns the float32 averages of ``weight(i)`` from several transformations."""

    @jax.jit
    def run(first):
        def body(averages, i):
            w = weight(i.astype(jnp.float32))
            return {
                name: lowbit_optax.step(tx, *averages[name], w)
                for name, tx in txs.items()
            }, None

        start = {name: (first, tx.init(first)) for name, tx in txs.items()}
        found, _ = jax.lax.scan(body, start, jnp.arange(steps))
        return {name: master_weights(*found[name]) for name in txs}

    return {k: np.asarray(v, np.float64) for k, v in run(first).items()}


def test_at_a_decay_of_0_9999_it_follows_float32_where_bfloat16_stands_still():
    start, drift = normal(0), normal(1)
    first = start.astype(jnp.bfloat16)
    txs = {
        name: ema_of_params(0.9999, debias=False, weights=weights, min_size=0)
        for name, weights in FORMATS.items()
    }
    per_step = jnp.float32(1 / STEPS)
    got = averages(txs, lambda i: start + i * per_step * drift, STEPS, first)
    # For weights a + i b, this is the average of i after all steps, in float64.
    kept = 0.9999**STEPS
    lag = (STEPS - 1) - (STEPS - 1) * kept - 0.9999 * (1 - 0.9999 ** (STEPS - 1)) / 1e-4
    lag += (STEPS - 1) * kept
    a, b = np.asarray(start, np.float64), np.asarray(drift, np.float64) / STEPS
    old = np.asarray(first, np.float64)
    want = kept * old + (1 - kept) * a + lag * b
    rms = lambda x: np.sqrt(np.mean(x**2))
    error = {name: rms(x - want) / rms(want - old) for name, x in got.items()}
    assert error["nearest"] > 0.9
    assert error["stochastic_rounding"] < 0.1
    assert error["kahan"] < 2e-3
    assert error["extra_bits 8"] < 5e-3
    assert error["extra_bits 16"] < 1e-4
    assert error["float32"] < 1e-4


def test_it_moves_where_a_float32_average_loses_every_step():
    # A step changes the average by 1e-5 of 1e-3, which is below 2^-25 of the average.
    first = jnp.ones(SHAPE, jnp.bfloat16)
    txs = {
        name: ema_of_params(0.99999, debias=False, weights=FORMATS[name], min_size=0)
        for name in FORMATS
    }
    weights = jnp.full(SHAPE, 1.001, jnp.float32)
    got = averages(txs, lambda i: weights, 2000, first)
    for name in ("float32", "extra_bits 16", "stochastic_rounding", "nearest"):
        assert np.all(got[name] == 1), name
    asked = (1 - 0.99999**2000) * 1e-3
    for name in ("extra_bits 8", "kahan"):
        assert np.mean(got[name] - 1) == pytest.approx(asked, rel=0.1), name


@pytest.mark.standard_promotion
def test_without_bias_it_is_the_average_that_optax_returns():
    series = jnp.stack([normal(seed) for seed in range(6)])
    optax_ema = optax.ema(0.9, debias=True)
    ema = ema_of_params(0.9, weights=extra_bits(), min_size=0)
    first = jnp.full(SHAPE, 100, jnp.bfloat16)  # which the average must forget

    @jax.jit
    def run(series):
        average, state, other = first, ema.init(first), optax_ema.init(series[0])
        for weights in series:
            want, other = optax_ema.update(weights, other)
            average, state = lowbit_optax.step(ema, average, state, weights)
        return master_weights(average, state), want

    got, want = run(series)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["kahan", "extra_bits 8", "stochastic_rounding"])
def test_kernels_give_the_same_bits(name):
    def run(implementation):
        # Every product with this decay is exact.
        options = dict(weights=FORMATS[name], implementation=implementation)
        ema = ema_of_params(1 - 2.0**-6, debias=False, min_size=0, **options)
        average = normal(0).astype(jnp.bfloat16)
        step = jax.jit(functools.partial(lowbit_optax.step, ema))
        return step(average, ema.init(average), normal(1))

    assert_same_bits(run("pallas"), run("xla"))


def test_only_floats_are_averaged():
    ema = ema_of_params(0.5)
    average = {"w": jnp.ones((64, 64)), "step": jnp.int32(0)}
    weights = {"w": jnp.zeros((64, 64)), "step": jnp.int32(1)}
    average, _ = lowbit_optax.step(ema, average, ema.init(average), weights)
    assert (float(average["w"][0, 0]), int(average["step"])) == (0, 0)


def test_noise_of_averages_and_optimizers_is_independent():
    # Both move a quarter of a spacing, from the same parameters and with default seeds.
    rounding = lowbit_optax.stochastic_rounding()
    sgd = lowbit_optax.lowbit(optax.sgd(1.0), weights=rounding, moments="float32")
    ema = ema_of_params(0.5, debias=False, weights=rounding)
    params = jnp.ones((64, 64), jnp.bfloat16)
    moved = [
        lowbit_optax.step(tx, params, tx.init(params), jnp.full((64, 64), input))[0]
        for tx, input in ((sgd, -(2.0**-9)), (ema, 1 + 2.0**-8))
    ]
    noise = np.corrcoef(*(np.asarray(x, np.float32).ravel() for x in moved))
    assert abs(noise[0, 1]) < 0.1
