"""Libraries that call optax transformations train like float32 with this package."""

import os

import jax
import jax.numpy as jnp
import optax
import pytest

from tests.helpers.side_by_side import (
    HIDDEN,
    LEARNING_RATE,
    OURS,
    STEPS,
    WIDTH,
    batches,
    compare,
    kernels,
    narrow,
    network,
    squared_error,
    with_narrow_updates,
)


def of_network(weights, inputs, targets):
    return squared_error(network(weights, inputs), targets)


def by_optaxs_lines(tx, params, loss):
    """Train with the loop of optax's documentation."""

    @jax.jit
    def advance(params, state, inputs, targets):
        grads = jax.grad(loss)(params, inputs, targets)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, (inputs, targets) = tx.init(params), map(jnp.asarray, batches())
    for step in range(STEPS):
        params, state = advance(params, state, inputs[step], targets[step])
    return loss(params, inputs[-1], targets[-1]), params, state


def haiku(tx, dtype):
    """Train a haiku module."""
    haiku = pytest.importorskip("haiku")
    model = haiku.without_apply_rng(
        haiku.transform(lambda x: haiku.nets.MLP([HIDDEN, WIDTH])(x))
    )
    params = narrow(model.init(jax.random.key(0), jnp.ones((1, WIDTH))), dtype)
    loss = lambda params, x, y: squared_error(model.apply(params, x), y)
    return by_optaxs_lines(tx, params, loss)


def keras(tx, dtype):
    """Train a Keras model on JAX with ``stateless_call``."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.layers.Dense(HIDDEN, activation="tanh"), keras.layers.Dense(WIDTH)]
    )
    model.build((None, WIDTH))
    params = narrow([x.value for x in model.trainable_variables], dtype)
    others = [x.value for x in model.non_trainable_variables]

    def loss(params, inputs, targets):
        outputs, _ = model.stateless_call(params, others, inputs)
        return squared_error(outputs, targets)

    return by_optaxs_lines(tx, params, loss)


def jaxopt(tx, dtype):
    """Train with jaxopt's ``OptaxSolver``."""
    jaxopt = pytest.importorskip("jaxopt", exc_type=ImportError)
    solver = jaxopt.OptaxSolver(opt=tx, fun=of_network, maxiter=STEPS, tol=0.0)
    inputs, targets = (x[0] for x in batches())
    found = solver.run(narrow(kernels(), dtype), inputs, targets)
    loss = of_network(found.params, inputs, targets)
    return loss, found.params, found.state.internal_state


def numpyro(tx, dtype):
    """Train with NumPyro's ``SVI``."""
    numpyro = pytest.importorskip("numpyro")
    from numpyro import distributions, infer

    def model(inputs, targets):
        start = narrow(kernels(), dtype)
        weights = {k: numpyro.param(k, x) for k, x in start.items()}
        mean = network(weights, inputs)
        numpyro.sample("y", distributions.Normal(mean, 1.0).to_event(2), obs=targets)

    svi = infer.SVI(model, lambda *_: None, tx, infer.Trace_ELBO())
    inputs, targets = batches()
    state = svi.init(jax.random.key(0), inputs[0], targets[0])
    advance = jax.jit(svi.update)
    for step in range(STEPS):
        state, _ = advance(state, inputs[step], targets[step])
    weights = svi.get_params(state)
    _, (_, optax_state) = state.optim_state
    return of_network(weights, inputs[-1], targets[-1]), weights, optax_state


def optimistix(tx, dtype):
    """Train with optimistix's ``OptaxMinimiser``, which calls equinox's updates."""
    optimistix = pytest.importorskip("optimistix")
    inputs, targets = (x[0] for x in batches())
    error = lambda weights, _: of_network(weights, inputs, targets)
    solver = optimistix.OptaxMinimiser(tx, rtol=0.0, atol=0.0)
    found = optimistix.minimise(
        error, solver, narrow(kernels(), dtype), max_steps=STEPS, throw=False
    )
    return error(found.value, None), found.value, found.state.opt_state


# A function that trains, the name of the row, and the package.
ROWS = [
    (haiku, "haiku", "dm-haiku"),
    (keras, "Keras stateless_call", "keras"),
    (jaxopt, "jaxopt OptaxSolver", "jaxopt"),
    (numpyro, "NumPyro SVI", "numpyro"),
    (with_narrow_updates(optimistix), "optimistix OptaxMinimiser", "optimistix"),
]


@pytest.mark.parametrize(("run", "trainer", "package"), ROWS)
def test_it_trains_like_float32(run, trainer, package):
    compare(trainer, package, run)


@pytest.mark.parametrize("name", OURS)
def test_float32_updates_of_bfloat16_parameters_are_refused_by_optimistix(name):
    with pytest.raises(ValueError, match=r"\+   {'first': f32"):
        optimistix(OURS[name](LEARNING_RATE), jnp.bfloat16)
