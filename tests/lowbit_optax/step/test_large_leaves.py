"""Leaves may have more elements than a kernel or the random counter can count.

The limits are lowered here, so that small stacks of layers exceed them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import cast, extra_bits, kahan, lowbit, release, stochastic_rounding
from lowbit_optax._numerics import random_bits
from lowbit_optax._step import plan
from tests.helpers.exact_steps import both
from tests.helpers.optimizers import apply, assert_same_bits, initial
from tests.helpers.released import ordinary, run

pytestmark = pytest.mark.standard_promotion

LAYERS, ROWS, COLUMNS = 3, 64, 68
FORMATS = {
    "extra bits": dict(weights=extra_bits(8)),
    "lowbit": dict(),
    "kahan": dict(weights=kahan(), moments=cast(jnp.bfloat16)),
    "stochastic": dict(weights=stochastic_rounding()),
}
slow = pytest.mark.slow_to_compile
ADVANCES = {"step": lowbit_optax.step, "update": apply}


@pytest.fixture(autouse=True)
def low_limits(monkeypatch):
    monkeypatch.setattr(plan, "MAX_ELEMENTS", ROWS * COLUMNS)
    monkeypatch.setattr(plan, "_LEAST_OF_LAYER", ROWS * COLUMNS)
    monkeypatch.setattr(random_bits, "COUNTERS", ROWS * COLUMNS)


def numbers(seed, shape=(LAYERS, ROWS, COLUMNS)):
    values = np.random.default_rng(seed).integers(-(2**15), 2**15, shape)
    return jnp.asarray(values / 2**17, jnp.float32)


SGD = optax.sgd(2.0**-7, momentum=0.5)
SERIES = [{"w": numbers(seed)} for seed in (1, 2)]
each_format = pytest.mark.parametrize(
    "options",
    [
        pytest.param(x, id=name, marks=() if name == "lowbit" else slow)
        for name, x in FORMATS.items()
    ],
)
each_advance = pytest.mark.parametrize("advance", ADVANCES.values(), ids=ADVANCES)


@each_advance
@each_format
def test_kernels_and_xla_give_a_large_stack_the_same_bits(options, advance):
    params = {"w": numbers(0).astype(jnp.bfloat16)}
    options = {"moments": None, "weights": None} | options
    assert_same_bits(*both(params, SERIES, inner=SGD, advance=advance, **options))


@slow
@each_advance
def test_kernels_and_xla_give_large_quantised_weights_the_same_bits(advance):
    params = lowbit_optax.lpmm.quantize_params({"w": numbers(0)}, bits=12)
    make = functools.partial(lowbit_optax.lpmm_sgd, 2.0**-7, 0.5)
    assert_same_bits(*both(params, SERIES, advance=advance, make=make))


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
def test_release_rounds_a_large_stack_as_the_step_does(implementation):
    def loss_fn(params, x):
        body = lambda x, w: (x @ w @ w.T, None)
        return jnp.sum(jax.lax.scan(body, x, params["w"])[0])

    tx = lowbit_optax.sr_sgd(2.0**-7, implementation=implementation)
    params = {"w": numbers(0).astype(jnp.bfloat16)}
    batches = [(numbers(seed, (4, ROWS)),) for seed in (1, 2)]
    places = release.explain(loss_fn, tx)(params, initial(tx, params), *batches[0])
    assert places == {"['w']": "in the loop"}
    _, released, _ = run(release.value_and_update(loss_fn, tx), tx, params, batches)
    _, expected, _ = run(ordinary(loss_fn, tx), tx, params, batches)
    assert_same_bits(released, expected)


def test_a_large_leaf_without_layers_is_left_to_xla():
    params = {"w": jnp.ones((LAYERS * ROWS, COLUMNS), jnp.bfloat16)}
    tx = lowbit(SGD, implementation="pallas")
    with pytest.raises(ValueError, match=r"\['w'\].* no layers along its first axis"):
        lowbit_optax.step(tx, params, initial(tx, params), params)
