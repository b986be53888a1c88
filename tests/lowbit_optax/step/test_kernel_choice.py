"""The device determines the kernels, and warnings report large leaves without one."""

import functools
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax._step import plan
from pallas_kernels import platforms
from tests.helpers.optimizers import assert_same_bits

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
    """Returns a context with a mesh of one abstract GPU."""
    gpu = AbstractDevice(name, 80, "gpu")
    mesh = AbstractMesh((1,), ("d",), (AxisType.Auto,), abstract_device=gpu)
    return jax.sharding.use_abstract_mesh(mesh)


def traced(**options):
    """Returns the jaxpr of a step."""
    tx = lowbit_optax.kahan_adamw(1e-3, **options)
    params = {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)}
    step = functools.partial(lowbit_optax.step, tx)
    return str(jax.make_jaxpr(step)(params, jax.eval_shape(tx.init, params), params))


@pytest.fixture(autouse=True)
def unsaid():
    plan.warn_once.cache_clear()


@pytest.mark.parametrize("name", WITHOUT)
def test_older_gpus_use_xla_with_one_warning(name):
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
def test_requesting_kernels_on_older_gpus_raises_an_error(implementation):
    with mesh_of("Tesla T4"), pytest.raises(ValueError, match=r"8\.0 .*Tesla T4.*7\.5"):
        traced(implementation=implementation)


def at_hand(monkeypatch, *gpus):
    """Replaces JAX's devices with GPUs of these names and compute capabilities."""
    devices = [
        types.SimpleNamespace(device_kind=name, compute_capability=capability)
        for name, capability in gpus
    ]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: devices)


def test_the_local_gpu_decides(monkeypatch):
    at_hand(monkeypatch, ("NVIDIA GeForce GTX 1660", "7.5"))
    with pytest.warns(UserWarning, match=r"GTX 1660.* 7\.5"):
        assert KERNEL not in traced()
    at_hand(monkeypatch, ("NVIDIA GeForce RTX 3060", "8.6"))
    assert KERNEL in traced()


def test_the_least_capable_of_several_gpus_decides(monkeypatch):
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


@pytest.mark.parametrize("name", WITH)
def test_gpus_without_mosaic_keep_triton(name, monkeypatch):
    monkeypatch.setattr(platforms, "DEFAULT_LAUNCHER", "mosaic")
    is_new = bool({"H100", "H200", "B200"} & {*name.split()})
    with mesh_of(name):
        assert platforms.launcher_name(None) == ("mosaic" if is_new else "triton")
        assert (platforms.refused_gpu("mosaic") is None) == is_new
        assert platforms.refused_gpu() is None


@pytest.mark.skipif(not platforms.has_mosaic(), reason="needs Mosaic GPU")
def test_a_gpu_that_mosaic_does_not_support_is_refused():
    with mesh_of("NVIDIA L4"), pytest.raises(ValueError, match=r"Mosaic.* L4 has 8\.9"):
        traced(implementation="mosaic")


@pytest.fixture
def without_triton(monkeypatch):
    """A JAX without Pallas's Triton backend, in which Mosaic is the default."""
    from jax.experimental import pallas

    monkeypatch.setattr(platforms, "DEFAULT_LAUNCHER", "mosaic")
    monkeypatch.delattr(pallas, "triton", raising=False)
    own = "pallas_kernels.fused_update.gpu.triton"
    for name in ("jax.experimental.pallas.triton", own, f"{own}_arrays"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without_triton")
def test_a_jax_without_triton_has_kernels_for_newer_gpus_only():
    with mesh_of("NVIDIA H200"):
        assert platforms.refused_gpu() is None
    reason = r"XLA.* for Mosaic GPU, but .*A100.* 8\.0"
    with mesh_of("NVIDIA A100-SXM4-80GB"), pytest.warns(UserWarning, match=reason):
        assert KERNEL not in traced()
    with pytest.raises(NotImplementedError, match=r"'triton' needs a JAX with Pallas"):
        traced(implementation="triton")


@pytest.mark.usefixtures("without_triton")
@pytest.mark.parametrize("name", ["kahan_adamw", "factored_adamw"])
def test_a_jax_without_triton_runs_the_reference_on_cpus(name):
    params = {"kernel": jnp.ones((72, 136), jnp.bfloat16)}

    def step(implementation):
        tx = getattr(lowbit_optax, name)(1e-3, implementation=implementation)
        return jax.jit(functools.partial(lowbit_optax.step, tx))(
            params, tx.init(params), params
        )

    assert_same_bits(step("pallas"), step("xla"))


def test_amds_gpus_have_no_capability(monkeypatch):
    at_hand(monkeypatch, ("AMD Instinct MI300X", "gfx942"))
    assert platforms.target_gpu() is None
    assert KERNEL in traced()  # in the branch for CUDA


LARGE = {
    "layers": jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16),
    "bias": jax.ShapeDtypeStruct((64,), jnp.bfloat16),
}
DEVICES = {
    "tpu": AbstractDevice("TPU v6 lite", 1, platform="tpu"),
    "gpu": AbstractDevice("NVIDIA H200", 132, platform="gpu"),
}


