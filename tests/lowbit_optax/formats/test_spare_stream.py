"""A weight format that spares a stream reads the leading 8 bits of its words alone.

The leaf's moments are rounded by the others.
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
BF16, FLOAT16 = jnp.bfloat16, jnp.float16
SPARING = {
    "8 extra bits": lo.extra_bits(8),
    "12 extra bits": lo.extra_bits(12),
}
OTHERS = {
    "7 extra bits": (lo.extra_bits(7), BF16),
    "8 extra bits and a stochastic sum": (
        lo.extra_bits(8, sum_rounding="stochastic"),
        BF16,
    ),
    "8 extra bits in float16": (lo.extra_bits(8), FLOAT16),
    "stochastic rounding": (lo.stochastic_rounding(), BF16),
    "rounded to nearest": (lo.nearest(), BF16),
    "quantised": (quantized_weights(), jnp.float32),
}


@dataclasses.dataclass(frozen=True)
class Given(RandomBits):
    """Words that are the same for all streams."""

    given: jax.Array | None = None

    def words(self, shape, stream=0):
        return self.given


def stored(format_, words):
    zero = jnp.uint32(0)
    random = Given(zero, zero, given=words)
    store = format_.store(MASTERS.astype(BF16), MASTERS * 1.01, random)
    return jax.tree.leaves(store[:2])


def differ(one, other):
    return any(bool(jnp.any(a != b)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", SPARING)
def test_what_is_spared_is_not_read(name):
    format_ = SPARING[name]
    assert format_.spare_stream(jnp.dtype(BF16)) is not None
    words = np.random.default_rng(1).integers(0, 2**32, MASTERS.shape, np.uint32)
    want = stored(format_, jnp.asarray(words))
    spared, leading = np.uint32(2**24 - 1), np.uint32(1 << 31)
    assert not differ(stored(format_, jnp.asarray(words ^ spared)), want)
    assert differ(stored(format_, jnp.asarray(words ^ leading)), want)


@pytest.mark.parametrize("name", OTHERS)
def test_a_format_that_may_read_more_bits_spares_none(name):
    format_, dtype = OTHERS[name]
    assert format_.spare_stream(jnp.dtype(dtype)) is None
