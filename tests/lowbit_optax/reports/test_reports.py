"""Reported bytes are those of the arrays; cancelled updates are those in numpy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from optimizers import (
    ALL_FORMATS,
    OPTIMIZERS,
    WRAPPED,
    each,
    gradient_series,
    model_params,
    train,
    weights_only,
)
from wrappers import WRAPPERS

import lowbit_optax
from lowbit_optax import cancelled_updates, extra_bits, kahan, lowbit, memory_report
from lowbit_optax._step.blanks import NO_RESIDUAL, NOT_HELD, is_blank

pytestmark = pytest.mark.standard_promotion


def _bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def _params():
    return model_params() | {"norm": jnp.ones(24), "scale": jnp.bfloat16(1)}


def _is_blank(x):
    return is_blank(x, NO_RESIDUAL) or is_blank(x, NOT_HELD)


FEW_WRAPPED = {name: tx for name, tx in WRAPPED.items() if name.endswith("_kahan")}


@each(OPTIMIZERS | FEW_WRAPPED)
def test_totals_are_the_bytes_of_the_live_arrays(optimizer):
    tx = optimizer()
    params = _params()
    report = memory_report(tx, params)
    state = tx.init(params)
    assert report.total.params == _bytes(params)
    kept = [x for x in jax.tree.leaves(state.residual) if not _is_blank(x)]
    assert report.total.residual == _bytes(kept)
    assert report.total.total == _bytes((params, state))
    # Every array is in one leaf's row, but for the scalars that belong to none.
    scalars = report.total.total - sum(leaf.total for leaf in report.leaves)
    blanks = sum(leaf.other for leaf in report.leaves)
    assert scalars == report.total.other - blanks <= 64
    assert report.bytes_per_param == report.total.total / (64 * 24 + 40 + 1 + 24)


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
    # The blank of a leaf whose format keeps no residual; see lowbit_optax._step.blanks.
    assert leaf.other <= (size / 256 if residual == 0 else 0)


def test_leaves_are_named_and_counted_one_by_one():
    params = {
        "block": [{"kernel": jnp.ones((64, 32), jnp.bfloat16)}, jnp.ones(8)],
        "kernel": jnp.ones((32, 8), jnp.bfloat16),
        "none": None,
    }
    tx = lowbit(
        optax.adamw(0.1), weights=kahan(), moments=lowbit_optax.cast("bfloat16")
    )
    report = memory_report(tx, params)
    state = tx.init(params)
    rows = {leaf.name: leaf for leaf in report.leaves}
    assert set(rows) == {"['block'][0]['kernel']", "['block'][1]", "['kernel']"}
    deep = rows["['block'][0]['kernel']"]
    assert (deep.shape, deep.dtype) == ((64, 32), "bfloat16")
    assert deep.residual == state.residual.tree["block"][0]["kernel"].nbytes
    assert deep.moments == 2 * 64 * 32 * 2
    norm = rows["['block'][1]"]
    assert (norm.params, norm.residual, norm.moments) == (32, 0, 32)
    # The usual step: bfloat16 parameter, float32 master, two float32 moments.
    assert deep.float32_master == 64 * 32 * (2 + 4 + 8)
    assert norm.float32_master == 8 * (4 + 8)
    assert report.total.float32_master == sum(r.float32_master for r in report.leaves)


def test_the_printed_table():
    params = {
        "dense": {"kernel": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)},
        "norm": jax.ShapeDtypeStruct((1024,), jnp.float32),
    }
    text = str(memory_report(lowbit_optax.extra_bits_adamw(1e-3, bits=8), params))
    lines = text.splitlines()
    assert lines[0] == "bytes per parameter"
    assert [" ".join(line.split()) for line in lines[1:5]] == [
        "leaf parameters dtype params residual moments total f32 master",
        "['dense']['kernel'] 1,048,576 bfloat16 2.000 1.000 8.000 11.000 14.000",
        "['norm'] 1,024 float32 4.000 0.000 8.000 12.500 12.000",
        "total 1,049,600 2.002 0.999 8.000 11.001 13.998",
    ]
    total = 1024 * 1024 * 11 + 1024 * 12 + 12 + 512
    usual = 1024 * 1024 * 14 + 1024 * 12
    summary = " ".join(lines[5:])
    assert f"{total:,} bytes of parameters and optimizer state" in summary
    assert f"float32 master: {usual:,} ({usual - total:,} more)" in summary
    assert "Gradients come on top" in summary
    assert len({len(line) for line in lines[1:5]}) == 1


def test_plain_optax_has_a_report_too():
    params = model_params(jnp.float32)
    tx = optax.adamw(0.1)
    report = memory_report(tx, params)
    assert report.total.total == _bytes((params, tx.init(params)))
    assert report.total.residual == 0
    assert report.total.float32_master == 3 * _bytes(params)


def _quantised(bits=12):
    params = {
        "w": jnp.asarray(np.random.default_rng(0).normal(size=(2048, 64)), jnp.float32),
        "b": jnp.ones(64),
    }
    return lowbit_optax.quantize_params(params, bits=bits)


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


def test_the_table_shows_accumulators_where_there_are_some():
    tx = lowbit_optax.accumulate_gradients(lowbit_optax.lpmm_sgd(0.1, 0.9), 4)
    abstract = jax.eval_shape(lambda: _quantised())
    lines = str(memory_report(tx, abstract)).splitlines()
    assert [" ".join(line.split()) for line in lines[1:5]] == [
        "leaf parameters dtype params residual moments accumulators total f32 master",
        "['b'] 64 float32 4.000 0.000 4.000 4.000 18.000 12.000",
        "['w'] 131,072 12 bits 1.502 0.000 1.001 1.001 3.508 12.000",
        "total 131,136 1.503 0.000 1.002 1.002 3.515 12.000",
    ]
    assert len({len(line) for line in lines[1:5]}) == 1


def test_sums_of_multi_steps_are_accumulators():
    tx = optax.MultiSteps(lowbit_optax.kahan_sgd(0.1), 2)
    params = {"w": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)}
    (row,) = memory_report(tx, params).leaves
    assert (row.moments, row.accumulators) == (0, 4 * 64 * 32)


NESTED = {
    name: wrap(
        lambda learning_rate: lowbit_optax.extra_bits_adamw(
            learning_rate, bits=8, min_size=0
        ),
        lowbit_optax.kahan_sgd(0.1, 0.9),
    )
    for name, wrap in WRAPPERS.items()
} | {
    "injected inside": weights_only(
        optax.inject_hyperparams(optax.adamw)(0.1), kahan()
    ),
    "chain of states": optax.chain(
        optax.trace(0.9), lowbit_optax.kahan_adamw(0.1), optax.ema(0.9)
    ),
}


@pytest.mark.parametrize("tx", NESTED.values(), ids=NESTED)
def test_wrappers_around_are_counted(tx):
    params = _params()
    report = memory_report(tx, params)
    state = tx.init(params)
    assert report.total.total == _bytes((params, state))
    kernel = report.leaves[[leaf.name for leaf in report.leaves].index("['kernel']")]
    assert kernel.residual in (64 * 24, 2 * 64 * 24)
    assert kernel.moments >= 2 * 64 * 24 * 2
    assert report.total.other <= 100


def test_moments_of_other_shapes_count_what_they_are_in_the_usual_step():
    # Adafactor's float32 rows and columns are the same with a float32 master.
    params = {"w": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)}
    inner = optax.adafactor(0.1, min_dim_size_to_factor=8)
    report = memory_report(
        lowbit(inner, weights=lowbit_optax.master_copy(), moments="float32"), params
    )
    wide = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32)}
    state = jax.eval_shape(inner.init, wide)
    floats = [x for x in jax.tree.leaves(state) if x.dtype == jnp.float32]
    usual = 64 * 32 * (2 + 4) + 4 * sum(x.size for x in floats)
    assert report.total.float32_master == usual


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_bare_arrays_hyperparameters_are_not_its_moments(dtype):
    params = jax.ShapeDtypeStruct((64, 32), dtype)
    plain = memory_report(lowbit_optax.kahan_adamw(0.1), params)
    injected = memory_report(
        optax.inject_hyperparams(
            lowbit_optax.kahan_adamw, hyperparam_dtype=jnp.float32
        )(0.1),
        params,
    )
    assert injected.leaves == plain.leaves
    assert injected.total.other > plain.total.other


def test_parameters_named_as_fields_of_the_state_are_told_apart():
    params = {
        name: jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
        for name in ("mu", "residual", "count", "words", "codes", "learning_rate")
    }
    tx = weights_only(
        optax.inject_hyperparams(optax.adamw)(0.1), extra_bits(8), min_size=0
    )
    for leaf in memory_report(tx, params).leaves:
        size = 64 * 32
        assert (leaf.residual, leaf.moments) == (size, 8 * size), leaf.name


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
    assert str(report).splitlines()[-2:] == [
        "float32 moments: mu of ['bias0'], ['bias1'], ['bias2'] and 2 more, too small "
        "for their moment format",
        "float32 moments: trace of every leaf, which no moment format holds",
    ]


def test_a_report_without_float32_moments_does_not_speak_of_them():
    params = {"w": jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)}
    report = memory_report(lowbit_optax.kahan_adamw(0.1), params)
    assert "float32 moments" not in str(report)
    # Sums of microbatches, float32 residuals and factored moments are no such moments.
    for tx in (
        optax.MultiSteps(lowbit_optax.kahan_sgd(0.1), 2),
        lowbit(optax.sgd(0.1), weights=lowbit_optax.master_copy()),
        lowbit(optax.adafactor(0.1, min_dim_size_to_factor=8), weights=kahan()),
    ):
        (row,) = memory_report(tx, params).leaves
        assert row.float32_moments == ()


def test_float32_parameters_that_make_the_saving_small_are_told_of():
    tx = lowbit_optax.lowbit_adamw(0.1)
    params = {
        "narrow": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
        "wide": jax.ShapeDtypeStruct((192, 64), jnp.float32),
    }
    report = memory_report(tx, params)
    assert report.float32_params == 192 * 64
    wide = report.leaves[1]
    text = " ".join(str(report).split())
    assert "75% of the parameters are float32 and pass through" in text
    assert f"they and their state take {wide.total:,} of the bytes" in text
    assert "from_master with param_dtypes narrows float32 weights" in text
    few = params | {"wide": jax.ShapeDtypeStruct((64,), jnp.float32)}
    assert "pass through" not in str(memory_report(tx, few))
    # QuantizedTensors are float32 to a program that reads them, and are stored in bits.
    assert memory_report(lowbit_optax.lpmm_sgd(0.1), _quantised()).float32_params == 64


def test_reports_allocate_nothing():
    before = len(jax.live_arrays())
    params = {"w": jax.ShapeDtypeStruct((2**20, 2**20), jnp.bfloat16)}
    report = memory_report(lowbit_optax.kahan_adamw(0.1), params)
    assert report.total.size == 2**40
    assert len(jax.live_arrays()) <= before + 8


def _count_cancelled(params, updates):
    """#{u != 0 and round(p + u) == p} / #{u != 0} in numpy."""
    p = np.asarray(params)
    u = np.asarray(updates, np.float32)
    moved = u != 0
    landed = (p.astype(np.float32) + u).astype(p.dtype)
    return (moved & (landed == p)).sum() / max(moved.sum(), 1)


