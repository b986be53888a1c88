"""TPU kernels have no races, and do not read memory that was not written.

Pallas's model of a TPU runs programs that may run at the same time on two cores, and
orders their reads and writes. In memory that was not written, all bits are set. An
access beyond the end of an array raises an error.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from lowbit_optax import block_quantized, extra_bits, kahan, stochastic_rounding
from lowbit_optax.formats import quantized_weights
from pallas_kernels import Scalars
from tests.helpers import tpu_refusals
from tests.helpers.exact_steps import dyadic_series, normal, trained
from tests.helpers.kernels import (
    TABLE,
    Mixture,
    assert_equal,
    assert_layer_written,
    index_of,
    stacks_of,
)
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.quantized_weights import quantised, shrinking

CAN_RAISE = "on_race" in {x.name for x in dataclasses.fields(pltpu.InterpretParams)}

pytestmark = [
    pytest.mark.skipif(not CAN_RAISE, reason="needs a JAX that raises on races"),
    pytest.mark.standard_promotion,
]

# Each matrix has programs that may run at the same time as those for the other. Three
# programs update its columns, and their scales are in the same row.
SHAPE = (2, 72, 257)
# Plain arrays have kernels if their columns fill registers.
SHAPES = {
    "halves": (2, 72, 256),
    "bytes": (2, 72, 256),
    "transposed blocks": (2, 1024, 136),
    "transposed heads": (72, 5, 64),
    "side by side": (71, 16, 128),
    "words side by side": (71, 8, 128),
    "vector": (2**18 + 2**17,),
}
FORMATS = {
    "words": {"weights": extra_bits(8)},
    "odd words": {"weights": extra_bits(5)},
    "halves": {"weights": kahan()},
    "blocks": {"moments": block_quantized(8)},
    "bytes": {"weights": stochastic_rounding()},
    "transposed blocks": {"moments": block_quantized(8)},
    "transposed heads": {"moments": block_quantized(8)},
    "side by side": {"moments": block_quantized(8)},
    "words side by side": {"weights": extra_bits(5)},
    "vector": {"moments": block_quantized(8), "min_size": 0},
    "lpmm": {
        "weights": quantized_weights(),
        "moments": block_quantized(8, code="dynamic", block_size=2048),
    },
}


@pytest.fixture(autouse=True)
def races_are_errors(monkeypatch):
    """Fail on races in kernels, and if a leaf has no kernel."""
    taken = tpu_refusals.noted(monkeypatch)
    params = pltpu.InterpretParams(
        detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan"
    )
    with pltpu.force_tpu_interpret_mode(params):
        yield
    pltpu.reset_tpu_interpret_mode_state()
    assert taken
    assert all(taken)


@pytest.mark.parametrize("name", FORMATS)
def test_every_kind_of_array_is_free_of_races(name):
    dtype = jnp.float8_e5m2 if name == "bytes" else jnp.bfloat16
    params = {"kernel": normal(SHAPES.get(name, SHAPE), dtype)}
    series = dyadic_series(params, 1)
    if name == "lpmm":
        params = quantised(SHAPE, 12, 2048)
        series = [shrinking(params, 0)]
    run = functools.partial(trained, params=params, series=series, **FORMATS[name])
    assert_same_bits(run("tpu"), run("xla"))


@pytest.mark.parametrize("proceeds", [False, True])
def test_a_step_that_may_be_skipped_is_free_of_races(proceeds):
    body = Mixture((8,))
    arrays, held = body.arrays(SHAPE)
    scalars = [int(proceeds), 7]
    table = Scalars(jnp.asarray(scalars, jnp.uint32), when=0)
    got = body.update(arrays, SHAPE, "tpu", scalars=table)
    want = body.want(held, scalars, index_of(SHAPE)) if proceeds else arrays
    assert_equal(got[:2], want[:2])


def test_a_layer_of_a_stack_is_free_of_races():
    body = Mixture((8,))
    stacks, held = stacks_of(body, SHAPE)
    options = {"scalars": jnp.asarray(TABLE[0]), "layer": jnp.int32(1)}
    got = body.update(stacks, SHAPE, "tpu", **options)
    want = body.want(held[1], [1, 2], index_of(SHAPE, math.prod(SHAPE)))
    assert_layer_written(got, stacks, 1, want)
