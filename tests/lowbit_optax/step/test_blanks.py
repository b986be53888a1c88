"""A state has an array for every leaf, even where a leaf keeps nothing."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from lowbit_optax import convert, extra_bits_adamw, kahan_adamw, lowbit_adamw, sr_adamw
from lowbit_optax._step.state import NO_RESIDUAL, NOT_HELD, shape_of_blank
from tests.helpers.optimizers import (
    ALIASES,
    assert_same_bits,
    each,
    elementwise,
    gradient_series,
    train,
)

BF16 = jnp.bfloat16
ADAMW = {
    "lowbit": lowbit_adamw,
    "kahan": kahan_adamw,
    "extra_bits": extra_bits_adamw,
    "sr": sr_adamw,
}
pytestmark = pytest.mark.standard_promotion

# These aliases pack every leaf. By default, small leaves have float32 moments.
EVERY = ALIASES | {
    f"{name} by default": lambda f=f: f(1e-2) for name, f in ADAMW.items()
}
BLANKS = (NOT_HELD, NO_RESIDUAL)


def _params(kernel=BF16):
    return {
        "kernel": jnp.full((256, 64), 0.5, kernel),
        "embedding": jnp.full((128, 64), 0.5),
        "scale": jnp.ones(64),
        "bias": jnp.ones(8, kernel),
    }


def _is_none(x):
    return x is None


@each(EVERY)
@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
def test_every_leaf_has_a_shape_and_is_mapped_beside_its_parameter(optimizer, dtype):
    params, tx = _params(dtype), optimizer()
    state = tx.init(params)
    leaves = jax.tree.leaves(state, is_leaf=_is_none)
    assert all(x.size for x in leaves)
    specs = {name: PartitionSpec(name) for name in params}
    mapped = optax.tree.map_params(
        tx,
        lambda x, spec: x.ndim == params[spec[0]].ndim,
        state,
        specs,
        transform_non_params=lambda x: None,
    )
    assert set(jax.tree.leaves(mapped)) == {True}


@each(ADAMW)
def test_arrays_of_the_state_are_found_by_name(optimizer):
    params = _params() | {"none": None}
    state = jax.eval_shape(optimizer(1e-2).init, params)
    for field in ("mu", "nu"):
        assert len(optax.tree.get_all_with_path(state, field)) == 1
    # There are two counts: Adam's count, and the steps that random bits depend on.
    with pytest.raises(KeyError, match="multiple"):
        optax.tree.get(state, "count")
    assert optax.tree.get(state.inner_state, "count").shape == ()


class _Model(nnx.Module):
    def __init__(self, dtype, rngs):
        along = lambda init, *axes: nnx.with_partitioning(init, axes)
        kernel = along(nnx.initializers.normal(0.1), "data", None)
        options = dict(param_dtype=dtype, use_bias=False, kernel_init=kernel, rngs=rngs)
        scale = along(nnx.initializers.ones, "data")
        self.norm = nnx.RMSNorm(64, scale_init=scale, rngs=rngs)
        self.first = nnx.Linear(64, 256, **options)
        self.second = nnx.Linear(256, 8, **options)

    def __call__(self, x):
        return self.second(nnx.relu(self.first(self.norm(x))))


@each(elementwise(EVERY))
@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
def test_nnx_reads_and_places_each_variable_of_the_optimizer(optimizer, dtype):
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("data",), axis_types=axes, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        _check_variables(mesh, optimizer(), dtype)


def _check_variables(mesh, tx, dtype):
    model = _Model(dtype, nnx.Rngs(0))
    held = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = nnx.state(held, nnx.optimizer.OptState)
    for path, variable in nnx.to_flat_state(state):
        assert variable.shape == variable[...].shape, path
        assert variable.dtype == variable[...].dtype, path
    specs = nnx.get_partition_spec(state)
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    nnx.update(held, jax.tree.map(place, state, specs))

    x = jax.random.normal(jax.random.key(1), (16, 64))
    loss = lambda model: jnp.mean((model(x) - 1) ** 2)

    @nnx.jit
    def step(model, held):
        found, grads = nnx.value_and_grad(loss)(model)
        held.update(model, grads)
        return found

    losses = [step(model, held) for _ in range(20)]
    assert losses[-1] < losses[0]


def _without_blanks(state):
    """Returns the state as older versions stored it, with holes."""
    state = jax.tree.map(lambda x: None if x.dtype in BLANKS else x, state)
    if state.residual.name is None:
        residual = state.residual._replace(by_name={"none": ()})
        state = state._replace(residual=residual)
    return state


@each(ADAMW)
def test_a_state_with_holes_continues_and_is_converted(optimizer):
    tx, params = optimizer(1e-2), _params()
    state = tx.init(params)
    old = _without_blanks(state)
    series = gradient_series(params, 2)
    want, want_state = train(tx, params, state, series)
    got, got_state = train(tx, params, old, series)
    assert_same_bits((got, got_state), (want, _without_blanks(want_state)))
    assert_same_bits(convert(got, got_state, tx, tx), (want, want_state))


@pytest.mark.parametrize("shards", [2, 3, 4, 6, 8, 12, 16, 32, 64])
def test_blanks_divide_where_meshes_divide_the_parameter(shards):
    for shape in ((96 * shards, 96 * shards), (shards * 125, 4096), (shards * 8,)):
        cut = shape_of_blank(shape)
        for length, of_blank in zip(shape, cut, strict=True):
            assert length % shards or of_blank % shards == 0, (shape, cut)
