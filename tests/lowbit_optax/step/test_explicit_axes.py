"""Steps and states on explicit axes, with and without ``jax.set_mesh``."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

import lowbit_optax
from lowbit_optax import accumulate_gradients, kahan_adamw, lowbit_adamw
from tests.helpers.optimizers import assert_same_bits

pytestmark = pytest.mark.standard_promotion


def mesh_of(*sizes):
    names = ("a", "b")[: len(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Explicit,) * len(sizes))


def trained(tx, params, grads, sharding=None, **options):
    """Return the parameters after four steps, and the master weights."""
    init, step = tx.init, jax.jit(functools.partial(lowbit_optax.step, tx))
    if sharding is not None:
        params, grads = jax.device_put((params, grads), sharding)
        shardings = lowbit_optax.state_shardings(tx, params, sharding, **options)
        init = jax.jit(tx.init, out_shardings=shardings)
    state = init(params)
    for _ in range(4):
        params, state = step(params, state, grads)
    assert sharding is None or params["w"].sharding.is_equivalent_to(sharding, 2)
    return params, lowbit_optax.master_weights(params, state)


def random(shape, dtype=jnp.bfloat16):
    draw = np.random.default_rng(0).standard_normal((2, *shape))
    return {"w": jnp.asarray(draw[0], dtype)}, {"w": jnp.asarray(draw[1], dtype)}


@pytest.mark.parametrize("inner", [kahan_adamw, lowbit_adamw])
@pytest.mark.parametrize("is_ambient", [False, True])
@pytest.mark.parametrize(
    ("sizes", "spec", "over"),
    [((2,), jax.P("a"), ()), ((4, 2), jax.P("b"), "a")],
    ids=["FSDP", "ZeRO-1 along a sharded axis"],
)
def test_gradients_are_accumulated(inner, is_ambient, sizes, spec, over):
    tx, given = accumulate_gradients(inner(1e-2), 2), random((512, 256))
    want, mesh = trained(tx, *given), mesh_of(*sizes)
    with jax.set_mesh(mesh) if is_ambient else contextlib.nullcontext():
        got = trained(tx, *given, NamedSharding(mesh, spec), over=over)
    assert_same_bits(got, want)


def test_states_are_divided_over_an_axis_of_one_device():
    tx, given, mesh = lowbit_adamw(1e-2), random((512, 64)), mesh_of(1)
    got = trained(tx, *given, NamedSharding(mesh, jax.P()), over="a")
    assert_same_bits(got, trained(tx, *given))


@pytest.mark.parametrize("rows", [130, 4090])
def test_rows_that_are_not_whole_words_start_from_a_master(rows):
    tx, (master, grads) = lowbit_adamw(1e-2), random((rows, 64), jnp.float32)
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    want = step(*lowbit_optax.from_master(tx, master), grads)
    sharding = NamedSharding(mesh_of(2), jax.P("a"))
    placed = jax.device_put((master, grads), sharding)
    got = step(*lowbit_optax.from_master(tx, placed[0]), placed[1])
    assert_same_bits(got[0], want[0])
    assert_same_bits(
        *(lowbit_optax.master_weights(params, state) for params, state in (got, want))
    )


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((128, 70), jax.P(None, "a")), ((126, 64), jax.P("a"))],
    ids=["columns", "rows"],
)
def test_shards_that_cut_words_are_refused_or_moved(shape, spec):
    tx, given = lowbit_adamw(1e-2), random(shape)
    sharding = NamedSharding(mesh_of(2), spec)
    with pytest.raises(ValueError, match="in whole words and blocks"):
        trained(tx, *given, sharding)
    want = trained(tx, *given)
    assert_same_bits(trained(tx, *given, sharding, uneven="other_axis"), want)
