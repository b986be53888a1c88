"""jaxopt's ``OptaxSolver``."""

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

jaxopt = pytest.importorskip("jaxopt", exc_type=ImportError)

LINES = (
    "opt = lowbit_optax.lowbit_adamw(learning_rate)",
    "params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)",
)


def _run(tx, dtype):
    error = lambda weights, inputs, targets: squared_error(
        network(weights, inputs), targets
    )
    solver = jaxopt.OptaxSolver(opt=tx, fun=error, maxiter=STEPS, tol=0.0)
    inputs, targets = batches()
    found = solver.run(narrow(kernels(), dtype), inputs[0], targets[0])
    loss = error(found.params, inputs[0], targets[0])
    return loss, found.params, found.state.internal_state


def test_it_trains_like_float32():
    compare("jaxopt OptaxSolver", "jaxopt", LINES, _run)
