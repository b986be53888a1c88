"""Eight devices compute the same numbers as one device, without communication."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import lowbit_optax
from tests.helpers.optimizers import (
    ALIASES,
    VARIANTS,
    apply,
    assert_same_bits,
    elementwise,
    initial,
    jitted,
    train,
)
from tools.hlo import collectives

pytestmark = pytest.mark.standard_promotion


SHARDED = elementwise(ALIASES | VARIANTS)
FEW = {
    name: SHARDED[name]
    for name in (
        "kahan_adamw",
        "sr_adamw",
        "extra_bits_adamw_8",
        "extra_bits_adamw_7_stochastic",
        "lowbit_adamw",
    )
}

AXES = pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
# On 8 devices, 512 rows or columns give each device whole words and blocks.
SPECS = {
    "rows": jax.P("x"),
    "columns": jax.P(None, "x"),
    "replicated": jax.P(),
}


def _mesh(axis_type):
    return jax.make_mesh((8,), ("x",), axis_types=(axis_type,))


@functools.cache
def _numpy_arrays(*shape):
    random = np.random.default_rng(0)
    return random.standard_normal(shape), 0.1 * random.standard_normal((2, *shape))


def _arrays(*shape):
    """Returns a parameter and two gradients on one device."""
    weight, grads = _numpy_arrays(*shape)
    return jnp.asarray(weight, jnp.bfloat16), list(jnp.asarray(grads, jnp.bfloat16))


def _placed(tx, params, sharding):
    """Returns a fresh state, placed according to the parameter's sharding."""
    shardings = lowbit_optax.state_shardings(tx, params, sharding)
    return jax.jit(tx.init, out_shardings=shardings)(params)


def _trained(tx, params, grads):
    return train(tx, params, initial(tx, params), grads, lowbit_optax.step)


@functools.cache
def _on_one_device(tx):
    return _trained(tx, *_arrays(512, 512))


_MADE = {name: optimizer() for name, optimizer in SHARDED.items()}


def _without_communication(tx, sharding, params, grads, advance=lowbit_optax.step):
    """Returns parameters and state after two steps, which must not communicate."""
    with jax.set_mesh(sharding.mesh):
        state = _placed(tx, params, sharding)
        params, grads = jax.device_put((params, grads), sharding)
        step = jitted(tx, advance).lower(params, state, grads[0]).compile()
        assert not collectives(step)
        for grad in grads:
            params, state = step(params, state, grad)
    return params, state


