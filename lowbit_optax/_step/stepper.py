"""``Stepper``: the base class of the objects behind this package's transformations.

Each transformation is a plain ``optax.GradientTransformationExtraArgs``, so you can map
over it, copy it, change it with ``_replace`` and store it in modules. Its ``update`` is
a bound method of a stepper. :func:`stepper_of` returns this stepper, and
:func:`lowbit_optax.step` calls its ``run`` to get new parameters directly.

``optax.chain``, ``masked``, ``partition`` and ``inject_hyperparams`` return the updates
of the transformation inside them unchanged. Therefore, :func:`lowbit_optax.step` traces
such wrappers with ``context.wants_params`` set. Each ``update`` whose state contains a
``LowbitState`` then calls :func:`marked`, which adds a marker to the trace instead of
computing anything, and :mod:`lowbit_optax._step.wrapped` reads the operations around
the markers.

Some wrappers do not work with this package, or need other results from it. They pass no
information about themselves to the transformation inside, so a few functions here look
for them in the calling frames. One is ``optax.MultiSteps``, which resets its
accumulator with a product with 0, and 0 x inf is NaN. One infinity or NaN in any
microbatch therefore stays in the accumulator. If a transformation inside skips such
gradients, it skips every later step, and training stops without an error. The ``init``
of this package's transformations refuses this.
"""

import abc
import contextlib
import functools
import inspect
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jax.extend.core import Primitive

from lowbit_optax._numerics.landing import ADD, ADD_LIKE_GRADS, Landing
from lowbit_optax._step import context, trees
from lowbit_optax._step.guard import UNGUARDED, Guard
from lowbit_optax._step.state import holds_lowbit
from pallas_kernels.lowered import lower_as


class Stepper(abc.ABC):
    """A transformation that can return new parameters directly."""

    def __repr__(self) -> str:
        """Return a short name, because the bound methods of a transformation show it.

        >>> import lowbit_optax
        >>> lowbit_optax.kahan_sgd(0.1).init
        <bound method Lowbit.init of lowbit(weights=KahanFormat)>
        """
        return type(self).__name__

    def __deepcopy__(self, memo) -> "Stepper":
        """Return itself, so that a deep copy of a tree equals the original."""
        del memo
        return self

    @abc.abstractmethod
    def init(self, params: optax.Params) -> typing.Any:
        """See ``optax.GradientTransformation``."""

    @abc.abstractmethod
    def run(
        self,
        params,
        state,
        grads: optax.Updates,
        landing: Landing,
        extra_args: dict,
        guard: Guard = UNGUARDED,
    ) -> tuple[typing.Any, typing.Any]:
        """Return ``(new params or updates, new state)``.

        Args:
          params, state, grads: the arguments of ``update``.
          landing: ``REPLACE`` for new parameters, ``ADD`` for updates.
          extra_args: passed to the inner transformation.
          guard: unscales the gradients, and decides whether the step happens.
        """

    def update(
        self, updates: optax.Updates, state, params: optax.Params | None = None, **extra
    ) -> tuple[optax.Updates, typing.Any]:
        """Return ``(updates, new state)``; add a marker while a wrapper is traced."""
        if context.current().wants_params and holds_lowbit(state):
            return marked(self, lambda _: self, (), updates, state, params, extra)
        if not _is_in_conditional():
            return self.run(params, state, updates, ADD, extra)
        results = self.run(params, state, updates, ADD_LIKE_GRADS, extra)
        _check_dtypes(results[0], updates)
        return results

    def update_within(
        self, updates: optax.Updates, state, params: optax.Params | None = None, **extra
    ) -> tuple[optax.Updates, typing.Any]:
        """Run ``update`` of a transformation that was created inside a traced wrapper.

        ``optax.inject_hyperparams`` creates such transformations. They may contain
        traced values, so they cannot run after the trace has ended. Therefore, they run
        immediately and add no marker.
        """
        with context.changed(wants_params=False):
            return self.update(updates, state, params, **extra)

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        """The optax transformation of this stepper."""
        is_within = context.current().wants_params
        update = self.update_within if is_within else self.update
        return optax.GradientTransformationExtraArgs(self.init, update)


def stepper_of(tx) -> Stepper | None:
    """Return the :class:`Stepper` behind a transformation, or None if it has none.

    >>> import optax
    >>> stepper_of(optax.sgd(0.1)) is None
    True
    """
    owner = getattr(getattr(tx, "update", None), "__self__", None)
    return owner if isinstance(owner, Stepper) else None


