"""States are sharded over more devices than their parameters (ZeRO-1)."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import lowbit_optax
from tests.helpers.optimizers import ALIASES, apply, assert_same_bits, initial, train

pytestmark = pytest.mark.standard_promotion

AXES = pytest.mark.parametrize(
    "axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]
)
SHAPES = {
    "rows": (512, 64),
    "columns": (7, 512),
    "stack": (3, 128, 64),
    "bias": (64,),
    "odd": (7,),
    "scalar": (),
}
OPTIMIZERS = {
    name: ALIASES[name]()
    for name in (
        "lowbit_adamw",
        "kahan_adamw",
        "sr_adamw",
        "extra_bits_adamw_8",
        "lowbit_lion",
    )
    if name in ALIASES
} | {
    "master": lowbit_optax.lowbit(
        optax.adamw(1e-2), weights=lowbit_optax.master_copy(), moments="float32"
    ),
    "summed": lowbit_optax.accumulate_gradients(lowbit_optax.kahan_adamw(1e-2), 2),
    "fed back": lowbit_optax.sr_adamw(1e-2, error_feedback="mu"),
}


def _mesh(axis_type, shape=(8,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(shape))


@functools.cache
def _numbers():
    random = np.random.default_rng(0)
    params = {name: random.standard_normal(shape) for name, shape in SHAPES.items()}
    grads = [
        {name: 0.1 * random.standard_normal(shape) for name, shape in SHAPES.items()}
        for _ in range(2)
    ]
    return params, grads


def _arrays():
    as_bf16 = lambda x: jnp.asarray(x, jnp.bfloat16)
    return jax.tree.map(as_bf16, _numbers())


WHOLE = jax.P()


def _placed(tx, params, mesh, specs=WHOLE):
    """Returns parameters with these specs, and a state that is divided over "data"."""
    shardings = lowbit_optax.state_shardings(tx, params, specs, mesh=mesh, over="data")
    place = lambda spec: jax.NamedSharding(mesh, spec)
    params = jax.device_put(params, jax.tree.map(place, specs))
    return params, jax.jit(tx.init, out_shardings=shardings)(params), shardings


def _step(tx, params, state, advance):
    """Returns a jitted step that keeps the places of its results."""
    places = jax.tree.map(lambda x: x.sharding, (params, state))
    step = lambda params, state, grads: advance(tx, params, state, grads)
    return jax.jit(step, out_shardings=places, donate_argnums=(0, 1))


@AXES
@pytest.mark.parametrize("advance", [lowbit_optax.step, apply], ids=["step", "update"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_divided_steps_are_one_devices_steps(name, advance, axis_type):
    tx = OPTIMIZERS[name]
    params, series = _arrays()
    want = train(tx, params, initial(tx, params), series, advance)
    mesh = _mesh(axis_type)
    with jax.set_mesh(mesh):
        params, state, _ = _placed(tx, params, mesh)
        places = jax.tree.map(lambda x: x.sharding, (params, state))
        step = _step(tx, params, state, advance)
        for grads in series:
            grads = jax.device_put(grads, jax.NamedSharding(mesh, jax.P()))
            params, state = step(params, state, grads)
    assert_same_bits((params, state), want)
    assert jax.tree.map(lambda x: x.sharding, (params, state)) == places


QUANTIZED = functools.partial(lowbit_optax.lpmm.quantize_params, bits=12, block_size=64)
PREPARED = {
    "lpmm": (lowbit_optax.lpmm_sgd(0.1, 0.9, block_size=64), QUANTIZED),
    "block-scaled": (
        lowbit_optax.lowbit(optax.sgd(0.1, 0.9)),
        lowbit_optax.block_scaling.block_scale,
    ),
}


@AXES
@pytest.mark.parametrize("name", PREPARED)
def test_quantized_weights_may_have_divided_states(name, axis_type):
    tx, prepared = PREPARED[name]
    random = np.random.default_rng(0)
    params = prepared({"w": jnp.asarray(random.standard_normal((512, 512)))})
    series = [{"w": jnp.asarray(random.standard_normal((512, 512)), jnp.bfloat16)}]
    want = train(tx, params, initial(tx, params), series, lowbit_optax.step)
    mesh = _mesh(axis_type)
    with jax.set_mesh(mesh):
        whole = jax.NamedSharding(mesh, WHOLE)
        places = lowbit_optax.state_shardings(tx, params, mesh=mesh, over="data")
        params = jax.device_put(params, whole)
        state = jax.jit(tx.init, out_shardings=places)(params)
        step = _step(tx, params, state, lowbit_optax.step)
        got = step(params, state, jax.device_put(series[0], whole))
    assert_same_bits(got, want)


def _loss(params, x):
    x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]
    return jnp.mean((x @ params["head"]).astype(jnp.float32) ** 2)


@AXES
def test_released_steps_accept_divided_states(axis_type):
    tx, mesh = lowbit_optax.lowbit_adamw(1e-2), _mesh(axis_type)
    random = np.random.default_rng(0)
    shapes = {"layers": (2, 64, 64), "head": (64, 64)}
    arrays = {name: 0.1 * random.standard_normal(x) for name, x in shapes.items()}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), arrays)
    x = jnp.asarray(random.standard_normal((8, 64)), jnp.bfloat16)
    step = jax.jit(lowbit_optax.release.value_and_update(_loss, tx))
    want = step(params, tx.init(params), x)
    with jax.set_mesh(mesh):
        params, state, _ = _placed(tx, params, mesh)
        # A replicated batch has the same gradients.
        x = jax.device_put(x, jax.NamedSharding(mesh, WHOLE))
        got = step(params, state, x)
    assert_same_bits(got, want)


@AXES
def test_metadata_of_nnx_divides_the_state(axis_type):
    nnx = pytest.importorskip("flax.nnx")
    from lowbit_optax.training import nnx_optimizer

    mesh = _mesh(axis_type)
    specs = {"out_sharding": (None, None), "optimizer_sharding": ("data", None)}
    with jax.set_mesh(mesh):
        init = nnx.with_metadata(nnx.initializers.lecun_normal(), **specs)
        model = nnx.Linear(256, 64, kernel_init=init, rngs=nnx.Rngs(0))
        optimizer = nnx_optimizer(model, lowbit_optax.lowbit_adamw(1e-2))

        @nnx.jit
        def train_step(model, optimizer, x):
            loss = lambda model: jnp.mean(model(x).astype(jnp.float32) ** 2)
            optimizer.update(model, nnx.grad(loss)(model))

        train_step(model, optimizer, jnp.ones((8, 256), jnp.bfloat16))
        words = optimizer.opt_state.residual.tree["kernel"]
        assert words[...].sharding.spec[0] == "data"


@AXES
def test_each_device_stores_its_part_of_the_state(axis_type):
    tx = lowbit_optax.lowbit_adamw(1e-2)
    params, _ = _arrays()
    mesh = _mesh(axis_type)
    with jax.set_mesh(mesh):
        _, state, _ = _placed(tx, params, mesh)
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path)
        here = math.prod(x.addressable_shards[0].data.shape)
        is_divided = x.ndim and "odd" not in name and x.dtype.itemsize * x.size > 64
        assert here * (8 if is_divided else 1) == x.size, name


@AXES
def test_parameters_may_be_sharded_over_other_axes(axis_type):
    tx = lowbit_optax.lowbit_adamw(1e-2)
    params, series = _arrays()
    params = {name: params[name] for name in ("rows", "stack")}
    series = [{name: grads[name] for name in params} for grads in series]
    want = train(tx, params, initial(tx, params), series, lowbit_optax.step)
    mesh = _mesh(axis_type, (4, 2), ("data", "model"))
    specs = {"rows": jax.P("model"), "stack": jax.P(None, None, "model")}
    with jax.set_mesh(mesh):
        params, state, _ = _placed(tx, params, mesh, specs)
        mu = jax.tree.leaves(state.inner_state[0].mu)
        assert {
            math.prod(x.sharding.shard_shape(x.shape)) * 8 // x.size for x in mu
        } == {1}
        step = _step(tx, params, state, lowbit_optax.step)
        for grads in series:
            grads = jax.device_put(grads, jax.tree.map(lambda x: x.sharding, params))
            params, state = step(params, state, grads)
    assert_same_bits((params, state), want)


@AXES
def test_functions_that_start_and_convert_accept_divided_states(axis_type):
    tx = lowbit_optax.lowbit_adamw(1e-2)
    other = lowbit_optax.kahan_adamw(1e-2)
    wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), _numbers()[0])
    want = lowbit_optax.from_master(tx, wide)
    mesh = _mesh(axis_type)
    with jax.set_mesh(mesh):
        wide = jax.device_put(wide, jax.NamedSharding(mesh, jax.P()))
        start = lambda x: lowbit_optax.from_master(tx, x)
        params, state = jax.eval_shape(start, wide)
        places = lowbit_optax.state_shardings(tx, params, mesh=mesh, over="data")
        whole = jax.tree.map(lambda _: jax.NamedSharding(mesh, jax.P()), params)
        params, state = jax.jit(start, out_shardings=(whole, places))(wide)
        assert_same_bits((params, state), want)
        masters = lowbit_optax.master_weights(params, state)
        assert_same_bits(masters, lowbit_optax.master_weights(*want))
        got = lowbit_optax.convert(params, state, tx, other)
        assert_same_bits(got, lowbit_optax.convert(*want, tx, other))


def test_an_axis_that_the_mesh_does_not_have_is_refused():
    tx, mesh = lowbit_optax.lowbit_adamw(1e-2), _mesh(AxisType.Auto)
    with pytest.raises(ValueError, match=r"over must be an axis.*'data'.*got 'model'"):
        lowbit_optax.state_shardings(tx, jnp.ones((64, 64)), mesh=mesh, over="model")
    with pytest.raises(TypeError, match=r"over must be names of axes.*got 3"):
        lowbit_optax.state_shardings(tx, jnp.ones((64, 64)), mesh=mesh, over=3)


def test_a_large_leaf_that_does_not_divide_is_refused_unless_it_may_be_whole():
    tx, mesh = lowbit_optax.lowbit_adamw(1e-2), _mesh(AxisType.Auto)
    params = {"emb": jax.ShapeDtypeStruct((5001, 70), jnp.bfloat16)}
    divided = functools.partial(
        lowbit_optax.state_shardings, tx, params, mesh=mesh, over="data"
    )
    with pytest.raises(ValueError, match=r"params\['emb'\].*such as 4992 or 5056"):
        divided()
    specs = {x.spec for x in jax.tree.leaves(divided(uneven="replicate"))}
    assert not any(map(any, specs))


@pytest.mark.parametrize(
    ("shape", "spec"), [((70_000,), jax.P()), ((5004, 70), jax.P("model"))]
)
def test_the_sizes_that_an_error_names_divide(shape, spec):
    mesh = _mesh(AxisType.Auto, (4, 2), ("data", "model"))

    def divided(length):
        params = jax.ShapeDtypeStruct((length, *shape[1:]), jnp.bfloat16)
        return lowbit_optax.state_shardings(
            lowbit_optax.lowbit_adamw(1e-2), params, spec, mesh=mesh, over="data"
        )

    with pytest.raises(ValueError, match=r"such as \d+ or \d+") as error:
        divided(shape[0])
    for size in re.search(r"such as (\d+) or (\d+)", str(error.value)).groups():
        divided(int(size))


@AXES
def test_divided_states_may_be_in_host_memory(axis_type):
    tx = lowbit_optax.lowbit_adamw(1e-2)
    # XLA:CPU contracts products and sums of small leaves differently in this program.
    packed = lambda tree: {name: tree[name] for name in ("rows", "stack")}
    params, series = _arrays()
    params, series = packed(params), list(map(packed, series))
    want = train(tx, params, initial(tx, params), series, lowbit_optax.step)
    mesh = _mesh(axis_type)
    with jax.set_mesh(mesh):
        whole = jax.NamedSharding(mesh, WHOLE)
        params = jax.device_put(params, whole)
        places = lowbit_optax.host_shardings(tx, params, whole, over="data")
        init = jax.jit(lambda params: jax.device_put(tx.init(params), places))
        state, results = init(params), (jax.tree.map(lambda _: whole, params), places)
        step = jax.jit(functools.partial(lowbit_optax.step, tx), out_shardings=results)
        for grads in series:
            params, state = step(params, state, jax.device_put(grads, whole))
    assert_same_bits((params, state), want)
    words = state.residual.tree["rows"].sharding
    assert (words.spec[0], words.memory_kind) == ("data", "pinned_host")
