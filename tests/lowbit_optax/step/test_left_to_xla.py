"""Large leaves that XLA updates on an accelerator are said; ``explain`` has them."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lowbit_optax
from lowbit_optax._step import left_to_xla

pytestmark = pytest.mark.standard_promotion

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


@pytest.fixture(autouse=True)
def unsaid():
    left_to_xla.warn_once.cache_clear()


def test_a_leaf_on_automatic_axes_of_tpus_is_said_once():
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


def test_what_is_told_or_explicit_has_a_kernel_and_says_nothing():
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
def test_leaves_that_xla_updates_in_one_pass_are_not_said(alias):
    _is_silent(alias(1e-3), _mesh("tpu", AxisType.Auto))


def test_an_update_that_is_not_float32_is_said_on_gpus_too():
    narrow = lambda updates, _: jax.tree.map(lambda g: g.astype("bfloat16"), updates)
    tx = lowbit_optax.lowbit(optax.stateless(narrow))
    with jax.sharding.use_abstract_mesh(_mesh("gpu", AxisType.Auto)):
        with pytest.warns(UserWarning, match=r"params\['layers'\].*its update is bf"):
            _trace(tx)
        found = lowbit_optax.explain(tx, LARGE)
    assert found["['layers']"] == "XLA: its update is bfloat16"


def test_nothing_is_said_on_cpus():
    tx = lowbit_optax.lowbit_adamw(1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _trace(tx)
    assert lowbit_optax.explain(tx, LARGE) == dict.fromkeys(
        ["['bias']", "['layers']"], "XLA"
    )
