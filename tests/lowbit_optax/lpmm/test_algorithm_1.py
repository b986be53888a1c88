"""The package's steps match Algorithm 1 of the LPMM paper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import accumulate_gradients, block_quantized, lpmm_adam, lpmm_sgd
from lowbit_optax import release as releases
from lowbit_optax._numerics.random_bits import DrawsToNearest
from lowbit_optax.formats.quantized_tensor import requantize
from tests.helpers.optimizers import apply, assert_same_bits

pytestmark = pytest.mark.standard_promotion

SHAPE, BITS = (128, 64), 8
# Products of powers of two are exact, so fusing them with sums changes nothing.
ALPHA, BETA, CURVATURE = 2.0**-4, 0.5, 0.5
LINEAR = block_quantized(8, code="linear", block_size=2048, rounding="nearest")
DYNAMIC = block_quantized(8, code="dynamic", block_size=2048, rounding="nearest")


def noise_of(steps, n):
    noise = np.random.default_rng(0).normal(size=(steps, n, *SHAPE))
    return jnp.asarray(noise, jnp.float32)


def start():
    theta = np.random.default_rng(1).normal(size=SHAPE)
    return lowbit_optax.lpmm.quantize_params(jnp.float32(theta), bits=BITS)


def gradient(theta, noise):
    """Returns a microbatch's gradient of CURVATURE / 2 |theta|^2 + noise theta."""
    return CURVATURE * theta + noise


def rounded(format_, x):
    return format_.decode(format_.encode(x, DrawsToNearest(), 0), SHAPE)


def algorithm_1(theta, noise):
    """Runs Algorithm 1; comments give the line numbers of the paper."""
    q_g, q_m = (functools.partial(rounded, x) for x in (LINEAR, DYNAMIC))
    m = jnp.zeros(SHAPE)
    for of_step in noise:  # 1: for t = 1, 2, ..., T do
        values, g = theta.dequantize(), jnp.zeros(SHAPE)  # 2: g_{t,0} <- 0
        for of_batch in of_step:  # 3: for i = 1, 2, ..., N do, 4: sample a minibatch
            g = q_g(g + gradient(values, of_batch))  # 5
        m = q_m(BETA * m + g)  # 7: m_t <- Q(beta m_{t-1} + g_{t,N})
        theta = requantize(values - ALPHA * m, theta, None)  # 8
        yield theta, m


def trained(tx, params, noise):
    """Returns the parameters and the state after each update."""

    @jax.jit
    def step(params, state, noise):
        grads = gradient(params.dequantize(), noise)
        return lowbit_optax.step(tx, params, state, grads)

    state = tx.init(params)
    for of_step in noise:
        for of_batch in of_step:
            params, state = step(params, state, of_batch)
        yield params, state


@pytest.mark.parametrize(
    ("n", "implementation"), [(1, "xla"), (3, "xla"), (1, "pallas"), (3, "pallas")]
)
def test_steps_rounded_to_nearest_match_the_algorithm(n, implementation):
    noise = noise_of(4, n)
    sgd = lpmm_sgd(ALPHA, BETA, rounding="nearest", implementation=implementation)
    tx = accumulate_gradients(sgd, n, LINEAR)
    expected = algorithm_1(start(), noise)
    for (got, state), (theta, m) in zip(
        trained(tx, start(), noise), expected, strict=True
    ):
        assert_same_bits(got, theta)
        trace = optax.tree.get(state, "trace")
        np.testing.assert_array_equal(DYNAMIC.decode(trace, SHAPE), m)


