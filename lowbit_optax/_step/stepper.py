"""What all transformations of this package are: steppers behind optax's interface.

A transformation is a plain ``optax.GradientTransformationExtraArgs``. So it can be
mapped over, copied, changed by ``_replace`` and kept in modules like any other. Its
``update`` is a bound method of a :class:`Stepper`, which survives all of these.

``optax.chain``, ``masked``, ``partition`` and ``inject_hyperparams`` pass on the
updates of the transformation inside them unchanged. So :func:`lowbit_optax.step` can
ask the transformations of this package for new parameters instead of differences
(``context.wants_params``). Each new parameter travels as a :class:`NewParam`, an opaque
object that no wrapper can compute with. If a wrapper tries to, or keeps one in its
state, the attempt fails, and the step is made with differences instead.
"""

import abc
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from lowbit_optax._numerics.landing import ADD, REPLACE, Landing
from lowbit_optax._step import context, trees
from lowbit_optax._step.state import LowbitState


class Stepper(abc.ABC):
    """The configuration behind a transformation that can step parameters directly."""

    @abc.abstractmethod
    def init(self, params: optax.Params) -> typing.Any:
        """As in optax."""

    @abc.abstractmethod
    def run(
        self, params, state, grads: optax.Updates, landing: Landing, extra_args: dict
    ) -> tuple[typing.Any, typing.Any]:
        """``(new params or updates, new state)``.

        Args:
          params, state, grads: as in optax.
          landing: ``REPLACE`` for new parameters, ``ADD`` for updates.
          extra_args: for the inner transformation.
        """

    def update(
        self, updates: optax.Updates, state, params: optax.Params | None = None, **extra
    ) -> tuple[optax.Updates, typing.Any]:
        """As in optax."""
        if not context.current().wants_params:
            return self.run(params, state, updates, ADD, extra)
        with context.params_wanted(False):
            new, state = self.run(params, state, updates, REPLACE, extra)
        _, leaves, treedef = trees.named_leaves(new)
        return treedef.unflatten(map(NewParam, leaves)), state

    def step(
        self, params: optax.Params, state, grads: optax.Updates, **extra
    ) -> tuple[optax.Params, typing.Any]:
        """``(new params, new state)``, without forming differences of parameters."""
        return self.run(params, state, grads, REPLACE, extra)

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation of this configuration."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)


def stepper_of(tx) -> Stepper | None:
    """The :class:`Stepper` behind a transformation; None if it has none.

    >>> import optax
    >>> stepper_of(optax.sgd(0.1)) is None
    True
    """
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    return owner if isinstance(owner, Stepper) else None


class NewParam:
    """A new parameter in place of an update; neither an array nor a pytree node."""

    def __init__(self, value):
        self.value = value


def new_params_by(
    tx: optax.GradientTransformationExtraArgs,
    params: optax.Params,
    state: optax.OptState,
    grads: optax.Updates,
    extra_args: dict,
    apply_update: Callable,
) -> tuple[optax.Params, optax.OptState] | None:
    """The step of a wrapped transformation, by new parameters in place of updates.

    ``apply_update(param, update)`` is for leaves that transformations of other packages
    update.

    Returns:
      ``(new params, new state)``; None if the transformation cannot step directly,
      because a wrapper prevents it or because it is not from this package.
    """
    names, leaves, treedef = trees.named_leaves(params)
    try:
        with context.params_wanted():
            updates, state = tx.update(grads, state, params, **extra_args)
        found = trees.parts_of(names, treedef, updates, "updates")
    except (TypeError, ValueError, AttributeError):
        # What computing with a NewParam raises. An error in the arguments occurs again,
        # and is reported, in the step with differences.
        return None
    is_new = lambda x: isinstance(x, NewParam)
    if not any(map(is_new, found)) or any(map(is_new, jax.tree.leaves(state))):
        return None
    new = [
        x.value if is_new(x) else apply_update(param, x)
        for param, x in zip(leaves, found, strict=True)
    ]
    return treedef.unflatten(new), state


def is_direct(tx, params: optax.Params, state: optax.OptState) -> bool | None:
    """Whether ``lowbit_optax.step`` writes new parameters without differences.

    Parameters and state may be shapes: nothing is computed. None if ``tx`` holds no
    transformation of this package.
    """
    is_own = lambda x: isinstance(x, LowbitState)
    if not any(map(is_own, jax.tree.leaves(state, is_leaf=is_own))):
        return None
    if stepper_of(tx) is not None:
        return True
    found = []

    def step(params, state):
        _, leaves, treedef = trees.named_leaves(params)
        grads = treedef.unflatten(jnp.zeros(x.shape, jnp.float32) for x in leaves)
        wide = optax.with_extra_args_support(tx)
        new = new_params_by(wide, params, state, grads, {}, lambda param, _: param)
        found.append(new is not None)

    with context.analysis():
        jax.eval_shape(step, params, state)
    return found[0]
