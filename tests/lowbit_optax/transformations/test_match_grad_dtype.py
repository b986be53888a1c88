"""Updates in the gradients' dtype add up to the parameters that ``step`` returns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import (
    extra_bits_adamw,
    kahan_adamw,
    lowbit_adamw,
    master_weights,
    sr_adamw,
)
from lowbit_optax._numerics.landing import Addition
from lowbit_optax._numerics.rounding import narrow_or_cast, to_float32
from tests.helpers.optimizers import (
    assert_same_bits,
    each,
    gradient_series,
    model_params,
    train,
)

pytestmark = pytest.mark.standard_promotion

ADAMW = {
    "extra_bits": functools.partial(extra_bits_adamw, bits=8, min_size=0),
    "kahan": kahan_adamw,
    "sr": sr_adamw,
    "lowbit": functools.partial(lowbit_adamw, min_size=0),
}


def _as_equinox(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return jax.tree.map(lambda u, p: p + u, updates, params), state


@each(ADAMW)
@pytest.mark.parametrize(
    "implementation",
    ["xla", pytest.param("pallas", marks=pytest.mark.slow_to_compile)],
)
def test_they_add_up_without_a_cast_and_train_as_step_does(optimizer, implementation):
    plain = optimizer(2.0**-10, implementation=implementation)
    tx = optimizer(2.0**-10, implementation=implementation, match_grad_dtype=True)
    params = model_params()
    series = gradient_series(params, 4, jnp.bfloat16)
    updates, _ = jax.eval_shape(tx.update, series[0], tx.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}
    got, state = train(tx, params, tx.init(params), series, _as_equinox)
    want, want_state = train(plain, params, plain.init(params), series)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(jnp.bfloat16)}
    for a, b in zip(
        jax.tree.leaves(master_weights(got, state)),
        jax.tree.leaves(master_weights(want, want_state)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2.0**-7, atol=1e-3)
    assert_same_bits(
        train(tx, params, tx.init(params), series, lowbit_optax.step),
        train(plain, params, plain.init(params), series, lowbit_optax.step),
    )


def test_wrappers_that_compare_dtypes_get_the_dtype_of_the_gradients():
    params = model_params()
    series = gradient_series(params, 3, jnp.bfloat16)
    tx = optax.apply_if_finite(lowbit_adamw(1e-2, match_grad_dtype=True), 3)
    plain = optax.apply_if_finite(lowbit_adamw(1e-2), 3)
    got, state = train(plain, params, plain.init(params), series)
    assert np.any(np.asarray(got["kernel"] != params["kernel"]))
    assert_same_bits((got, state), train(tx, params, tx.init(params), series))


def test_wrappers_that_compare_dtypes_refuse_other_updates_and_say_what_to_use():
    tx = optax.apply_if_finite(kahan_adamw(1e-2), 3)
    params, grads = {"w": jnp.ones(4)}, {"w": jnp.ones(4, jnp.bfloat16)}
    with pytest.raises(TypeError, match=r"params\['w'\] is float32\[4\].*step"):
        tx.update(grads, tx.init(params), params)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_stored_weight_equals_the_sum(dtype):
    """Tries every old weight, with new weights near it and far away."""
    landing = Addition(like_grads=True, dtype=jnp.dtype(dtype))
    old = jnp.arange(2**16, dtype=jnp.uint16)
    value = lambda bits: jax.lax.bitcast_convert_type(bits, dtype)
    add = jax.jit(lambda old, u: narrow_or_cast(to_float32(old) + to_float32(u), dtype))
    land, result = jax.jit(landing.land), jax.jit(landing.result)
    random = np.random.default_rng(0)
    steps = [random.integers(-(2**k), 2**k + 1, 2**16) for k in range(1, 16)]
    exact = total = 0
    for step in steps:
        new = value(jnp.asarray((np.arange(2**16) + step) % 2**16, jnp.uint16))
        before = value(old)
        landed, update = land(before, new)
        finite = np.isfinite(np.asarray([before, new, landed], np.float32)).all(0)
        again = result(before, landed)
        values = landed, new, add(before, update), add(before, again)
        after, wanted, sums, others = (
            np.asarray(x).view(np.uint16)[finite] for x in values
        )
        np.testing.assert_array_equal(sums, after)
        np.testing.assert_array_equal(others, after)
        if np.abs(step).max() <= 128:
            exact += np.sum(after == wanted)
            total += finite.sum()
    assert exact > 0.9 * total
