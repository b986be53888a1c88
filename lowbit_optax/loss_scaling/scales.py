"""How the loss scale changes from step to step.

A scaling is static data: a frozen dataclass. What it remembers is in the optimizer's
state, its bounds are not, so that no checkpoint or tree operation can lose them.
"""

import dataclasses
import math
import statistics
import typing

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = 2.0**126
"""No scale is larger: its inverse is a normal float32 too."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Chooses loss scales. Subclasses define :meth:`init` and :meth:`next`."""

    def init(self) -> tuple[jax.Array, typing.Any]:
        """The first scale, a float32 scalar, and what is remembered."""
        raise NotImplementedError

    def next(
        self, scale: jax.Array, state, largest: jax.Array, finite: jax.Array
    ) -> tuple[jax.Array, typing.Any]:
        """The next scale and what is remembered after a step.

        Args:
          scale: float32 scalar, of this step.
          state: as :meth:`init` and this method return it.
          largest: float32 scalar, max |g| of the gradients divided by the scale.
          finite: bool scalar, whether all of them are finite.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Static(Scaling):
    """See :func:`static_scale`; remembers nothing."""

    scale: float

    def init(self):
        return jnp.float32(self.scale), ()

    def next(self, scale, state, largest, finite):
        del largest, finite
        return scale, state


@dataclasses.dataclass(frozen=True)
class Backoff(Scaling):
    """See :func:`backoff_scale`; remembers an int32, good steps since a change."""

    initial: float
    factor: float
    period: int
    smallest: float
    largest: float

    def init(self):
        return jnp.float32(self.initial), jnp.zeros([], jnp.int32)

    def next(self, scale, state, largest, finite):
        del largest
        good = state + jnp.int32(1)
        grows = good >= jnp.int32(self.period)
        up = jnp.minimum(scale * jnp.float32(self.factor), jnp.float32(self.largest))
        down = jnp.maximum(scale / jnp.float32(self.factor), jnp.float32(self.smallest))
        after = jnp.where(finite, jnp.where(grows, up, scale), down)
        return after, jnp.where(finite & ~grows, good, jnp.int32(0))


class LogNormalState(typing.NamedTuple):
    """What :func:`log_normal_scale` remembers, float32 scalars.

    Args:
      mean, square: running means of x = log2 max|g| and of x^2, not yet corrected.
      weight: sum of the weights in them, 1 in the long run.
    """

    mean: jax.Array
    square: jax.Array
    weight: jax.Array


@dataclasses.dataclass(frozen=True)
class LogNormal(Scaling):
    """See :func:`log_normal_scale`; remembers a :class:`LogNormalState`."""

    initial: float
    overflow_probability: float
    decay: float
    least_deviation: float
    smallest: float
    largest: float
    limit: float

    def init(self):
        zero = jnp.zeros([], jnp.float32)
        return jnp.float32(self.initial), LogNormalState(zero, zero, zero)

    def next(self, scale, state, largest, finite):
        # Of an overflow it is known that max|g| was past limit / scale: say, twice.
        seen = jnp.log2(jnp.float32(2 * self.limit) / scale)
        x = jnp.where(finite, jnp.log2(largest), seen)
        is_known = jnp.isfinite(x)  # not of gradients that are all zero
        x = jnp.where(is_known, x, jnp.float32(0))
        rate = jnp.where(is_known, jnp.float32(1 - self.decay), jnp.float32(0))
        state = LogNormalState(
            state.mean + rate * (x - state.mean),
            state.square + rate * (x * x - state.square),
            state.weight + rate * (jnp.float32(1) - state.weight),
        )
        weight = jnp.maximum(state.weight, jnp.float32(1e-30))
        mean = state.mean / weight
        variance = state.square / weight - mean * mean
        least = jnp.float32(self.least_deviation**2)
        deviation = jnp.sqrt(jnp.maximum(variance, least))
        most = mean + jnp.float32(_quantile(1 - self.overflow_probability)) * deviation
        # Down to a power of two, by which gradients are scaled exactly.
        exponent = jnp.floor(jnp.float32(math.log2(self.limit)) - most)
        exponent = jnp.clip(
            exponent,
            jnp.float32(math.log2(self.smallest)),
            jnp.float32(math.log2(self.largest)),
        )
        return jnp.where(is_known, _power_of_two(exponent), scale), state


def static_scale(scale: float = 2.0**15) -> Scaling:
    """A loss scale that stays.

    Args:
      scale: positive; a power of two changes no bit of gradients in range.

    >>> static_scale(1024.0).init()[0]
    Array(1024., dtype=float32)
    """
    return Static(_positive("scale", scale))


def backoff_scale(
    initial: float = 2.0**15,
    *,
    factor: float = 2.0,
    period: int = 2000,
    smallest: float = 1.0,
    largest: float = 2.0**24,
) -> Scaling:
    """A scale that falls at overflows and rises where there have been none for long.

        overflow: scale / factor;  after ``period`` steps without: scale * factor

    Args:
      initial: the first scale.
      factor: more than 1.
      period: steps without overflow before the scale rises.
      smallest, largest: bounds of the scale. It moves between them and never stops:
        at ``smallest`` overflows are skipped and counted like others.

    References:
      OpenSeq2Seq, "Automatic Loss Scaling", Backoff.

    >>> import jax.numpy as jnp
    >>> scaling = backoff_scale(8.0)
    >>> scale, state = scaling.init()
    >>> scaling.next(scale, state, jnp.float32(jnp.inf), jnp.bool_(False))[0]
    Array(4., dtype=float32)
    """
    if isinstance(period, bool) or not isinstance(period, int) or period < 1:
        raise ValueError(f"backoff_scale: period is {period!r}, not a positive int")
    if _positive("factor", factor) <= 1:
        raise ValueError(f"backoff_scale: factor is {factor!r}, not more than 1")
    _check_bounds(initial, smallest, largest)
    return Backoff(
        float(initial), float(factor), period, float(smallest), float(largest)
    )


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
    """A scale with which the largest gradient seldom overflows, from its statistics.

        x = log2 max|g| ~ N(mu, sigma^2), by running means;
        scale = 2^floor(log2(limit) - mu - z sigma)
        P(z' > z) = ``overflow_probability``

    Args:
      initial: the scale of the first step.
      overflow_probability: the probability that max|g| * scale is past the limit.
      decay: of the running means, a step.
      least_deviation: sigma is taken for no less; in powers of two.
      smallest, largest: bounds of the scale.
      limit: the largest gradient, float16's largest number.

    References:
      OpenSeq2Seq, "Automatic Loss Scaling", LogNormal.

    >>> import jax.numpy as jnp
    >>> scaling = log_normal_scale()
    >>> scale, state = scaling.init()
    >>> scaling.next(scale, state, jnp.float32(1.0), jnp.bool_(True))[0]
    Array(4096., dtype=float32)
    """
    if not 0 < overflow_probability < 1:
        raise ValueError(
            "log_normal_scale: overflow_probability is "
            f"{overflow_probability!r}, not in (0, 1)"
        )
    if not 0 <= decay < 1:
        raise ValueError(f"log_normal_scale: decay is {decay!r}, not in [0, 1)")
    if least_deviation < 0:
        raise ValueError(
            f"log_normal_scale: least_deviation is {least_deviation!r}, not 0 or more"
        )
    _check_bounds(initial, smallest, largest)
    return LogNormal(
        float(initial),
        float(overflow_probability),
        float(decay),
        float(least_deviation),
        float(smallest),
        float(largest),
        _positive("limit", limit),
    )


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """Exactly, which ``exp2`` is not on every backend."""
    pattern = (exponent.astype(jnp.int32) + jnp.int32(127)) << jnp.int32(23)
    return jax.lax.bitcast_convert_type(pattern, jnp.float32)


def _quantile(probability: float) -> float:
    """Of the standard normal distribution."""
    return statistics.NormalDist().inv_cdf(probability)


def _check_bounds(initial, smallest, largest) -> None:
    for name, value in (("smallest", smallest), ("largest", largest)):
        _positive(name, value)
    if not smallest <= _positive("initial", initial) <= largest:
        raise ValueError(
            f"loss scale: initial is {initial!r}, not between {smallest!r} and "
            f"{largest!r}"
        )


def _positive(name: str, value) -> float:
    is_number = isinstance(value, int | float | np.floating)
    if not is_number or isinstance(value, bool) or not 1 / LARGEST <= value <= LARGEST:
        raise ValueError(
            f"loss scale: {name} is {value!r}; accepted are numbers from 2^-126 to "
            "2^126"
        )
    return float(value)
