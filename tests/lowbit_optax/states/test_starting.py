"""Trainers that call ``init`` themselves can keep the low bits of a float32 start."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import lowbit_optax
from lowbit_optax import (
    from_master,
    kahan_adamw,
    lowbit_adamw,
    release,
    with_master,
)
from lowbit_optax.states.checkpoints import storage_formats
from lowbit_optax.training import cast_model, nnx_optimizer
from tests.helpers.optimizers import assert_same_bits

pytestmark = pytest.mark.standard_promotion


def _master():
    return {
        "kernel": jax.random.normal(jax.random.key(0), (64, 64)),
        "bias": jax.random.normal(jax.random.key(1), (8,)),
    }


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, lambda tx: optax.chain(optax.clip(1.0), tx)]
)
@pytest.mark.parametrize("optimizer", [lowbit_adamw, kahan_adamw])
def test_init_makes_the_state_of_from_master(optimizer, wrap):
    tx, master = wrap(optimizer(1e-2)), _master()
    params, want = from_master(tx, master, jnp.bfloat16, None)
    start = with_master(tx, master)
    shapes = jax.eval_shape(start.init, params)
    assert jax.tree.structure(shapes) == jax.tree.structure(want)
    assert_same_bits(start.init(params), want)
    with pytest.raises(ValueError, match="with_master: init"):
        start.init(params)
    # Other uses of the transformation work as before.
    assert jax.eval_shape(start.init, params) == shapes
    assert storage_formats(start, params) == storage_formats(tx, params)
    assert_same_bits(lowbit_optax.convert(params, want, start, tx), (params, want))


def test_parameters_of_another_model_are_refused():
    tx = with_master(lowbit_adamw(1e-2), _master())
    other = {"kernel": jnp.ones((64, 64), jnp.bfloat16), "bias": jnp.ones(9)}
    with pytest.raises(ValueError, match=r"params\['bias'\] is float32\[9\] and"):
        tx.init(other)
    with pytest.raises(ValueError, match="same leaves"):
        tx.init({"bias": jnp.ones(8)})


class _Model(nnx.Module):
    def __init__(self):
        self.first = nnx.Linear(16, 64, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(64, 64, rngs=nnx.Rngs(1))


def test_nnxs_optimizer_starts_from_a_float32_model():
    model, tx = _Model(), lowbit_adamw(1e-2)
    master = jax.tree.map(jnp.array, nnx.as_pure(nnx.state(model, nnx.Param)))
    optimizer = nnx_optimizer(model, tx)
    assert model.first.kernel[...].dtype == jnp.bfloat16
    assert model.first.bias[...].dtype == jnp.float32

    params, state = from_master(tx, master)
    found = nnx.as_pure(optimizer.opt_state)
    assert_same_bits(jax.tree.leaves(found), jax.tree.leaves(state))
    held = nnx.as_pure(nnx.state(model, nnx.Param))
    assert_same_bits(jax.tree.leaves(held), jax.tree.leaves(params))
    kernel = lowbit_optax.master_weights(held, found)["second"]["kernel"]
    exact, narrowed = master["second"]["kernel"], params["second"]["kernel"]
    assert jnp.abs(kernel - exact).max() < jnp.abs(narrowed - exact).max() / 100


def test_trainers_that_make_the_optimizer_get_a_narrow_model():
    model = _Model()
    kernel = model.second.kernel[...]
    tx = cast_model(model, lowbit_optax.extra_bits_adamw(1e-2))
    held = nnx.Optimizer(model, tx, wrt=nnx.Param)
    params = nnx.as_pure(nnx.state(model, nnx.Param))
    masters = lowbit_optax.master_weights(params, nnx.as_pure(held.opt_state))
    assert_same_bits(masters["second"]["kernel"], kernel)


def test_states_that_are_made_under_jit_start_a_released_run():
    tx = lowbit_optax.extra_bits_sgd(0.1)
    master = {"layers": jnp.full((3, 64, 64), 0.01)}
    params, _ = from_master(tx, master)
    start = with_master(tx, master)
    state, x = jax.jit(start.init)(params), jnp.ones((2, 64), jnp.bfloat16)

    def loss_fn(params, x):
        x, _ = jax.lax.scan(lambda x, w: (x @ w, None), x, params["layers"])
        return jnp.mean(x.astype(jnp.float32))

    explained = str(release.explain(loss_fn, start)(params, state, x))
    assert explained == str(release.explain(loss_fn, tx)(params, state, x))


def test_masters_enter_an_object_of_multi_steps():
    def started(make):
        tx, master = make(optax.MultiSteps(lowbit_adamw(1e-2), 2)), _master()
        params, want = from_master(tx, master, jnp.bfloat16, None)
        assert_same_bits(with_master(tx, master).init(params), want)

    started(lambda tx: tx)
    started(lambda tx: tx.gradient_transformation())
