"""``lowbit_muon`` matches optax's Muon and updates a stack one matrix at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import block_quantized, lowbit, lowbit_muon
from lowbit_optax.aliases.newton_schulz import orthogonalized
from lowbit_optax.states.checkpoints import storage_formats
from tests.helpers.optimizers import gradient_series, initial, train
from tests.helpers.released import assert_equal_steps

pytestmark = pytest.mark.standard_promotion


def weights():
    random = np.random.default_rng(0)
    shapes = {"stack": (3, 48, 32), "wide": (32, 64), "embedding": (64, 32), "b": (32,)}
    return {
        k: jnp.asarray(random.normal(size=v), jnp.float32) for k, v in shapes.items()
    }


def is_matrix(path, leaf):
    return leaf.ndim >= 2 and "embedding" not in path


def of_optax(params):
    last_two = lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
    return jax.tree.map_with_path(
        lambda path, x: last_two(x) if is_matrix(path[0].key, x) else None, params
    )


@pytest.mark.parametrize("nesterov", [True, False])
def test_in_float32_it_is_muon_of_optax(nesterov):
    options = dict(adam_learning_rate=1e-3, weight_decay=0.1, nesterov=nesterov)
    params = weights()
    series = gradient_series(params, 3)
    tx = lowbit_muon(0.02, is_matrix=is_matrix, moments="float32", **options)
    muon = optax.contrib.muon(0.02, muon_weight_dimension_numbers=of_optax, **options)
    got, _ = train(tx, params, initial(tx, params), series, lowbit_optax.step)
    want, _ = train(muon, params, muon.init(params), series, lowbit_optax.step)
    for name in params:
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=2e-6)


def test_a_stack_is_its_matrices_one_by_one():
    stack = weights()["stack"]
    alone = jnp.stack([orthogonalized(x) for x in stack])
    np.testing.assert_allclose(orthogonalized(stack), alone, rtol=0, atol=1e-5)


def test_products_in_bfloat16_are_near_and_in_bfloat16():
    x = weights()["stack"]
    narrow = functools.partial(orthogonalized, dtype=jnp.bfloat16)
    want, got = orthogonalized(x), narrow(x)
    assert 1e-4 < jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2)) < 0.1
    lines = str(jax.make_jaxpr(narrow)(x)).splitlines()
    products = [line for line in lines if "dot_general" in line]
    assert len(products) == 3 * 5
    assert all(":bf16[" in line for line in products)
    values = jnp.linalg.svd(got, compute_uv=False)
    assert jnp.all((values > 0.6) & (values < 1.3))


def test_the_products_of_one_matrix_of_a_stack_are_temporary():
    params = {"w": jax.ShapeDtypeStruct((12, 256, 256), jnp.bfloat16)}
    dimensions = {"w": optax.contrib.MuonDimensionNumbers(1, 2)}
    muon = optax.contrib.muon(0.02, muon_weight_dimension_numbers=dimensions)

    def temporary(tx):
        """Returns the temporary bytes per parameter."""
        step = jax.jit(functools.partial(lowbit_optax.step, tx), donate_argnums=(0, 1))
        compiled = step.lower(params, jax.eval_shape(tx.init, params), params).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (12 * 256 * 256)

    # Products of the whole stack would need 4 bytes per parameter each.
    assert temporary(lowbit_muon(0.02)) < temporary(lowbit(muon)) - 7


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=jnp.dtype)
def test_released_steps_are_the_same_in_the_loop(dtype):
    def loss_fn(params, x):
        body = lambda x, w: (jnp.tanh(x @ w.astype(jnp.float32)), None)
        return jnp.mean(jax.lax.scan(body, x, params["w"])[0] ** 2)

    stack = np.random.default_rng(0).normal(size=(3, 64, 64)) / 8
    params, x = {"w": jnp.asarray(stack, jnp.bfloat16)}, jnp.ones((4, 64))
    tx = lowbit_muon(0.02, ns_dtype=dtype)
    assert_equal_steps(loss_fn, tx, params, [(x,), (-x,)], in_loop=["['w']"])


@pytest.mark.parametrize(
    "tx",
    [lowbit_muon(0.02), lowbit(optax.contrib.muon(0.02))],
    ids=["lowbit_muon", "optax"],
)
def test_the_codes_of_its_momentum_are_linear_and_those_of_adam_are_not(tx):
    params = {
        "w": jnp.ones((128, 128), jnp.bfloat16),
        "b": jnp.ones(8192, jnp.bfloat16),
    }
    formats = storage_formats(tx, params)
    stored = {str(x) for x in jax.tree.leaves(formats) if "8-bit signed" in str(x)}
    kinds = {kind for kind in ("linear", "companded") if kind in " ".join(stored)}
    assert kinds == {"linear", "companded"}


def test_formats_that_are_given_are_kept():
    given = block_quantized(8, code="dynamic", rounding="stochastic")
    chosen = given.for_field("mu", False, is_orthogonalized=True)
    assert (chosen.code, chosen.rounding) == ("dynamic", "stochastic")
    chosen = block_quantized(8).for_field("mu", False, is_orthogonalized=True)
    assert (chosen.code, chosen.rounding) == ("linear", "nearest")


def test_float64_weights_keep_the_dtypes_of_the_state():
    with jax.enable_x64(True):
        params = {"w": jnp.eye(4, dtype=jnp.float64)}
        tx = lowbit_muon(0.1, warn=False)
        run = params, tx.init(params)
        step = lambda params, state: lowbit_optax.step(tx, params, state, params)
        assert jax.eval_shape(step, *run) == jax.eval_shape(lambda: run)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 0, 4)])
def test_empty_matrices_stay_empty(shape):
    tx = lowbit_muon(0.1, is_matrix=lambda path, leaf: True)
    params = {"w": jnp.ones(shape, jnp.bfloat16), "v": jnp.eye(4, dtype=jnp.bfloat16)}
    new, _ = lowbit_optax.step(tx, params, tx.init(params), params)
    assert new["w"].shape == shape
    assert (new["v"] != params["v"]).any()
