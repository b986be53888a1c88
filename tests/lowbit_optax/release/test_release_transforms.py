"""Released steps work under jit, scan, vmap and donation, and on eight devices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType

import lowbit_optax
from lowbit_optax import release
from tests.helpers import released
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.released import RATE, SGD, simple_loss, simple_params
from tools.hlo import collectives

pytestmark = pytest.mark.standard_promotion

KAHAN = lowbit_optax.kahan_sgd(RATE, 0.5)


def arguments(tx=SGD, dtype=jnp.float32, rows=4):
    """Returns the parameters, the state and the batch of a first step."""
    params = simple_params(dtype=dtype)
    return params, tx.init(params), *released.batches(1, rows)[0]


@pytest.mark.parametrize("max_norm", [None, 1.0], ids=["one_pass", "two_passes"])
def test_a_loss_is_traced_once_for_each_shape_of_its_batch(max_norm):
    calls = []

    def loss_fn(*args):
        calls.append(args)
        return simple_loss(*args)

    step = jax.jit(release.value_and_update(loss_fn, SGD, max_grad_norm=max_norm))
    params, state, _ = arguments()
    for rows, count in ((4, 1), (4, 1), (8, 2), (4, 2), (8, 2)):
        _, params, state = step(params, state, *released.batches(1, rows)[0])
        assert len(calls) == count


def test_jit_finds_arguments_by_their_names():
    def loss_fn(params, x, train):
        return simple_loss(params, x) * (1.0 if train else 2.0)

    step = jax.jit(
        release.value_and_update(loss_fn, SGD),
        static_argnames="train",
        donate_argnames=("params", "opt_state"),
    )
    params, state, x = arguments()
    loss, _, _ = step(params, state, x, train=True)
    assert jnp.isfinite(loss)
    assert params["layers"].is_deleted()


@pytest.mark.parametrize("tx", [SGD, KAHAN], ids=["optax", "kahan"])
def test_donated_parameters_and_state_are_overwritten(tx):
    args = arguments(tx, jnp.bfloat16)
    step = jax.jit(release.value_and_update(simple_loss, tx), donate_argnums=(0, 1))
    compiled = step.lower(*args).compile()
    stacks = [x for x in jax.tree.leaves(args) if x.ndim == 3]
    size = sum(x.nbytes for x in stacks)
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    after = jax.block_until_ready(step(*args))
    assert all(x.is_deleted() for x in stacks)
    assert not any(x.is_deleted() for x in jax.tree.leaves(after))


def test_no_stack_of_gradients_is_alive():
    params = simple_params(layers=32)
    state = SGD.init(params)
    batch = released.batches(1)[0]

    def temporary(make):
        step = jax.jit(make(simple_loss, SGD), donate_argnums=(0, 1))
        compiled = step.lower(params, state, *batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    stack = params["layers"].nbytes
    assert temporary(released.ordinary) >= stack
    # Only activations and a few arrays of one layer's size remain.
    assert temporary(release.value_and_update) <= stack // 3


def test_steps_under_scan_are_steps_in_a_loop():
    batches = released.batches(4)
    step = release.value_and_update(simple_loss, KAHAN)
    params, state, _ = arguments(KAHAN, jnp.bfloat16)

    @functools.partial(jax.jit, compiler_options=released.OPERATION_BY_OPERATION)
    def train(params, state, inputs):
        def body(carry, x):
            value, *carry = step(*carry, x)
            return tuple(carry), value

        return lax.scan(body, (params, state), inputs)

    inputs = jnp.stack([x for (x,) in batches])
    (got, got_state), values = train(params, state, inputs)
    want_values, want, want_state = released.run(step, KAHAN, params, batches, state)
    chex.assert_trees_all_equal(values, jnp.stack(want_values))
    assert_same_bits((got, got_state), (want, want_state))


def test_a_step_in_a_branch_is_taken_or_not():
    args = arguments()
    step = release.value_and_update(simple_loss, SGD)
    unchanged = jnp.float32(0), *args[:2]

    @jax.jit
    def maybe(flag):
        return lax.cond(flag, lambda: step(*args), lambda: unchanged)

    assert_same_bits(maybe(True), jax.jit(step)(*args))
    assert_same_bits(maybe(False), unchanged)


def test_an_ensemble_under_vmap_is_its_members():
    members = [simple_params(), jax.tree.map(lambda x: x * 0.5, simple_params())]
    stack = lambda trees: jax.tree.map(lambda *x: jnp.stack(x), *trees)
    states = [SGD.init(params) for params in members]
    (x,) = released.batches(1)[0]
    step = release.value_and_update(simple_loss, SGD)
    got = jax.jit(jax.vmap(step, (0, 0, None)))(stack(members), stack(states), x)
    want = stack([step(*each, x) for each in zip(members, states, strict=True)])
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("max_norm", [None, 2.0**-4], ids=["free", "clipped"])
@pytest.mark.parametrize(
    ("spec", "axis_type"),
    [
        ("replicated", AxisType.Auto),
        ("rows", AxisType.Auto),
        ("columns", AxisType.Auto),
        ("layers", AxisType.Auto),
        ("replicated", AxisType.Explicit),
    ],
)
def test_eight_devices_step_as_one_with_the_plain_steps_collectives(
    spec, axis_type, max_norm
):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    specs = {
        "replicated": jax.P(),
        "rows": jax.P(None, "x"),
        "columns": jax.P(None, None, "x"),
        "layers": jax.P("x"),
    }
    params = simple_params(layers=8)
    (x,) = released.batches(1, rows=16)[0]
    plain_tx = SGD
    if max_norm is not None:
        plain_tx = optax.chain(optax.clip_by_global_norm(max_norm), SGD)
    ours = release.value_and_update(simple_loss, SGD, max_grad_norm=max_norm)
    want = jax.jit(ours)(params, SGD.init(params), x)

    def place(leaf):
        spec_of_leaf = specs[spec] if leaf.ndim == 3 else jax.P()
        return jax.device_put(leaf, jax.NamedSharding(mesh, spec_of_leaf))

    def compiled(step, tx):
        args = jax.tree.map(place, (params, tx.init(params)))
        out = jax.tree.map(lambda x: x.sharding, args)
        step = jax.jit(step, out_shardings=(None, *out))
        rows = jax.device_put(x, jax.NamedSharding(mesh, jax.P("x")))
        return step.lower(*args, rows).compile(), (*args, rows)

    with jax.set_mesh(mesh):
        step, args = compiled(ours, SGD)
        got = step(*args)
        plain, _ = compiled(released.ordinary(simple_loss, plain_tx), plain_tx)
    got, want = jax.tree.map(np.asarray, (got, want))
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)
    assert set(collectives(step)) <= set(collectives(plain))


def test_a_part_of_the_loss_may_leave_explicit_axes():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))

    def loss_fn(params, rows):
        # Internally, JAX runs a lookup with a placed result on automatic axes.
        x = params["table"].at[rows].get(out_sharding=jax.P("x"))
        return simple_loss(params, x)

    params = simple_params(dtype=jnp.float32)
    params["table"] = released.normal(32, 64)
    rows = jnp.arange(16) % 7
    place = lambda tree, spec: jax.device_put(tree, jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        params, rows = place(params, jax.P()), place(rows, jax.P("x"))
        state = SGD.init(params)
        results = [
            jax.jit(make(loss_fn, SGD))(params, state, rows)
            for make in (release.value_and_update, released.ordinary)
        ]
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


def on_shards(step, args, **options):
    """Returns the results of a data-parallel step inside ``shard_map``."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    specs = jax.P(), jax.P(), jax.P("x")
    options |= {"mesh": mesh, "in_specs": specs, "out_specs": jax.P()}
    return jax.jit(jax.shard_map(step, **options))(*args)


