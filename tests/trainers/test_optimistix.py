"""optimistix' ``OptaxMinimiser``, which applies updates by equinox."""

import jax.numpy as jnp
import pytest
from side_by_side import (
    LEARNING_RATE,
    OURS,
    STEPS,
    batches,
    compare,
    kernels,
    narrow,
    network,
    squared_error,
    with_narrow_updates,
)

optimistix = pytest.importorskip("optimistix")

LINES = (
    "tx = lowbit_optax.lowbit_adamw(learning_rate, match_grad_dtype=True)",
    "params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)",
)


def _run(tx, dtype):
    inputs, targets = (x[0] for x in batches())
    error = lambda weights, _: squared_error(network(weights, inputs), targets)
    solver = optimistix.OptaxMinimiser(tx, rtol=0.0, atol=0.0)
    found = optimistix.minimise(
        error, solver, narrow(kernels(), dtype), max_steps=STEPS, throw=False
    )
    return error(found.value, None), found.value, found.state.opt_state


def test_it_trains_like_float32():
    compare("optimistix OptaxMinimiser", "optimistix", LINES, with_narrow_updates(_run))


@pytest.mark.parametrize("name", OURS)
def test_float32_updates_of_bfloat16_parameters_are_refused(name):
    with pytest.raises(ValueError, match=r"\+   {'first': f32"):
        _run(OURS[name](LEARNING_RATE), jnp.bfloat16)
