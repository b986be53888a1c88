"""Wrapping layers in a loss updates them like the ordinary step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import released
from jax import lax
from optimizers import assert_same_bits
from released import RATE, SGD, dense, head_loss, simple_loss, simple_params, weights

import lowbit_optax
from lowbit_optax import release

pytestmark = pytest.mark.standard_promotion

TX = lowbit_optax.lowbit_adamw(2.0**-7)
UPDATE = functools.partial(lowbit_optax.step, TX)


def one_operation_at_a_time(function):
    return jax.jit(function, compiler_options=released.OPERATION_BY_OPERATION)


def stepped(loss_fn, params, states, x, steps=2):
    """Returns parameters and states after steps of a loss with the wrappers."""
    step = one_operation_at_a_time(jax.value_and_grad(loss_fn, (0, 1)))
    states = jax.tree.map(release.as_floats, states, is_leaf=is_state)
    for _ in range(steps):
        _, (params, states) = step(params, states, x)
    is_floats = lambda x: hasattr(x, "dtypes")
    return params, jax.tree.map(release.as_state, states, is_leaf=is_floats)


def is_state(x):
    return isinstance(x, type(TX.init(jnp.zeros(2))))


def mean_square(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


def test_released_layers_are_updated_as_by_the_ordinary_step():
    params = [weights(dtype=jnp.bfloat16, seed=n) for n in range(3)]
    states, (x,) = [TX.init(w) for w in params], released.batches(1)[0]

    def plain(params, x):
        for w in params:
            x = dense(x, w)
        return mean_square(x)

    def with_wrappers(params, states, x):
        for w, state in zip(params, states, strict=True):
            w, x = release.released(UPDATE, w, state, x)
            x = dense(x, w)
        return mean_square(x)

    @one_operation_at_a_time
    def step(params, states):
        grads = jax.grad(plain)(params, x)
        pairs = map(UPDATE, params, states, grads)
        return tuple(map(list, zip(*pairs, strict=True)))

    want = params, states
    for _ in range(2):
        want = step(*want)
    assert_same_bits(stepped(with_wrappers, params, states, x), want)


def test_layers_of_a_scan_are_updated_as_by_the_ordinary_step():
    layers, scale = weights(3, dtype=jnp.bfloat16), jnp.float32(0.5)
    states, (x,) = jax.vmap(TX.init)(layers), released.batches(1)[0]
    xs = jnp.arange(3), jnp.linspace(0.5, 1, 3)

    def body(carry, w, x):
        (count, h), (number, factor) = carry, x
        h = dense(h, w) * factor * scale  # scale is closed over
        return (count + number, h), h[0]

    def plain(layers, x):
        run = lambda carry, x: body(carry, *x)
        (_, h), ys = lax.scan(run, (0, x), (layers, xs))
        return mean_square(h) + mean_square(ys)

    def with_wrapper(layers, states, x):
        (count, h), ys = release.scan(body, UPDATE, (0, x), layers, states, xs)
        return mean_square(h) + mean_square(ys) + 0 * count

    @one_operation_at_a_time
    def step(layers, states):
        return jax.vmap(UPDATE)(layers, states, jax.grad(plain)(layers, x))

    got, want = stepped(with_wrapper, layers, states, x), (layers, states)
    for _ in range(2):
        want = step(*want)
    # Random bits differ under vmap and in a stack, but rounding to nearest does not.
    np.testing.assert_allclose(
        *(np.asarray(x[0], np.float32) for x in (got, want)), rtol=2.0**-7, atol=1e-3
    )
    assert got[1].count.tolist() == [2, 2, 2]


def test_layers_with_one_gradient_are_rounded_by_different_random_bits():
    tx = lowbit_optax.sr_sgd(2.0**-12)
    update = functools.partial(lowbit_optax.step, tx)
    layers = jnp.ones((2, 64, 64), jnp.bfloat16)
    states = release.as_floats(jax.vmap(tx.init)(layers))

    def loss_fn(layers, states):
        body = lambda total, w, _: (total + jnp.sum(w.astype(jnp.float32)), None)
        return release.scan(body, update, jnp.float32(0), layers, states)[0]

    new = np.asarray(jax.jit(jax.grad(loss_fn))(layers, states), np.float32)
    moved = new != 1
    assert moved[0].any()
    assert moved[1].any()
    assert (moved[0] != moved[1]).any()


def test_closed_over_parameters_of_a_scan_get_their_gradient():
    layers, x = weights(3), released.batches(1)[0][0]
    states = release.as_floats(jax.vmap(SGD.init)(layers))
    update = functools.partial(lowbit_optax.step, SGD)

    def plain(shared, x):
        body = lambda x, w: (dense(x, w) + shared, None)
        return mean_square(lax.scan(body, x, layers)[0])

    def with_wrapper(shared, x):
        body = lambda x, w, _: (dense(x, w) + shared, None)
        return mean_square(release.scan(body, update, x, layers, states)[0])

    arguments = jnp.ones(64), x
    got, want = (
        one_operation_at_a_time(jax.grad(f, (0, 1)))(*arguments)
        for f in (with_wrapper, plain)
    )
    assert_same_bits(got, want)


def test_a_state_keeps_its_bits_and_dtypes_as_floats():
    state = {
        "bytes": jnp.arange(256, dtype=jnp.uint8),
        "words": jnp.arange(2**16, dtype=jnp.uint16),
        "long": jnp.asarray([0x7F800001, 0xFFFFFFFF, 1], jnp.uint32),
        "signed": jnp.asarray([-1, 3], jnp.int32),
        "flag": jnp.bool_(True),
        "key": jax.random.key(3),
        "mu": jnp.ones(2, jnp.bfloat16),
        "nothing": None,
    }
    floats = release.as_floats(state)
    for x in jax.tree.leaves(floats):
        assert jnp.issubdtype(x.dtype, jnp.inexact)
    found = jax.jit(release.as_state)(floats)
    found["key"], state["key"] = map(jax.random.key_data, (found["key"], state["key"]))
    assert_same_bits(found, state)


def no_gradient(params, x):
    # JAX finds no gradient here and never calls the backward rules.
    flat = jnp.sum(jnp.sign(params["flat"] @ params["flat"])) + jnp.sum(
        jnp.floor(params["layers"])
    )
    stopped, _ = lax.scan(
        lambda x, w: (jnp.floor(dense(x, w)), None), x, params["layers"]
    )
    return head_loss(params, x) + flat + jnp.sum(stopped) * 0


def sharp(params, x):
    # The derivative of round is zero, but only JAX's own rule shows this.
    x, _ = lax.scan(lambda x, w: (jnp.round(dense(x, w)), None), x, params["layers"])
    return jnp.mean(x * params["head"])


@pytest.mark.parametrize("loss_fn", [no_gradient, sharp])
def test_leaves_without_a_gradient_step_as_with_a_zero_gradient(loss_fn):
    params = simple_params(dtype=jnp.bfloat16)
    if loss_fn is no_gradient:
        params["flat"] = weights(seed=1, dtype=jnp.bfloat16)
    tx = lowbit_optax.kahan_adamw(2.0**-7, weight_decay=0.5)
    released.assert_equal_steps(loss_fn, tx, params, released.batches(2))


def test_float8_leaves_are_stepped_as_usual():
    params = {
        "layers": weights(3).astype(jnp.float8_e4m3fn),
        "wide": weights(seed=3).astype(jnp.float8_e4m3fn),
        "head": jnp.ones(64, jnp.bfloat16),
    }
    tx = lowbit_optax.lowbit(
        optax.sgd(2.0**-7, momentum=0.5), weights=lowbit_optax.extra_bits(8)
    )

    def loss_fn(params, x):
        return simple_loss(params, dense(x, params["wide"]))

    def plain(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return loss, *lowbit_optax.step(tx, params, state, grads)

    steps = plain, release.value_and_update(loss_fn, tx)
    want, got = (released.run(x, tx, params, released.batches(2)) for x in steps)
    assert_same_bits(got, want)


def test_reports_name_a_state_that_is_not_kept_by_parameter():
    params = simple_params() | {"wide": weights(seed=3)}
    loss_fn = lambda params, x: simple_loss(params, dense(x, params["wide"]))
    tx = optax.lbfgs(linesearch=None)
    reports = released.explained(loss_fn, tx, params, *released.batches(1)[0])
    assert reports["['wide']"].endswith("needs the gradients of other leaves")
    assert reports["['layers']"].endswith("is not a stack of layers")


def test_the_error_of_an_update_that_changes_a_dtype_names_the_place():
    def in_float16(params, state, gradients):
        del gradients
        return jax.tree.map(lambda x: x.astype(jnp.float16), params), state

    def loss_fn(params):
        params, _ = release.released(in_float16, params, release.as_floats(()), ())
        return jnp.sum(params["w"])

    message = r"\(params, state\)\[0\]\['w'\] .*float32\[2\] .*float16\[2\]"
    with pytest.raises(TypeError, match=message):
        jax.grad(loss_fn)({"w": jnp.ones(2)})


def test_a_state_that_changes_its_dtype_is_named():
    tx = lowbit_optax.kahan_adamw(RATE)
    params = simple_params() | {"order": jnp.arange(3)}
    step = release.value_and_update(simple_loss, tx)
    with pytest.raises(TypeError, match=r"state\.inner_state\[0\]\.mu\['order'\]"):
        step(params, tx.init(params), *released.batches(1)[0])
