"""A released step gives the ordinary step's numbers, for every shape of model."""

import typing

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
import released
from jax import lax
from released import (
    SGD,
    WIDTH,
    dense,
    head_loss,
    normal,
    simple_body,
    simple_params,
    weights,
)

from lowbit_optax import release

pytestmark = pytest.mark.standard_promotion

MODELS = {}


def model(*in_loop, has_aux=False, params=simple_params):
    """Registers a loss with the paths of what is updated in the loop."""

    def register(loss_fn):
        MODELS[loss_fn.__name__] = loss_fn, params, in_loop, has_aux
        return loss_fn

    return register


LAYERS = "['layers']"


@model(LAYERS)
def one_scan(params, x):
    return released.simple_loss(params, x)


@model("['a']", "['b']", params=lambda: simple_params() | _two())
def two_scans(params, x):
    x, _ = jax.lax.scan(simple_body, x, params["a"])
    x, _ = jax.lax.scan(simple_body, x * params["head"], params["b"])
    return head_loss(params, x)


def _two():
    return {"a": weights(2, seed=8), "b": weights(3, seed=9)}


@model(LAYERS)
def scan_under_jit(params, x):
    @jax.jit
    def inner(x, layers):
        return jax.jit(lambda: jax.lax.scan(simple_body, x, layers)[0] * 0.5)()

    return head_loss(params, inner(x, params["layers"]))


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
    return head_loss(params, jax.lax.scan(body, x, xs)[0])


@model(LAYERS)
def in_reverse(params, x):
    x, _ = jax.lax.scan(simple_body, x, params["layers"], reverse=True)
    return head_loss(params, x)


@model(LAYERS)
def unrolled_by_two(params, x):
    x, _ = jax.lax.scan(simple_body, x, params["layers"], length=3, unroll=2)
    return head_loss(params, x)


@model(LAYERS)
def unrolled(params, x):
    x, _ = jax.lax.scan(simple_body, x, params["layers"], unroll=True)
    return head_loss(params, x)


@model(LAYERS)
def outputs_in_the_loss(params, x):
    def body(x, w):
        x = dense(x, w)
        return x, (jnp.sum(x, axis=0), jnp.int32(1), jnp.sum(x * x))

    x, (sums, ones, unread) = jax.lax.scan(body, x, params["layers"])
    del unread
    return head_loss(params, x) + jnp.sum(sums[1] * sums[2]) * jnp.sum(ones)


@model(LAYERS)
def outputs_alone_in_the_loss(params, x):
    def body(x, w):
        return dense(x, w), jnp.sum(x**2)

    _, ys = jax.lax.scan(body, x * params["head"], params["layers"])
    return jnp.sum(ys)


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

    return head_loss(params, jax.lax.scan(body, x, params["layers"])[0])


@model(LAYERS)
def parameters_as_the_first_carry(params, x):
    x, _ = jax.lax.scan(simple_body, x * 0 + params["head"], params["layers"])
    return jnp.sum(x**2)


class Block(typing.NamedTuple):
    """A container of the user's."""

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

    return head_loss(params, jax.lax.scan(body, x, params["blocks"])[0])


@model(LAYERS, params=lambda: simple_params() | {"embed": weights(seed=7)})
def tied_embedding(params, x):
    x, _ = jax.lax.scan(simple_body, x @ params["embed"], params["layers"])
    return jnp.mean((x @ params["embed"].T) ** 2) + head_loss(params, x)


@model()
def stack_used_outside_too(params, x):
    x, _ = jax.lax.scan(simple_body, x, params["layers"])
    return head_loss(params, x) + jnp.sum(params["layers"][0] ** 2)


@model()
def stack_cast_before(params, x):
    layers = params["layers"].astype(jnp.bfloat16)
    return head_loss(params, jax.lax.scan(simple_body, x, layers)[0])


@model()
def stack_scanned_twice(params, x):
    x, _ = jax.lax.scan(simple_body, x, params["layers"])
    x, _ = jax.lax.scan(simple_body, x, params["layers"], reverse=True)
    return head_loss(params, x)


@model()
def stack_twice_in_one_scan(params, x):
    def body(x, pair):
        return dense(dense(x, pair[0]), pair[1]), None

    pair = params["layers"], params["layers"]
    return head_loss(params, jax.lax.scan(body, x, pair)[0])


@model()
def stack_scanned_and_closed_over(params, x):
    def body(x, w):
        return dense(x, w + params["layers"][1]), None

    return head_loss(params, jax.lax.scan(body, x, params["layers"])[0])


@model()
def stack_reshaped_before(params, x):
    layers = params["layers"].reshape(3, 1, WIDTH, WIDTH)
    body = lambda x, w: (dense(x, w[0]), None)
    return head_loss(params, jax.lax.scan(body, x, layers)[0])


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

    return head_loss(params, jax.lax.scan(outer, x, params["groups"])[0])


def _groups():
    return {"groups": weights(2, 3, seed=8)}


@model("['groups']", params=lambda: simple_params() | _groups())
def matrices_over_a_batch(params, x):
    def body(x, group):
        return jax.vmap(dense, (None, 0))(x, group).sum(0), None

    return head_loss(params, jax.lax.scan(body, x, params["groups"])[0])


@model(LAYERS, params=lambda: simple_params(layers=1))
def a_single_layer(params, x):
    return released.simple_loss(params, x)


@model(LAYERS, params=lambda: simple_params(layers=WIDTH))
def as_many_layers_as_columns(params, x):
    return released.simple_loss(params, x)


@model(LAYERS, has_aux=True)
def auxiliary_results(params, x):
    def body(x, w):
        x = dense(x, w)
        return x, jnp.max(x)

    x, tops = jax.lax.scan(body, x, params["layers"])
    return head_loss(params, x), {"tops": tops, "rows": x.shape[0], "none": None}


@model(has_aux=True)
def the_stack_itself_as_auxiliary_result(params, x):
    return released.simple_loss(params, x), params["layers"]


@model(LAYERS, has_aux=True)
def layers_as_auxiliary_outputs(params, x):
    body = lambda x, w: (dense(x, w), w * 2)
    x, doubled = jax.lax.scan(body, x, params["layers"])
    return head_loss(params, x), doubled


@pytest.mark.parametrize("name", MODELS)
def test_released_steps_are_ordinary_ones(name):
    loss_fn, params, in_loop, has_aux = MODELS[name]
    released.assert_equal_steps(
        loss_fn, SGD, params(), released.batches(3), in_loop=in_loop, has_aux=has_aux
    )


def test_lax_scan_is_released_as_well():
    def loss_fn(params, x):
        return head_loss(params, lax.scan(simple_body, x, params["layers"])[0])

    released.assert_equal_steps(
        loss_fn, SGD, simple_params(), released.batches(3), in_loop=[LAYERS]
    )


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


def test_a_whole_gradient_is_never_updated_from_a_part_of_it():
    # The gradient of a sum is one everywhere: of each use of the stack, another one.
    def loss_fn(params):
        body = lambda total, w: (total + jnp.sum(w), None)
        total, _ = jax.lax.scan(body, jnp.float32(0), params)
        return total + jnp.sum(params)

    params = jnp.zeros((2, WIDTH, WIDTH))
    tx = optax.sgd(0.5)
    step = release.value_and_update(loss_fn, tx)
    _, params, _ = step(params, tx.init(params))
    chex.assert_trees_all_equal(params, jnp.full_like(params, -1.0))


def test_the_loss_sees_python_values_as_such():
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