def with_extra_args(tx) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that accepts extra arguments, and ignores unknown ones.

    Unlike ``optax.with_extra_args_support``, it passes each argument that the signature
    of ``tx.update`` accepts, also if ``tx`` is an ``optax.MultiSteps``.

    >>> tx = with_extra_args(optax.MultiSteps(optax.contrib.reduce_on_plateau(), 2))
    >>> params = jax.numpy.ones(3)
    >>> updates, _ = tx.update(params, tx.init(params), params, value=1.0, other=2.0)
    """
    parameters = inspect.signature(tx.update).parameters
    takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters.values())

    def update(updates, state, params=None, **extra_args):
        accepted = {n: x for n, x in extra_args.items() if takes_all or n in parameters}
        arguments = updates, state, params
        leaves = jax.tree.leaves((arguments, accepted))
        is_eager = not any(isinstance(x, Tracer) for x in leaves)
        is_plain = context.current() == context.StepContext()
        if is_eager and is_plain and trees.all_of(_CONDITIONAL, state):
            # A schedule may need concrete values. An extra argument may be a function.
            with contextlib.suppress(TypeError):
                return _compiled(tx.update)(*arguments, **accepted)
        return tx.update(*arguments, **accepted)

    return optax.GradientTransformationExtraArgs(tx.init, update)


_CONDITIONAL = (
    optax.ApplyIfFiniteState,
    optax.ConditionallyMaskState,
    optax.ConditionallyTransformState,
    optax.MultiStepsState,
)
"""States of transformations that create a conditional with new closures in every step.

Outside of jit, JAX would trace and compile this conditional in every step.
"""


@functools.lru_cache(maxsize=64)
def _compiled(update: Callable) -> Callable:
    return jax.jit(update)


def split_extra_args(extra_args: dict) -> tuple[dict, dict]:
    """Return the arguments that consist of arrays, and all other arguments.

    >>> split_extra_args({"value": jax.numpy.ones(()), "name": "x", "value_fn": abs})
    ({'value': Array(1., dtype=float32)}, {'name': 'x', 'value_fn': <built-in ...>})
    """
    is_array = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")
    is_traced = lambda x: all(map(is_array, jax.tree.leaves(x)))
    traced = {name: x for name, x in extra_args.items() if is_traced(x)}
    static = {name: x for name, x in extra_args.items() if name not in traced}
    return traced, static


def check_state(function: str, state, kind: type, integers: Sequence[str] = ()) -> None:
    """Raise a TypeError unless a state and its integers have the types of ``init``."""
    if not isinstance(state, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(
            f"{function}: state must be {article} {kind.__name__}, got a "
            f"{type(state).__name__}. Pass the state that this transformation's init "
            "returned"
        )
    for field in integers:
        number = getattr(state, field)
        dtype = getattr(number, "dtype", type(number))
        if np.shape(number) or not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                f"{function}: state.{field} must be an integer, got "
                f"{trees.describe(number)}"
            )


def _is_in_conditional() -> bool:
    """Return whether a wrapper such as ``optax.apply_if_finite`` calls the update.

    Such a wrapper has a conditional that returns updates or zeros, and JAX requires
    the dtypes of the gradients for both. The wrapper passes no information about
    itself, so this function looks for it in the calling frames.
    """
    return any(
        frame.f_code.co_name == "do_update"
        and frame.f_globals.get("__name__", "").startswith("optax.")
        for frame in context.calling_frames()
    )


def _check_dtypes(updates, grads) -> None:
    """Raise a TypeError unless updates are arrays with the dtypes of the gradients."""
    kind = lambda x: "quantized" if trees.is_quantized(x) else trees.describe(x)
    names, leaves, treedef = trees.named_leaves(grads)
    parts = trees.parts_of(names, treedef, updates, "updates")
    for name, grad, part in zip(names, leaves, parts, strict=True):
        wanted, given = kind(grad), kind(part)
        if given != wanted:
            raise TypeError(
                "optax.apply_if_finite and conditionally_mask need updates with the "
                f"dtypes of the gradients, but the update of params{name} is {given}, "
                f"and its gradient {wanted}. Use lowbit_optax.step, or put the wrapper "
                "inside, as in lowbit(optax.apply_if_finite(optax.adamw(1e-3), 5)) or "
                "direct_updates(optax.apply_if_finite(tx, 5))"
            )


class MarkedArguments(typing.NamedTuple):
    """The arguments of a marked update, and the traced values that it contains."""

    grads: typing.Any
    state: typing.Any
    params: typing.Any
    extra_args: dict
    held: Sequence


update_p = Primitive("lowbit_update")
"""Marks the place of an update in a trace."""
update_p.multiple_results = True


@update_p.def_abstract_eval
def _results_of_update(*avals, results: int, **_):
    return list(avals[:results])


def _run_marked(*leaves, results: int, structure, with_held, static, **_):
    """Run a marked update.

    The step does not run markers. But if a wrapper contains ``jax.jit(tx.update)``, JAX
    caches the trace with the marker, and runs it when the function is called again.
    """
    grads, state, params, traced, held = structure.unflatten(leaves)
    arguments = params, state, grads, ADD_LIKE_GRADS, traced | static()
    found = jax.tree.leaves(with_held(held).run(*arguments))
    like = zip(found, leaves[:results], strict=True)
    return [x.astype(old.dtype) for x, old in like]


update_p.def_impl(_run_marked)
lower_as(update_p, _run_marked)


def marked(
    stepper: Stepper,
    with_held: Callable[[Sequence], Stepper],
    held: Sequence,
    grads: optax.Updates,
    state,
    params,
    extra_args: dict,
) -> tuple[optax.Updates, typing.Any]:
    """Add a marker for an update to a trace, and return placeholders for its results.

    Args:
      stepper: the transformation.
      with_held: function that returns the transformation with other values for
        ``held``.
      held: the traced values that the transformation contains.
      grads, state, params, extra_args: the arguments of the update.
    """
    traced, static = split_extra_args(extra_args)
    arguments = MarkedArguments(grads, state, params, traced, held)
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
        static=lambda: static,
    )
    return jax.tree.unflatten(of_results, found)


_SKIPS = (optax.ApplyIfFiniteState, optax.ZeroNansState)
"""States of optax's transformations that skip or zero non-finite gradients."""


