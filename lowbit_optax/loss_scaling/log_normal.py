"""The loss scale that follows from the sizes of the gradients seen so far.

Like every scaling, it is a frozen dataclass of constants; what changes is in its state.
"""

import dataclasses
import functools
import math
import statistics
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._arguments import check_number
from lowbit_optax.loss_scaling.scales import Scaling, check_bounds, positive

# Normally distributed sizes are this far out on one side three times in a row once in
# 4e8 steps.
_FAR = 3.0  # deviations
_IN_A_ROW = 3.0


class LogNormalState(typing.NamedTuple):
    """State of :func:`log_normal_scale`, float32 scalars.

    Args:
      mean, square: running means of x = log2 max|g| and of x^2, without bias
      correction.
      weight: the sum of the weights in these means, which tends to 1.
      overflows, zeros: how many steps in a row, up to the last one, overflowed, or had
      gradients that were all zero. Steps far below the mean do not end a row of zeros.
      far: how many of the x in a row, up to the last one, were far from the mean on the
      same side; negative if below.
    """

    mean: jax.Array
    square: jax.Array
    weight: jax.Array
    overflows: jax.Array
    zeros: jax.Array
    far: jax.Array


@dataclasses.dataclass(frozen=True)
class LogNormal(Scaling):
    """See :func:`log_normal_scale`; its state is a :class:`LogNormalState`."""

    initial: float
    overflow_probability: float
    decay: float
    least_deviation: float
    smallest: float
    largest: float
    limit: float

    def init(self):
        zeros = [jnp.zeros([], jnp.float32) for _ in LogNormalState._fields]
        return jnp.float32(self.initial), LogNormalState(*zeros)

    def next(self, scale, state, largest, finite):
        x = jnp.log2(largest)
        # Only a finite gradient that is not zero says how large gradients are.
        is_seen = finite & jnp.isfinite(x)
        is_zero = finite & ~is_seen
        state = self._learnt(state, x, is_seen, is_zero, finite)
        usual = self._usual(state)
        # The size of this step would not overflow in the next one.
        fits = self._fitting(x)
        # Gradients that fall spread, but are no sign of larger ones.
        least = jnp.where(state.far < 0, scale, jnp.float32(0))
        after_seen = jnp.minimum(jnp.maximum(usual, least), fits)
        halved = self._halved(scale, state, jnp.isinf(largest))
        after_overflow = jnp.where(scale > usual, usual, halved)
        # Zeros at a scale below 1 are no sign of gradients too large for 1.
        least = jnp.where(state.weight > 0, jnp.float32(0), jnp.float32(1))
        memories = self._memories(state.zeros)
        octaves = jnp.floor(jnp.float32(3) * memories * memories)
        raised = jnp.maximum(usual, least) * _power_of_two(octaves)
        after = jnp.where(is_seen, after_seen, after_overflow)
        after = jnp.where(is_zero, jnp.maximum(raised, scale), after)
        after = jnp.clip(after, jnp.float32(self.smallest), jnp.float32(self.largest))
        return after, state

    def _learnt(self, state: LogNormalState, x, is_seen, is_zero, finite):
        """The state after a step; x counts if it was seen."""
        one, none = jnp.float32(1), jnp.float32(0)
        far = jnp.where(is_seen, self._far(state, x), state.far)
        # The statistics say nothing about gradients of another size.
        has_changed = jnp.abs(far) >= jnp.float32(_IN_A_ROW)
        keep = jnp.where(has_changed, none, one)
        mean, square, weight = (keep * old for old in state[:3])
        far = keep * far
        x = jnp.where(is_seen, x, none)
        rate = jnp.where(is_seen, jnp.float32(1 - self.decay), none)
        return LogNormalState(
            mean + rate * (x - mean),
            square + rate * (x * x - square),
            weight + rate * (one - weight),
            jnp.where(finite, none, state.overflows + one),
            jnp.where(is_zero, state.zeros + one, jnp.where(far < 0, state.zeros, 0)),
            far,
        )

    def _far(self, state: LogNormalState, x: jax.Array) -> jax.Array:
        """``far`` of the state after an x that was seen."""
        distance = x - self._mean(state)
        side = jnp.sign(distance)
        is_far = jnp.abs(distance) > jnp.float32(_FAR) * self._deviation(state)
        is_far = is_far & (state.weight > jnp.float32(0))
        goes_on = side * state.far > jnp.float32(0)
        far = side + jnp.where(goes_on, state.far, jnp.float32(0))
        return jnp.where(is_far, far, jnp.float32(0))

    def _usual(self, state: LogNormalState) -> jax.Array:
        """The scale by the statistics; the first scale while there are none."""
        quantile = statistics.NormalDist().inv_cdf(1 - self.overflow_probability)
        deviations = jnp.float32(quantile) * self._deviation(state)
        by_statistics = self._fitting(self._mean(state) + deviations)
        return jnp.where(state.weight > 0, by_statistics, jnp.float32(self.initial))

    def _halved(self, scale, state: LogNormalState, is_infinite) -> jax.Array:
        """Half the scale, unless gradients of the mean size would then be subnormal.

        An infinity, unlike a NaN, shows that they are too large, whatever they were.
        """
        # The smallest normal number is 4 / limit in float16, and near it in others.
        exponent = jnp.float32(2 - math.log2(self.limit)) - self._mean(state)
        # One octave less for as many overflows in a row as the means remember.
        exponent = jnp.ceil(exponent) - jnp.floor(self._memories(state.overflows))
        least = jnp.minimum(_power_of_two(exponent), scale)
        is_bounded = (state.weight > 0) & ~is_infinite
        least = jnp.where(is_bounded, least, jnp.float32(0))
        return jnp.maximum(scale * jnp.float32(0.5), least)

    def _memories(self, steps: jax.Array) -> jax.Array:
        """Steps, in units of how many the running means remember."""
        return steps * jnp.float32(1 - self.decay)

    def _mean(self, state: LogNormalState) -> jax.Array:
        return state.mean / jnp.maximum(state.weight, jnp.float32(1e-30))

    def _deviation(self, state: LogNormalState) -> jax.Array:
        mean, weight = self._mean(state), jnp.maximum(state.weight, jnp.float32(1e-30))
        variance = state.square / weight - mean * mean
        least_variance = jnp.float32(self.least_deviation**2)
        return jnp.sqrt(jnp.maximum(variance, least_variance))

    def _fitting(self, x: jax.Array) -> jax.Array:
        """The largest power of two that times 2^x is at most the limit."""
        # By a power of two, gradients are scaled exactly.
        return _power_of_two(jnp.floor(jnp.float32(math.log2(self.limit)) - x))