def _assert_placed(tree, sharding):
    """Every array with the rank of the parameter has the sharding of the parameter."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path)
        if leaf.ndim:
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), name
            local = sharding.shard_shape(leaf.shape)
            assert {shard.data.shape for shard in leaf.addressable_shards} == {local}


def _cases():
    """Yields every optimizer with rows, and a few optimizers with other layouts."""
    for name in SHARDED:
        yield name, "rows", AxisType.Auto
    for name in FEW:
        yield name, "columns", AxisType.Auto
        yield name, "replicated", AxisType.Auto
        yield name, "rows", AxisType.Explicit
        yield name, "columns", AxisType.Explicit


@pytest.mark.parametrize(("name", "spec", "axis_type"), list(_cases()))
def test_sharded_steps_are_one_devices_steps_without_communication(
    name, spec, axis_type
):
    tx = _MADE[name]
    advance = apply if axis_type == AxisType.Explicit else lowbit_optax.step
    sharding = jax.NamedSharding(_mesh(axis_type), SPECS[spec])
    got = _without_communication(tx, sharding, *_arrays(512, 512), advance)
    assert_same_bits(got, _on_one_device(tx))
    if advance is apply:
        got = got[1]  # JAX places the parameters
    _assert_placed(got, sharding)


PLACED = {
    "stack by layer": ((8, 64, 16), (8,), jax.P("x")),
    "stack by column": ((3, 32, 64), (8,), jax.P(None, None, "x")),
    "vector": ((2048,), (8,), jax.P("x")),
    "convolution by channel": ((3, 3, 32, 256), (8,), jax.P(None, None, None, "x")),
    "two axes": ((128, 64), (4, 2), jax.P("x", "y")),
    "one axis of two": ((256, 64), (4, 2), jax.P(("x", "y"))),
}


@pytest.mark.parametrize(
    ("placed", "axis_type"),
    [(name, AxisType.Auto) for name in PLACED]
    + [(name, AxisType.Explicit) for name in ("stack by layer", "two axes")],
)
def test_other_ranks_and_meshes(placed, axis_type):
    shape, devices, spec = PLACED[placed]
    tx = _MADE["extra_bits_sgd_8"]
    axes = ("x", "y")[: len(devices)]
    mesh = jax.make_mesh(devices, axes, axis_types=(axis_type,) * len(axes))
    sharding = jax.NamedSharding(mesh, spec)
    params, grads = _arrays(*shape)
    got = _without_communication(tx, sharding, params, grads)
    _assert_placed(got, sharding)
    assert_same_bits(got, _trained(tx, params, grads))


QUANTISED = functools.partial(lowbit_optax.lpmm.quantize_params, bits=12, block_size=64)
# Maps a name to a transformation and to the function that prepares its parameters.
OTHERS = {
    "quantised": (lowbit_optax.lpmm_sgd(0.1, 0.9, block_size=64), QUANTISED),
    "quantised adam": (lowbit_optax.lpmm_adam(1e-2, block_size=64), QUANTISED),
    "block-scaled": (
        lowbit_optax.lowbit(optax.sgd(0.1, 0.9)),
        lowbit_optax.block_scaling.block_scale,
    ),
    "sums": (
        lowbit_optax.accumulate_gradients(lowbit_optax.kahan_sgd(0.5), 2),
        jnp.asarray,
    ),
    "average": (lowbit_optax.ema_of_params(0.99, min_size=0), jnp.asarray),
}


@pytest.mark.parametrize("spec", ["rows", "columns"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_and_states_need_no_communication_either(name, spec):
    tx, prepared = OTHERS[name]
    sharding = jax.NamedSharding(_mesh(AxisType.Auto), SPECS[spec])
    params, grads = _arrays(512, 512)
    params = prepared(params)
    got = _without_communication(tx, sharding, params, grads)
    _assert_placed(got, sharding)
    assert_same_bits(got, _trained(tx, params, grads))


CUT = {
    "one row each": ((8, 40), jax.P("x"), "shards of 1 along axis 0.*multiples of 8"),
    "half a block": ((32, 36), jax.P("x"), "shards of 4 along axis 0.*multiples of 8"),
    "two columns": ((40, 16), jax.P(None, "x"), "of 2 along axis 1.*multiples of 4"),
    "half a vector": ((1024,), jax.P("x"), "of 128 along axis 0.*multiples of 256"),
}
UNEVEN = {
    "125 rows each": ((1000, 64), jax.P("x"), jax.P(None, "x")),
    "one row each": ((8, 512), jax.P("x"), jax.P(None, "x")),
    "half a block": ((32, 512), jax.P("x"), jax.P(None, "x")),
    "two columns": ((64, 16), jax.P(None, "x"), jax.P("x")),
}


@AXES
@pytest.mark.parametrize(("shape", "spec", "other"), UNEVEN.values(), ids=UNEVEN)
def test_state_of_uneven_shards_has_another_axis(shape, spec, other, axis_type):
    tx = lowbit_optax.lowbit_adamw(0.01, min_size=0)
    mesh = _mesh(axis_type)
    sharding, moved = (jax.NamedSharding(mesh, x) for x in (spec, other))
    params, grads = _arrays(*shape)
    want = _trained(tx, params, grads)
    with jax.set_mesh(mesh):
        if axis_type == AxisType.Auto:
            placed = lowbit_optax.state_shardings(
                tx, params, sharding, uneven="other_axis"
            )
            state = jax.jit(tx.init, out_shardings=placed)(params)
        params, grads = jax.device_put((params, grads), sharding)
        if axis_type == AxisType.Explicit:
            state = jax.jit(tx.init)(params)
        _assert_placed(state, moved)
        for advance in (lowbit_optax.step, apply):
            got = train(tx, params, state, grads, advance)
            assert_same_bits(got, want)
        if axis_type == AxisType.Explicit:
            _assert_placed(got[0], sharding)
            _assert_placed(got[1], moved)
            masters = lowbit_optax.master_weights(*got)
            assert_same_bits(masters, lowbit_optax.master_weights(*want))


@pytest.mark.parametrize(("shape", "spec", "message"), CUT.values(), ids=CUT)
def test_cut_words_and_blocks_on_explicit_axes_raise_an_error_with_the_leaf(
    shape, spec, message
):
    tx = lowbit_optax.lowbit_adamw(0.01, min_size=0)
    mesh = _mesh(AxisType.Explicit)
    params, grads = _arrays(*shape)
    state = initial(tx, {"a": params})
    with jax.set_mesh(mesh):
        params = jax.device_put(params, jax.NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=rf"params\['a'\], \w+\[.*{message}"):
            tx.init({"a": params})
        with pytest.raises(ValueError, match=r"params\['a'\], .*explicit axes"):
            jax.eval_shape(
                functools.partial(lowbit_optax.step, tx),
                {"a": params},
                state,
                {"a": grads[0]},
            )


def test_without_a_mesh_in_context_shardings_carry_over_too():
    tx = _MADE["extra_bits_adamw_8"]
    sharding = jax.NamedSharding(_mesh(AxisType.Auto), jax.P("x"))
    params, grads = _arrays(512, 512)
    params, grads = jax.device_put((params, grads), sharding)
    state = tx.init(params)
    _assert_placed(state, sharding)
    got = train(tx, params, state, grads, lowbit_optax.step)
    _assert_placed(got, sharding)
    assert_same_bits(got, _on_one_device(tx))


@AXES
def test_master_weights_and_reports_of_sharded_training(axis_type):
    tx = _MADE["extra_bits_adamw_8"]
    mesh = _mesh(axis_type)
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    params, grads = _arrays(512, 512)
    want = lowbit_optax.master_weights(*_on_one_device(tx))
    with jax.set_mesh(mesh):
        params, grads = jax.device_put((params, grads), sharding)
        state = tx.init(params)
        _assert_placed(state, sharding)
        got = train(tx, params, state, grads, lowbit_optax.step)
        masters = jax.jit(lowbit_optax.master_weights).lower(*got).compile()
        assert not collectives(masters)
        masters = masters(*got)
        _assert_placed(masters, sharding)
        assert_same_bits(masters, want)
        share = jax.jit(lambda *a: lowbit_optax.step_report(tx, *a).lost)
        share = share(*got, grads[0])
        assert 0 <= float(share) <= 1


@pytest.mark.parametrize("name", ["extra_bits_adamw_8", "sr_adamw"])
def test_shards_that_cut_words_give_the_same_numbers(name):
    # With 400 rows on 8 devices, 2 of each device's 50 rows are in a cut word. The step
    # communicates but computes the same numbers.
    tx = _MADE[name]
    mesh = _mesh(AxisType.Auto)
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    params, grads = _arrays(400, 16)
    want = _trained(tx, params, grads)
    assert_same_bits(_trained(tx, *jax.device_put((params, grads), sharding)), want)
