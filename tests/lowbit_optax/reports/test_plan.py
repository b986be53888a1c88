"""``plan`` finds the least lossy formats that fit in memory."""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from lowbit_optax import memory_report, plan

pytestmark = pytest.mark.standard_promotion

SHAPES = {"layers": (4, 256, 512), "out": (512, 256), "bias": (256,)}
SIZE = sum(map(math.prod, SHAPES.values()))
ADAMW = (
    "float32", "extra_bits", "kahan", "lowbit", "factored_adamw", "error into mu",
    "factored_adamw, bits=0", "lpmm, 12 bits", "lpmm, 8 bits",
)  # fmt: skip


def _shapes(dtype=jnp.float32):
    return {name: jax.ShapeDtypeStruct(x, dtype) for name, x in SHAPES.items()}


@functools.cache
def _planned(device_bytes=2**40, **options):
    return plan(_shapes(), device_bytes, **options)


ALIASES = {
    "float32": optax.adamw,
    "extra_bits": lowbit_optax.extra_bits_adamw,
    "kahan": lowbit_optax.kahan_adamw,
    "lowbit": lowbit_optax.lowbit_adamw,
    "factored_adamw": lowbit_optax.factored_adamw,
    "factored_adamw, bits=0": functools.partial(lowbit_optax.factored_adamw, bits=0),
}


@pytest.mark.parametrize("name", ALIASES)
def test_bytes_are_those_of_the_optimizers_by_name(name):
    params = _shapes(jnp.float32 if name == "float32" else jnp.bfloat16)
    params["bias"] = jax.ShapeDtypeStruct(SHAPES["bias"], jnp.float32)
    want = memory_report(ALIASES[name](1e-3), params)
    assert _planned()[name].report.total == want.total


def test_runs_made_from_a_row_have_the_bytes_of_its_report():
    masters = _shapes()
    for row in _planned().rows:
        tx = row.make(1e-3)

        def start(weights, row=row, tx=tx):
            return row.init(tx, weights)

        def step(weights, tx=tx, start=start):
            return lowbit_optax.step(tx, *start(weights), weights)

        started = jax.eval_shape(start, masters)
        assert jax.eval_shape(step, masters) == started
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(started))
        assert held == row.report.total.total, row.name


def test_gradients_are_two_leaves_with_release_and_one_layer_of_a_stack():
    sizes = {name: 2 * math.prod(x) for name, x in SHAPES.items()}
    sizes["bias"] *= 2  # float32
    row = _planned()["lowbit"]
    assert row.report.gradients == sum(sizes.values())
    assert row.report.released_gradients == sizes["layers"] + sizes["out"]
    stacked = _planned(stacked=lambda path: path == "['layers']")["lowbit"]
    assert stacked.report.released_gradients == sizes["layers"] / 4 + sizes["out"]
    # The dequantised weights count as well.
    lpmm = _planned()["lpmm, 12 bits"]
    assert lpmm.report.gradients == 2 * (sizes["layers"] + sizes["out"]) + sizes["bias"]


def test_less_memory_requires_lossier_formats():
    rows = _planned().rows
    found = []
    for release in (False, True):
        for row in rows:
            budget = row.bytes_per_device(release)
            best = _planned(budget).best
            assert best.fits(release=True)
            assert best.needs_release or best.fits(release=False)
            assert rows.index(row) >= ADAMW.index(best.name)
            if budget > min(x.bytes_per_device(release=True) for x in rows):
                found.append(best.name)
    assert {"float32", "extra_bits", "kahan", "lowbit"} <= set(found)
    least = min(row.bytes_per_device(release=True) for row in rows)
    assert _planned(least - 1).best is None
    assert f"none fits into {0:.2f} GiB" in str(_planned(least - 1))


def test_the_table_also_names_the_format_for_the_memory_that_jax_uses_by_default():
    budget = _planned()["extra_bits"].bytes_per_device(release=False)
    planned, smaller = _planned(budget), _planned(int(0.75 * budget))
    assert planned.best.name != smaller.best.name
    text = str(planned)
    whole, _, by_default = text.partition("75% of a GPU's memory")
    assert f"GiB: {planned.best.name}" in whole
    assert f"GiB: {smaller.best.name}" in by_default


def test_a_row_says_whether_it_needs_release():
    budget = _planned()["lowbit"].bytes_per_device(release=True)
    assert "with release" in repr(_planned(budget)["lowbit"])
    assert "with release" not in repr(_planned()["lowbit"])


def test_activations_and_devices_count():
    row = _planned()["lowbit"]
    split = _planned(devices=5, other_bytes=1000)["lowbit"]
    total = row.report.total.total + row.report.gradients
    assert row.bytes_per_device(release=False) == total
    assert total % 5
    assert split.bytes_per_device(release=False) == math.ceil(total / 5) + 1000


ONLY_ADAMW = {"factored_adamw", "error into mu", "factored_adamw, bits=0"}


OTHERS = {
    "sgd": lambda rate: optax.sgd(rate, 0.9),
    "lion": optax.lion,
    "rmsprop": optax.rmsprop,
    "adafactor": optax.adafactor,
    "adabelief": optax.adabelief,
    "nadamw": optax.nadamw,
}


@pytest.mark.parametrize("optimizer", OTHERS.values(), ids=OTHERS)
def test_other_optimizers_have_the_rows_that_they_support(optimizer):
    names = [row.name for row in _planned(optimizer=optimizer).rows]
    assert names == [name for name in ADAMW if name not in ONLY_ADAMW]
