"""A step that the inner transformation skips changes no master.

The inner transformation returns the moments unchanged, but ``lowbit`` encodes them
again, so their codes may change by about as much as one rounding.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import block_quantized, cast, convert, lowbit, master_weights
from tests.helpers.optimizers import (
    ALL_FORMATS,
    apply,
    assert_same_bits,
    initial,
    jitted,
    normal,
    random_grads,
    train,
)

pytestmark = pytest.mark.standard_promotion


def grads_of(params, seed, value=0):
    grads = random_grads(params, seed)
    return grads | {"w": grads["w"].at[3, 4].set(value)}


def trained(tx, advance=lowbit_optax.step):
    """Returns the jitted step, and parameters and state after some good steps."""
    params = {"w": normal(0, (64, 80), jnp.bfloat16), "b": normal(1, (80,))}
    series = [grads_of(params, seed) for seed in range(3)]
    params, state = train(tx, params, initial(tx, params), series, advance)
    return jitted(tx, advance), params, state


def assert_close(got, want, share):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= share * np.linalg.norm(b)


def assert_skips(inner, options, advance=lowbit_optax.step):
    """Steps with non-finite gradients change no master, and moments only once."""
    tx = lowbit(inner, **options)
    step, params, state = trained(tx, advance)
    want = master_weights(params, state)
    _, moments = convert(params, state, tx, inner)
    after, new = params, state
    for bad in (np.nan, -np.inf, np.nan):
        after, new = step(after, new, grads_of(params, 9, bad))
        assert_same_bits(master_weights(after, new), want)
    _, kept = convert(after, new, tx, inner)
    kept, moments = (optax.tree.get(x, "inner_state") for x in (kept, moments))
    assert_close(kept, moments, 0.02)
    moved, _ = step(params, state, grads_of(params, 9))
    assert all((moved[name] != params[name]).any() for name in params)


def finite_only(inner):
    return optax.apply_if_finite(inner, max_consecutive_errors=10)


ADAMW = finite_only(optax.adamw(0.01))
SGD = finite_only(optax.sgd(0.1, momentum=0.9))
MOMENTS = {
    "8 bits": block_quantized(8),
    "4 bits": block_quantized(4),
    "linear": block_quantized(8, code="linear"),
    "bfloat16": cast(jnp.bfloat16),
}
# This format rounds its parameters stochastically in every step.
DRAWN = {"weights": ALL_FORMATS["extra_bits_7_stochastic"]}
CASES = {
    **{name: (ADAMW, {"moments": x}, lowbit_optax.step) for name, x in MOMENTS.items()},
    **{
        name: (SGD, {"weights": x}, lowbit_optax.step)
        for name, x in ALL_FORMATS.items()
    },
    "update": (ADAMW, DRAWN, apply),
    "kernel step": (ADAMW, DRAWN | {"implementation": "pallas"}, lowbit_optax.step),
    "kernel update": (ADAMW, DRAWN | {"implementation": "pallas"}, apply),
}


@pytest.mark.parametrize(("inner", "options", "advance"), CASES.values(), ids=CASES)
def test_apply_if_finite_inside_changes_no_master(inner, options, advance):
    assert_skips(inner, {"implementation": "xla", "min_size": 0} | options, advance)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_skipped_update_keeps_the_sign_of_zeros(dtype):
    inner = lowbit(optax.sgd(0.1), moments="float32")
    tx = lowbit_optax.with_loss_scale(inner, lowbit_optax.loss_scaling.backoff_scale())
    params = jnp.full(8, -0.0, dtype)
    for advance in (lowbit_optax.step, apply):
        after, _ = advance(tx, params, tx.init(params), jnp.full(8, jnp.inf))
        assert_same_bits(after, params)


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_multi_steps_inside_changes_only_its_sum_between_updates(implementation):
    tx = lowbit(
        optax.MultiSteps(optax.adamw(0.01), 3).gradient_transformation(),
        min_size=0,
        implementation=implementation,
    )
    step, params, state = trained(tx)
    for i in range(2):
        after, new = step(params, state, grads_of(params, 10 + i))
        assert_same_bits(master_weights(after, new), master_weights(params, state))
        before = state.inner_state
        assert (new.inner_state.acc_grads["w"] != before.acc_grads["w"]).any()
        params, state = after, new
    after, _ = step(params, state, grads_of(params, 12))
    assert (after["w"] != params["w"]).any()
