"""Released steps match ordinary steps for models of every shape."""

import functools
import typing

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from lowbit_optax import release
from tests.helpers import released
from tests.helpers.released import (
    SGD,
    WIDTH,
    dense,
    head_loss,
    normal,
    simple_body,
    simple_loss,
    simple_params,
    weights,
)

pytestmark = pytest.mark.standard_promotion

model = released.Models()
LAYERS = "['layers']"


model(LAYERS, name="one_scan")(simple_loss)


@model("['a']", "['b']", params=lambda: simple_params() | _two())
def two_scans(params, x):
    x, _ = jax.lax.scan(simple_body, x, params["a"])
    x, _ = jax.lax.scan(simple_body, x * params["head"], params["b"])
    return head_loss(params, x)


def _two():
    return {"a": weights(2, seed=8), "b": weights(3, seed=9)}


@model("['a']", "['b']", params=lambda: simple_params() | _two())
def one_jitted_function_called_twice(params, x):
    inner = jax.jit(lambda x, layers: jax.lax.scan(simple_body, x, layers)[0])
    return head_loss(params, inner(inner(x, params["a"]), params["b"]))


@model(LAYERS)
def keys_and_data_beside_the_layers(params, x):
    def body(x, inputs):
        w, key, scale = inputs
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.where(keep, dense(x, w), 0) * scale + x, None

    keys = jax.random.split(jax.random.key(3), 3)
    xs = params["layers"], keys, jnp.asarray([0.5, 1.0, 2.0])
    return simple_loss(params, x, body, xs)


OPTIONS = {
    "in_reverse": {"reverse": True},
    "unrolled_by_two": {"length": 3, "unroll": 2},
    "unrolled": {"unroll": True},
}
for name, options in OPTIONS.items():
    model(LAYERS, name=name)(functools.partial(simple_loss, **options))


@model(LAYERS)
def outputs_in_the_loss(params, x):
    def body(x, w):
        x = dense(x, w)
        return x, (jnp.sum(x, axis=0), jnp.int32(1), jnp.sum(x * x))

    x, (sums, ones, unread) = jax.lax.scan(body, x, params["layers"])
    del unread
    return head_loss(params, x) + jnp.sum(sums[1] * sums[2]) * jnp.sum(ones)


@model(LAYERS)
def integers_and_several_dtypes_in_the_carry(params, x):
    def body(carry, w):
        x, low, count, key, flag = carry
        key, _ = jax.random.split(key)
        x = jnp.where(flag, dense(x, w), x) + 0.0625 * low.astype(x.dtype)
        low = low + 0.0625 * jnp.sum(x, axis=0).astype(low.dtype)
        return (x, low, count + 1, key, ~flag | (count > 0)), count

    init = (
        x,
        params["head"].astype(jnp.bfloat16),
        jnp.int32(0),
        jax.random.key(1),
        jnp.bool_(True),
    )
    (x, low, *_), _ = jax.lax.scan(body, init, params["layers"])
    return head_loss(params, x) + jnp.sum(low.astype(jnp.float32))


@model(LAYERS, params=lambda: simple_params() | {"shared": weights(seed=7)})
def parameters_shared_by_the_layers(params, x):
    def body(x, w):
        return dense(dense(x, w), params["shared"]) * params["head"], None

    return simple_loss(params, x, body)


@model(LAYERS)
def parameters_as_the_first_carry(params, x):
    x, _ = jax.lax.scan(simple_body, x * 0 + params["head"], params["layers"])
    return jnp.sum(x**2)


class Block(typing.NamedTuple):
    """A user-defined container."""

    up: jax.Array
    nothing: None
    down: dict


def _nested():
    block = Block(weights(2, seed=8), None, {"x": (weights(2, seed=9), [])})
    return {"blocks": [block, None], "head": normal(WIDTH)}


@model("['blocks'][0].up", "['blocks'][0].down['x'][0]", params=_nested)
def nested_containers_and_none(params, x):
    def body(x, blocks):
        block, nothing = blocks
        assert nothing is None
        return dense(dense(x, block.up), block.down["x"][0]), None

    return simple_loss(params, x, body, params["blocks"])


@model(LAYERS, params=lambda: simple_params() | {"embed": weights(seed=7)})
def tied_embedding(params, x):
    x, _ = jax.lax.scan(simple_body, x @ params["embed"], params["layers"])
    return jnp.mean((x @ params["embed"].T) ** 2) + head_loss(params, x)


@model(waits="besides being scanned over, it is used by slice")
def stack_used_outside_too(params, x):
    x, _ = jax.lax.scan(simple_body, x, params["layers"])
    return head_loss(params, x) + jnp.sum(params["layers"][0] ** 2)


@model(waits="it is changed before a scan runs over it")
def stack_cast_before(params, x):
    layers = params["layers"].astype(jnp.bfloat16)
    return simple_loss(params, x, simple_body, layers)


@model(waits="several scans run over it")
def stack_scanned_twice(params, x):
    x, _ = jax.lax.scan(simple_body, x, params["layers"])
    return simple_loss(params, x, reverse=True)


@model(waits="besides being scanned over, it is used by the scan, in another way")
def stack_twice_in_one_scan(params, x):
    def body(x, pair):
        return dense(dense(x, pair[0]), pair[1]), None

    pair = params["layers"], params["layers"]
    return simple_loss(params, x, body, pair)


@model(waits="besides being scanned over, it is used by the scan, in another way")
def stack_scanned_and_closed_over(params, x):
    def body(x, w):
        return dense(x, w + params["layers"][1]), None

    return simple_loss(params, x, body)


