"""A weight format that spares a stream reads at most 24 bits of each random word.

The moments of the leaf are rounded with products of these words.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowbit_optax as lo
from lowbit_optax.formats.quantized_weights import quantized_weights
from tests.helpers.given_words import random_of

MASTERS = jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)
BF16, FLOAT16 = jnp.bfloat16, jnp.float16
SPARING = {
    "8 extra bits": (lo.extra_bits(8), BF16, 0x00FFFFFF),
    "5 extra bits": (lo.extra_bits(5), BF16, 0x001FFFFF),
    "8 extra bits and a stochastic sum": (
        lo.extra_bits(8, sum_rounding="stochastic"),
        BF16,
        0x00FF0000,
    ),
    "stochastic rounding": (lo.stochastic_rounding(), BF16, 0x0000FFFF),
    "quantised": (quantized_weights(), None, 0x000001FF),
}
"""Maps names to a format, a dtype and a mask of the bits that are not read."""
OTHERS = {
    "5 extra bits and a stochastic sum": (
        lo.extra_bits(5, sum_rounding="stochastic"),
        BF16,
    ),
    "a stochastic sum": (lo.stochastic_rounding(sum_rounding="stochastic"), BF16),
    "8 extra bits in float16": (lo.extra_bits(8), FLOAT16),
    "stochastic rounding in float16": (lo.stochastic_rounding(), FLOAT16),
    "rounded to nearest": (lo.nearest(), BF16),
    "quantised to nearest": (quantized_weights(rounding="nearest"), jnp.float32),
}


def stored(format_, dtype, words):
    random = random_of(words)
    if dtype is None:
        param = lo.lpmm.quantize_params(MASTERS, bits=12)
    else:
        param = MASTERS.astype(dtype)
    return jax.tree.leaves(format_.store(param, MASTERS * 1.01, random)[:2])


def differ(one, other):
    return any(bool(jnp.any(a != b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", SPARING)
def test_spared_bits_are_not_read(name):
    format_, dtype, spared = SPARING[name]
    assert format_.spare_stream(jnp.dtype(dtype or jnp.float32)) is not None
    words = np.random.default_rng(1).integers(0, 2**32, MASTERS.shape, np.uint32)
    want = stored(format_, dtype, jnp.asarray(words))
    unread, leading = np.uint32(spared), np.uint32(1 << 31)
    assert not differ(stored(format_, dtype, jnp.asarray(words ^ unread)), want)
    assert differ(stored(format_, dtype, jnp.asarray(words ^ leading)), want)


@pytest.mark.parametrize("name", OTHERS)
def test_a_format_that_may_read_all_bits_spares_none(name):
    format_, dtype = OTHERS[name]
    assert format_.spare_stream(jnp.dtype(dtype)) is None