def _mesh(platform, *kinds):
    names = ("a", "b")[: len(kinds)]
    device = DEVICES[platform]
    return AbstractMesh((4,) * len(kinds), names, kinds, abstract_device=device)


def _trace(tx, params=LARGE):
    step = functools.partial(lowbit_optax.step, tx)
    jax.eval_shape(step, params, jax.eval_shape(tx.init, params), params)


def test_a_leaf_on_automatic_axes_of_tpus_warns_once():
    tx = lowbit_optax.lowbit_adamw(1e-3)
    with jax.sharding.use_abstract_mesh(_mesh("tpu", AxisType.Auto)):
        text = (
            r"no kernel updates params\['layers'\], bfloat16\[1024, 512\]: .*partition"
            r".*param_shardings.* 6 MiB"
        )
        with pytest.warns(UserWarning, match=text):
            _trace(tx)
        _trace(tx)
        found = lowbit_optax.explain(tx, LARGE)
    assert "param_shardings" in found["['layers']"]
    assert found["['bias']"].startswith("XLA")


def _is_silent(tx, mesh, params=LARGE):
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        _trace(tx, params)
        return lowbit_optax.explain(tx, params)


def test_given_or_explicit_shardings_have_a_kernel_and_no_warning():
    told = lambda _: {"layers": P("a"), "bias": P()}
    tx = lowbit_optax.lowbit_adamw(1e-3, param_shardings=told)
    found = _is_silent(tx, _mesh("tpu", AxisType.Auto))
    assert found["['layers']"] == "a kernel"
    mesh = _mesh("tpu", AxisType.Explicit)
    place = NamedSharding(mesh, P("a"))
    params = {"w": jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=place)}
    found = _is_silent(lowbit_optax.lowbit_adamw(1e-3), mesh, params)
    assert found == {"['w']": "a kernel"}


@pytest.mark.parametrize("alias", [lowbit_optax.sr_adamw, lowbit_optax.kahan_adamw])
def test_leaves_that_xla_updates_in_one_pass_cause_no_warning(alias):
    _is_silent(alias(1e-3), _mesh("tpu", AxisType.Auto))


def test_an_update_that_is_not_float32_warns_on_gpus_too():
    narrow = lambda updates, _: jax.tree.map(lambda g: g.astype("bfloat16"), updates)
    tx = lowbit_optax.lowbit(optax.stateless(narrow))
    with jax.sharding.use_abstract_mesh(_mesh("gpu", AxisType.Auto)):
        with pytest.warns(UserWarning, match=r"params\['layers'\].*its update is bf"):
            _trace(tx)
        found = lowbit_optax.explain(tx, LARGE)
    assert found["['layers']"] == "XLA: its update is bfloat16"


def test_kernels_update_leaves_and_layers_from_a_size_on():
    shapes = {
        "least": (64, 64),
        "fewer": (64, 63),
        "least layer": (2**15 + 1, 256, 256),
        "smaller layer": (2**16, 256, 255),
    }
    params = {n: jax.ShapeDtypeStruct(x, jnp.bfloat16) for n, x in shapes.items()}
    tx = lowbit_optax.lowbit_adamw(1e-3, min_size=0)
    with mesh_of("NVIDIA H200"):
        found = lowbit_optax.explain(tx, params)
    by_xla = {name for name in shapes if found[f"['{name}']"].startswith("XLA")}
    assert by_xla == {"fewer", "smaller layer"}


def test_layers_on_several_devices_have_no_loop_of_kernels():
    mesh = _mesh("gpu", AxisType.Explicit)
    tx, shape = lowbit_optax.lowbit_adamw(1e-3), (2**18, 256, 256)
    with jax.sharding.use_abstract_mesh(mesh):
        for spec, has_kernel in ((P(None, None, "a"), True), (P("a"), False)):
            place = NamedSharding(mesh, spec)
            params = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place)}
            found = lowbit_optax.explain(tx, params)["['w']"]
            assert found.startswith("XLA") != has_kernel, (spec, found)


def test_cpus_cause_no_warning():
    tx = lowbit_optax.lowbit_adamw(1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _trace(tx)
    assert lowbit_optax.explain(tx, LARGE) == dict.fromkeys(
        ["['bias']", "['layers']"], "XLA"
    )
