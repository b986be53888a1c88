"""Which GPUs get kernels, and which XLA's operations, where nothing is named."""

import functools
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

import lowbit_optax
from lowbit_optax._step import left_to_xla
from pallas_kernels import platforms

pytestmark = pytest.mark.standard_promotion

WITHOUT = ["Tesla V100-SXM2-16GB", "Tesla T4"]
WITH = [
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA L4",
    "NVIDIA GeForce RTX 4090",
    "NVIDIA GeForce RTX 5090",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H200",
    "NVIDIA B200",
]


KERNEL = "name=fused_update"


def mesh_of(name):
    """A mesh of one described GPU, in force."""
    gpu = jax.sharding.AbstractDevice(name, 80, "gpu")
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((1,), ("d",), automatic, abstract_device=gpu)
    return jax.sharding.use_abstract_mesh(mesh)


def traced(**options):
    """A step's jaxpr."""
    tx = lowbit_optax.kahan_adamw(1e-3, **options)
    params = {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)}
    step = functools.partial(lowbit_optax.step, tx)
    return str(jax.make_jaxpr(step)(params, jax.eval_shape(tx.init, params), params))


@pytest.fixture(autouse=True)
def unsaid():
    left_to_xla.warn_once.cache_clear()


@pytest.mark.parametrize("name", WITHOUT)
def test_older_gpus_get_xla_which_is_said_once(name):
    with mesh_of(name):
        with pytest.warns(UserWarning, match=f"XLA.* capability 8.0 .*{name}"):
            jaxpr = traced()
        assert KERNEL not in jaxpr
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            traced()


@pytest.mark.parametrize("name", WITH)
def test_newer_gpus_get_kernels(name):
    with mesh_of(name), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert KERNEL in traced()


@pytest.mark.parametrize("implementation", ["pallas", "triton"])
def test_kernels_that_are_named_are_an_error_on_older_gpus(implementation):
    with mesh_of("Tesla T4"), pytest.raises(ValueError, match=r"8\.0 .*Tesla T4.*7\.5"):
        traced(implementation=implementation)


def at_hand(monkeypatch, *gpus):
    """As if these were JAX's devices: names and compute capabilities."""
    devices = [
        types.SimpleNamespace(device_kind=name, compute_capability=capability)
        for name, capability in gpus
    ]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: devices)


def test_the_gpu_at_hand_decides(monkeypatch):
    at_hand(monkeypatch, ("NVIDIA GeForce GTX 1660", "7.5"))
    with pytest.warns(UserWarning, match=r"GTX 1660.* 7\.5"):
        assert KERNEL not in traced()
    at_hand(monkeypatch, ("NVIDIA GeForce RTX 3060", "8.6"))
    assert KERNEL in traced()


def test_of_several_gpus_that_of_the_least_capability_decides(monkeypatch):
    new, old = ("NVIDIA RTX PRO 6000", "12.0"), ("NVIDIA TITAN V", "7.0")
    at_hand(monkeypatch, new, old)
    assert platforms.target_gpu() == old
    with mesh_of(new[0]):
        assert platforms.target_gpu() == new
    with mesh_of("NVIDIA B200"):
        assert platforms.target_gpu() == ("NVIDIA B200", "10.0")


def test_an_old_jax_is_told_what_mosaic_needs(monkeypatch):
    monkeypatch.setattr(platforms, "has_mosaic", lambda: False)
    with pytest.raises(NotImplementedError, match=r"'mosaic' needs JAX 0\.11"):
        lowbit_optax.kahan_adamw(1e-3, implementation="mosaic")


def test_kernels_for_gpus_are_those_that_are_named_or_tritons():
    assert platforms.launcher_name(None) == platforms.launcher_name("pallas")
    assert platforms.launcher_name(None) == "triton"
    assert platforms.launcher_name("mosaic") == "mosaic"
    assert platforms.launcher_name("triton") == "triton"


def test_amds_gpus_have_no_capability(monkeypatch):
    at_hand(monkeypatch, ("AMD Instinct MI300X", "gfx942"))
    assert platforms.target_gpu() is None
    assert KERNEL in traced()  # in the branch that is for CUDA
