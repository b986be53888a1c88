"""Random bits from a counter, the same for every sharding and implementation.

The generator is a keyed 32-bit mixing hash. With the global row-major index ``i`` of an
element and two 32-bit keys, it computes

    x = i + k0;  x ^= x >> 16;  x *= 0x7feb352d
    x += k1;     x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16

This is C. Wellons' ``lowbias32`` finaliser (https://github.com/skeeto/hash-prospector),
with one key added before it and the other between its two rounds. Let ``mix(i)`` be
this hash with both keys 0. For each of the integers n = seed, step, leaf id and stream,
in this order, the keys are updated with

    k0 = mix(k0 + n * 0x9e3779b9);  k1 = mix(k1 ^ k0)

Initially, ``k0 = 0x243f6a88`` and ``k1 = 0x85a308d3`` (the first digits of pi).

In a leaf of more than 2^32 elements, ``i`` is the index modulo 2^32, and one more
integer updates the keys before the stream: the position along the first axes, using the
fewest axes that leave at most 2^32 elements for each position. For a stack of layers,
this is the index of the layer.

Inside the user's ``jax.shard_map``, an array is one shard, and its position in the
whole array is unknown. ``i`` is the index in the shard, and the index of the shard
updates the keys before any integer that depends on the shape. Shards are counted along
the mesh axes over which the type of the leaf varies, so replicas draw the same bits,
and different shards draw different bits. Without these types (``check_vma=False``),
replicas cannot be distinguished from shards, and all draw the same bits.

The generator is not cryptographic. ``test_random_bits.py`` tests what rounding needs:
unbiased bits, and no correlation between neighbors, steps, leaves and streams. Two
rounds of mixing leave two small defects. With some keys, the bits of neighboring rows
correlate by up to 1% (the leading 8 bits do not correlate measurably). And all draws
use the same 2^32 counters ``i + k0``, so draws for large leaves overlap at a random
distance. In the overlap, only k1 differs, and with some pairs of keys the bits
correlate by up to 1%.

Keys are not stored in an array. A random number depends only on the position of its
element, so it does not change with sharding, fusion or the order of leaves.

**Streams.** Two uses with the same seed, step and leaf need different streams. With the
same stream, their values would be rounded up and down together.

======================  ====================  =======================================
stream                  rounds                for
======================  ====================  =======================================
0                       the parameter         weight formats, QuantizedTensors,
                                              SplitArrays; values (``precision``)
1                       the residual          weight formats and SplitArrays;
                                              cotangents (``precision``)
2 to 65                 moments (2 per word)  a parameter's moments 0 to 127
from 66                 moments (1 per word)  moment n, which has stream 66 + n
from 65536              accumulators, like    ``accumulate_gradients``, which may run
                        moments               with the optimizer's seed and step
======================  ====================  =======================================

``precision`` and SplitArrays have separate keys: their seeds or steps count calls, and
their leaf ids identify the tensors of a program, or are 0.

Two uses deliberately have no stream of their own. A sum that is rounded stochastically
(:mod:`lowbit_optax._numerics.rounding`) uses the last 16 bits of the weight's words, if
the weight reads at most the leading 16. Moments 0 and 1 use products of the weight's
words with two odd constants, if the weight reads at most 24 bits. This saves the words
of the moments, which would be most of the cost of rounding them. The leading bits of a
product depend on all bits of the word. For fixed values of the bits that the weight
reads, the other bits still make the leading bits of both moments uniform, each alone
and both together.
"""

import dataclasses
import math
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from lowbit_optax._jaxprs.compiling import not_fused, traced_once

COUNTERS = 2**32
"""Largest number of elements that can have different counters."""

PARAM_STREAM = 0
RESIDUAL_STREAM = 1
FORWARD_STREAM, BACKWARD_STREAM = 0, 1
_MOMENT_STREAM = 2
_FIRST_WHOLE_WORD = 64  # relative to the first stream of the moments
ACCUMULATOR_STREAM = 1 << 16
_OF_MOMENTS = 0xF1357AEB, 0xA0761D65

