"""Steps compiled for TPUs as users write them: plain ``jit``, and no active mesh."""

import contextlib
import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax._step import plan

pytest.importorskip("libtpu", reason="needs the tpu-program extra")

from tools import hlo
from tools.gpu_program.steps import quantized_like
from tools.tpu_program.targets import TARGETS, tpu_mesh

LEAF = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
STACK = jax.ShapeDtypeStruct((4, 1024, 2048), jnp.bfloat16)
MOVED = 12.26
"""Bytes per parameter of ``lowbit_adamw`` with kernels."""
_OF_SCALARS = 2**18
"""Bytes that every step moves, whatever its size; a TPU7x moves the most."""


def _lying(tx, place, params, grads):
    """Arguments of a step, sharded with ``place``."""
    lying = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x))
    return jax.tree.map(lying, (params, jax.eval_shape(tx.init, params), grads))


def _compiled(tx, place, params=LEAF, grads=None, step=None):
    """A step with these arguments and donated parameters and state."""
    arguments = _lying(tx, place, params, params if grads is None else grads)
    step = step or functools.partial(lowbit_optax.step, tx)
    return jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()


def _assert_by_kernels(compiled, parameters, kernels=1):
    """Assert that kernels update all ``parameters`` of one device."""
    moved = sum(x.moved for x in hlo.entry(compiled))
    assert compiled.as_text().count('"tpu_custom_call"') == kernels
    assert moved <= MOVED * parameters + _OF_SCALARS
    assert hlo.memory(compiled).temp_size_in_bytes < 0.01 * parameters + _OF_SCALARS
    assert hlo.collectives(compiled) == []


@contextlib.contextmanager
def _host_of(monkeypatch, devices):
    """Pretend that JAX runs on a host with these TPUs."""
    plan.warn_once.cache_clear()
    with monkeypatch.context() as patch, jax.default_device(devices[0]):
        patch.setattr(jax, "default_backend", lambda: "tpu")
        patch.setattr(jax, "device_count", lambda: len(devices))
        yield


def _rows(mesh):
    return lambda x: NamedSharding(mesh, P("d") if x.ndim == 2 else P())


@pytest.mark.parametrize("target", TARGETS)
def test_one_chip_of_a_host_with_four_has_kernels(target, monkeypatch):
    devices = list(tpu_mesh(TARGETS[target].topology, (2,)).devices.flat)
    with _host_of(monkeypatch, devices):
        place = SingleDeviceSharding(devices[1])
        step = _compiled(lowbit_optax.lowbit_adamw(1e-3), lambda _: place)
    _assert_by_kernels(step, LEAF.size)


@pytest.mark.parametrize("target", TARGETS)
def test_automatic_axes_that_are_told_have_kernels(target):
    count = 2 if target == "tpu7x" else 4
    mesh = tpu_mesh(TARGETS[target].topology, (count,))
    told = NamedSharding(mesh, P("d"))
    tx = lowbit_optax.lowbit_adamw(1e-3, param_shardings=told)
    _assert_by_kernels(_compiled(tx, _rows(mesh)), LEAF.size / count)


@pytest.mark.parametrize("axis", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_state_that_is_divided_over_more_chips_has_kernels(axis):
    mesh = tpu_mesh("v6e:4x4", (16,))
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(axis,))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("d"))
    told = {"param_shardings": rows} if axis == AxisType.Auto else {}
    tx = lowbit_optax.lowbit_adamw(1e-3, **told)
    places = lowbit_optax.state_shardings(tx, LEAF, whole, over="d")
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    state = jax.tree.map(place, jax.eval_shape(tx.init, LEAF), places)
    step = functools.partial(lowbit_optax.step, tx)
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(whole, places))
        compiled = jitted.lower(place(LEAF, whole), state, place(LEAF, whole)).compile()
    assert compiled.as_text().count('"tpu_custom_call"') == 1
    assert hlo.exchanged(compiled) == {"all-gather": 2 * LEAF.size}


def test_accumulators_and_quantised_weights_are_told_too():
    mesh = tpu_mesh("v6e:2x2", (4,))
    told = {"param_shardings": NamedSharding(mesh, P("d"))}
    tx = lowbit_optax.accumulate_gradients(lowbit_optax.lowbit_adamw(1e-3, **told), 4)
    step = _compiled(tx, _rows(mesh))
    assert step.as_text().count('"tpu_custom_call"') == 2  # the sum and the step
    assert hlo.memory(step).temp_size_in_bytes < 0.1 * LEAF.size / 4
    assert hlo.collectives(step) == []
    params = quantized_like(LEAF, 12, 2048)
    tx = lowbit_optax.lpmm_adam(2.0**-6, **told)
    _assert_by_kernels(_compiled(tx, _rows(mesh), params, grads=LEAF), LEAF.size / 4)


def test_explicit_axes_need_no_mesh_in_force():
    mesh = tpu_mesh("v6e:2x2", (4,), axis=AxisType.Explicit)
    step = _compiled(lowbit_optax.lowbit_adamw(1e-3), _rows(mesh))
    _assert_by_kernels(step, LEAF.size / 4)


def test_several_chips_by_plain_jit_are_left_to_xla_which_is_said(monkeypatch):
    mesh = tpu_mesh("v6e:2x2", (4,))
    with _host_of(monkeypatch, list(mesh.devices.flat)):
        with pytest.warns(UserWarning, match="no kernel updates params.*param_shard"):
            step = _compiled(lowbit_optax.lowbit_adamw(1e-3), _rows(mesh))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _compiled(lowbit_optax.lowbit_adamw(1e-3, warn=False), _rows(mesh))
    assert "tpu_custom_call" not in step.as_text()
    assert hlo.collectives(step) == []


@pytest.mark.parametrize("spec", [P(None, "a"), P(None, None, "b"), P(None, "a", "b")])
def test_stacked_layers_over_256_chips_need_no_collectives(spec):
    mesh = tpu_mesh("v6e:16x16", (16, 16), ("a", "b"))
    place = lambda x: NamedSharding(mesh, spec if x.ndim == 3 else P())
    told = lambda params: jax.tree.map(place, params)
    tx = lowbit_optax.lowbit_adamw(1e-3, param_shardings=told)
    step = _compiled(tx, place, {"gate": STACK, "up": STACK})
    shards = 256 if spec == P(None, "a", "b") else 16
    _assert_by_kernels(step, 2 * STACK.size / shards, kernels=2)


@pytest.mark.parametrize("is_told", [False, True])
def test_param_shardings_change_nothing_in_a_users_shard_map(is_told):
    mesh = tpu_mesh("v6e:2x2", (4,))
    told = NamedSharding(mesh, P("d")) if is_told else None
    tx = lowbit_optax.lowbit_adamw(1e-3, param_shardings=told)
    arguments = _lying(tx, _rows(mesh), LEAF, LEAF)
    specs = jax.tree.map(lambda x: x.sharding.spec, arguments)
    step = jax.shard_map(
        functools.partial(lowbit_optax.step, tx),
        mesh=mesh,
        in_specs=specs,
        out_specs=specs[:2],
        check_vma=False,
    )
    _assert_by_kernels(_compiled(tx, _rows(mesh), step=step), LEAF.size / 4)
