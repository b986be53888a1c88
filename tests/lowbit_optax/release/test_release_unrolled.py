"""Released steps of models that are written layer by layer, without a scan."""

import jax
import jax.numpy as jnp
import optax
import pytest
import released
from optimizers import assert_same_bits
from released import RATE, SGD, dense, head_loss, normal, weights

import lowbit_optax

pytestmark = pytest.mark.standard_promotion

LOWBIT = lowbit_optax.lowbit_sgd(RATE, 0.5)


def params(layers=3, dtype=jnp.bfloat16):
    matrices = [weights(dtype=dtype, seed=n) for n in range(layers)]
    return {"layers": matrices, "head": normal(64, dtype=dtype)}


def one_after_another(params, x):
    for w in params["layers"]:
        x = dense(x, w)
    return head_loss(params, x)


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


MODELS = [one_after_another, all_cast_first, under_jit, checkpointed, tied]


@pytest.mark.parametrize("loss_fn", MODELS, ids=lambda f: f.__name__)
def test_released_steps_are_ordinary_ones(loss_fn):
    # Of a bfloat16 leaf that is used twice XLA may add up the gradients in float32.
    dtype = jnp.float32 if loss_fn is tied else jnp.bfloat16
    start = params(dtype=dtype)
    released.assert_equal_steps(loss_fn, LOWBIT, start, released.batches(3))


@pytest.mark.parametrize("loss_fn", MODELS, ids=lambda f: f.__name__)
def test_each_layer_is_updated_on_its_own_the_last_one_first(loss_fn):
    reports = released.explained(loss_fn, LOWBIT, params(), *released.batches(1)[0])
    for number in range(3):
        report = reports[f"['layers'][{number}]"]
        assert report.startswith(f"in the backward pass, update {3 - number} of 3: ")
    assert (
        reports["['head']"]
        == "after the backward pass: it has fewer than 4096 elements"
    )


@pytest.mark.parametrize("loss_fn", MODELS, ids=lambda f: f.__name__)
def test_frozen_leaves_stay_and_others_are_updated(loss_fn):
    labels = {"layers": ["train", "freeze", "train"], "head": "freeze"}
    tx = optax.partition({"train": SGD, "freeze": optax.set_to_zero()}, labels)
    before = params(dtype=jnp.float32)
    _, after, _ = released.assert_equal_steps(loss_fn, tx, before, released.batches(2))
    assert_same_bits(after["layers"][1], before["layers"][1])


def test_where_all_gradients_are_needed_leaves_wait_and_say_so():
    tx = optax.chain(optax.clip_by_global_norm(1.0), SGD)
    start, batches = params(dtype=jnp.float32), released.batches(2)
    reports = released.explained(one_after_another, tx, start, *batches[0])
    assert reports["['layers'][0]"] == (
        "after the backward pass: its update needs the gradients of other leaves"
    )
    released.assert_equal_steps(one_after_another, tx, start, batches)
