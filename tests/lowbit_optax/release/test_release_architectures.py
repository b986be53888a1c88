"""Released steps of whole architectures, without a scan over layers, are ordinary."""

import jax
import jax.numpy as jnp
import optax
import pytest
import released
from jax import lax
from released import RATE, SGD, WIDTH, dense, head_loss, normal, weights

import lowbit_optax

pytestmark = pytest.mark.standard_promotion

MODELS = {}


def model(params, has_aux=False):
    """Registers a loss of parameters and rows, and what makes its parameters."""

    def register(loss_fn):
        MODELS[loss_fn.__name__] = loss_fn, params, has_aux
        return loss_fn

    return register


def layers(count=2, **more):
    matrices = [weights(seed=n) for n in range(count)]
    return {"layers": matrices, "head": normal(WIDTH)} | more


def one_by_one(params, x):
    for w in params["layers"]:
        x = dense(x, w)
    return x


@model(lambda: layers(experts=weights(4, seed=7), router=normal(WIDTH, 4, seed=8)))
def experts_by_gather_and_scatter(params, x):
    x = one_by_one(params, x)
    gates = jax.nn.softmax(x @ params["router"])
    gate, expert = lax.top_k(gates, 1)
    gate, expert = gate[:, 0], expert[:, 0]
    gathered = params["experts"][expert]
    y = jnp.einsum("bi,bij->bj", x, gathered) * gate[:, None]
    order = jnp.argsort(expert)
    scattered = jnp.zeros_like(x).at[order].add(y[order])
    return head_loss(params, x + scattered)


@model(lambda: layers(words=normal(128, WIDTH, seed=7)))
def embedding_gathered_and_tied(params, x):
    tokens = jnp.argsort(x, axis=1)[:, :8]
    h = one_by_one(params, jnp.sum(params["words"][tokens], axis=1))
    return jnp.mean(jax.nn.logsumexp(h @ params["words"].T, axis=1)) + head_loss(
        params, h
    )


def _gru():
    names = ("update_x", "update_h", "reset_x", "reset_h", "new_x", "new_h")
    return {name: weights(seed=n) for n, name in enumerate(names)} | {
        "head": normal(WIDTH)
    }


@model(_gru)
def gru_over_time(params, x):
    """Every weight gets a contribution to its gradient from each of five times."""

    def cell(h, x):
        update = jax.nn.sigmoid(x @ params["update_x"] + h @ params["update_h"])
        reset = jax.nn.sigmoid(x @ params["reset_x"] + h @ params["reset_h"])
        new = jnp.tanh(x @ params["new_x"] + (reset * h) @ params["new_h"])
        h = (1 - update) * h + update * new
        return h, None

    times = jnp.stack([x * 2.0**-n for n in range(5)])
    h, _ = lax.scan(cell, jnp.zeros_like(x), times)
    return head_loss(params, h)


@model(layers)
def dropout_by_a_key_for_each_layer(params, x):
    for key, w in zip(
        jax.random.split(jax.random.key(3)), params["layers"], strict=True
    ):
        keep = jax.random.bernoulli(key, 0.75, x.shape)
        x = jnp.where(keep, dense(x, w) / 0.75, 0)
    return head_loss(params, x)


@model(lambda: layers(scale=normal(2, WIDTH, seed=7)), has_aux=True)
def batch_statistics_as_auxiliary_results(params, x):
    statistics = []
    for w, scale in zip(params["layers"], params["scale"], strict=True):
        x = x @ w
        mean, var = jnp.mean(x, 0), jnp.var(x, 0)
        statistics.append({"mean": mean, "var": var, "rows": x.shape[0]})
        x = jnp.tanh((x - mean) * lax.rsqrt(var + 0.125) * scale)
    return head_loss(params, x), statistics


def flax_model():
    """A linen model with dropout and batch statistics."""
    linen = pytest.importorskip("flax.linen")

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            for _ in range(2):
                x = linen.Dense(WIDTH, use_bias=False)(x)
                x = linen.BatchNorm(not train, momentum=0.5)(x)
                x = linen.Dropout(0.25, deterministic=not train)(jnp.tanh(x))
            return linen.Dense(1)(x)

    net = Net()
    variables = net.init(jax.random.key(0), jnp.ones((4, WIDTH)), False)

    def loss_fn(params, x):
        y, new = net.apply(
            {"params": params, "batch_stats": variables["batch_stats"]},
            x,
            True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(1)},
        )
        return jnp.mean(y**2), new

    return loss_fn, variables["params"]


def nnx_model():
    """An nnx model with dropout, split into its graph, parameters and the rest."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.drop = nnx.Dropout(0.25, rngs=rngs)
            self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

        def __call__(self, x):
            x = self.drop(jnp.tanh(self.norm(self.first(x))))
            return self.head(jnp.tanh(self.second(x)))

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, x):
        net = nnx.merge(graph, params, rest, copy=True)
        loss = jnp.mean(net(x) ** 2)
        return loss, nnx.state(net, nnx.BatchStat)

    return loss_fn, params


@pytest.mark.parametrize("name", MODELS)
def test_released_steps_are_ordinary_ones(name):
    loss_fn, params, has_aux = MODELS[name]
    released.assert_equal_steps(
        loss_fn, SGD, params(), released.batches(2), has_aux=has_aux
    )


@pytest.mark.parametrize("make", [flax_model, nnx_model])
def test_released_steps_of_flax_are_ordinary_ones(make):
    loss_fn, params = make()
    released.assert_equal_steps(loss_fn, SGD, params, released.batches(2), has_aux=True)


OPTIMIZERS = {
    "multi_steps": optax.MultiSteps(SGD, 2).gradient_transformation(),
    "low_bit_sums": lowbit_optax.accumulate_gradients(
        lowbit_optax.kahan_sgd(RATE, 0.5), 2
    ),
    "muon": optax.contrib.muon(RATE),
}


def unrolled(params, x):
    return head_loss(params, one_by_one(params, x))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unrolled_layers_are_updated_by_every_optimizer_as_without(name):
    dtype = jnp.bfloat16 if name == "low_bit_sums" else jnp.float32
    params = jax.tree.map(lambda x: x.astype(dtype), layers())
    reports = released.explained(unrolled, OPTIMIZERS[name], params, jnp.ones((4, 64)))
    for number in range(2):
        report = reports[f"['layers'][{number}]"]
        assert report.startswith(f"in the backward pass, update {2 - number} of 2: ")
    released.assert_equal_steps(unrolled, OPTIMIZERS[name], params, released.batches(3))
