"""NumPyro's ``SVI``, whose optimizer may be one of optax."""

import jax
import pytest
from side_by_side import (
    STEPS,
    batches,
    compare,
    kernels,
    narrow,
    network,
    squared_error,
)

numpyro = pytest.importorskip("numpyro")
from numpyro import distributions, infer  # noqa: E402

LINES = (
    "optimizer = lowbit_optax.lowbit_adamw(learning_rate)",
    "numpyro.param(name, initial.astype(jnp.bfloat16))",
)


def _run(tx, dtype):
    def model(inputs, targets):
        start = narrow(kernels(), dtype)
        weights = {k: numpyro.param(k, x) for k, x in start.items()}
        mean = network(weights, inputs)
        numpyro.sample("y", distributions.Normal(mean, 1.0).to_event(2), obs=targets)

    def guide(inputs, targets):
        pass

    svi = infer.SVI(model, guide, tx, infer.Trace_ELBO())
    inputs, targets = batches()
    state = svi.init(jax.random.key(0), inputs[0], targets[0])
    advance = jax.jit(svi.update)
    for step in range(STEPS):
        state, _ = advance(state, inputs[step], targets[step])
    weights = svi.get_params(state)
    loss = squared_error(network(weights, inputs[-1]), targets[-1])
    _, (_, optax_state) = state.optim_state
    return loss, weights, optax_state


def test_it_trains_like_float32():
    compare("NumPyro SVI", "numpyro", LINES, _run)
