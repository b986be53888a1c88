"""Keeping the state of scanned layers in host memory does not change the steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax import release
from lowbit_optax.states import host_memory
from tests.helpers import released
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.released import SGD, simple_body, simple_loss, simple_params

pytestmark = pytest.mark.standard_promotion

HOST = "pinned_host"
BF16 = jnp.bfloat16
LOWBIT = lowbit_optax.lowbit_adamw(2.0**-7)
STEPS = {
    "lowbit_adamw": (LOWBIT, {}),
    "extra_bits_adamw": (lowbit_optax.extra_bits_adamw(2.0**-7, bits=8), {}),
    "adamw": (optax.adamw(2.0**-7), {}),
    "kahan_clipped": (lowbit_optax.kahan_sgd(2.0**-7, 0.5), {"max_grad_norm": 0.25}),
    "scaled": (
        lowbit_optax.with_loss_scale(
            LOWBIT, lowbit_optax.loss_scaling.backoff_scale(256.0)
        ),
        {},
    ),
}


def kinds(state) -> list[str]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(state)]


def kinds_with_stacks_on_host(state) -> list[str]:
    is_stack = lambda x: x.ndim == 3 and x.shape[0] == 3
    return [HOST if is_stack(x) else "device" for x in jax.tree.leaves(state)]


def trained(tx, params, state, loss_fn=simple_loss, steps=3, **options):
    step = jax.jit(release.value_and_update(loss_fn, tx, **options))
    values = []
    for batch in released.batches(steps):
        value, params, state, *_ = step(params, state, *batch)
        values.append(value)
    assert np.isfinite(values).all()
    return values, params, state


@pytest.mark.parametrize("name", STEPS)
def test_the_numbers_are_those_of_the_state_on_the_device(name):
    tx, options = STEPS[name]
    params = simple_params(dtype=BF16)
    state = tx.init(params)
    want = trained(tx, params, state, **options)
    got = trained(tx, params, state, state_memory=HOST, **options)
    assert_same_bits(got, want)
    assert kinds(got[1]) == ["device"] * 2
    assert HOST in kinds(got[2])
    assert kinds(got[2]) == kinds_with_stacks_on_host(state)


@pytest.mark.slow_to_compile
def test_quantised_layers_have_their_state_in_host_memory_too():
    params = lowbit_optax.lpmm.quantize_params(simple_params(), bits=12)
    tx = lowbit_optax.lpmm_adam(2.0**-7)

    def loss_fn(params, x):
        head = lowbit_optax.lpmm.dequantize(params["head"], jnp.float32)
        body = lambda x, w: simple_body(x, lowbit_optax.lpmm.dequantize(w, jnp.float32))
        return simple_loss({"head": head}, x, body, params["layers"])

    state = tx.init(params)
    want = trained(tx, params, state, loss_fn)
    got = trained(tx, params, state, loss_fn, state_memory=HOST)
    assert_same_bits(got, want)
    assert HOST in kinds(got[2])


def test_a_state_that_begins_in_host_memory_stays_there():
    params = jax.device_put(simple_params(), jax.devices()[0])
    batch, traces = released.batches(1)[0], []

    def loss_fn(params, x):
        traces.append(x)
        return simple_loss(params, x)

    abstract = jax.eval_shape(SGD.init, params)
    shardings = release.host_shardings(simple_loss, SGD)(params, abstract, *batch)
    state = jax.jit(SGD.init, out_shardings=shardings)(params)
    step = release.value_and_update(loss_fn, SGD, state_memory=HOST)
    step = jax.jit(step, donate_argnums=(0, 1))
    before = kinds(state)
    assert HOST in before
    for _ in range(2):
        _, params, state = step(params, state, *batch)
        assert kinds(state) == before
    assert len(traces) == 1


@pytest.mark.slow_to_compile
def test_sharded_layers_keep_their_shardings():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = {"layers": P(None, None, "d"), "head": P()}
    placed = jax.tree.map(lambda s: NamedSharding(mesh, s), spec)
    params = jax.device_put(simple_params(dtype=BF16), placed)
    tx = lowbit_optax.extra_bits_adamw(2.0**-7, bits=8)
    where = lowbit_optax.state_shardings(tx, params, placed)
    state = jax.jit(tx.init, out_shardings=where)(params)
    batch = released.batches(1)[0]
    on_host = release.host_shardings(simple_loss, tx)(params, state, *batch)
    want = trained(tx, params, state)
    moved = jax.device_put(state, on_host)
    got = trained(tx, params, moved, state_memory=HOST)
    assert_same_bits(got, want)
    shardings = [x.sharding for x in jax.tree.leaves(got[2])]
    for found, expected in zip(shardings, jax.tree.leaves(on_host), strict=True):
        assert found.memory_kind == expected.memory_kind
        if found.memory_kind == HOST:
            assert found.is_equivalent_to(expected, 3)


def test_a_backend_without_host_memory_is_named(monkeypatch):
    monkeypatch.setattr(host_memory, "_memory_kinds", lambda device: {"device"})
    params, batch = simple_params(), released.batches(1)[0]
    state = SGD.init(params)
    message = "cannot be in 'pinned_host' memory.* 'device'"
    with pytest.raises(ValueError, match=rf"state\[0\].trace\['layers'\] {message}"):
        release.host_shardings(simple_loss, SGD)(params, state, *batch)
    step = release.value_and_update(simple_loss, SGD, state_memory=HOST)
    with pytest.raises(ValueError, match=f"state of layers {message}"):
        jax.eval_shape(step, params, state, *batch)


def test_checkpoints_are_restored_into_either_memory(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params = simple_params(dtype=BF16)
    batch = released.batches(1)[0]
    on_device = LOWBIT.init(params)
    shardings = release.host_shardings(simple_loss, LOWBIT)(params, on_device, *batch)
    _, params, on_device = trained(LOWBIT, params, on_device)
    on_host = jax.device_put(on_device, shardings)
    with ocp.StandardCheckpointer() as checkpointer:
        for name, saved in {"host": on_host, "device": on_device}.items():
            checkpointer.save(tmp_path / name, saved)
            checkpointer.wait_until_finished()
            for target in (on_host, on_device):
                like = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
                got = checkpointer.restore(tmp_path / name, like)
                assert kinds(got) == kinds(target)
                assert_same_bits(got, on_device)