def log_normal_scale(
    initial: float = 2.0**15,
    *,
    overflow_probability: float = 0.001,
    decay: float = 0.99,
    least_deviation: float = 1.0,
    smallest: float = 2.0**-24,
    largest: float = 2.0**24,
    limit: float = 65504.0,
) -> Scaling:
    """A scale with which the largest gradient seldom overflows, judged by its
    statistics.

        x = log2 max|g| ~ N(mu, sigma^2), with running means for mu and sigma
        scale = 2^floor(log2(limit) - mu - z sigma)

    where a standard normal variable exceeds z with probability
    ``overflow_probability``. Only finite gradients that are not all zero enter the
    statistics, and after them the scale is at most 2^floor(log2(limit) - x). Otherwise:

        after an overflow:       scale / 2, or the scale above if the last was larger
        after all-zero gradients: the scale above, if the last was smaller

    A NaN says nothing about magnitude. So NaNs in a row halve the scale only as long as
    gradients of the mean size stay normal numbers, from 4 / limit up; from there it
    falls by one octave per 1 / (1 - decay) of them. An infinity always halves it.
    All-zero gradients, if they go on, raise the scale above the formula's, by
    ``3 (n (1 - decay))^2`` octaves after n, since they may have vanished. While there
    are no statistics, ``initial`` replaces the formula (1 after zeros, if that is
    more), and overflows halve the scale down to ``smallest``.

    Three x in a row that are more than 3 sigma above the mean, or below it, are of
    another distribution. The means start anew with the third, and until then those
    below do not lower the scale.

    OpenSeq2Seq's description has only the formula, and lets an overflow skip the
    update. The scale would then stay where it overflows, if gradients have grown, or
    where they vanish, if they have shrunk: sigma counts the change as spread.

    Args:
      initial: the scale of the first step.
      overflow_probability: the probability that max|g| * scale exceeds the limit.
      decay: factor per step of the running means, in [0, 1). They remember
        1 / (1 - decay) steps.
      least_deviation: lower bound of sigma; like x, in powers of two.
      smallest, largest: bounds of the scale.
      limit: the largest gradient that does not overflow, by default float16's largest
        number.

    Returns:
      A scaling for :func:`with_loss_scale`.

    Raises:
      ValueError: if an argument is not as above.

    References:
      OpenSeq2Seq, "Automatic Loss Scaling", LogNormal.

    >>> import jax.numpy as jnp
    >>> scaling = log_normal_scale()
    >>> scale, state = scaling.init()
    >>> scaling.next(scale, state, jnp.float32(1.0), jnp.bool_(True))[0]
    Array(4096., dtype=float32)
    """
    check = functools.partial(check_number, "log_normal_scale")
    is_share = lambda x: 0 < x < 1
    check("overflow_probability", overflow_probability, is_share, "a number in (0, 1)")
    check("decay", decay, lambda x: 0 <= x < 1, "a number in [0, 1)")
    check("least_deviation", least_deviation, lambda x: x >= 0, "at least 0")
    check_bounds(initial, smallest, largest)
    chosen = overflow_probability, decay, least_deviation
    bounds = smallest, largest, positive("limit", limit)
    return LogNormal(*map(float, (initial, *chosen, *bounds)))


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent exactly, which ``exp2`` is not on every backend.

    Of exponents out of range the nearest is taken for which the power and its inverse
    are normal numbers.
    """
    exponent = jnp.clip(exponent, jnp.float32(-126), jnp.float32(126))
    pattern = (exponent.astype(jnp.int32) + jnp.int32(127)) << jnp.int32(23)
    return jax.lax.bitcast_convert_type(pattern, jnp.float32)