def test_steps_rounded_stochastically_match_sgd_in_expectation():
    noise = noise_of(3, 2)
    values, m = start().dequantize(), jnp.zeros(SHAPE)
    for first, second in noise:
        m = BETA * m + gradient(values, first) + gradient(values, second)
        values = values - ALPHA * m
    tx = accumulate_gradients(lpmm_sgd(ALPHA, BETA), 2)

    @jax.jit
    def end(seed):
        params, state = start(), tx.init(start())
        inner = state.inner_state._replace(seed=seed + 1000)
        carry = params, state._replace(seed=seed, inner_state=inner)

        def body(carry, of_batch):
            grads = gradient(carry[0].dequantize(), of_batch)
            return lowbit_optax.step(tx, *carry, grads), None

        (params, _), _ = jax.lax.scan(body, carry, noise.reshape(-1, *SHAPE))
        return params.dequantize()

    ends = np.stack([end(jnp.uint32(seed)) for seed in range(48)])
    error, spread = ends.mean(axis=0) - values, ends.std(axis=0).mean()
    assert spread > 0.1 * float(start().scales.view(jnp.float32).mean())
    # The standard error of a mean of 48 runs is 1/7 of their spread.
    assert np.abs(error).max() < 5.5 * spread / np.sqrt(48)
    assert abs(error.mean()) < 5 * spread / np.sqrt(48 * error.size)


# With four bits, the stored momentum differs visibly from the momentum before rounding.
SGD = functools.partial(
    lpmm_sgd, ALPHA, BETA, momentum_bits=4, block_size=64, rounding="nearest"
)
ADAM = functools.partial(lpmm_adam, ALPHA, 0.5, 0.75, block_size=64, rounding="nearest")
FOUR_BITS, EIGHT_BITS = (
    block_quantized(bits, code="dynamic", block_size=64) for bits in (4, 8)
)
CLIPPED = lambda **options: optax.chain(optax.clip_by_global_norm(1.0), SGD(**options))


def adams_update(state):
    mu = EIGHT_BITS.decode(optax.tree.get(state, "mu"), SHAPE)
    squares = block_quantized(8).for_field("nu", is_second=True)
    nu = squares.decode(optax.tree.get(state, "nu"), SHAPE)
    count = np.float64(optax.tree.get(state, "count", filtering=_is_adams))
    mu, nu = mu / (1 - 0.5**count), nu / (1 - 0.75**count)
    return -ALPHA * mu / (np.sqrt(nu) + 1e-8)


def _is_adams(path, _):
    return any(getattr(x, "tuple_name", None) == "ScaleByAdamState" for x in path)


def sgds_update(state):
    return -ALPHA * FOUR_BITS.decode(optax.tree.get(state, "trace"), SHAPE)


def released(tx, params, state, grads):
    loss = lambda params: jnp.sum(lowbit_optax.lpmm.dequantize(params) * grads)
    step = releases.value_and_update(loss, tx)
    _, params, state = step(params, state)
    return params, state


def scaled(tx):
    return lowbit_optax.with_loss_scale(tx, lowbit_optax.loss_scaling.static_scale(1.0))


ROUTES = {
    "step": (SGD, "xla", lowbit_optax.step),
    "adam": (ADAM, "xla", lowbit_optax.step),
    "adam in a kernel": (ADAM, "pallas", lowbit_optax.step),
    "blocks": (ADAM, None, lowbit_optax.step),
    "update": (SGD, "xla", apply),
    "update in a kernel": (SGD, "pallas", apply),
    "release": (SGD, None, released),
    "clipped": (CLIPPED, None, lowbit_optax.step),
    "loss scale": (lambda **options: scaled(SGD(**options)), "xla", lowbit_optax.step),
    "eager": (SGD, None, lowbit_optax.step),
}


@pytest.mark.parametrize("route", ROUTES)
def test_the_step_reads_the_momentum_as_it_is_stored(route):
    make, implementation, step = ROUTES[route]
    tx, params = make(implementation=implementation), start()
    state = tx.init(params)
    step = functools.partial(step, tx)
    step = step if route == "eager" else jax.jit(step)
    update = adams_update if make is ADAM else sgds_update
    for noise in noise_of(2, 1):
        old, (params, state) = params, step(params, state, noise[0])
        want = requantize(old.dequantize() + update(state), old, None)
        # Roots and fused sums may differ in the last bits.
        assert np.mean(np.asarray(params.dequantize() != want.dequantize())) < 0.001
