"""``step_memory`` predicts a step's memory, compiles the step and plots both."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import memory_report, plan
from lowbit_optax.reports import bars as memory_bars
from lowbit_optax.reports import step_memory

pytestmark = pytest.mark.standard_promotion

LAYERS, WIDTH, ROWS = 4, 256, 8
BATCH = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)


def _params(dtype=jnp.bfloat16):
    return {
        "layers": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), dtype),
        "norm": jax.ShapeDtypeStruct((WIDTH,), jnp.float32),
    }


def _loss(params, x):
    @jax.checkpoint
    def body(h, w):
        w = lowbit_optax.lpmm.dequantize(w, jnp.bfloat16).astype(h.dtype)
        return jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(body, x * params["norm"].astype(x.dtype), params["layers"])
    return jnp.mean(h.astype(jnp.float32) ** 2)


def _is_stack(path):
    return path == "['layers']"


CASES = {
    "optax": (lambda: optax.adamw(1e-3), False),
    "kahan": (lambda: lowbit_optax.kahan_adamw(1e-3), False),
    "lowbit": (lambda: lowbit_optax.lowbit_adamw(1e-3), False),
    "lowbit, released": (lambda: lowbit_optax.lowbit_adamw(1e-3), True),
}


@pytest.mark.parametrize(("make", "released"), CASES.values(), ids=CASES)
def test_stored_bytes_are_predicted_exactly_and_the_peak_from_below(make, released):
    tx = make()
    found = step_memory(tx, _params(), _loss, BATCH, release=released)
    report = memory_report(tx, _params())
    batch = 2 * ROWS * WIDTH
    assert found.predicted.arguments == report.total.total + batch
    assert found.predicted.peak == report.step_peak(released) + batch + 4
    assert found.compiled.arguments == found.predicted.arguments
    assert found.compiled.in_place == found.predicted.in_place
    # The tuple of results needs some bytes.
    assert 0 <= found.compiled.outputs - found.predicted.outputs < 1024
    # On CPUs, XLA widens whole leaves, unlike kernels.
    assert "converts bfloat16 arrays to float32 on CPUs" in str(found)
    beyond = found.compiled.peak - found.predicted.peak
    assert 0 <= beyond < 12 * report.total.size


def test_bytes_are_those_of_one_device():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = (
        jax.NamedSharding(mesh, jax.P(None, "d")),
        jax.NamedSharding(mesh, jax.P()),
    )
    tx = lowbit_optax.kahan_adamw(1e-3)
    batch = jax.ShapeDtypeStruct(
        BATCH.shape, BATCH.dtype, sharding=jax.NamedSharding(mesh, jax.P("d"))
    )
    shardings = {"layers": rows, "norm": whole}
    found = step_memory(tx, _params(), _loss, batch, shardings=shardings)
    stack, norm = LAYERS * WIDTH**2 // 8, WIDTH
    # Parameter, compensation and moments. A float32 leaf has a blank of 512 bytes
    # instead of a compensation.
    held = 8 * stack + (4 + 4) * norm + 2 * WIDTH * ROWS // 8 + 512
    assert held <= found.predicted.arguments < held + 64
    assert found.predicted.temporary == 2 * stack + 4 * norm
    assert found.compiled.arguments == found.predicted.arguments


def test_batches_are_counted_in_the_dtypes_of_jax():
    params = {"w": jax.ShapeDtypeStruct((32, 32), jnp.bfloat16)}
    loss = lambda params, tokens: params["w"][tokens].astype(jnp.float32).sum()
    for tokens in (np.zeros(1000, np.int64), 3):
        found = step_memory(lowbit_optax.kahan_sgd(1e-3), params, loss, tokens)
        assert found.predicted.arguments == found.compiled.arguments


def test_a_sharding_of_another_kind_is_refused():
    with pytest.raises(TypeError, match=r"shardings .*NamedSharding.* P"):
        step_memory(optax.sgd(0.1), _params(), _loss, BATCH, shardings=jax.P())


def test_a_row_of_a_plan_is_confirmed_by_compiling():
    planned = plan(_params(jnp.float32), 1e9, stacked=_is_stack)
    row = planned["lpmm, 12 bits"]
    tx = row.make(1e-3)
    found = step_memory(tx, row.params, _loss, BATCH, stacked=_is_stack)
    batch = 2 * ROWS * WIDTH
    assert found.predicted.peak == row.bytes_per_device(release=False) + batch + 4
    assert found.compiled.arguments == row.report.total.total + batch
    assert "predicted" in str(found)
    assert f"{found.compiled.peak:,}" in str(found)


def test_the_bars_are_the_reports_bytes():
    report = memory_report(
        lowbit_optax.lowbit_adamw(1e-3), _params(), stacked=_is_stack
    )
    heights = {name: sum(x.values()) for name, x in memory_bars.bars(report).items()}
    size = report.total.size
    np.testing.assert_allclose(
        heights["this optimizer"], report.step_peak() / size, atol=1e-3
    )
    np.testing.assert_allclose(
        heights["with gradient release"],
        report.step_peak(release=True) / size,
        atol=1e-3,
    )
    usual = report.total.float32_master + report.gradients
    np.testing.assert_allclose(heights["optax, float32 master"], usual / size)


def test_the_error_without_matplotlib_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report = memory_report(lowbit_optax.kahan_adamw(1e-3), _params())
    with pytest.raises(ImportError, match=r"matplotlib.*print\(report\)"):
        report.plot()