def check_multi_steps_around(params, skips: str | None = None) -> None:
    """Raise an error if the caller is inside a MultiSteps that does not support it.

    Args:
      params: the parameters that the caller's ``init`` received.
      skips: the name of the caller if it skips non-finite gradients.
    """
    this, init = check_multi_steps_around.__code__, optax.MultiSteps.init.__code__
    if sum(x.f_code is this for x in context.calling_frames()) > 1:
        return  # the outer call checks the whole state
    around = next((x for x in context.calling_frames() if x.f_code is init), None)
    if around is None:
        return
    if any(map(trees.is_quantized, trees.named_leaves(params)[1])):
        raise TypeError(
            "optax.MultiSteps does not support quantized weights, because its "
            "accumulators have the types of the parameters. Use "
            "lowbit_optax.accumulate_gradients, or put MultiSteps inside lowbit"
        )
    if skips is not None:
        raise ValueError(_refusal(skips))
    multi_steps, params = around.f_locals["self"], around.f_locals["params"]
    # Use a new function, because JAX may already be tracing the bound method.
    init = lambda params: multi_steps.init(params)
    check_multi_steps_in(jax.eval_shape(init, params))


def check_multi_steps_in(state) -> None:
    """Raise an error if a MultiSteps contains a transformation that skips gradients.

    A MultiSteps with ``should_skip_update_fn`` is allowed, because it skips such
    gradients itself.
    """
    for multi_steps in trees.all_of(optax.MultiStepsState, state):
        skips = trees.all_of(_SKIPS, multi_steps.inner_opt_state)
        if skips and not jax.tree.leaves(multi_steps.skip_state):
            raise ValueError(_refusal(type(skips[0]).__name__))


def _refusal(skips: str) -> str:
    return (
        f"optax.MultiSteps must not contain {skips}, which skips non-finite gradients. "
        "MultiSteps resets its accumulator with a product with 0, so an infinity or "
        "NaN would stay there, and every later step would be skipped. Use the other "
        "order, as in with_loss_scale(optax.MultiSteps(tx, 4), scaling), "
        "lowbit(optax.apply_if_finite(optax.MultiSteps(optax.adamw(1e-3), 4), 5)) or "
        "optax.chain(optax.zero_nans(), optax.MultiSteps(tx, 4)). Or use "
        "lowbit_optax.accumulate_gradients instead of MultiSteps, as in "
        "accumulate_gradients(with_loss_scale(tx, scaling), 4)"
    )
