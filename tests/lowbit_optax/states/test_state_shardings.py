"""``state_shardings`` places every array of the state with its parameter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import lowbit_optax
from lowbit_optax import lowbit, state_shardings
from tests.helpers.optimizers import (
    ALIASES,
    BFLOAT16_MOMENTS,
    VARIANTS,
    assert_same_bits,
    elementwise,
    initial,
    train,
)
from tests.helpers.wrappers import WRAPPERS

pytestmark = pytest.mark.standard_promotion


def _mesh(axis_type=AxisType.Auto):
    return jax.make_mesh((8,), ("x",), axis_types=(axis_type,))


def _adamw(learning_rate=0.01):
    return lowbit_optax.lowbit_adamw(learning_rate, min_size=0)


WRAPPED = {
    name: functools.partial(wrap, _adamw, lowbit_optax.kahan_adamw(0.01))
    for name, wrap in WRAPPERS.items()
} | {
    "schedule": lambda: lowbit_optax.kahan_sgd(
        optax.linear_schedule(1.0, 0.0, 9), momentum=0.9
    ),
    "injected inside": lambda: lowbit(
        optax.inject_hyperparams(optax.adamw)(0.01), moments=BFLOAT16_MOMENTS
    ),
    "codes of one moment": lambda: lowbit(
        optax.adamw(0.01), moments={"nu": lowbit_optax.block_quantized(8)}, min_size=0
    ),
    "master copy": lambda: lowbit(
        optax.adamw(0.01), weights=lowbit_optax.master_copy()
    ),
    "plain optax": lambda: optax.adamw(0.01),
}


def _params():
    random = np.random.default_rng(0)
    return {
        "kernel": jnp.asarray(random.standard_normal((512, 64)), jnp.bfloat16),
        "norm": jnp.asarray(random.standard_normal(512), jnp.float32),
        "unused": None,
    }


def _assert_beside_their_parameters(state):
    """Arrays at a parameter's path are split by rows; others are replicated."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        name = jax.tree_util.keystr(path)
        if name.endswith(("['kernel']", "['norm']")):
            local = (leaf.shape[0] // 8, *leaf.shape[1:])
            assert {x.data.shape for x in leaf.addressable_shards} == {local}, name
        else:
            assert leaf.sharding.is_fully_replicated, name
            assert len(leaf.sharding.device_set) == 8, name


@pytest.mark.parametrize(
    "make",
    elementwise(ALIASES | VARIANTS | WRAPPED).values(),
    ids=elementwise(ALIASES | VARIANTS | WRAPPED),
)
def test_arrays_have_the_spec_of_their_parameter_or_are_replicated(make):
    tx, params = make(), _params()
    shardings = state_shardings(tx, params, jax.P("x"), mesh=_mesh())
    shapes = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(shardings) == jax.tree.structure(shapes)
    for path, sharding in jax.tree_util.tree_flatten_with_path(shardings)[0]:
        name = jax.tree_util.keystr(path)
        beside = name.endswith(("['kernel']", "['norm']"))
        assert sharding.spec == (jax.P("x") if beside else jax.P()), name


@pytest.mark.parametrize(
    ("name", "axis_type"),
    [("multi_steps", AxisType.Auto), ("partition", AxisType.Explicit)],
)
def test_training_continues_with_the_numbers_of_one_device(name, axis_type):
    tx, params = WRAPPED[name](), _params()
    grads = jax.tree.map(lambda x: (x * 0.1).astype(x.dtype), params)
    want = train(tx, params, initial(tx, params), [grads] * 2, lowbit_optax.step)
    mesh = _mesh(axis_type)
    rows = jax.tree.map(lambda _: jax.NamedSharding(mesh, jax.P("x")), params)
    with jax.set_mesh(mesh):
        shardings = state_shardings(tx, params, jax.P("x"))
        got, grads = jax.device_put((params, grads), (rows, rows))
        got = got, jax.jit(tx.init, out_shardings=shardings)(got)
        step = functools.partial(lowbit_optax.step, tx)
        sharded = jax.jit(step, out_shardings=(rows, shardings))
        for _ in range(2):
            got = sharded(*got, grads)
    _assert_beside_their_parameters(got[1])
    assert_same_bits(got, want)


def test_quantised_weights_may_have_one_sharding_or_one_per_array():
    mesh = _mesh()
    columns = jax.NamedSharding(mesh, jax.P(None, "x"))
    params = lowbit_optax.lpmm.quantize_params({"w": jnp.ones((2048, 256))}, bits=12)
    tx = lowbit_optax.lpmm_adam(0.1)
    one = state_shardings(tx, params, {"w": columns})
    per_array = state_shardings(tx, params, jax.tree.map(lambda _: columns, params))
    assert one == per_array
    shapes = jax.eval_shape(tx.init, params)
    jax.tree.map(lambda leaf, sharding: sharding.shard_shape(leaf.shape), shapes, one)
    assert one.inner_state[0].mu.codes["w"] == columns
    assert one.inner_state[0].mu.scales["w"] == columns
    assert one.count.spec == jax.P()


def test_parameters_named_as_fields_of_the_state():
    names = ("mu", "residual", "count", "codes", "scales", "learning_rate")
    params = {name: jnp.ones((512, 8), jnp.bfloat16) for name in names}
    by_rows = state_shardings(_adamw(), params, jax.P("x"), mesh=_mesh())
    state = jax.jit(_adamw().init, out_shardings=by_rows)(params)
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.is_fully_replicated == (leaf.ndim == 0)


def test_shards_that_do_not_divide_name_the_leaf_and_the_remedy():
    params = {"block": {"w": jnp.ones((40, 128), jnp.bfloat16)}}
    with pytest.raises(ValueError, match="does not divide") as error:
        state_shardings(_adamw(), params, jax.P("x"), mesh=_mesh())
    message = str(error.value)
    assert "params['block']['w'], of shape [40, 128]" in message
    assert "8 shards" in message
    assert "another axis" in message
    assert "uneven='other_axis'" in message
    assert "'replicate'" in message
    options = dict(mesh=_mesh(), uneven="replicate")
    found = state_shardings(_adamw(), params, jax.P("x"), **options)
    assert found.residual.tree["block"]["w"].is_fully_replicated


def test_an_axis_that_is_sharded_takes_no_second_mesh_axis():
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"))
    tx, spec = lowbit_optax.lowbit_adamw(1e-3), jax.P("x", "y")
    with pytest.raises(ValueError, match=r"axis 0 .* does not divide into the 4 sh"):
        state_shardings(
            tx, _bfloat16((1000, 256)), spec, mesh=mesh, uneven="other_axis"
        )


def test_over_divides_rows_if_the_shards_of_columns_cut_words():
    axis_types = (AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"), axis_types=axis_types)
    tx, params = lowbit_optax.lowbit_adamw(1e-3), _bfloat16((2048, 70))
    found = state_shardings(tx, params, jax.P(None, "y"), mesh=mesh, over="x")
    assert found.residual.tree["w"].spec == jax.P("x", "y")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_wrapper_may_rename_leaves(axis_type):
    tx = lowbit_optax.lowbit_adamw(1e-3)
    renamed = tx._replace(init=lambda params: tx.init({"other": params["w"]}))
    given = _bfloat16((2048, 64)), jax.P("x")
    found = state_shardings(renamed, *given, mesh=_mesh(axis_type))
    assert found.count.is_fully_replicated


def test_state_is_sharded_along_an_axis_that_divides():
    mesh = jax.sharding.AbstractMesh((4,), ("x",))
    tx, params = lowbit_optax.lowbit_adamw(1e-3), _bfloat16((1000, 6, 256))
    found = state_shardings(tx, params, jax.P("x"), mesh=mesh, uneven="other_axis")
    assert found.inner_state[0].mu.codes["w"].spec == jax.P(None, None, "x")


def _quantized(shape):
    weights = {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}
    return jax.eval_shape(lowbit_optax.lpmm.quantize_params, weights)


def _bfloat16(shape):
    return {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}


@pytest.mark.parametrize(
    ("make", "params_of", "shape", "axis", "shards", "multiple", "near"),
    [
        (lowbit_optax.lowbit_adamw, _bfloat16, (264, 256), 0, 2, 16, (256, 272)),
        (lowbit_optax.lowbit_adamw, _bfloat16, (256, 260), 1, 2, 8, (256, 264)),
        (lowbit_optax.lowbit_adamw, _bfloat16, (40, 512), 0, 8, 64, (64,)),
        (lowbit_optax.lowbit_adamw, _bfloat16, (1001, 64), 0, 8, 64, (960, 1024)),
        (
            functools.partial(lowbit_optax.extra_bits_adamw, bits=7),
            _bfloat16, (264, 256), 0, 2, 64, (256, 320),
        ),
        (lowbit_optax.lpmm_adam, _quantized, (264, 256), 0, 2, 128, (256, 384)),
        (lowbit_optax.lpmm_adam, _quantized, (264, 256), 1, 16, 512, (512,)),
        (optax.adamw, _bfloat16, (1001, 64), 0, 8, 8, (1000, 1008)),
    ],
)  # fmt: skip
def test_the_sizes_that_an_error_names_work(
    make, params_of, shape, axis, shards, multiple, near
):
    tx, spec = make(1e-3), jax.P(*[None] * axis, "x")
    mesh = jax.sharding.AbstractMesh((shards,), ("x",))

    def fits(length):
        longer = (*shape[:axis], length, *shape[axis + 1 :])
        try:
            state_shardings(tx, params_of(longer), spec, mesh=mesh)
        except ValueError:
            return False
        return True

    named = " or ".join(map(str, near))
    with pytest.raises(
        ValueError, match=f"axis {axis} of the parameter a multiple of {multiple} for "
        f"its size, such as {named}; or "
    ):  # fmt: skip
        state_shardings(tx, params_of(shape), spec, mesh=mesh)
    assert all(map(fits, near))
    assert fits(4096 + multiple)
    assert not fits(4096 + multiple // 2)
