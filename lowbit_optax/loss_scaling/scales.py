"""Rules that change the loss scale from step to step.

A scaling is a frozen dataclass that contains only constants, such as the bounds of the
scale. Everything that changes is in the optimizer's state. Therefore, checkpoints and
tree operations cannot lose the bounds.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._arguments import check_number, check_static_int

LARGEST_SCALE = 2.0**126
"""The largest scale whose inverse is still a normal float32."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Chooses the loss scales. Subclasses define :meth:`init` and :meth:`next`."""

    def init(self) -> tuple[jax.Array, typing.Any]:
        """Return the first scale (float32 scalar) and state of the scaling."""
        raise NotImplementedError

    def next(
        self, scale: jax.Array, state: typing.Any, largest: jax.Array, finite: jax.Array
    ) -> tuple[jax.Array, typing.Any]:
        """Return the next scale, and the state of the scaling after a step.

        Args:
          scale: float32 scalar, the scale of this step.
          state: the state from :meth:`init` or the last call of this method.
          largest: float32 scalar, max |g| of the gradients divided by the scale.
          finite: bool scalar, whether all gradients are finite.

        Returns:
          ``(next scale, new state)``.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Static(Scaling):
    """See :func:`static_scale`. The state is empty."""

    scale: float

    def init(self):
        return jnp.float32(self.scale), ()

    def next(self, scale, state, largest, finite):
        del largest, finite
        return scale, state


@dataclasses.dataclass(frozen=True)
class Backoff(Scaling):
    """See :func:`backoff_scale`. The state is the number of good steps, int32."""

    initial: float
    factor: float
    period: int
    smallest: float
    largest: float

    def init(self):
        return jnp.float32(self.initial), jnp.zeros([], jnp.int32)

    def next(self, scale, state, largest, finite):
        del largest
        good = state + 1
        grows = good >= self.period
        up = jnp.minimum(scale * jnp.float32(self.factor), jnp.float32(self.largest))
        down = jnp.maximum(scale / jnp.float32(self.factor), jnp.float32(self.smallest))
        after = jnp.where(finite, jnp.where(grows, up, scale), down)
        return after, jnp.where(finite & ~grows, good, 0)


def static_scale(scale: float = 2.0**15) -> Scaling:
    """Use a constant loss scale.

        scale_{t+1} = scale_t = ``scale``

    Args:
      scale: a number from 2^-126 to 2^126. A power of two scales gradients exactly, as
        long as they stay in the range of their dtype.

    Returns:
      A scaling for :func:`with_loss_scale`.

    Raises:
      ValueError: if ``scale`` is not a number in this range.

    References:
      Micikevicius et al. 2018, section 3.2.

    >>> static_scale(1024.0).init()[0]
    Array(1024., dtype=float32)
    """
    return Static(positive("scale", scale))


def backoff_scale(
    initial: float = 2.0**15,
    *,
    factor: float = 2.0,
    period: int = 2000,
    smallest: float = 1.0,
    largest: float = 2.0**24,
) -> Scaling:
    """Lower the scale after each overflow, and raise it if none occurs for a while.

        after an overflow:                            scale / factor
        after ``period`` steps without an overflow:   scale * factor

    Args:
      initial: the scale of the first step.
      factor: a number above 1.
      period: number of steps without an overflow after which the scale rises.
      smallest, largest: bounds of the scale. At ``smallest``, an overflow still skips
        the step and is counted, but does not lower the scale.

    Returns:
      A scaling for :func:`with_loss_scale`.

    Raises:
      ValueError: if an argument has a wrong value.

    References:
      OpenSeq2Seq, "Automatic Loss Scaling", Backoff.

    >>> import jax.numpy as jnp
    >>> scaling = backoff_scale(8.0)
    >>> scale, state = scaling.init()
    >>> scaling.next(scale, state, jnp.float32(jnp.inf), jnp.bool_(False))[0]
    Array(4., dtype=float32)
    """
    check_static_int("backoff_scale", "period", period, 1)
    if positive("factor", factor) <= 1:
        raise ValueError(f"backoff_scale: factor must be above 1, got {factor!r}")
    check_bounds(initial, smallest, largest)
    bounds = float(smallest), float(largest)
    return Backoff(float(initial), float(factor), period, *bounds)


def check_bounds(initial, smallest, largest) -> None:
    """Raise a ValueError unless all are scales and ``initial`` is within the bounds."""
    for name, value in (("smallest", smallest), ("largest", largest)):
        positive(name, value)
    if not smallest <= positive("initial", initial) <= largest:
        raise ValueError(
            f"loss scale: initial must be from {smallest!r} (smallest) to {largest!r} "
            f"(largest), got {initial!r}"
        )


def positive(name: str, value) -> float:
    """Return the value as a float, or raise a ValueError if it is not a scale."""
    is_scale = lambda x: 1 / LARGEST_SCALE <= x <= LARGEST_SCALE
    check_number("loss scale", name, value, is_scale, "a number from 2^-126 to 2^126")
    return float(value)