@pytest.mark.parametrize("weights", ALL_FORMATS.values(), ids=ALL_FORMATS)
def test_cancelled_updates_are_counted_as_in_numpy(weights):
    params = model_params()
    grads = gradient_series(params, 1)[0]
    grads["kernel"] = grads["kernel"].at[::3].set(0)
    tx = lowbit(optax.sgd(0.03), weights=weights, min_size=0, moments="float32")
    got = jax.jit(lambda *a: cancelled_updates(tx, *a))(params, tx.init(params), grads)
    updates = jax.tree.map(lambda g: jnp.float32(-0.03) * g, grads)
    for name in params:
        want = _count_cancelled(params[name], updates[name])
        np.testing.assert_allclose(got[name], want, rtol=1e-6, err_msg=name)
    assert 0.2 < got["kernel"] < 0.8


def test_float32_leaves_cancel_nothing():
    params = {"norm": jnp.linspace(0.5, 2, 64), "w": jnp.ones(64, jnp.bfloat16)}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.1), params)
    for tx in (lowbit_optax.kahan_adamw(1e-4), optax.adamw(1e-4)):
        shares = cancelled_updates(tx, params, tx.init(params), grads)
        assert float(shares["norm"]) == 0
        assert float(shares["w"]) == 1


def test_without_updates_the_share_is_zero_not_nan():
    params = {"w": jnp.ones(64, jnp.bfloat16), "empty": jnp.ones(0, jnp.bfloat16)}
    tx = lowbit_optax.sr_sgd(0.1)
    grads = jax.tree.map(jnp.zeros_like, params)
    shares = cancelled_updates(tx, params, tx.init(params), grads)
    assert jax.tree.leaves(shares) == [0, 0]


