"""``reports.donation`` names the arguments that a step did not overwrite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax.reports import donation
from lowbit_optax.training import TrainState

pytestmark = pytest.mark.standard_promotion  # optax adds ints and floats


def _run(dtype=jnp.bfloat16):
    tx = lowbit_optax.lowbit_adamw(1e-3)
    master = {"a": jnp.ones((256, 256)), "b": jnp.ones(64)}
    return tx, *lowbit_optax.from_master(tx, master, dtype)


def _step(tx, **options):
    def step(params, state, grads):
        return lowbit_optax.step(tx, params, state, grads)

    return jax.jit(step, **options)


def test_a_donated_run_is_overwritten():
    tx, params, state = _run()
    before = donation((params, state))
    grads = jax.tree.map(jnp.copy, params)
    after = before.after(_step(tx, donate_argnums=(0, 1))(params, state, grads))
    assert after.copied == {}
    assert after.total == sum(x.nbytes for x in jax.tree.leaves((params, state)))


def test_arguments_that_were_not_donated_are_named_with_their_bytes():
    tx, params, state = _run()
    before = donation({"params": params, "state": state})
    results = _step(tx, donate_argnums=1)(params, state, jax.tree.map(jnp.copy, params))
    assert before.after(results).copied == {
        "['params']['a']": 2 * 256 * 256,
        "['params']['b']": 4 * 64,
    }
    assert "131,072" in str(before.after(results))


def _aligned(shape) -> np.ndarray:
    """Return a float32 array of numpy that jax can use without a copy."""
    size = 4 * int(np.prod(shape))
    memory = np.zeros(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(np.float32).reshape(shape)


def test_memory_that_belongs_to_numpy_cannot_be_overwritten():
    # JAX donates the array, deletes it, and warns of nothing.
    held = _aligned((256, 256))
    params = {"own": jnp.ones((256, 256)), "of_numpy": jax.device_put(held)}
    copied = jax.tree.map(jnp.copy, params)
    step = jax.jit(lambda x: jax.tree.map(jnp.sin, x), donate_argnums=0)
    before = donation(params)
    new = step(params)
    assert params["of_numpy"].is_deleted()
    assert before.after(new).copied == {"['of_numpy']": 4 * 256 * 256}
    before = donation(copied)
    assert before.after(step(copied)).copied == {}


def test_every_shard_must_be_overwritten():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    place = lambda *spec: jax.NamedSharding(mesh, jax.P(*spec))
    x = jax.device_put(jnp.ones((64, 64)), place("x"))
    before = donation(x)
    moved = jax.jit(jnp.sin, donate_argnums=0, out_shardings=place("x"))(x)
    assert before.after(moved).copied == {}
    *kept, last = (shard.data for shard in moved.addressable_shards)
    other = jax.make_array_from_single_device_arrays(
        moved.shape, moved.sharding, [*kept, jnp.copy(last)]
    )
    assert donation(moved).after(other).copied == {"": 64 * 64 * 4}


def test_other_leaves_are_ignored():
    tree = {"n": 3, "key": jax.random.key(0), "none": None, "empty": jnp.zeros((0,))}
    assert donation(tree).places == {}


def test_traced_and_deleted_arrays_are_refused():
    with pytest.raises(ValueError, match=r"\['w'\].* traced"):
        jax.eval_shape(lambda x: donation({"w": x}).sizes, jnp.ones(3))
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(ValueError, match="deleted"):
        donation(x)


def test_a_train_state_is_accepted():
    params = {"w": jnp.ones((32, 32))}
    state = TrainState.create(
        apply_fn=None, params=params, tx=lowbit_optax.lowbit(optax.adam(1e-3))
    )
    before = donation(state)
    grads = jax.tree.map(jnp.copy, state.params)
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g), donate_argnums=0)
    assert before.after(step(state, grads)).copied == {}
