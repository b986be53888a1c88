"""Random bits from a counter: the same numbers on every sharding and implementation.

The generator is a keyed 32-bit mixing hash. With ``i`` the element's global row-major
index and two 32-bit keys,

    x = i + k0;  x ^= x >> 16;  x *= 0x7feb352d
    x ^= x >> 15;  x ^= k1;     x *= 0x846ca68b;  x ^= x >> 16

which is C. Wellons' ``lowbias32`` finaliser
with a key added before and another between its two rounds. The keys come from (seed,
step, leaf, stream) through the same finaliser. It is no cryptographic generator;
``tests/test_random_bits.py`` holds it to what rounding needs: unbiased bits, no
correlation between neighbours, steps, leaves and streams.

Two limits, each a test that is expected to fail: in a leaf of more than about 10^8
elements, the bits of an element in one stream correlate by up to 2% with those of an
element as far away in another stream; and elements of a leaf with more than 2^32
elements repeat where a middle axis alone has 2^31.

No array of keys exists: a number depends on where its element is, not on what else is
computed, so it does not change with sharding, fusion, or the order of leaves.
"""

import dataclasses
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_GOLDEN = 0x9E3779B9


@dataclasses.dataclass(frozen=True)
class RandomBits:
    """The random bits of one leaf at one step, made by :func:`random_bits`.

    Args:
      key, second: uint32 scalars, k0 and k1 of the module's docstring.
      stream: static number that tells the uses of one leaf apart.

    >>> import jax.numpy as jnp
    >>> (bits,) = random_bits(jnp.uint32(0), jnp.uint32(7), [leaf_number("['w']")])
    >>> bits.words((2, 3)).dtype
    dtype('uint32')
    """

    key: jax.Array
    second: jax.Array
    stream: int = 0

    def words(self, shape: tuple[int, ...], stream: int = 0) -> jax.Array:
        """One uint32 an element, all 32 bits random.

        Args:
          shape: global shape of the leaf.
          stream: static; other streams are independent of this one.
        """
        # Streams start far apart in the counter and differ in the second key too.
        number = (self.stream + stream) * _GOLDEN & 0xFFFFFFFF
        key = self.key + jnp.uint32(number)
        second = self.second ^ jnp.uint32(number)
        low, high = _global_index(shape)
        if high is not None:
            second = second ^ _mix(high)
        return hash_words(low, key, second)

    def halves(self, shape: tuple[int, ...], number: int) -> jax.Array:
        """16 random bits an element, two numbers to a word: cheaper than two words.

        Args:
          shape: global shape of the leaf.
          number: static; ``2j`` and ``2j+1`` are the low and high half of stream ``j``.

        Returns:
          uint32 values below ``2**16``.
        """
        words = self.words(shape, number // 2)
        return words >> jnp.uint32(16) if number % 2 else words & jnp.uint32(0xFFFF)


def random_bits(
    seed: jax.Array, step: jax.Array, leaves: Sequence[int]
) -> list[RandomBits]:
    """The random bits of every leaf at one step.

    Args:
      seed, step: uint32 scalars.
      leaves: static 32-bit numbers, see :func:`leaf_number`.

    Returns:
      One :class:`RandomBits` a leaf.
    """
    numbers = jnp.asarray(np.array(leaves, np.uint32))
    # For all leaves at once: a few vector operations instead of many scalar ones.
    keys = _mix(_mix(_mix(seed + jnp.uint32(_GOLDEN)) + step) ^ numbers)
    seconds = _mix(keys ^ jnp.uint32(0x5851F42D))
    pick = lambda x, i: lax.index_in_dim(x, i, keepdims=False)
    return [RandomBits(pick(keys, i), pick(seconds, i)) for i in range(len(leaves))]


def leaf_number(path: str) -> int:
    """A leaf's 32-bit number, from its path in the parameter tree.

    The path and not the position, so that masking or adding other leaves leaves a
    leaf's random numbers as they were.

    >>> leaf_number("['dense']['kernel']") == leaf_number("['dense']['bias']")
    False
    """
    return zlib.crc32(path.encode())


def hash_words(index: jax.Array, key: jax.Array, second: jax.Array) -> jax.Array:
    """The keyed hash of the module's docstring, on uint32 arrays of any shape."""
    x = index + key
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x7FEB352D)
    x = x ^ (x >> jnp.uint32(15))
    x = x ^ second
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _mix(x: jax.Array) -> jax.Array:
    return hash_words(x, jnp.uint32(0), jnp.uint32(0))


def _global_index(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
    """Row-major index of every element; its high word only where 32 bits overflow."""
    strides = [
        int(np.prod(shape[axis + 1 :], dtype=object)) for axis in range(len(shape))
    ]
    inner = next(
        (a for a, s in enumerate(strides) if s * shape[a] <= 2**32), len(shape)
    )

    def index(axes: range, unit: int) -> jax.Array:
        total = jnp.zeros(shape, jnp.uint32)
        for axis in axes:
            position = lax.broadcasted_iota(jnp.uint32, shape, axis)
            total = total + position * jnp.uint32(strides[axis] // unit)
        return total

    low = index(range(inner, len(shape)), 1)
    if inner == 0:
        return low, None
    return low, index(range(inner), strides[inner - 1])
