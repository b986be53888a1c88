"""Training in 16-bit arithmetic reproduces figures 2 and 10 of Zamirai et al. (2020).

The task is least squares in 10 dimensions with stochastic gradient descent and one
example per step: inputs N(0, 1), weights uniform in [0, 100), labels with noise 0.5,
learning rate 0.01. Where bfloat16's numbers are 0.5 apart, updates under 0.25 are lost.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowbit_optax
from lowbit_optax import emulation, kahan, master_weights, nearest, precision
from lowbit_optax.precision import FloatFormat, Formats
from tests.helpers.optimizers import weights_only

pytestmark = pytest.mark.standard_promotion

DIMENSIONS, EXAMPLES, STEPS, SEEDS = 10, 1000, 10_000, 3
NOISE, LEARNING_RATE = 0.5, 0.01


def problem(seed):
    random = np.random.default_rng(seed)
    weights = random.uniform(0, 100, DIMENSIONS)
    inputs = random.standard_normal((EXAMPLES, DIMENSIONS))
    labels = inputs @ weights + NOISE * random.standard_normal(EXAMPLES)
    order = random.integers(0, EXAMPLES, STEPS)
    data = [jnp.asarray(x, jnp.float32) for x in (inputs, labels)]
    return data, jnp.asarray(order)


def loss_fn(weights, inputs, labels):
    products = jnp.einsum("ij,j->i", inputs, weights.astype(jnp.float32))
    return jnp.mean(jnp.square(products - labels)) / 2


def trained(tx, dtype, formats=None):
    """Returns each seed's data and the results of training on it.

    The results are the parameters of every 50th step in the last half, the last
    masters, and the mean of the parameters in the last half. With ``formats``, every
    activation, weight and gradient is rounded to them.
    """
    loss = loss_fn
    if formats is not None:
        weights = jax.ShapeDtypeStruct((DIMENSIONS,), dtype)
        plan = precision.trace(loss_fn, weights, jnp.ones((1, 10)), jnp.ones(1))
        rounded = precision.apply(loss_fn, precision.uniform(plan, formats=formats))
        loss = lambda *args: rounded(*args)[0]

    @jax.jit
    def run(inputs, labels, order):
        def step(carry, i):
            params, state = carry
            grads = jax.grad(loss)(params, inputs[i][None], labels[i][None])
            params, state = lowbit_optax.step(tx, params, state, grads)
            return (params, state), params

        params = jnp.zeros(DIMENSIONS, dtype)
        (params, state), steps = lax.scan(step, (params, tx.init(params)), order)
        late = steps[STEPS // 2 :].astype(jnp.float32)
        masters = params if dtype == jnp.float32 else master_weights(params, state)
        mean = jnp.mean(late, 0, keepdims=True)
        return {"params": late[::50], "masters": masters[None], "mean": mean}

    problems = [problem(seed) for seed in range(SEEDS)]
    return [(data, run(*data, order)) for data, order in problems]


def losses(results, which):
    """Returns the mean over seeds of the exact loss of params, masters or the mean."""
    loss_of = jax.vmap(loss_fn, (0, None, None))
    values = [loss_of(x[which].astype(jnp.float32), *data) for data, x in results]
    return float(np.mean([jnp.mean(x) for x in values]))


SGD = optax.sgd(LEARNING_RATE)
BFLOAT16 = Formats(FloatFormat.of("bfloat16"), FloatFormat.of("bfloat16"))
in_bfloat16 = lambda weights: weights_only(SGD, weights, min_size=0)


@functools.cache
def float32():
    return losses(trained(SGD, jnp.float32), "params")


@functools.cache
def nearest_updates():
    """Trains in float32, except that each update rounds the weights to nearest."""
    return losses(trained(in_bfloat16(nearest()), jnp.bfloat16), "params")


def test_float32_reaches_the_noise():
    assert NOISE**2 / 2 * 0.9 < float32() < NOISE**2 / 2 * 1.15


def test_nearest_updates_alone_stop_far_above_float32():
    assert nearest_updates() > 15 * float32()


def test_rounding_forward_and_backward_alone_does_little():
    excess = losses(trained(SGD, jnp.float32, BFLOAT16), "params") - float32()
    assert excess < (nearest_updates() - float32()) / 50


@pytest.mark.slow_to_compile
def test_nearest_updates_in_16_bit_arithmetic_stop_as_far_above():
    tx = in_bfloat16(nearest())
    assert losses(trained(tx, jnp.bfloat16, BFLOAT16), "params") > 10 * float32()


@pytest.mark.parametrize(
    "tx",
    [emulation.sixteen_bit_sgd(LEARNING_RATE), in_bfloat16(kahan())],
    ids=["16-bit unit", "float32 updates"],
)
def test_kahan_summation_in_16_bit_arithmetic_trains_like_float32(tx):
    results = trained(tx, jnp.bfloat16, BFLOAT16)
    # The remaining loss is due to the spacing of bfloat16 near the solution.
    rounded = [
        (data, {"masters": x["masters"].astype(jnp.bfloat16)}) for data, x in results
    ]
    assert losses(results, "params") < 2 * float32()
    assert losses(results, "params") < 1.3 * losses(rounded, "masters")
    assert losses(results, "masters") < 1.5 * float32()
    assert losses(results, "mean") < 1.1 * float32()


@pytest.mark.slow_to_compile
def test_stochastic_rounding_in_16_bit_arithmetic_is_float32_with_noise():
    tx = in_bfloat16(lowbit_optax.stochastic_rounding())
    results = trained(tx, jnp.bfloat16, BFLOAT16)
    assert losses(results, "params") < nearest_updates() / 3
    assert losses(results, "mean") < 1.5 * float32()


@pytest.mark.slow_to_compile
def test_shorter_weights_come_near_with_14_bits_only():
    """Uses Kahan summation; weights, gradients and activations have 1 + 8 + m bits."""
    found = {}
    for mantissa in (3, 5, 7):
        fmt = FloatFormat(8, mantissa)
        results = trained(in_bfloat16(kahan()), jnp.bfloat16, Formats(fmt, fmt))
        found[fmt.bits] = losses(results, "params")
    assert found[12] > 3 * found[14] > 3 * found[16]
    assert found[14] < 5 * float32() < 20 * float32() < found[12]