@model()
def scan_in_a_conditional(params, x):
    scanned = lambda: jax.lax.scan(simple_body, x, params["layers"])[0]
    return head_loss(params, lax.cond(x[0, 0] > -100, scanned, lambda: x))


@model()
def scan_under_checkpoint(params, x):
    whole = jax.checkpoint(lambda x, w: jax.lax.scan(simple_body, x, w)[0])
    return head_loss(params, whole(x, params["layers"]))


@model("['groups']", params=lambda: simple_params() | _groups())
def scan_in_a_scan(params, x):
    def outer(x, group):
        return jax.lax.scan(simple_body, x, group)[0], None

    return simple_loss(params, x, outer, params["groups"])


def _groups():
    return {"groups": weights(2, 3, seed=8)}


@model("['groups']", params=lambda: simple_params() | _groups())
def matrices_over_a_batch(params, x):
    def body(x, group):
        return jax.vmap(dense, (None, 0))(x, group).sum(0), None

    return simple_loss(params, x, body, params["groups"])


# Kinds of layers.


@model(LAYERS)
def checkpointed_body(params, x):
    body = jax.checkpoint(simple_body)
    return simple_loss(params, x, body)


@model(LAYERS)
def named_residuals(params, x):
    def named(x, w):
        return jnp.tanh(checkpoint_name(x @ w, "product")), None

    policy = jax.checkpoint_policies.save_only_these_names("product")
    body = jax.checkpoint(named, policy=policy)
    return simple_loss(params, x, body)


@jax.custom_vjp
def doubled_backwards(x):
    return x * 1.0


doubled_backwards.defvjp(lambda x: (x * 1.0, None), lambda _, ct: (2 * ct,))


@model(LAYERS)
def custom_derivatives_in_the_body(params, x):
    def body(x, w):
        return jax.nn.relu(doubled_backwards(x @ doubled_backwards(w))), None

    return simple_loss(params, x, body)


@model(LAYERS)
def a_layer_whose_gradient_is_stopped(params, x):
    def body(x, w):
        return dense(x, lax.stop_gradient(w)), None

    return simple_loss(params, x * params["head"], body)


@model(waits="the loss does not depend on it")
def a_stack_that_nothing_reads(params, x):
    return head_loss(params, x)


@model(LAYERS)
def a_body_that_ignores_its_layer(params, x):
    body = lambda x, w: (x * 2, None)
    return simple_loss(params, x, body)


@model(LAYERS)
def complex_numbers_in_the_carry(params, x):
    def body(z, w):
        y = dense(z.real + z.imag, w)
        return lax.complex(y, y * 0.5), None

    z, _ = jax.lax.scan(body, lax.complex(x, x), params["layers"])
    return head_loss(params, z.real)


@model(LAYERS)
def complex_numbers_closed_over(params, x):
    rotation = lax.complex(params["head"], params["head"])

    def body(x, w):
        return dense(x, w) + (rotation * (1 + 2j)).imag, None

    return jnp.mean(jax.lax.scan(body, x, params["layers"])[0] ** 2)


@model(LAYERS)
def complex_numbers_out_of_the_scan(params, x):
    def body(x, w):
        x = dense(x, w)
        return x, lax.complex(x, 2 * x)

    _, ys = jax.lax.scan(body, x * params["head"], params["layers"])
    return jnp.sum(ys.real * ys.imag)


# Numbers of layers, and auxiliary results.

for name, count in {"a_single_layer": 1, "as_many_layers_as_columns": WIDTH}.items():
    params = functools.partial(simple_params, layers=count)
    model(LAYERS, name=name, params=params)(simple_loss)


@model(LAYERS, has_aux=True)
def auxiliary_results(params, x):
    def body(x, w):
        x = dense(x, w)
        return x, jnp.max(x)

    x, tops = jax.lax.scan(body, x, params["layers"])
    return head_loss(params, x), {"tops": tops, "rows": x.shape[0], "none": None}


@model(has_aux=True)
def the_stack_itself_as_auxiliary_result(params, x):
    return simple_loss(params, x), params["layers"]


@model(LAYERS, has_aux=True)
def layers_as_auxiliary_outputs(params, x):
    body = lambda x, w: (dense(x, w), w * 2)
    x, doubled = jax.lax.scan(body, x, params["layers"])
    return head_loss(params, x), doubled


@pytest.mark.parametrize("name", model)
def test_released_steps_are_ordinary_ones(name):
    model.check(name)


def test_flax_scan_is_released_as_well():
    linen = pytest.importorskip("flax.linen")

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return jnp.tanh(linen.Dense(WIDTH)(x)), None

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            stack = linen.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=3,
            )
            x, _ = stack(name="layers")(x, None)
            return linen.Dense(1)(x)

    net = Model()
    params = net.init(jax.random.key(0), jnp.ones((4, WIDTH)))
    released.assert_equal_steps(
        lambda params, x: jnp.mean(net.apply(params, x) ** 2),
        SGD,
        params,
        released.batches(3),
        in_loop=["['params']['layers']['Dense_0']['kernel']"],
    )


def test_the_loss_receives_python_values_unchanged():
    def loss_fn(params, x, scale, name, *, train, rows=None):
        assert name == "mean"
        assert rows is None
        x, _ = jax.lax.scan(simple_body, x, params["layers"])
        return head_loss(params, x * scale if train else x)

    params, (x,) = simple_params(), released.batches(1)[0]
    state = SGD.init(params)
    step = release.value_and_update(loss_fn, SGD)
    got = step(params, state, x, 0.5, "mean", train=True)
    want = released.ordinary(
        lambda params: loss_fn(params, x, 0.5, "mean", train=True), SGD
    )
    chex.assert_trees_all_close(got, want(params, state), rtol=1e-5, atol=1e-6)
