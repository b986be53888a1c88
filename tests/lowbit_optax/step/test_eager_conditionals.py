"""Outside of jit, steps with optax's conditionals compile nothing after the first two.

These transformations create a conditional with new closures in every step. JAX would
compile it each time, and keep the program.
"""

import collections

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.core import Tracer

import lowbit_optax
from lowbit_optax import kahan_sgd, loss_scaling, lowbit, with_loss_scale

PARAMS = {"w": jnp.ones((8, 8), jnp.bfloat16)}
GRADS = {"w": jnp.ones((8, 8), jnp.bfloat16)}
SGD = optax.sgd(0.5, momentum=0.5)

_compiled: collections.Counter[str] = collections.Counter()
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, **__: _compiled.update([name])
)


def update(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def compilations(tx, advance, grads=GRADS, **extra_args):
    """Returns the number of programs that two steps compile, after four others."""
    params, state = PARAMS, tx.init(PARAMS)
    for number in range(6):
        if number == 4:
            before = _compiled["/jax/core/compile/backend_compile_duration"]
        params, state = advance(tx, params, state, grads, **extra_args)
    jax.block_until_ready(params)
    return _compiled["/jax/core/compile/backend_compile_duration"] - before


@pytest.mark.parametrize("tx", [
    optax.MultiSteps(kahan_sgd(0.5), 2),
    with_loss_scale(optax.MultiSteps(kahan_sgd(0.5), 2), loss_scaling.static_scale(2)),
    lowbit(optax.MultiSteps(SGD, 2)),
    lowbit(optax.apply_if_finite(SGD, 2)),
    lowbit(optax.conditionally_mask(SGD, lambda step, **_: step < 3)),
], ids=["around", "scaled", "inside", "finite", "mask"])  # fmt: skip
@pytest.mark.standard_promotion
def test_steady_steps_compile_nothing(tx):
    assert compilations(tx, lowbit_optax.step) == 0


@pytest.mark.standard_promotion
def test_update_compiles_no_more_than_optaxs_own_transformations():
    # Here, MultiSteps itself creates the conditional.
    float32 = {"w": GRADS["w"].astype(jnp.float32)}
    few = compilations(optax.MultiSteps(SGD, 2), update, float32)
    assert compilations(optax.MultiSteps(kahan_sgd(0.5), 2), update, float32) <= few


@pytest.mark.standard_promotion
def test_schedules_may_need_concrete_values():
    tx = optax.MultiSteps(kahan_sgd(0.5), lambda step: jnp.int32(1 if step < 1 else 2))
    state, params = tx.init(PARAMS), PARAMS
    for _ in range(3):
        params, state = lowbit_optax.step(tx, params, state, GRADS)
    assert int(state.gradient_step) == 2
    assert float(params["w"][0, 0]) == 0


@pytest.mark.standard_promotion
def test_after_the_first_step_the_inner_update_runs_once_per_step():
    calls, inner = [], optax.adam(1e-2)

    def update(*args):
        calls.append(any(isinstance(x, Tracer) for x in jax.tree.leaves(args)))
        return inner.update(*args)

    tx = lowbit_optax.lowbit(optax.GradientTransformation(inner.init, update))
    params, state = lowbit_optax.from_master(tx, {"w": jnp.ones((64, 64))})
    grads = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    for _ in range(3):
        params, state = lowbit_optax.step(tx, params, state, grads)
    assert calls.count(False) == 3
    assert calls.count(True) <= 2  # the first step, and its check of the wrapper
