"""How the loss scale changes from step to step.

A scaling is a frozen dataclass that holds only constants, such as the bounds of the
scale. What changes from step to step is in the optimizer's state. So no checkpoint and
no tree operation can lose the bounds.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._arguments import check_number

LARGEST_SCALE = 2.0**126
"""The largest scale whose inverse is still a normal float32."""


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Chooses the loss scales. Subclasses define :meth:`init` and :meth:`next`."""

    def init(self) -> tuple[jax.Array, typing.Any]:
        """The first scale, a float32 scalar, and the first state of the scaling."""
        raise NotImplementedError

    def next(
        self, scale: jax.Array, state, largest: jax.Array, finite: jax.Array
    ) -> tuple[jax.Array, typing.Any]:
        """The next scale, and the state of the scaling after a step.

        Args:
          scale: float32 scalar, the scale of this step.
          state: from :meth:`init` or the last call of this method.
          largest: float32 scalar, max |g| of the gradients divided by the scale.
          finite: bool scalar, whether all gradients are finite.

        Returns:
          ``(next scale, new state)``.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Static(Scaling):
    """See :func:`static_scale`; its state is empty."""

    scale: float

    def init(self):
        return jnp.float32(self.scale), ()

    def next(self, scale, state, largest, finite):
        del largest, finite
        return scale, state


@dataclasses.dataclass(frozen=True)
class Backoff(Scaling):
    """See :func:`backoff_scale`; its state is int32: good steps since a change."""

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


def static_scale(scale: float = 2.0**15) -> Scaling:
    """A constant loss scale.

        scale_{t+1} = scale_t = ``scale``

    Args:
      scale: positive, from 2^-126 to 2^126. A power of two scales gradients exactly as
        long as they stay in range.

    Returns:
      A scaling for :func:`with_loss_scale`.

    Raises:
      ValueError: if the scale is not a number in this range.

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
    """A scale that falls at every overflow, and rises after a period without overflows.

        after an overflow:                      scale / factor
        after ``period`` steps without one:     scale * factor

    Args:
      initial: the first scale.
      factor: more than 1.
      period: number of steps without overflow after which the scale rises.
      smallest, largest: bounds of the scale. At ``smallest``, steps that overflow are
        still skipped and counted, and the scale does not fall further.

    Returns:
      A scaling for :func:`with_loss_scale`.

    Raises:
      ValueError: if an argument is not as above.

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
    if positive("factor", factor) <= 1:
        raise ValueError(f"backoff_scale: factor is {factor!r}, not more than 1")
    check_bounds(initial, smallest, largest)
    return Backoff(
        float(initial), float(factor), period, float(smallest), float(largest)
    )


def check_bounds(initial, smallest, largest) -> None:
    """Raise a ValueError unless they are scales, and the first lies between them."""
    for name, value in (("smallest", smallest), ("largest", largest)):
        positive(name, value)
    if not smallest <= positive("initial", initial) <= largest:
        raise ValueError(
            f"loss scale: initial is {initial!r}, not between {smallest!r} and "
            f"{largest!r}"
        )


def positive(name: str, value) -> float:
    """The value as a float, or a ValueError that names it, unless it is a scale."""
    is_scale = lambda x: 1 / LARGEST_SCALE <= x <= LARGEST_SCALE
    check_number("loss scale", name, value, is_scale, "from 2^-126 to 2^126")
    return float(value)
