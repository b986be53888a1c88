"""What a step must know and cannot be given as an argument.

optax's wrappers (``masked``, ``chain``, ``MultiSteps``, ``partition``) stand between
the code that knows these things and the functions that need them. They pass on
``grads``, ``state`` and ``params``, and nothing else. So the rest travels in one
context variable:

    masters.from_master ---> start -------------+
    release, in its loop --> layer -------------+--> [wrappers] --> current()
    release, before it ----> is_analysed -------+
    convert, before it ----> start -------------+
    diagnostics -----------> report ------------+
    step, around a wrapper > wants_params ------+
    step, inside a wrapper > of_wrappers -------+
"""

import contextlib
import contextvars
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator

import jax
from jax.extend.core import get_opaque_trace_state

from lowbit_optax._step.layers import Layer


@dataclasses.dataclass(frozen=True)
class StepContext:
    """The surroundings of an ``init`` or a step.

    Args:
      start: what ``init`` of ``lowbit`` returns, a function of its configuration and
        of the parameters; None for the state in which every master is its parameter.
      layer: the layer of stacked parameters that is updated; None if the arguments are
        whole parameters.
      is_analysed: whether the step is traced only to read its jaxpr. It then runs on
        XLA, and its jaxpr shows the calls of functions that :func:`layerwise` marks.
      wants_params: whether ``update`` should only mark its place in a trace, for new
        parameters instead of updates; see :mod:`lowbit_optax._step.wrapped`.
      of_wrappers: the arrays from which wrappers compute the gradients, perhaps inside
        the inner update.
      report: what steps call with themselves and the inner update, instead of doing
        anything; None for steps that are done.
    """

    start: Callable[..., typing.Any] | None = None
    layer: Layer | None = None
    is_analysed: bool = False
    wants_params: bool = False
    of_wrappers: tuple = ()
    report: Callable[..., None] | None = None


_NOTHING = StepContext()
_CURRENT = contextvars.ContextVar("lowbit_optax_step", default=_NOTHING)


def current() -> StepContext:
    """The context of the call that is running."""
    return _CURRENT.get()


@contextlib.contextmanager
def changed(**fields) -> Iterator[None]:
    """A context in which :func:`current` has other fields of :class:`StepContext`."""
    token = _CURRENT.set(dataclasses.replace(current(), **fields))
    try:
        yield
    finally:
        _CURRENT.reset(token)


LAYERWISE = "lowbit_layerwise"
"""The name of the calls that :func:`layerwise` marks."""


def layerwise(function: Callable) -> Callable:
    """Mark a function that treats the layers of stacked arguments alike.

    That is, ``function(x)[i]`` must be ``function(x[i])`` for every layer ``i``. Its
    arguments are arrays, either all stacked along their first axis or all of one layer;
    or None. While a step is analysed, its call appears in the jaxpr under the name
    ``LAYERWISE``: the packing of bits is hard to follow there.
    """
    if not current().is_analysed:
        return function
    named = functools.partial(function)
    named.__name__ = LAYERWISE  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(named)


@contextlib.contextmanager
def reporting(what: str, measure: Callable) -> Iterator[dict[str, typing.Any]]:
    """A context in which steps of ``lowbit`` only add to the mapping that it gives.

    Args:
      what: the function that asks, for errors.
      measure: ``(step, inner update, implementation) -> values by path``; see
        :mod:`lowbit_optax.reports.diagnostics`.
    """
    found, trace = {}, get_opaque_trace_state()

    def report(step, update: Callable, implementation) -> None:
        if get_opaque_trace_state() != trace:
            # The values cannot leave a conditional.
            raise ValueError(
                f"{what}: a wrapper around lowbit steps inside a conditional, as "
                "optax.MultiSteps does; give the transformation that lowbit returned"
            )
        found.update(measure(step, update, implementation))

    with changed(report=report):
        yield found
