"""The streams of random bits: one table, so that no two uses of a leaf share one.

A leaf's keys (:mod:`lowbit_optax._numerics.random_bits`) take in the seed, the step and
the leaf, and last a stream. Two uses of the same seed, step and leaf need two streams:
with one, what they round would be rounded up and down together.

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

``precision`` and SplitArrays have keys of their own: their seeds count calls, and their
leaves are tensors of a program, or the number 0.

One exception is on purpose. A weight format that reads at most 8 leading bits of a word
of the residual's stream leaves 24, and moments 0 and 1 take 12 of them each: a word is
most of what a moment's rounding costs. See :func:`moment_draws`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.random_bits import RandomBits

PARAM_STREAM = 0
RESIDUAL_STREAM = 1
FORWARD_STREAM, BACKWARD_STREAM = 0, 1
_MOMENT_STREAM = 2
_WHOLE_WORDS = 64  # after the moments' first stream
_ACCUMULATOR_STREAM = 1 << 16

_SHARED_MOMENTS = 2
_MOMENT_BITS = 12
_RESIDUAL_BITS = 32 - _SHARED_MOMENTS * _MOMENT_BITS


@dataclasses.dataclass(frozen=True)
class Draws:
    """The random numbers of one leaf's moments, or accumulators, at one step.

    Args:
      random: the leaf's random bits.
      first: stream of the first of them.
      shares_words: whether moments 0 and 1 take what the residual leaves of its words.
    """

    random: RandomBits
    first: int = _MOMENT_STREAM
    shares_words: bool = False

    def words(self, shape: tuple[int, ...], number: int) -> jax.Array:
        """32 random bits per element.

        Args:
          shape: as for :meth:`RandomBits.words`.
          number: static; which of the leaf's moments they are for.
        """
        return self.random.words(shape, self.first + _WHOLE_WORDS + number)

    def halves(self, shape: tuple[int, ...], number: int) -> jax.Array:
        """16 random bits per element, two numbers to a word: cheaper than two words.

        Args:
          shape, number: as for :meth:`words`. Moments ``2j`` and ``2j + 1`` have the
            low and high half of one word.

        Returns:
          uint32 values below ``2**16``.
        """
        words = self.random.words(shape, self.first + number // 2)
        return words >> jnp.uint32(16) if number % 2 else words & jnp.uint32(0xFFFF)

    def twelve(self, shape: tuple[int, ...], number: int) -> jax.Array:
        """12 random bits per element, leading in a uint32; the bits after them vary.

        Args:
          shape, number: as for :meth:`words`.
        """
        if self.shares_words and number < _SHARED_MOMENTS:
            words = self.random.words(shape, RESIDUAL_STREAM)
            return words << jnp.uint32(_RESIDUAL_BITS + _MOMENT_BITS * number)
        return self.halves(shape, number) << jnp.uint32(16)


def moment_draws(random: RandomBits, residual_random_bits: int = 32) -> Draws:
    """The random numbers of a leaf's moments.

    Args:
      random: the leaf's random bits.
      residual_random_bits: how many leading bits of the residual stream's words the
        leaf's weight format reads, see :meth:`WeightFormat.residual_random_bits`.
    """
    return Draws(random, shares_words=residual_random_bits <= _RESIDUAL_BITS)


def accumulator_draws(random: RandomBits) -> Draws:
    """The random numbers of a leaf's gradient accumulator."""
    return Draws(random, _ACCUMULATOR_STREAM)
