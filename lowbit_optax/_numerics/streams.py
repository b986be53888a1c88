"""The streams of random bits, in one table, so that no two uses share one.

The keys of a leaf (:mod:`lowbit_optax._numerics.random_bits`) take in the seed, the
step, the leaf and, last, a stream. Two uses with the same seed, step and leaf need
different streams. If they shared one, their values would be rounded up and down
together.

======================  ====================  =======================================
stream                  used for              of
======================  ====================  =======================================
0                       the parameter         weight formats, QuantizedTensors,
                                              SplitArrays; values (``precision``)
1                       the residual          weight formats and SplitArrays;
                                              cotangents (``precision``)
2 to 65                 moments, two numbers  a parameter's moments 0 to 127
                        to a word
66 and on               moments, a word each  moment n has stream 66 + n
65536 and on            accumulators, as for  ``accumulate_gradients``, which may run
                        moments               with the optimizer's seed and step
======================  ====================  =======================================

``precision`` and SplitArrays have keys of their own: their seeds or steps count calls,
and their leaves are the tensors of a program, or the number 0.

There is one deliberate exception. A weight format that reads at most the leading 8 bits
of the residual's words leaves 24 bits. Moment 0 reads them from the leading one on, and
moment 1 from the last byte on. So the leading 8 bits of each are its own; on the 8 bits
in the middle a rounding depends with probability 2^-8. It saves a word per moment,
which would be most of the cost of rounding it. See :func:`moment_draws`. A sum that is
rounded stochastically (:mod:`lowbit_optax._numerics.sums`) takes the last 16 bits of
the same words, the leading ones of which are the last that the moments look at.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.random_bits import RandomBits
from pallas_kernels import operations

PARAM_STREAM = 0
RESIDUAL_STREAM = 1
FORWARD_STREAM, BACKWARD_STREAM = 0, 1
_MOMENT_STREAM = 2
_FIRST_WHOLE_WORD = 64  # counted from the first stream of the moments
_ACCUMULATOR_STREAM = 1 << 16

_STATIC = {"static": True}

_SHARED_MOMENTS = 2
_RESIDUAL_BITS = 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """The random numbers of one leaf's moments, or accumulators, at one step.

    Args:
      random: the leaf's random bits.
      first: the first of their streams.
      shares_words: whether moments 0 and 1 use the bits that the residual leaves of its
        words.
    """

    random: RandomBits
    first: int = dataclasses.field(default=_MOMENT_STREAM, metadata=_STATIC)
    shares_words: bool = dataclasses.field(default=False, metadata=_STATIC)

    def words(self, shape: tuple[int, ...], number: int) -> jax.Array:
        """32 random bits per element.

        Args:
          shape: as for :meth:`RandomBits.words`.
          number: static; which of the leaf's moments the bits are for.
        """
        return self.random.words(shape, self.first + _FIRST_WHOLE_WORD + number)

    def halves(self, shape: tuple[int, ...], number: int) -> jax.Array:
        """16 random bits per element; two moments share a word, which is cheaper.

        Args:
          shape, number: as for :meth:`words`. Moments ``2j`` and ``2j + 1`` get the low
            and the high half of one word.

        Returns:
          uint32 values, less than ``2**16``.
        """
        words = self.random.words(shape, self.first + number // 2)
        return words >> jnp.uint32(16) if number % 2 else words & jnp.uint32(0xFFFF)

    def twelve(self, shape: tuple[int, ...], number: int) -> jax.Array:
        """12 random bits per element, the leading bits of a uint32.

        The bits below them are random too, or make the middle of what they could be.

        Args:
          shape, number: as for :meth:`words`.
        """
        if self.shares_words and number < _SHARED_MOMENTS:
            words = self.random.words(shape, RESIDUAL_STREAM)
            if number:
                return operations.reverse_bytes(words)
            return words << jnp.uint32(_RESIDUAL_BITS)
        return self.halves(shape, number) << jnp.uint32(16) | jnp.uint32(1 << 15)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DrawsToNearest(Draws):
    """Constant numbers, with which stochastic rounding becomes rounding to nearest."""

    random: RandomBits = dataclasses.field(
        default_factory=lambda: RandomBits(jnp.uint32(0), jnp.uint32(0))
    )

    def words(self, shape, number):
        """The word 2^31 per element, which is half a unit."""
        del number
        return jnp.full(shape, 0x80000000, jnp.uint32)

    def halves(self, shape, number):
        """The half word 2^15 per element."""
        del number
        return jnp.full(shape, 0x8000, jnp.uint32)

    def twelve(self, shape, number):
        """The word 2^31 per element."""
        return self.words(shape, number)


def moment_draws(random: RandomBits, residual_random_bits: int = 32) -> Draws:
    """The random numbers for the moments of a leaf.

    Args:
      random: the leaf's random bits.
      residual_random_bits: how many leading bits of the residual's words the leaf's
        weight format reads; see :meth:`WeightFormat.residual_random_bits`.
    """
    return Draws(random, shares_words=residual_random_bits <= _RESIDUAL_BITS)


def accumulator_draws(random: RandomBits) -> Draws:
    """The random numbers for the gradient accumulator of a leaf."""
    return Draws(random, _ACCUMULATOR_STREAM)
