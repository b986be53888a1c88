"""A loss scale that follows the sizes of past gradients."""

import dataclasses
import functools
import math
import statistics
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._arguments import check_number
from lowbit_optax.loss_scaling.scales import Scaling, check_bounds, positive

# Normally distributed sizes exceed their mean by this much three times in a row about
# once in 4e8 steps.
_FAR = 3.0  # standard deviations
_IN_A_ROW = 3.0


class LogNormalState(typing.NamedTuple):
    """State of :func:`log_normal_scale`, float32 scalars.

    Args:
      mean, square: running means of x = log2 max|g| and of x^2, without bias
        correction.
      weight: the sum of the weights in these means, which approaches 1.
      overflows, zeros: the number of consecutive steps, up to the last one, that
        overflowed or had only zero gradients. Steps far below the mean do not reset
        ``zeros``.
      far: the number of consecutive x, up to the last one, that were far from the mean
        on the same side; negative if they were below it.
    """

    mean: jax.Array
    square: jax.Array
    weight: jax.Array
    overflows: jax.Array
    zeros: jax.Array
    far: jax.Array


@dataclasses.dataclass(frozen=True)
class LogNormal(Scaling):
    """See :func:`log_normal_scale`. The state is a :class:`LogNormalState`."""

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
        # Zeros, infinities and NaNs do not show how large gradients are.
        is_seen = finite & jnp.isfinite(x)
        is_zero = finite & ~is_seen
        state = self._learnt(state, x, is_seen, is_zero, finite)
        usual = self._usual(state)
        # With this scale, the gradients of this step would not overflow.
        fits = self._fitting(x)
        # Shrinking gradients increase the deviation, but larger ones need not follow.
        least = jnp.where(state.far < 0, scale, jnp.float32(0))
        after_seen = jnp.minimum(jnp.maximum(usual, least), fits)
        halved = self._halved(scale, state, jnp.isinf(largest))
        after_overflow = jnp.where(scale > usual, usual, halved)
        # Zeros at a scale below 1 do not mean that a scale of 1 would overflow.
        least = jnp.where(state.weight > 0, jnp.float32(0), jnp.float32(1))
        memories = self._memories(state.zeros)
        octaves = jnp.floor(jnp.float32(3) * memories * memories)
        raised = jnp.maximum(usual, least) * _power_of_two(octaves)
        after = jnp.where(is_seen, after_seen, after_overflow)
        after = jnp.where(is_zero, jnp.maximum(raised, scale), after)
        after = jnp.clip(after, jnp.float32(self.smallest), jnp.float32(self.largest))
        return after, state

    def _learnt(self, state: LogNormalState, x, is_seen, is_zero, finite):
        """Return the state after a step. Its statistics include x if ``is_seen``."""
        one, none = jnp.float32(1), jnp.float32(0)
        far = jnp.where(is_seen, self._far(state, x), state.far)
        # The old statistics do not describe gradients of another size.
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
        """Return the new value of the state's ``far`` field, given x."""
        distance = x - self._mean(state)
        side = jnp.sign(distance)
        is_far = jnp.abs(distance) > jnp.float32(_FAR) * self._deviation(state)
        is_far = is_far & (state.weight > jnp.float32(0))
        goes_on = side * state.far > jnp.float32(0)
        far = side + jnp.where(goes_on, state.far, jnp.float32(0))
        return jnp.where(is_far, far, jnp.float32(0))

    def _usual(self, state: LogNormalState) -> jax.Array:
        """Return the scale that the statistics suggest, or ``initial`` without any."""
        quantile = statistics.NormalDist().inv_cdf(1 - self.overflow_probability)
        deviations = jnp.float32(quantile) * self._deviation(state)
        by_statistics = self._fitting(self._mean(state) + deviations)
        return jnp.where(state.weight > 0, by_statistics, jnp.float32(self.initial))

    def _halved(self, scale, state: LogNormalState, is_infinite) -> jax.Array:
        """Return half the scale, or more if mean gradients would become subnormal."""
        # The smallest normal number is about 4 / limit in float16 and other dtypes.
        exponent = jnp.float32(2 - math.log2(self.limit)) - self._mean(state)
        # Lower the bound by an octave per 1 / (1 - decay) consecutive overflows.
        exponent = jnp.ceil(exponent) - jnp.floor(self._memories(state.overflows))
        least = jnp.minimum(_power_of_two(exponent), scale)
        is_bounded = (state.weight > 0) & ~is_infinite
        least = jnp.where(is_bounded, least, jnp.float32(0))
        return jnp.maximum(scale * jnp.float32(0.5), least)

    def _memories(self, steps: jax.Array) -> jax.Array:
        """Return ``steps`` divided by the number of steps that the means remember."""
        return steps * jnp.float32(1 - self.decay)

    def _mean(self, state: LogNormalState) -> jax.Array:
        return state.mean / jnp.maximum(state.weight, jnp.float32(1e-30))

    def _deviation(self, state: LogNormalState) -> jax.Array:
        mean, weight = self._mean(state), jnp.maximum(state.weight, jnp.float32(1e-30))
        variance = state.square / weight - mean * mean
        least_variance = jnp.float32(self.least_deviation**2)
        return jnp.sqrt(jnp.maximum(variance, least_variance))

    def _fitting(self, x: jax.Array) -> jax.Array:
        """Return the largest power of two that scales 2^x to at most the limit."""
        # Powers of two scale gradients exactly.
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
    """Choose the scale from running statistics of the largest gradient.

        x = log2 max|g| ~ N(mu, sigma^2), with running means for mu and sigma
        scale = 2^floor(log2(limit) - mu - z sigma)

    A standard normal variable exceeds z with probability ``overflow_probability``. Only
    steps whose gradients are finite and not all zero change the statistics. After such
    a step, the scale is at most 2^floor(log2(limit) - x), so that the same gradients
    would not overflow. After other steps, it changes as follows:

    - After an overflow, a scale above the formula becomes the scale of the formula, and
      any other scale is halved. A NaN does not show how large a gradient was.
      Therefore, consecutive NaNs halve the scale only while gradients of the mean size
      stay normal numbers, which are at least 4 / limit. From there, the scale falls by
      one octave per 1 / (1 - decay) NaNs. An infinity always halves it.
    - After zero gradients, a scale below the formula becomes the scale of the formula.
      The gradients may have underflowed, so n such steps in a row raise the formula by
      ``3 (n (1 - decay))^2`` octaves.
    - Without statistics, ``initial`` replaces the formula (after zeros, 1 if that is
      larger), and overflows halve the scale down to ``smallest``.

    If three consecutive x are more than 3 sigma above the mean, or three are more than
    3 sigma below it, their distribution has changed. The third x then restarts the
    statistics. Before that, x below the mean do not lower the scale.

    OpenSeq2Seq describes only the formula, and skips the update after an overflow. With
    the formula alone, growing gradients would continue to overflow, and shrinking
    gradients would continue to vanish, because the change increases sigma.

    Args:
      initial: the scale of the first step.
      overflow_probability: the probability that max|g| * scale exceeds the limit.
      decay: the decay rate of the running means, at least 0 and below 1. They remember
        1 / (1 - decay) steps.
      least_deviation: the smallest sigma, in octaves.
      smallest, largest: bounds of the scale.
      limit: the largest gradient that does not overflow; by default, the largest number
        of float16.

    Returns:
      A scaling for :func:`with_loss_scale`.

    Raises:
      ValueError: if an argument has a wrong value.

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
    """Return 2^exponent exactly, which ``exp2`` does not do on every backend.

    Exponents are limited to the range in which the power and its inverse are normal
    numbers.
    """
    exponent = jnp.clip(exponent, jnp.float32(-126), jnp.float32(126))
    pattern = (exponent.astype(jnp.int32) + jnp.int32(127)) << jnp.int32(23)
    return jax.lax.bitcast_convert_type(pattern, jnp.float32)
