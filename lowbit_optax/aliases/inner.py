"""The optax optimizers inside the aliases, made after checks of their arguments.

Each class holds the arguments of one optimizer, in optax's order.
"""

import typing

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._step.moment_slots import Moments
from lowbit_optax.aliases.common import (
    Implementation,
    Mask,
    check_learning_rate,
    check_moment_dtype,
    check_numbers,
)
from lowbit_optax.formats import WeightFormat
from lowbit_optax.transformations.lowbit import lowbit


class Sgd(typing.NamedTuple):
    """``optax.sgd``, and weight decay that is added to the gradient."""

    learning_rate: optax.ScalarOrSchedule
    momentum: float | None
    nesterov: bool
    accumulator_dtype: typing.Any
    weight_decay: float | jax.Array | None

    def checked(
        self, alias: str, moments: Moments
    ) -> optax.GradientTransformationExtraArgs:
        """Its state is that of ``optax.sgd``, whatever the weight decay."""
        decay = 0.0 if self.weight_decay is None else self.weight_decay
        check_learning_rate(alias, self.learning_rate)
        check_numbers(alias, weight_decay=decay)
        if self.momentum is not None:
            check_numbers(alias, momentum=self.momentum)
            dtype = self.accumulator_dtype
            check_moment_dtype(alias, "accumulator_dtype", dtype, "trace", moments)
        sgd = optax.with_extra_args_support(optax.sgd(*self[:4]))
        is_array = isinstance(decay, jax.Array)
        if not is_array and decay == 0:
            return sgd
        decayed = optax.add_decayed_weights(decay)

        def update_fn(updates, state, params=None, **extra_args):
            grads, _ = decayed.update(updates, optax.EmptyState(), params)
            if is_array:
                # A decay that may be zero: zero times an infinite weight would be NaN.
                keep = lambda g, new: jnp.where(decay == 0, g, new)
                grads = jax.tree.map(keep, updates, grads)
            return sgd.update(grads, state, params, **extra_args)

        return optax.GradientTransformationExtraArgs(sgd.init, update_fn)


class AdamW(typing.NamedTuple):
    """``optax.adamw``."""

    learning_rate: optax.ScalarOrSchedule
    b1: float
    b2: float
    eps: float
    eps_root: float
    mu_dtype: typing.Any
    weight_decay: float
    mask: Mask
    nesterov: bool

    def checked(
        self, alias: str, moments: Moments
    ) -> optax.GradientTransformationExtraArgs:
        """The transformation."""
        numbers = ("b1", "b2", "eps", "eps_root", "weight_decay")
        _check(self, alias, numbers, moments)
        return optax.adamw(**self._asdict())


class Lion(typing.NamedTuple):
    """``optax.lion``."""

    learning_rate: optax.ScalarOrSchedule
    b1: float
    b2: float
    mu_dtype: typing.Any
    weight_decay: float
    mask: Mask

    def checked(self, alias: str, moments: Moments) -> optax.GradientTransformation:
        """The transformation."""
        _check(self, alias, ("b1", "b2", "weight_decay"), moments)
        return optax.lion(**self._asdict())


def in_formats(
    alias: str,
    inner: Sgd | AdamW | Lion,
    weights: WeightFormat,
    moments: Moments,
    seed: int | None,
    min_size: int | None,
    implementation: Implementation,
) -> optax.GradientTransformationExtraArgs:
    """An alias: an optimizer of optax in these formats.

    Args:
      alias: its name, for errors.
      inner: the optimizer.
      weights, moments, seed, min_size, implementation: as for ``lowbit``.
    """
    return lowbit(
        inner.checked(alias, moments),
        weights=weights,
        moments=moments,
        seed=seed,
        min_size=min_size,
        implementation=implementation,
    )


def _check(
    inner: AdamW | Lion, alias: str, numbers: tuple[str, ...], moments: Moments
) -> None:
    check_learning_rate(alias, inner.learning_rate)
    check_numbers(alias, **{name: getattr(inner, name) for name in numbers})
    check_moment_dtype(alias, "mu_dtype", inner.mu_dtype, "mu", moments)