_START = 0x243F6A88, 0x85A308D3
_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RandomBits:
    """Random bits of one leaf at one step, made by :func:`random_bits`.

    Args:
      key, second: uint32 scalars k0 and k1 of the module's docstring, updated with
        all integers except the stream.
      index: uint32 array that :meth:`words` uses as the row-major index of the
        elements; None for a whole leaf. With an index, a kernel that processes a part
        of a leaf (of up to 2^32 elements) gets the leaf's words for these elements.

    >>> import jax.numpy as jnp
    >>> (bits,) = random_bits(jnp.uint32(0), jnp.uint32(7), [leaf_number("['w']")])
    >>> bits.words((2, 3)).dtype
    dtype('uint32')
    """

    key: jax.Array
    second: jax.Array
    index: jax.Array | None = None

    def words(self, shape: tuple[int, ...], stream: int = 0) -> jax.Array:
        """Return one uint32 per element, with 32 random bits.

        Args:
          shape: global shape of the leaf, or the shape of the index.
          stream: static int that distinguishes the uses of a leaf's random bits; see
            the table in the module's docstring.

        Raises:
          ValueError: if the index has another shape or is not uint32.
        """
        key, second, index = self.key, self.second, self.index
        if index is None:
            index, place = row_major(shape), _place_on_first_axes(shape)
            if place is not None:
                key, second = take_in(key, second, place)
        if index.shape != tuple(shape) or index.dtype != jnp.uint32:
            raise ValueError(
                f"words: the index must be uint32{list(shape)}, got "
                f"{index.dtype}{list(index.shape)}"
            )
        key, second = take_in(key, second, jnp.uint32(stream))
        return hash_words(index, key, second)

    def on_shard(self, number: jax.Array) -> "RandomBits":
        """Return the random bits of the shard with the uint32 index ``number``."""
        key, second = take_in(self.key, self.second, number)
        return dataclasses.replace(self, key=key, second=second)

    def at_layer(
        self, layer: jax.Array, layers: int, shape: tuple[int, ...]
    ) -> "RandomBits":
        """Return the random bits of one layer of a stacked leaf.

        Args:
          layer: int32 scalar, the index of the layer.
          layers: number of layers.
          shape: shape of one layer, with at most 2^32 elements.
        """
        key, second = keys_at_layer(self.key, self.second, layer, layers, shape)
        first = layer.astype(jnp.uint32) * jnp.uint32(math.prod(shape) % 2**32)
        return dataclasses.replace(
            self, key=key, second=second, index=row_major(shape) + first
        )


@dataclasses.dataclass(frozen=True)
class DrawnOnce(RandomBits):
    """Random bits whose words XLA computes once, although several results read them.

    Args:
      known: dict from stream to words that were already drawn.
    """

    known: dict[int, jax.Array] = dataclasses.field(default_factory=dict)

    def words(self, shape: tuple[int, ...], stream: int = 0) -> jax.Array:
        if stream not in self.known:
            words = super().words(shape, stream)
            self.known[stream] = lax.optimization_barrier(words)
        return self.known[stream]


