"""Reported bytes match the arrays, and reported cancelled updates match numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import kahan, lowbit, memory_report
from lowbit_optax._step.state import NO_RESIDUAL, NOT_HELD, is_blank
from lowbit_optax.reports import step_report
from tests.helpers.optimizers import (
    OPTIMIZERS,
    WRAPPED,
    each,
    model_params,
    weights_only,
)
from tests.helpers.wrappers import WRAPPERS

pytestmark = pytest.mark.standard_promotion


def _bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _params():
    return model_params() | {"norm": jnp.ones(24), "scale": jnp.bfloat16(1)}


def _is_blank(x):
    return is_blank(x, NO_RESIDUAL) or is_blank(x, NOT_HELD)


FEW_WRAPPED = {name: tx for name, tx in WRAPPED.items() if name.endswith("_kahan")}


@pytest.mark.parametrize(
    ("tx", "residual", "moments"),
    [
        (lowbit_optax.kahan_sgd(0.1, 0.9), 2, 2),
        (lowbit_optax.kahan_adamw(0.1), 2, 4),
        (lowbit_optax.sr_sgd(0.1, 0.9), 0, 2),
        (lowbit_optax.sr_adamw(0.1), 0, 4),
        (lowbit_optax.extra_bits_sgd(0.1, 0.9, bits=8), 1, 4),
        (lowbit_optax.extra_bits_sgd(0.1, 0.9), 2, 4),
        (lowbit_optax.extra_bits_adamw(0.1, bits=8), 1, 8),
        (lowbit_optax.extra_bits_adamw(0.1, bits=4), 0.5, 8),
        (lowbit_optax.extra_bits_adamw(0.1), 2, 8),
        (weights_only(optax.adamw(0.1), lowbit_optax.master_copy()), 4, 8),
    ],
)
def test_bytes_per_parameter_are_the_documented_ones(tx, residual, moments):
    size = 1024 * 512
    params = {"w": jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)}
    (leaf,) = memory_report(tx, params).leaves
    assert leaf.params == 2 * size
    assert (leaf.residual, leaf.moments) == (residual * size, moments * size)
    assert leaf.total - leaf.other == (2 + residual + moments) * size
    # A leaf without a residual has a blank instead; see lowbit_optax._step.state.
    assert leaf.other <= (size / 256 if residual == 0 else 0)


def _quantised(bits=12):
    params = {
        "w": jnp.asarray(np.random.default_rng(0).normal(size=(2048, 64)), jnp.float32),
        "b": jnp.ones(64),
    }
    return lowbit_optax.lpmm.quantize_params(params, bits=bits)


@pytest.mark.parametrize(
    ("tx", "moments", "accumulators"),
    [
        (lowbit_optax.lpmm_sgd(0.1), 0, 0),
        (lowbit_optax.lpmm_sgd(0.1, 0.9), 1 + 2 / 2048, 0),
        (lowbit_optax.lpmm_adam(0.1), 2 + 2 / 2048 + 2 / 32, 0),
        (
            lowbit_optax.accumulate_gradients(lowbit_optax.lpmm_sgd(0.1, 0.9), 4),
            1 + 2 / 2048,
            1 + 2 / 2048,
        ),
    ],
    ids=["sgd", "momentum", "adam", "accumulated"],
)
def test_a_quantised_weight_is_one_row(tx, moments, accumulators):
    params, size = _quantised(), 2048 * 64
    report = memory_report(tx, params)
    by_name = {leaf.name: leaf for leaf in report.leaves}
    assert set(by_name) == {"['w']", "['b']"}
    row = by_name["['w']"]
    assert (row.shape, row.size, row.dtype) == ((2048, 64), size, "12 bits")
    assert row.params == params["w"].nbytes == (1.5 + 4 / 2048) * size
    assert row.moments == moments * size
    assert row.accumulators == accumulators * size
    assert report.total.total == _bytes((params, tx.init(params)))
    assert report.total.other <= 32 + sum(leaf.other for leaf in report.leaves)
    usual = (moments > 0) + (moments > 2) + (accumulators > 0)
    assert row.float32_master == 4 * size * (1 + usual)


def _eight_bits(learning_rate):
    return lowbit_optax.extra_bits_adamw(learning_rate, bits=8, min_size=0)


NESTED = {
    name: functools.partial(wrap, _eight_bits, lowbit_optax.kahan_sgd(0.1, 0.9))
    for name, wrap in WRAPPERS.items()
} | {
    "injected inside": lambda: weights_only(
        optax.inject_hyperparams(optax.adamw)(0.1), kahan()
    ),
    "chain of states": lambda: optax.chain(
        optax.trace(0.9), lowbit_optax.kahan_adamw(0.1), optax.ema(0.9)
    ),
}


# Their parameters must all have 16 bits.
OF_16_BITS = {n: tx for n, tx in OPTIMIZERS.items() if n.startswith("sixteen_bit")}


@each(OPTIMIZERS | FEW_WRAPPED | NESTED)
def test_totals_are_the_bytes_of_the_live_arrays(optimizer):
    tx, params = optimizer(), _params()
    if optimizer in OF_16_BITS.values():
        params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    report = memory_report(tx, params)
    state = tx.init(params)
    assert report.total.params == _bytes(params)
    assert report.total.total == _bytes((params, state))
    if isinstance(state, lowbit_optax.LowbitState):
        kept = [x for x in jax.tree.leaves(state.residual) if not _is_blank(x)]
        assert report.total.residual == _bytes(kept)
    # Every array belongs to the row of a leaf, except for a few scalars.
    scalars = report.total.total - sum(leaf.total for leaf in report.leaves)
    blanks = sum(leaf.other for leaf in report.leaves)
    assert scalars == report.total.other - blanks <= 64
    assert report.bytes_per_param == report.total.total / (64 * 24 + 40 + 1 + 24)


def test_moments_that_stayed_float32_are_listed_with_the_reason():
    params = {
        "kernel": jax.ShapeDtypeStruct((64, 128), jnp.bfloat16),
        **{f"bias{i}": jax.ShapeDtypeStruct((128,), jnp.bfloat16) for i in range(5)},
    }
    tx = lowbit(
        optax.chain(optax.scale_by_adam(), optax.trace(0.9)),
        moments={
            "mu": lowbit_optax.block_quantized(8),
            "nu": lowbit_optax.cast(jnp.bfloat16),
        },
    )
    report = memory_report(tx, params)
    rows = {leaf.name: leaf for leaf in report.leaves}
    kernel = rows["['kernel']"]
    assert kernel.moment_dtypes == (
        ("mu", "uint32"),
        ("nu", "bfloat16"),
        ("trace", "float32"),
    )
    assert kernel.float32_moments == ("trace",)
    assert rows["['bias0']"].float32_moments == ("mu", "trace")
    small, every = str(report).splitlines()[-2:]
    assert "float32: mu of ['bias0'], ['bias1'], ['bias2'] and 2 more (" in small
    assert "float32: trace of all leaves (" in every


def test_float32_parameters_that_reduce_the_saving_are_reported():
    tx = lowbit_optax.lowbit_adamw(0.1)
    params = {
        "narrow": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        "wide": jax.ShapeDtypeStruct((192, 64), jnp.float32),
    }
    report = memory_report(tx, params)
    assert report.float32_params == 192 * 64
    wide = report.leaves[1]
    text = " ".join(str(report).split())
    assert "75% of the parameters are float32" in text
    assert f" {wide.total:,} of the bytes" in text
    assert "from_master" in text
    few = params | {"wide": jax.ShapeDtypeStruct((64,), jnp.float32)}
    assert "of the parameters are float32" not in str(memory_report(tx, few))
    # Programs see QuantizedTensors as float32, but they are stored in few bits.
    assert memory_report(lowbit_optax.lpmm_sgd(0.1), _quantised()).float32_params == 64


def test_reports_allocate_nothing():
    before = len(jax.live_arrays())
    params = {"w": jax.ShapeDtypeStruct((2**20, 2**20), jnp.bfloat16)}
    report = memory_report(lowbit_optax.kahan_adamw(0.1), params)
    assert report.total.size == 2**40
    assert len(jax.live_arrays()) <= before + 8


@pytest.mark.parametrize("bits", [4, 8, 12])
def test_updates_of_quantised_weights_are_cancelled_below_half_a_step(bits):
    params, tx = _quantised(bits), lowbit_optax.lpmm_sgd(1.0, rounding="stochastic")
    scales = np.asarray(params["w"].scales).view(np.float32)
    steps = np.repeat(np.repeat(scales, 64, axis=0), 32, axis=1)
    # Move toward zero, so that each block keeps the step size of its largest weight.
    values = np.asarray(params["w"].dequantize())
    inward = np.where(np.abs(values) < 0.5 * np.abs(values).max(), -np.sign(values), 0)
    share = jax.jit(lambda *a: step_report(tx, *a).lost)
    for size, want in ((0.4, 1), (0.6, 0), (0.0, 0)):
        grads = {"w": jnp.asarray(-size * steps * inward), "b": jnp.ones(64)}
        got = share(params, tx.init(params), grads)
        assert (float(got["w"]), float(got["b"])) == (want, 0)


def test_float32_shapes_are_reported_in_the_dtypes_that_they_will_have():
    shapes = jax.eval_shape(lambda: {"w": jnp.ones((64, 64)), "bias": jnp.ones(64)})
    tx = lowbit_optax.kahan_adamw(1e-3)
    params, _ = lowbit_optax.from_master(tx, jax.tree.map(jnp.zeros_like, shapes))
    report = memory_report(tx, shapes, dtype=jnp.bfloat16)
    assert report == memory_report(tx, params)
    assert "parameters stored in float32: ['bias']\n" in str(report)
    assert {leaf.name: leaf.dtype for leaf in report.leaves} == {
        "['bias']": "float32",
        "['w']": "bfloat16",
    }


def test_a_long_report_is_short_in_a_terminal_and_whole_when_it_is_printed():
    params = {f"w{i}": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16) for i in range(40)}
    report = memory_report(lowbit_optax.kahan_adamw(1e-3), params)
    assert len(str(report).splitlines()) > 40 > len(repr(report).splitlines())
    for shown in (repr(report), report._repr_html_()):
        assert f"{report.total.total:,}" in shown
    assert report._repr_html_().count("<tr>") == 1 + 12 + 1


def test_complex_leaves_count_with_their_own_bytes():
    shapes = {"w": jax.ShapeDtypeStruct((64, 64), jnp.complex64)}
    report = memory_report(optax.adam(1e-3), shapes)
    assert report.gradients == 8 * 64 * 64
    assert report.leaves[0].total == report.leaves[0].float32_master == 24 * 64 * 64
    assert "lpmm" not in str(lowbit_optax.plan(shapes, 2**30))


def test_float64_arrays_of_numpy_count_as_the_arrays_that_jax_makes_of_them():
    tx = lowbit_optax.lowbit_adamw(1e-3)
    got = memory_report(tx, {"w": np.ones((64, 64))})
    assert got == memory_report(tx, {"w": jnp.ones((64, 64))})