def mean_loss(params, x):
    return lax.pmean(simple_loss(params, x), "x")


def test_data_parallel_gradients_are_reduced_inside_shard_map():
    args = arguments(rows=16)
    got, want = (
        on_shards(make(mean_loss, SGD), args)
        for make in (release.value_and_update, released.ordinary)
    )
    one = jax.jit(released.ordinary(simple_loss, SGD))(*args)
    chex.assert_trees_all_close(want, one, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)


MEAN = optax.stateless(lambda grads, _: lax.pmean(grads, "x"))


@pytest.mark.parametrize(
    "make", [release.value_and_update, release.value_and_update_layers]
)
def test_gradients_of_replicas_are_not_used_before_they_are_reduced(make):
    params, _, x = arguments(rows=16)
    args = params["layers"][0], optax.sgd(RATE).init(()), x

    def loss_fn(w, x):
        w, x = release.released(w, x)  # only handles are opened
        return lax.pmean(jnp.mean(released.dense(x, w) ** 2), "x")

    with pytest.raises(ValueError, match=r"check_vma=True.*'x'.*reduce gradients"):
        on_shards(make(loss_fn, optax.sgd(RATE)), args, check_vma=False)
    reduced = optax.chain(MEAN, optax.sgd(RATE))
    args = args[0], reduced.init(args[0]), x
    got = on_shards(make(loss_fn, reduced), args, check_vma=False)
    want = on_shards(released.ordinary(loss_fn, reduced), args, check_vma=False)
    chex.assert_trees_all_close(got, want, rtol=1e-4, atol=1e-5)
    assert (got[1] != args[0]).any()


def test_one_loss_scale_suits_devices_whose_losses_differ():
    w, _, x = arguments(rows=16)
    scaled = lowbit_optax.with_loss_scale(
        SGD, lowbit_optax.loss_scaling.static_scale(8)
    )

    def stepped(tx):
        def step(w, state, x):
            loss_fn = lambda w, x: jnp.sum(released.dense(x, w) ** 2)
            loss, *new = release.value_and_update(loss_fn, tx)(w, state, x)
            return lax.pmean(loss, "x"), new[0]

        return on_shards(step, (w["layers"][0], tx.init(w["layers"][0]), x))

    chex.assert_trees_all_close(stepped(scaled), stepped(SGD), rtol=1e-5, atol=1e-6)
