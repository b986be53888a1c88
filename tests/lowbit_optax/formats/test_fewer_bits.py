"""Weights of 10 to 15 bits are bfloat16 numbers with fewer mantissa bits."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import kahan, lowbit, nearest, stochastic_rounding
from lowbit_optax._step.state import NO_RESIDUAL, is_blank
from lowbit_optax.formats.plain import Significand
from lowbit_optax.precision import FloatFormat
from tests.helpers.optimizers import normal

BITS = {10: FloatFormat(8, 1), 12: FloatFormat(8, 3), 14: FloatFormat(8, 5)}
BF16 = jnp.bfloat16


def formats(bits, **overflow):
    fmt = FloatFormat(8, bits - 9, **overflow)
    return {
        "nearest": nearest(float_format=fmt),
        "stochastic_rounding": stochastic_rounding(float_format=fmt),
        "stochastic sum": stochastic_rounding(
            sum_rounding="stochastic", float_format=fmt
        ),
        "kahan": kahan(float_format=fmt),
        "kahan, stochastic": kahan(rounding="stochastic", float_format=fmt),
        "kahan param": kahan(arithmetic="param", float_format=fmt),
    }


def all_kinds_of_numbers():
    """Returns random bit patterns and patterns around special numbers."""
    random = np.random.default_rng(0)
    special = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF]
    edges = [0x3F800000 + (1 << i) + d for i in range(23) for d in (-1, 0, 1)]
    huge = [0x7F7FFFFF - (1 << i) for i in range(23)]
    patterns = np.array([*special, *edges, *huge], np.uint32)
    patterns = np.concatenate([patterns, patterns | np.uint32(1 << 31)])
    more = random.integers(0, 2**32, 4096, np.uint32)
    return np.concatenate([patterns, more]).view(np.float32)


def test_rounding_is_that_of_the_float_format():
    x = all_kinds_of_numbers()
    words = np.random.default_rng(1).integers(0, 2**32, x.shape, np.uint32)

    @jax.jit
    def both(x, words):
        found = []
        for m in range(1, 8):
            for overflow in ("saturate", "infinity"):
                for random in (None, words):
                    fmt = FloatFormat(8, m, overflow=overflow)
                    own = Significand(m, overflow == "saturate").round(x, random)
                    found.append((fmt.round(x, random), own.astype(jnp.float32)))
        return found

    for want, got in both(x, words):
        np.testing.assert_array_equal(want, got)
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.signbit(want[number]), np.signbit(got[number]))


@pytest.mark.parametrize("bits", BITS)
def test_initial_weights_and_compensations_have_the_format(bits):
    fmt = BITS[bits]
    txs = {
        name: lowbit(optax.sgd(2.0**-6), weights=weights)
        for name, weights in formats(bits).items()
    }

    @jax.jit
    def run(master, grads):
        found = {}
        for name, tx in txs.items():
            start = lowbit_optax.from_master(tx, {"w": master}, BF16, None)
            stepped = lowbit_optax.step(tx, *start, {"w": grads})
            masters = lowbit_optax.master_weights(*stepped)["w"]
            found[name] = start, stepped, masters
        return found

    for name, (start, stepped, master) in run(normal(0), normal(1)).items():
        for params, state in (start, stepped):
            residual = _compensations(state)
            assert len(residual) == name.startswith("kahan")
            for x in (params["w"], *residual):
                assert x.dtype == BF16
                np.testing.assert_array_equal(x, fmt.round(x))
        params, state = stepped
        assert np.any(np.asarray(params["w"] != start[0]["w"]))
        w = params["w"].astype(jnp.float32)
        for c in _compensations(state):
            # Compensations are larger with fewer weight bits, and none may be dropped.
            np.testing.assert_array_equal(master, w - c.astype(jnp.float32))


def _compensations(state):
    found = jax.tree.leaves(state.residual)
    return [x for x in found if not is_blank(x, NO_RESIDUAL)]


def test_overflow_modes_and_pickled_copies_share_one_state_structure():
    formats = [BITS[12], FloatFormat(8, 3, overflow="infinity")]
    first, other = (
        lowbit(optax.sgd(0.1), weights=kahan(float_format=x)).init(jnp.ones(8, BF16))
        for x in formats
    )
    for state in (other, pickle.loads(pickle.dumps(first))):
        assert jax.tree.structure(state) == jax.tree.structure(first)
