"""With ``jax_enable_x64``, every optimizer returns the same bits.

There is one difference in optax: it raises Adam's decays to the power of the count in
float64. The counts here are so large that both powers are 0.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import release
from tests.helpers.kernels import QUICK
from tests.helpers.optimizers import EVERY_ALIAS, assert_same_bits, initial

pytestmark = pytest.mark.standard_promotion

RATE = 0.01
BOTH = [False, True]

TRANSFORMATIONS = {
    **{
        name: alias(RATE, **({"momentum": 0.9} if name.endswith("_sgd") else {}))
        for name, alias in EVERY_ALIAS.items()
    },
    "schedule": lowbit_optax.extra_bits_adamw(
        optax.linear_schedule(RATE, RATE / 2, 4 * 10**6), bits=5
    ),
    "accumulate_gradients": lowbit_optax.accumulate_gradients(
        lowbit_optax.lowbit_sgd(RATE), 2
    ),
    **{
        f"with_loss_scale {name}": lowbit_optax.with_loss_scale(
            lowbit_optax.kahan_sgd(RATE), scaling
        )
        for name, scaling in {
            "static": lowbit_optax.loss_scaling.static_scale(128.0),
            "backoff": lowbit_optax.loss_scaling.backoff_scale(),
            "log-normal": lowbit_optax.loss_scaling.log_normal_scale(),
        }.items()
    },
}

# The other optimizers are jitted, and jit compiles each of them twice.
EAGER = ["sr_sgd", "lowbit_sgd", "lpmm_sgd"]


def normal(seed, *shape, dtype=jnp.bfloat16, size=1.0):
    """Returns the same numbers with and without 64-bit types."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * size
    return jnp.asarray(numbers.astype(np.float32)).astype(dtype)


def problem(name, jit):
    """Returns parameters, the transformation's state, and gradients in two dtypes."""
    params = {"matrix": normal(0, 96, 48), "vector": normal(1, 48)}
    if name.startswith("lpmm"):
        params = jit(functools.partial(lowbit_optax.lpmm.quantize_params, bits=12))(
            params
        )
    grads = {
        "matrix": normal(2, 96, 48, size=0.1),
        "vector": normal(3, 48, dtype=jnp.float32, size=0.1),
    }
    return params, old(jit(TRANSFORMATIONS[name].init)(params)), grads


def old(state):
    """Replaces the counts of the state with large ones."""

    def replace(path, x):
        is_count = getattr(path[-1], "name", None) == "count"
        return jnp.full_like(x, 10**6) if is_count else x

    return jax.tree_util.tree_map_with_path(replace, state)


def two_steps(name):
    """Takes one step with ``step`` and one with ``update``."""
    tx = TRANSFORMATIONS[name]

    def run(params, state, grads):
        params, state = lowbit_optax.step(tx, params, state, grads)
        updates, state = tx.update(grads, state, params)
        return lowbit_optax.apply_updates(params, updates), state

    return run


def without_and_with(function):
    """Returns the function's results without and with 64-bit types."""
    found = []
    for enabled in BOTH:
        with jax.enable_x64(enabled):
            found.append(function())
    return found


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_steps_are_the_same(name):
    jit = (lambda function: function) if name in EAGER else jax.jit
    run = jit(two_steps(name))
    assert_same_bits(*without_and_with(lambda: run(*problem(name, jit))))


def test_release_is_the_same():
    tx = TRANSFORMATIONS["kahan_adamw"]

    def loss_fn(params, h):
        body = lambda h, w: (jnp.tanh(h @ w), None)
        h, _ = jax.lax.scan(body, h, params["layers"])
        return jnp.mean((h * params["out"]).astype(jnp.float32) ** 2)

    step = jax.jit(release.value_and_update(loss_fn, tx), compiler_options=QUICK)

    def run():
        params = {"layers": normal(0, 3, 32, 32, size=0.1), "out": normal(1, 32)}
        return step(params, old(initial(tx, params)), normal(2, 8, 32))

    assert_same_bits(*without_and_with(run))


def test_gradients_may_be_wider_than_their_parameters():
    with jax.enable_x64(True):
        for make in (lowbit_optax.kahan_adamw, lowbit_optax.lowbit_adamw):
            tx = make(0.1, min_size=0, warn=False)
            params = {"w": normal(0, 64, 64, dtype=jnp.float32)}
            step = jax.jit(functools.partial(lowbit_optax.step, tx))
            grads = {"w": normal(1, 64, 64, dtype=jnp.float32)}
            want = step(params, tx.init(params), grads)
            wide = jax.tree.map(lambda x: x.astype(jnp.float64), grads)
            assert_same_bits(step(params, tx.init(params), wide), want)
