"""Released steps work for models written layer by layer, without a scan."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import lowbit_optax
from tests.helpers import released
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.released import RATE, SGD, WIDTH, dense, head_loss, normal, weights

pytestmark = pytest.mark.standard_promotion

LOWBIT = lowbit_optax.lowbit_sgd(RATE, 0.5)
ACCUMULATED = lowbit_optax.accumulate_gradients(lowbit_optax.kahan_sgd(RATE, 0.5), 2)


def layers(count=2, dtype=jnp.float32, **more):
    matrices = [weights(dtype=dtype, seed=n) for n in range(count)]
    return {"layers": matrices, "head": normal(WIDTH, dtype=dtype)} | more


def through_layers(params, x):
    for w in params["layers"]:
        x = dense(x, w)
    return x


def one_after_another(params, x):
    return head_loss(params, through_layers(params, x))


def all_cast_first(params, x):
    return one_after_another(jax.tree.map(lambda w: w.astype(x.dtype), params), x)


def under_jit(params, x):
    return jax.jit(one_after_another)(params, x)


def checkpointed(params, x):
    for w in params["layers"]:
        x = jax.checkpoint(dense)(x, w)
    return head_loss(params, x)


def tied(params, x):
    first = params["layers"][0]
    return one_after_another(params, x) + jnp.mean(dense(x, first.T) ** 2)


LOSSES = [one_after_another, all_cast_first, under_jit, checkpointed, tied]
CASES = {f.__name__: (f, LOWBIT, jnp.bfloat16) for f in LOSSES} | {
    # If a bfloat16 leaf is used twice, XLA may add its gradients in float32.
    "tied": (tied, LOWBIT, jnp.float32),
    "multi_steps": (
        one_after_another,
        optax.MultiSteps(SGD, 2).gradient_transformation(),
        jnp.float32,
    ),
    "low_bit_sums": (one_after_another, ACCUMULATED, jnp.bfloat16),
    "muon": (one_after_another, optax.contrib.muon(RATE), jnp.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_each_layer_is_updated_on_its_own_the_last_one_first(name):
    loss_fn, tx, dtype = CASES[name]
    params, batches = layers(3, dtype), released.batches(3)
    reports = released.explained(loss_fn, tx, params, *batches[0])
    for number in range(3):
        report = reports[f"['layers'][{number}]"]
        assert report == f"in the backward pass, update {3 - number} of 3"
    assert (
        reports["['head']"]
        == "after the backward pass: it has fewer than 4096 elements"
    )
    released.assert_equal_steps(loss_fn, tx, params, batches)


@pytest.mark.parametrize("loss_fn", LOSSES, ids=lambda f: f.__name__)
def test_frozen_leaves_stay_and_others_are_updated(loss_fn):
    labels = {"layers": ["train", "freeze", "train"], "head": "freeze"}
    tx = optax.partition({"train": SGD, "freeze": optax.set_to_zero()}, labels)
    before = layers(3)
    _, after, _ = released.assert_equal_steps(loss_fn, tx, before, released.batches(2))
    assert_same_bits(after["layers"][1], before["layers"][1])


def test_leaves_that_need_all_gradients_wait_and_are_reported():
    tx = optax.chain(optax.clip_by_global_norm(1.0), SGD)
    start, batches = layers(3), released.batches(2)
    reports = released.explained(one_after_another, tx, start, *batches[0])
    assert reports["['layers'][0]"] == (
        "after the backward pass: its update needs the gradients of other leaves"
    )
    released.assert_equal_steps(one_after_another, tx, start, batches)


model = released.Models()


@model(
    params=lambda: layers(experts=weights(4, seed=7), router=normal(WIDTH, 4, seed=8))
)
def experts_by_gather_and_scatter(params, x):
    x = through_layers(params, x)
    gates = jax.nn.softmax(x @ params["router"])
    gate, expert = lax.top_k(gates, 1)
    gate, expert = gate[:, 0], expert[:, 0]
    gathered = params["experts"][expert]
    y = jnp.einsum("bi,bij->bj", x, gathered) * gate[:, None]
    order = jnp.argsort(expert)
    scattered = jnp.zeros_like(x).at[order].add(y[order])
    return head_loss(params, x + scattered)


@model(params=lambda: layers(words=normal(128, WIDTH, seed=7)))
def embedding_gathered_and_tied(params, x):
    tokens = jnp.argsort(x, axis=1)[:, :8]
    h = through_layers(params, jnp.sum(params["words"][tokens], axis=1))
    return jnp.mean(jax.nn.logsumexp(h @ params["words"].T, axis=1)) + head_loss(
        params, h
    )


def _gru():
    names = ("update_x", "update_h", "reset_x", "reset_h", "new_x", "new_h")
    return {name: weights(seed=n) for n, name in enumerate(names)} | {
        "head": normal(WIDTH)
    }


@model(params=_gru)
def gru_over_time(params, x):
    """Each of five time steps contributes to the gradient of every weight."""

    def cell(h, x):
        update = jax.nn.sigmoid(x @ params["update_x"] + h @ params["update_h"])
        reset = jax.nn.sigmoid(x @ params["reset_x"] + h @ params["reset_h"])
        new = jnp.tanh(x @ params["new_x"] + (reset * h) @ params["new_h"])
        h = (1 - update) * h + update * new
        return h, None

    times = jnp.stack([x * 2.0**-n for n in range(5)])
    h, _ = lax.scan(cell, jnp.zeros_like(x), times)
    return head_loss(params, h)


@model(params=lambda: layers(4))
def activations_read_before_and_after_an_update(params, x):
    """The order of three terms in the cotangent of each ``x`` affects the bits."""
    first, second, third, fourth = params["layers"]
    for gate, out in ((first, second), (third, fourth)):
        x = x + dense(x * dense(x, gate), out)
    return head_loss(params, x)


@pytest.mark.parametrize("name", model)
def test_released_steps_of_architectures_are_ordinary_ones(name):
    model.check(name)


def test_released_steps_of_nnx_are_ordinary_ones():
    """Uses an nnx model with dropout, split into its graph, parameters and the rest."""
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

    released.assert_equal_steps(loss_fn, SGD, params, released.batches(2), has_aux=True)
