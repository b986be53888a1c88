"""Gradient release rejects unsuitable updates and explains where leaves are updated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import release
from tests.helpers import released
from tests.helpers.released import RATE, SGD, simple_loss, simple_params

pytestmark = pytest.mark.standard_promotion


def _called(loss_fn=simple_loss, tx=SGD, params=None, **options):
    params = simple_params() if params is None else params
    step = release.value_and_update(loss_fn, tx, **options)
    return step(params, tx.init(params), *released.batches(1)[0])


def _norm_in_state():
    def init(params):
        del params
        return jnp.float32(0)

    def update(updates, state, params=None):
        del state, params
        return updates, optax.tree.norm(updates)

    return optax.GradientTransformation(init, update)


NEEDS_ALL = {
    "clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), SGD),
    "clip_inside_lowbit": lowbit_optax.lowbit(
        optax.chain(optax.clip_by_global_norm(1.0), SGD),
        weights=lowbit_optax.extra_bits(16),
        moments="float32",
    ),
    "apply_if_finite": optax.apply_if_finite(SGD, 3),
    "multi_steps_that_skip": optax.MultiSteps(
        SGD, 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "norm_in_state": optax.chain(_norm_in_state(), SGD),
    "normalized": optax.chain(optax.normalize_by_update_norm(), SGD),
}


@pytest.mark.parametrize("name", NEEDS_ALL)
def test_the_error_of_an_update_that_needs_all_gradients_names_a_remedy(name):
    refused = pytest.raises(
        ValueError, match=r"^release: .*params\['layers'\].*max_grad_norm"
    )
    with refused:
        _called(tx=NEEDS_ALL[name])
    with refused:
        params, batch = simple_params(), released.batches(1)[0]
        released.explained(simple_loss, NEEDS_ALL[name], params, *batch)


def test_a_refused_analysis_leaves_later_steps_as_they_are():
    tx, params = lowbit_optax.kahan_sgd(RATE), simple_params(dtype=jnp.bfloat16)
    refused = lowbit_optax.lowbit(NEEDS_ALL["norm_in_state"])

    def fails(updates, params=None):
        raise ValueError("max_grad_norm")

    args = jax.eval_shape(lambda: (params, tx.init(params), params))

    def traced():
        # Use a new function each time, because traces are cached by function.
        return str(jax.make_jaxpr(functools.partial(lowbit_optax.step, tx))(*args))

    before = traced()
    for each in (refused, optax.chain(tx, optax.stateless(fails))):
        with pytest.raises(ValueError, match="max_grad_norm"):
            _called(tx=each, params=params)
    assert traced() == before


def _layer_into_head(updates):
    # This is not a norm of all gradients: only the head uses a layer's gradient.
    return updates | {"head": updates["head"] + updates["layers"][0, 0, 0]}


def _head_into_layers(updates):
    return updates | {"layers": updates["layers"] * jnp.mean(updates["head"])}


@pytest.mark.parametrize(
    ("change", "updated", "needed"),
    [
        (_layer_into_head, "head", "layers"),
        (_head_into_layers, "layers", "head"),
    ],
)
def test_a_leaf_may_not_be_updated_from_the_gradient_of_another(
    change, updated, needed
):
    tx = optax.chain(optax.stateless(lambda updates, params: change(updates)), SGD)
    message = rf"update of params\['{updated}'\].*\['{needed}'\]"
    with pytest.raises(ValueError, match=message):
        _called(tx=tx)


def test_updates_from_a_frozen_leafs_gradient_alone_are_no_obstacle():
    tx = optax.partition(
        {"clipped": NEEDS_ALL["clip_by_global_norm"], "free": SGD},
        {"layers": "free", "head": "clipped"},
    )
    released.assert_equal_steps(
        simple_loss,
        tx,
        simple_params(),
        released.batches(2),
        in_loop=released.SIMPLE_IN_LOOP,
    )


def test_a_stack_whose_gradient_norm_is_in_the_state_waits_for_its_whole_gradient():
    tx = optax.partition(
        {"measured": NEEDS_ALL["norm_in_state"], "free": SGD},
        {"layers": "measured", "head": "free"},
    )
    params, batches = simple_params(), released.batches(1)
    report = released.explained(simple_loss, tx, params, *batches[0])["['layers']"]
    assert report.endswith("stores a number that depends on its whole gradient")
    _, new, state = _called(tx=tx)
    norm = state.inner_states["measured"].inner_state[0]
    grad = jax.grad(simple_loss)(params, *batches[0])["layers"]
    np.testing.assert_allclose(norm, optax.tree.norm(grad), rtol=1e-4)
    want = params["layers"] - RATE * grad
    np.testing.assert_allclose(new["layers"], want, rtol=1e-4, atol=1e-6)


def test_complex_leaves_are_refused_by_name():
    params = simple_params() | {"wave": jnp.ones(2, jnp.complex64)}
    for loss_fn in (simple_loss, lambda params, x: jnp.abs(params["wave"]).sum()):
        with pytest.raises(TypeError, match=r"params\['wave'\] .*real.* complex64"):
            _called(loss_fn, params=params, max_grad_norm=1.0)


def test_a_mask_may_know_only_arrays():
    # The step of each part sees all leaves, and no optax.MaskedNode.
    matrices = lambda tree: {name: x.ndim > 1 for name, x in tree.items()}
    tx = optax.chain(optax.add_decayed_weights(0.5, matrices), SGD)

    def loss_fn(params, x):
        return simple_loss(params, x @ params["first"])

    params = simple_params() | {"first": released.weights()}
    reports = released.explained(loss_fn, tx, params, *released.batches(1)[0])
    assert reports["['first']"] == "in the backward pass, update 1 of 1"
    released.assert_equal_steps(
        loss_fn, tx, params, released.batches(2), in_loop=released.SIMPLE_IN_LOOP
    )


AS_AN_ARRAY = {
    "matmul": lambda x, w: x @ w,
    "product": lambda x, w: x * (w * 2)[0],
    "dot": jnp.dot,
    "einsum": lambda x, w: jnp.einsum("ij,jk", x, w),
    "asarray": lambda x, w: x @ jnp.asarray(w),
    "where": lambda x, w: jnp.where(x[0] > 0, w, 0),
    "numpy": lambda x, w: x @ np.asarray(w),
    "negation": lambda x, w: x @ -w,
    "comparison": lambda x, w: x * (w > 0)[0],
}


@pytest.mark.parametrize("name", AS_AN_ARRAY)
def test_a_body_that_computes_with_a_quantised_layer_is_told_to_dequantise_it(name):
    layers = lowbit_optax.lpmm.quantize_params(released.weights(3), block_size=64)
    params, tx = {"layers": layers, "head": jnp.ones(64)}, lowbit_optax.lpmm_sgd(RATE)

    def loss_fn(params, x):
        body = lambda x, w: (AS_AN_ARRAY[name](x, w), None)
        return simple_loss(params, x, body)

    (x,) = released.batches(1)[0]
    with pytest.raises(TypeError, match=r"lpmm\.dequantize"):
        release.value_and_update(loss_fn, tx)(params, tx.init(params), x)
    with pytest.raises(TypeError, match=r"lpmm\.dequantize"):
        lowbit_optax.lpmm.value_and_grad(loss_fn, lazy=True)(params, x)


def test_an_arrays_method_of_a_quantised_weight_names_dequantize():
    weight = lowbit_optax.lpmm.quantize_params(released.weights(), block_size=64)
    with pytest.raises(AttributeError, match=r"astype.*lpmm\.dequantize"):
        weight.astype(jnp.bfloat16)


def test_the_state_of_more_layers_is_refused():
    state = SGD.init(simple_params(layers=4))
    step = release.value_and_update(simple_loss, SGD)
    with pytest.raises((TypeError, ValueError)):
        step(simple_params(), state, *released.batches(1)[0])


def test_explain_reports_only_leaves_that_are_updated_in_the_loop():
    tx = optax.partition(
        {"whole": optax.lamb(RATE), "layers": SGD},
        {"a": "whole", "b": "layers", "head": "layers"},
    )
    params = {"a": released.weights(3), "b": released.weights(3), "head": jnp.ones(64)}

    def loss_fn(params, x):
        body = lambda x, w: (released.dense(released.dense(x, w[0]), w[1]), None)
        return simple_loss(params, x, body, (params["a"], params["b"]))

    found = released.updated_in_loop(loss_fn, tx, params, *released.batches(1)[0])
    assert found == {"['b']"}


def test_explain_runs_nothing():
    def never(x):
        raise AssertionError(x)

    def loss_fn(params, x):
        jax.debug.callback(never, x)
        return simple_loss(params, x)

    shapes = jax.eval_shape(simple_params)
    x = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    assert released.explained(loss_fn, SGD, shapes, x)["['layers']"] == "in the loop"
    jax.effects_barrier()