class ToNearest(RandomBits):
    """Constant bits that turn stochastic rounding into rounding to nearest."""

    def __init__(self):
        super().__init__(jnp.uint32(0), jnp.uint32(0))

    def words(self, shape: tuple[int, ...], stream: int = 0) -> jax.Array:
        return jnp.full(shape, 0x80000000, jnp.uint32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """Random numbers for the moments, or accumulators, of one leaf at one step.

    Args:
      random: the leaf's random bits.
      first: first stream of the moments, or :data:`ACCUMULATOR_STREAM`.
      spare: stream of the leaf's weight, if the weight reads at most 24 bits of its
        words; otherwise None.
    """

    random: RandomBits
    first: int = dataclasses.field(default=_MOMENT_STREAM, metadata=_STATIC)
    spare: int | None = dataclasses.field(default=None, metadata=_STATIC)

    def words(self, shape: tuple[int, ...], number: int) -> jax.Array:
        """Return 32 random bits per element for the moment with this static index."""
        return self.random.words(shape, self.first + _FIRST_WHOLE_WORD + number)

    def halves(self, shape: tuple[int, ...], number: int) -> jax.Array:
        """Return 16 random bits per element, as uint32 values less than 2^16.

        To save words, two moments share each word: moment ``2j`` uses the low half and
        moment ``2j + 1`` the high half.
        """
        words = self.random.words(shape, self.first + number // 2)
        return words >> jnp.uint32(16) if number % 2 else words & jnp.uint32(0xFFFF)

    def twelve(self, shape: tuple[int, ...], number: int) -> jax.Array:
        """Return 12 random bits per element, as the leading bits of a uint32.

        The lower bits are also random, or are fixed at the middle of their range.
        """
        if self.spare is None or number >= len(_OF_MOMENTS):
            return self.halves(shape, number) << jnp.uint32(16) | jnp.uint32(1 << 15)
        factor = jnp.uint32(_OF_MOMENTS[number])
        return self.random.words(shape, self.spare) * factor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrawsToNearest(Draws):
    """Constant numbers that turn stochastic rounding into rounding to nearest."""

    random: None = None  # pyright: ignore[reportIncompatibleVariableOverride]

    def words(self, shape, number):
        return ToNearest().words(shape)

    def halves(self, shape, number):
        return jnp.full(shape, 0x8000, jnp.uint32)

    def twelve(self, shape, number):
        return self.words(shape, number)


def random_bits(
    seed: jax.Array, step: jax.Array, leaves: Sequence[int]
) -> list[RandomBits]:
    """Return the random bits of every leaf at one step.

    ``seed`` and ``step`` are uint32 scalars. ``leaves`` are static ids from
    :func:`leaf_number`.
    """
    if not leaves:
        return []
    keys, seconds = random_keys(seed, step, leaves)
    # Outside of jit, each static index would compile a separate program.
    is_traced = isinstance(keys, Tracer)
    index = lax.index_in_dim if is_traced else lax.dynamic_index_in_dim
    pick = lambda x, i: index(x, i, keepdims=False)
    return [RandomBits(pick(keys, i), pick(seconds, i)) for i in range(len(leaves))]


def random_keys(
    seed: jax.Array, step: jax.Array, leaves: Sequence[int]
) -> tuple[jax.Array, jax.Array]:
    """Return two uint32 vectors with the :func:`random_bits` keys of each leaf."""
    # Compute all leaves together, with a few vector operations instead of many scalar
    # ones.
    return traced_once(_keys)(seed, step, np.array(leaves, np.uint32))


def keys_at_layer(
    key: jax.Array,
    second: jax.Array,
    layer: jax.Array,
    layers: int,
    shape: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Return the keys of one layer of a stacked leaf.

    ``key`` and ``second`` are the keys of the stack. Unless the leaf is large, all its
    layers have the same keys. See :meth:`RandomBits.at_layer`.
    """
    if math.prod(shape) > COUNTERS:
        raise ValueError(
            "keys_at_layer: a layer must have at most 2^32 elements, got shape "
            f"{list(shape)}"
        )
    if not layers_have_keys(layers, shape):
        return key, second
    return take_in(key, second, layer.astype(jnp.uint32))


def layers_have_keys(layers: int, shape: tuple[int, ...]) -> bool:
    """Return whether a stacked leaf is so large that each layer has its own keys."""
    return layers * math.prod(shape) > COUNTERS


def _keys(*numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the initial keys, updated with each of the integers in turn."""
    keys, seconds = (jnp.uint32(start) for start in _START)
    for number in numbers:
        keys, seconds = take_in(keys, seconds, number)
    keys, seconds = not_fused(keys, seconds)
    return keys, seconds


def leaf_number(path: str) -> int:
    """Return a 32-bit id for a leaf, computed from its path in the parameter tree.

    The id does not depend on other leaves, so masking or adding leaves does not change
    a leaf's random numbers.

    >>> leaf_number("['dense']['kernel']") == leaf_number("['dense']['bias']")
    False
    """
    return zlib.crc32(path.encode())


def hash_words(index: jax.Array, key: jax.Array, second: jax.Array) -> jax.Array:
    """Return the hash in the module's docstring, with i = index, k0 = key, k1 = second.

    For fixed keys, the hash is a bijection of the index. Keys are scalars or have the
    shape of the index.
    """
    x = index + key
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x7FEB352D)
    # Add the second key before the shift; do not combine it with an exclusive or. If
    # the first rounds of two draws coincide, their x differ by a constant here. The
    # carries of the sum and the shift make the difference vary with x. With an
    # exclusive or, the difference would stay constant, and the last product alone would
    # leave correlations of several percent.
    x = x + second
    x = x ^ (x >> jnp.uint32(15))
    x = x * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def _mix(x: jax.Array) -> jax.Array:
    return hash_words(x, jnp.uint32(0), jnp.uint32(0))


def take_in(
    key: jax.Array, second: jax.Array, number: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the keys updated with an integer; every integer gives different keys.

    Users may replace the count and the seed of a state by integers of any dtype, which
    are taken modulo 2^32. A signed number would make all words signed, and comparing or
    shifting signed words would bias every rounding.
    """
    number = lax.convert_element_type(number, jnp.uint32)
    key = _mix(key + number * jnp.uint32(0x9E3779B9))
    return key, _mix(second ^ key)


def row_major(shape: tuple[int, ...]) -> jax.Array:
    """Return the row-major index of every element, modulo 2^32."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        index = index + lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return index


def _place_on_first_axes(shape: tuple[int, ...]) -> jax.Array | None:
    """Return positions on the first axes of a leaf of over 2^32 elements, or None."""
    first = 0
    while math.prod(shape[first:]) > COUNTERS:
        first += 1
    if not first:
        return None
    place = row_major(shape[:first])
    return place.reshape(place.shape + (1,) * (len(shape) - first))
