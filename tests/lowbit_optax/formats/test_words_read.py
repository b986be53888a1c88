"""Weight formats read no more bits of their words than they say.

The others are those that round the leaf's moments.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowbit_optax as lo
from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax.formats.quantized_weights import quantized_weights

MASTERS = jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)
FORMATS = {
    "8 extra bits": (lo.extra_bits(8), jnp.bfloat16, 8),
    "5 extra bits": (lo.extra_bits(5), jnp.bfloat16, 11),
    "stochastic rounding": (lo.stochastic_rounding(), jnp.bfloat16, 16),
    "quantised": (quantized_weights(), None, 23),
}
ALL_READ = {
    "3 extra bits and a stochastic sum": (
        lo.extra_bits(3, sum_rounding="stochastic"),
        jnp.bfloat16,
    ),
    "a stochastic sum": (
        lo.stochastic_rounding(sum_rounding="stochastic"),
        jnp.bfloat16,
    ),
    "float16": (lo.stochastic_rounding(), jnp.float16),
    "rounded to nearest": (lo.nearest(), jnp.bfloat16),
    "quantised to nearest": (quantized_weights(rounding="nearest"), jnp.float32),
}


@dataclasses.dataclass(frozen=True)
class Given(RandomBits):
    """Words that are the same for all streams."""

    given: jax.Array | None = None

    def words(self, shape, stream=0):
        return self.given


def stored(format_, dtype, words):
    zero = jnp.uint32(0)
    random = Given(zero, zero, given=words)
    if dtype is None:
        param = lo.quantize_params(MASTERS, bits=12)
    else:
        param = MASTERS.astype(dtype)
    return jax.tree.leaves(format_.store(param, MASTERS * 1.01, random)[:2])


def differ(one, other):
    return any(bool(jnp.any(a != b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_reads_the_bits_that_it_says(name):
    format_, dtype, read = FORMATS[name]
    assert format_.words_read(jnp.dtype(dtype or jnp.float32))[1] == read
    words = np.random.default_rng(1).integers(0, 2**32, MASTERS.shape, np.uint32)
    want = stored(format_, dtype, jnp.asarray(words))
    unread = np.uint32(2 ** (32 - read) - 1)
    assert not differ(stored(format_, dtype, jnp.asarray(words ^ unread)), want)
    leading = np.uint32(1 << 31)
    assert differ(stored(format_, dtype, jnp.asarray(words ^ leading)), want)


@pytest.mark.parametrize("name", ALL_READ)
def test_a_format_that_may_read_all_bits_leaves_none(name):
    format_, dtype = ALL_READ[name]
    assert format_.words_read(jnp.dtype(dtype)) is None
