"""What all transformations of this package are: steppers behind optax's interface.

A transformation is a plain ``optax.GradientTransformationExtraArgs``. So it can be
mapped over, copied, changed by ``_replace`` and kept in modules like any other. Its
``update`` is a bound method of a :class:`Stepper`, which survives all of these.

``optax.chain``, ``masked``, ``partition`` and ``inject_hyperparams`` pass on the
updates of the transformation inside them unchanged. So :func:`lowbit_optax.step` traces
them with a mark in the place of each update (``context.wants_params``), and reads what
they do around it; see :mod:`lowbit_optax._step.wrapped`.
"""

import abc
import typing
from collections.abc import Callable, Sequence

import jax
import optax
from jax.extend.core import Primitive

from lowbit_optax._numerics.landing import ADD, REPLACE, Landing
from lowbit_optax._step import context
from lowbit_optax._step.guard import UNGUARDED, Guard, Unguarded


class Stepper(abc.ABC):
    """The configuration behind a transformation that can step parameters directly."""

    def __deepcopy__(self, memo) -> "Stepper":
        """Return itself. So a deep copy of a tree that holds it equals the original."""
        del memo
        return self

    @abc.abstractmethod
    def init(self, params: optax.Params) -> typing.Any:
        """As in optax."""

    @abc.abstractmethod
    def run(
        self,
        params,
        state,
        grads: optax.Updates,
        landing: Landing,
        extra_args: dict,
        guard: Guard | Unguarded = UNGUARDED,
    ) -> tuple[typing.Any, typing.Any]:
        """``(new params or updates, new state)``.

        Args:
          params, state, grads: as in optax.
          landing: ``REPLACE`` for new parameters, ``ADD`` for updates.
          extra_args: for the inner transformation.
          guard: unscales the gradients, and decides whether the step happens.
        """

    def update(
        self, updates: optax.Updates, state, params: optax.Params | None = None, **extra
    ) -> tuple[optax.Updates, typing.Any]:
        """As in optax."""
        if not context.current().wants_params:
            return self.run(params, state, updates, ADD, extra)
        return marked(self, lambda _: self, (), updates, state, params, extra)

    def update_within(
        self, updates: optax.Updates, state, params: optax.Params | None = None, **extra
    ) -> tuple[optax.Updates, typing.Any]:
        """The ``update`` of a transformation that a wrapper makes while it is traced.

        ``optax.inject_hyperparams`` makes such transformations. They may hold values of
        the trace, so they cannot run after the trace has ended. They run at once, and
        leave no mark.
        """
        with context.changed(wants_params=False):
            return self.run(params, state, updates, ADD, extra)

    def step(
        self, params: optax.Params, state, grads: optax.Updates, **extra
    ) -> tuple[optax.Params, typing.Any]:
        """``(new params, new state)``, without forming differences of parameters."""
        return self.run(params, state, grads, REPLACE, extra)

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation of this configuration."""
        is_within = context.current().wants_params
        update = self.update_within if is_within else self.update
        return optax.GradientTransformationExtraArgs(self.init, update)


def stepper_of(tx) -> Stepper | None:
    """The :class:`Stepper` behind a transformation; None if it has none.

    >>> import optax
    >>> stepper_of(optax.sgd(0.1)) is None
    True
    """
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    return owner if isinstance(owner, Stepper) else None


def check_state(function: str, state, kind: type) -> None:
    """Raise a TypeError unless a state is of the kind that ``init`` returns.

    ``function`` is the name of what made the transformation.
    """
    if not isinstance(state, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(
            f"{function}: state is a {type(state).__name__}, not {article} "
            f"{kind.__name__}; was it made by this transformation's init?"
        )


update_p = Primitive("lowbit_update")
"""The place of an update in a trace; nothing computes it."""
update_p.multiple_results = True


@update_p.def_abstract_eval
def _results_of_update(*avals, results: int, **_):
    return list(avals[:results])


def marked(
    stepper: Stepper,
    with_held: Callable[[Sequence], Stepper],
    held: Sequence,
    grads: optax.Updates,
    state,
    params,
    extra_args: dict,
) -> tuple[optax.Updates, typing.Any]:
    """Mark the place of an update in a trace; return placeholders of its results.

    Args:
      stepper: the transformation.
      with_held: the same with values in place of what it holds of the trace.
      held: what it holds of the trace.
      grads, state, params, extra_args: of the update.
    """
    functions = {name: x for name, x in extra_args.items() if callable(x)}
    extra_args = {name: x for name, x in extra_args.items() if name not in functions}
    arguments = grads, state, params, extra_args, held
    leaves, structure = jax.tree.flatten(arguments)
    updates = len(jax.tree.leaves(grads))
    results, of_results = jax.tree.flatten((grads, state))
    found = update_p.bind(
        *leaves,
        updates=updates,
        results=len(results),
        stepper=stepper,
        with_held=with_held,
        structure=structure,
        functions=functions,
    )
    return jax.tree.unflatten(of_results, found)
