"""Wrapping layers in a loss updates them like the ordinary step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowbit_optax
from lowbit_optax import release
from lowbit_optax.release.wrappers import as_floats, as_state
from tests.helpers import released
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.released import (
    SGD,
    dense,
    head_loss,
    simple_loss,
    simple_params,
    weights,
)

pytestmark = pytest.mark.standard_promotion

TX = lowbit_optax.lowbit_adamw(2.0**-7)
UPDATE = functools.partial(lowbit_optax.step, TX)


def one_operation_at_a_time(function):
    return jax.jit(function, compiler_options=released.OPERATION_BY_OPERATION)


def stepped(loss_fn, params, states, x, steps=2, tx=TX):
    """Returns parameters and states after steps of a loss that opens its layers."""
    step = one_operation_at_a_time(release.value_and_update_layers(loss_fn, tx))
    for _ in range(steps):
        _, params, states = step(params, states, x)
    return params, states


def mean_square(x):
    return jnp.mean(x.astype(jnp.float32) ** 2)


def test_released_layers_are_updated_as_by_the_ordinary_step():
    params = [weights(dtype=jnp.bfloat16, seed=n) for n in range(3)]
    states, (x,) = [TX.init(w) for w in params], released.batches(1)[0]

    def plain(params, x):
        for w in params:
            x = dense(x, w)
        return mean_square(x)

    def with_wrappers(layers, x):
        for layer in layers:
            w, x = release.released(layer, x)
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

    def with_wrapper(layers, x):
        (count, h), ys = release.scan(body, (0, x), layers, xs)
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
    layers = jnp.ones((2, 64, 64), jnp.bfloat16)

    def loss_fn(layers):
        body = lambda total, w, _: (total + jnp.sum(w.astype(jnp.float32)), None)
        return release.scan(body, jnp.float32(0), layers)[0]

    step = jax.jit(release.value_and_update_layers(loss_fn, tx))
    _, new, _ = step(layers, jax.vmap(tx.init)(layers))
    new = np.asarray(new, np.float32)
    moved = new != 1
    assert moved[0].any()
    assert moved[1].any()
    assert (moved[0] != moved[1]).any()


def test_layers_that_a_scan_closes_over_get_their_gradient():
    params = {"layers": weights(3), "shared": jnp.ones(64)}
    states = {"layers": jax.vmap(SGD.init)(params["layers"])}
    states["shared"] = SGD.init(params["shared"])

    def loss_fn(params, x):
        shared, x = release.released(params["shared"], x)
        body = lambda x, w, _: (dense(x, w) + shared, None)
        return mean_square(release.scan(body, x, params["layers"])[0])

    @one_operation_at_a_time
    def step(params, states, x):
        # Handles are opened; parameters pass through.
        grads = jax.grad(loss_fn)(params, x)
        layers = jax.vmap(functools.partial(lowbit_optax.step, SGD))
        trees = [tree["layers"] for tree in (params, states, grads)]
        rest = [tree["shared"] for tree in (params, states, grads)]
        pairs = layers(*trees), lowbit_optax.step(SGD, *rest)
        new = zip(*pairs, strict=True)
        return tuple({"layers": x, "shared": y} for x, y in new)

    x = released.batches(1)[0][0]
    got = stepped(loss_fn, params, states, x, steps=1, tx=SGD)
    assert_same_bits(got, step(params, states, x))


@pytest.mark.parametrize("tx", [TX, SGD], ids=["lowbit", "optax"])
def test_layers_without_a_gradient_keep_their_weights_and_state(tx):
    params = [weights(dtype=jnp.bfloat16, seed=n) for n in range(3)]
    params += [weights(2, dtype=jnp.bfloat16)]
    init = jax.vmap(tx.init)
    states, (x,) = [*map(tx.init, params[:3]), init(params[3])], released.batches(1)[0]

    def loss_fn(layers, x):
        x, _ = release.scan(lambda x, w, _: (dense(x, w), None), x, layers[3])
        w, x = release.released(layers[0], x)
        x = lax.stop_gradient(dense(x, w))
        w, x = release.released(layers[1], x)
        return mean_square(dense(x, w))  # layers[2] is not opened

    got, new_states = stepped(loss_fn, params, states, x, steps=1, tx=tx)
    for n in (0, 2, 3):
        assert_same_bits((got[n], new_states[n]), (params[n], states[n]))
    assert (got[1] != params[1]).any()


def with_a_penalty(layers, x):
    w, x = release.released(layers[0], x)
    return mean_square(x @ w) + sum(map(jnp.sum, layers))


def with_the_norm_of_all_layers(layers, x):
    return optax.tree.norm(layers)


def with_a_product(layers, x):
    w, x = release.released(layers[0], x)
    return mean_square(x @ w * layers[0])


def with_a_method(layers, x):
    return mean_square(x @ layers[0].astype(x.dtype))


def with_a_returned_layer(layers, x):
    w, x = release.released(layers[0], x)
    return mean_square(x @ w), layers


def opened_twice(layers, x):
    w, x = release.released(layers[0], x)
    _, x = release.released(layers[0], x)
    return mean_square(x @ w)


def opened_and_scanned(layers, x):
    _, x = release.released(layers[0], x)
    return mean_square(release.scan(lambda x, w, _: (x * w, None), x, layers[0])[0])


def opened_in_a_loop(layers, x):
    def body(x, _):
        w, x = release.released(layers[0], x)
        return x @ w, None

    return mean_square(lax.scan(body, x, length=3)[0])


def opened_in_a_checkpoint(layers, x):
    @jax.checkpoint
    def layer(x):
        w, x = release.released(layers[0], x)
        return x @ w

    return mean_square(layer(x))


def all_opened_at_once(layers, x):
    (w,), x = release.released(layers, x)
    return mean_square(x @ w)


MISUSES = [
    with_a_penalty, with_the_norm_of_all_layers, with_a_product, with_a_method,
    with_a_returned_layer, opened_twice, opened_and_scanned, opened_in_a_loop,
    opened_in_a_checkpoint, all_opened_at_once, jax.jit(opened_twice),
]  # fmt: skip


@pytest.mark.parametrize("loss_fn", MISUSES, ids=lambda f: f.__name__)
def test_a_layer_can_be_read_only_where_it_was_opened(loss_fn):
    params, (x,) = [weights()], released.batches(1)[0]
    has_aux = loss_fn is with_a_returned_layer
    step = release.value_and_update_layers(loss_fn, SGD, has_aux=has_aux)
    errors = TypeError, ValueError, AttributeError
    with pytest.raises(errors, match=r"params\[0\] .* release\.released"):
        step(params, [SGD.init(params[0])], x)


SCALED = lowbit_optax.with_loss_scale(TX, lowbit_optax.loss_scaling.static_scale(8))
WRONG_LAYERS = [
    (
        SGD,
        [weights()],
        SGD.init([weights()]),
        ValueError,
        r"opt_state, which has tx\.init\(layer\)",
    ),
    (SGD, [1j * weights()], [()], TypeError, r"params\[0\] .*real.* complex64"),
    (SGD, [{"a": 1}], [()], TypeError, r"params\[0\]\['a'\] .*array"),
    (SCALED, [weights()], [()], ValueError, "value_and_update, which scales"),
]


@pytest.mark.parametrize(("tx", "params", "states", "error", "text"), WRONG_LAYERS)
def test_errors_name_wrong_layers_and_states(tx, params, states, error, text):
    with pytest.raises(error, match=text):
        release.value_and_update_layers(opened_twice, tx)(params, states, 1.0)


def test_the_state_of_scanned_layers_is_stacked():
    layers = weights(3)
    loss_fn = lambda w, x: release.scan(lambda x, w, _: (x @ w, None), x, w)[0].sum()
    step = release.value_and_update_layers(loss_fn, TX)
    with pytest.raises(ValueError, match=r"stacked, like jax\.vmap\(tx\.init\)"):
        step(layers, TX.init(layers), *released.batches(1)[0])


def test_a_loss_without_layers_returns_empty_lists():
    step = release.value_and_update_layers(lambda layers, x: mean_square(x), SGD)
    assert step([], [], jnp.ones(2)) == (1, [], [])


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
    floats = as_floats(state)
    for x in jax.tree.leaves(floats):
        assert jnp.issubdtype(x.dtype, jnp.inexact)
    found = jax.jit(as_state)(floats)
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
    def in_float16(updates, state, params=None):
        return updates, jax.tree.map(lambda x: x.astype(jnp.float16), state)

    tx = optax.GradientTransformation(lambda params: params, in_float16)

    def loss_fn(params):
        params, _ = release.released(params["layer"], ())
        return jnp.sum(params["w"])

    params = {"layer": {"w": jnp.ones(2)}}
    message = r"state\['w'\] .*float32\[2\] .*float16\[2\]"
    with pytest.raises(TypeError, match=message):
        release.value_and_update_layers(loss_fn, tx)(params, params)


def test_a_state_that_changes_its_dtype_is_named():
    def in_float16(updates, state, params=None):
        return updates, jax.tree.map(lambda x: x.astype(jnp.float16), state)

    tx = optax.GradientTransformation(lambda params: params, in_float16)
    step, params = release.value_and_update(simple_loss, tx), simple_params()
    with pytest.raises(TypeError, match=r"state\['head'\] .*float32\[64\] .*float16"):
        step(params, tx.init(params), *released.batches(1)[0])


@pytest.mark.parametrize("tx", [TX, optax.adamw(2.0**-7)], ids=["lowbit", "optax"])
def test_integers_and_booleans_keep_their_values_and_state(tx):
    params = {
        "layer": {"w": weights(), "order": jnp.arange(5), "flag": jnp.bool_(True)}
    }
    if tx is TX:  # optax does not support PRNG keys
        params["layer"]["key"] = jax.random.key(0)
    state, (x,) = tx.init(params["layer"]), released.batches(1)[0]

    def loss_fn(params, x):
        layer, x = release.released(params["layer"], x)  # only handles are opened
        return mean_square(dense(x, layer["w"]) * layer["order"][1] * layer["flag"])

    step = release.value_and_update(lambda layer, x: loss_fn({"layer": layer}, x), tx)
    _, new, new_state = jax.jit(step)(params["layer"], state, x)
    step = release.value_and_update_layers(loss_fn, tx)
    _, by_hand, by_hand_state = jax.jit(step)(params, {"layer": state}, x)
    before = jax.tree.leaves_with_path((params["layer"], state))
    for got in (new, new_state), (by_hand["layer"], by_hand_state["layer"]):
        for (path, x), y in zip(before, jax.tree.leaves(got), strict=True):
            if {"order", "flag"} & {getattr(key, "key", "") for key in path}:
                assert_same_bits(y, x)
        assert (got[0]["w"] != params["layer"]["w"]).any()
        assert tx is not TX or got[0]["key"] == params["layer"]["key"]


def test_the_state_of_a_layer_may_contain_a_random_key():
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    tx, params = optax.chain(noise, optax.sgd(0.1)), {"w": jnp.ones(4)}

    def loss_fn(params):
        w, _ = release.released(params["w"], ())
        return jnp.sum(w)

    step = release.value_and_update_layers(loss_fn, tx)
    before = {"w": tx.init(params["w"])}
    _, _, after = step(params, before)
    assert optax.tree.get(after, "rng_key") != optax.tree.get(before, "rng_key")
