"""Trees may mix leaves that are stored in a format, passed through, or None."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import extra_bits, kahan, lowbit, master_weights
from lowbit_optax._step.state import is_blank
from tests.helpers.exact_steps import apply_any
from tests.helpers.optimizers import (
    ALIASES,
    ALL_FORMATS,
    BFLOAT16_MOMENTS,
    apply,
    assert_same_bits,
    each,
    gradient_series,
    model_params,
    random_grads,
    spec_of,
    train,
    weights_only,
)
from tests.helpers.patterns import each_dtype

pytestmark = pytest.mark.standard_promotion

SOME_FORMATS = ("extra_bits_8", "kahan", "stochastic_rounding", "master_copy")


@pytest.mark.parametrize("name", SOME_FORMATS)
def test_float32_leaves_train_exactly_as_under_optax(name):
    weights = ALL_FORMATS[name]
    params = {
        "kernel": model_params()["kernel"],
        "norm": jnp.linspace(0.5, 2, 40),
        "deep": {"bias": jnp.linspace(-1, 1, 8)},
    }
    inner = optax.adamw(0.01, weight_decay=0.1)
    tx = lowbit(inner, weights=weights, min_size=0, moments="float32")
    series = gradient_series(params, 10)
    state = tx.init(params)
    residual = state.residual.tree
    assert is_blank(residual["norm"])
    assert is_blank(residual["deep"]["bias"])
    assert not is_blank(residual["kernel"])
    got, state = train(tx, params, state, series)

    plain = {name: params[name] for name in ("norm", "deep")}
    plain_series = [{name: g[name] for name in plain} for g in series]
    want, _ = train(inner, plain, inner.init(plain), plain_series)
    assert_same_bits({name: got[name] for name in plain}, want)
    assert_same_bits(master_weights(got, state)["norm"], got["norm"])
    stepped, _ = train(tx, params, tx.init(params), series, lowbit_optax.step)
    assert_same_bits(stepped, got)


@each(ALIASES)
def test_none_and_empty_and_scalar_leaves_stay_what_they_are(optimizer):
    tx = optimizer()
    params = {
        "w": jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16),
        "none": None,
        "empty": jnp.zeros((0,), jnp.bfloat16),
        "empty rows": jnp.zeros((0, 4), jnp.bfloat16),
        "empty columns": jnp.zeros((4, 0), jnp.bfloat16),
        "scalar": jnp.bfloat16(1.0),
        "masked": optax.MaskedNode(),
        "tuple": (),
    }
    series = gradient_series(params, 2)
    state = tx.init(params)
    moved, end = train(tx, params, state, series)
    assert spec_of((moved, end)) == spec_of((params, state))
    assert moved["none"] is None
    assert not np.array_equal(moved["w"], params["w"])
    masters = master_weights(moved, end)
    assert masters["empty rows"].shape == (0, 4)
    assert isinstance(masters["masked"], optax.MaskedNode)
    lowbit_optax.memory_report(tx, params)
    lowbit_optax.step_report(tx, moved, end, series[0])


def test_integer_leaves_are_left_to_the_inner_transformation():
    params = {"w": jnp.ones(32, jnp.bfloat16), "steps": jnp.arange(4)}
    is_float = {"w": True, "steps": False}
    inner = optax.chain(
        optax.masked(optax.adamw(0.1), is_float),
        optax.masked(optax.set_to_zero(), {"w": False, "steps": True}),
    )
    for weights in (kahan(), extra_bits(8), lowbit_optax.stochastic_rounding()):
        tx = lowbit(inner, weights=weights, moments=BFLOAT16_MOMENTS, min_size=0)
        grads = {"w": jnp.ones(32), "steps": jnp.ones(4, jnp.int32)}
        for advance in (apply, lowbit_optax.step):
            moved, state = train(tx, params, tx.init(params), [grads], advance)
            assert_same_bits(moved["steps"], params["steps"])
            assert (moved["w"] < 1).all()
        assert_same_bits(master_weights(moved, state)["steps"], params["steps"])


def test_float0_gradients_of_integer_leaves_are_passed_through():
    # This is the result of jax.grad(..., allow_int=True).
    params = {"w": jnp.ones(32, jnp.bfloat16), "steps": jnp.arange(4)}
    grads = jax.grad(lambda p: p["w"].astype(jnp.float32).sum(), allow_int=True)(params)
    assert grads["steps"].dtype == jax.dtypes.float0
    mask = {"w": True, "steps": False}
    tx = optax.masked(lowbit_optax.kahan_sgd(0.5), mask)
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], -0.5)


@each_dtype
def test_every_narrow_dtype_trains_as_float32_through_step(dtype):
    params = jnp.linspace(0.5, 1.75, 64).astype(dtype)
    masters = params.astype(jnp.float32)
    inner = optax.sgd(2.0**-6, momentum=0.9)
    series = [0.1 * random_grads(params, seed) for seed in range(20)]
    want, _ = train(inner, masters, inner.init(masters), series)
    # By default, a leaf keeps all the bits that its dtype allows.
    for weights in (extra_bits(), lowbit_optax.master_copy(), kahan()):
        tx = lowbit(inner, weights=weights, min_size=0, moments="float32")
        got, state = train(tx, params, tx.init(params), series, lowbit_optax.step)
        assert got.dtype == dtype
        if weights != kahan():
            assert_same_bits(master_weights(got, state), want)
        updated = train(tx, params, tx.init(params), series, apply_any)
        assert_same_bits(updated, (got, state))


def test_leaves_under_min_size_keep_float32_masters():
    params = {
        "small": jnp.ones((32, 31), jnp.bfloat16),
        "large": jnp.ones((32, 32), jnp.bfloat16),
    }
    tx = weights_only(optax.sgd(0.01, 0.9), extra_bits(8), min_size=1024)
    state = tx.init(params)
    words = state.residual.tree
    assert (words["small"].dtype, words["small"].shape) == (jnp.float32, (32, 31))
    assert (words["large"].dtype, words["large"].shape) == (jnp.uint32, (8, 32))
    series = gradient_series(params, 5)
    got, state = train(tx, params, state, series)
    inner = optax.sgd(0.01, 0.9)
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    want, _ = train(inner, wide, inner.init(wide), series)
    masters = master_weights(got, state)
    assert_same_bits(masters["small"], want["small"])
    assert not np.array_equal(masters["large"], want["large"])


def test_moments_of_float32_leaves_are_stored_in_the_format_too():
    params = {"w": jnp.ones((32, 4), jnp.bfloat16), "norm": jnp.ones(4)}
    state = lowbit_optax.kahan_adamw(0.1).init(params)
    assert state.inner_state[0].nu["norm"].dtype == jnp.bfloat16
    exact = lowbit_optax.kahan_adamw(0.1, moments="float32").init(params)
    assert exact.inner_state[0].nu["norm"].dtype == jnp.float32