def test_cancelled_updates_are_those_of_the_inner_transformation_mid_training():
    params = {"kernel": model_params()["kernel"]}
    series = gradient_series(params, 6)
    tx = weights_only(optax.adamw(1e-3), extra_bits(16), min_size=0)
    moved, state = train(tx, params, tx.init(params), series[:5])
    got = cancelled_updates(tx, moved, state, series[5])["kernel"]
    masters = lowbit_optax.master_weights(moved, state)
    updates, _ = optax.adamw(1e-3).update(series[5], state.inner_state, masters)
    want = _count_cancelled(moved["kernel"], updates["kernel"])
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_cancelled_updates_of_plain_optax_on_low_precision_parameters():
    params = jnp.asarray([1.0, 1.0, 2.0, 0.001], jnp.bfloat16)
    updates = np.float32([-1e-4, -0.1, 0, -1e-4])
    tx = optax.sgd(1.0)
    share = cancelled_updates(tx, params, tx.init(params), -jnp.asarray(updates))
    np.testing.assert_allclose(share, 1 / 3, rtol=1e-6)
    assert _count_cancelled(np.asarray(params, ml_dtypes.bfloat16), updates) == 1 / 3


@pytest.mark.parametrize("bits", [4, 8, 12])
def test_cancelled_updates_of_quantised_weights_are_counted_as_in_numpy(bits):
    params, tx = _quantised(bits), lowbit_optax.lpmm_sgd(1.0, rounding="stochastic")
    random = np.random.default_rng(1)

    def of_elements(scales):
        return np.repeat(np.repeat(scales, 64, axis=0), 32, axis=1)

    scales = np.asarray(params["w"].scales).view(np.float32)
    steps = of_elements(scales)
    u = (random.uniform(-2, 2, size=(2048, 64)) * steps).astype(np.float32)
    u[::3] = 0
    # Half of the blocks keep their largest weight, and with it their steps.
    p = np.asarray(params["w"].dequantize())
    largest = of_elements(np.abs(p).reshape(32, 64, 2, 32).max((1, 3)))
    stay = (np.abs(p + u) > largest) | (np.abs(p) == largest)
    stay[:, 32:] = False
    u[stay] = 0
    grads = {"w": -jnp.asarray(u), "b": jnp.ones(64)}
    got = jax.jit(lambda *a: cancelled_updates(tx, *a))(params, tx.init(params), grads)
    assert float(got["b"]) == 0
    # A block whose largest weight moves past its step has other steps, and no weight of
    # it stays.
    landed = lowbit_optax.quantize_params(jnp.asarray(p + u), bits=bits)
    # A step is kept while it fits, down to a code just below what a new one would have.
    top, least = {4: (7, 6), 8: (127, 112), 12: (2047, 1819)}[bits]
    size = np.abs(p + u).reshape(32, 64, 2, 32).max((1, 3))
    kept = (least * scales <= size) & (size <= top * scales)
    same = of_elements(kept | (np.asarray(landed.scales).view(np.float32) == scales))
    assert same.mean() > 0.4
    codes = np.rint((p + u) / steps)
    cancelled = (u != 0) & (codes * steps == p)
    np.testing.assert_allclose(
        got["w"],
        np.where(same, cancelled, landed.dequantize() == p)[u != 0].mean(),
        atol=1e-4,  # a tie may be rounded the other way
    )
    assert 0.05 < float(got["w"]) < 0.5


@pytest.mark.parametrize("name", ["chain", "partition", "inject_hyperparams"])
def test_cancelled_updates_of_a_wrapper_are_the_reports(name):
    params, tx = _params(), NESTED[name]
    arguments = params, tx.init(params), gradient_series(params, 1)[0]
    share = jax.jit(functools.partial(cancelled_updates, tx))(*arguments)
    report = jax.jit(functools.partial(lowbit_optax.step_report, tx))(*arguments)
    is_leaf = lambda x: x is None or isinstance(x, lowbit_optax.LeafReport)
    lost = jax.tree.map(lambda x: x and x.lost, report, is_leaf=is_leaf)
    assert share == lost
    assert jax.tree.leaves(share)


def test_extra_arguments_reach_the_inner_transformation():
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
    params = jnp.ones(8, jnp.bfloat16)
    grads = jnp.ones(8)
    for tx in (lowbit(inner, weights=kahan(), moments="float32"), inner):
        share = cancelled_updates(tx, params, tx.init(params), grads, value=1.0)
        assert float(share) == 0
