"""``StepContext``: information that optax's function signatures cannot pass to a step.

Wrappers of optax (``masked``, ``chain``, ``MultiSteps``, ``partition``) are called
between the functions that set this information and the functions that need it. They
pass only ``grads``, ``state`` and ``params``. All other information is stored in one
context variable:

    masters.from_master ---> start -------------+
    release, in its loop --> layer -------------+--> [wrappers] --> current()
    release, before it ----> is_analysed -------+
    host_step, release ---> group_of ----------+
    init_with, analyses ---> start -------------+
    diagnostics -----------> report ------------+
    patches.step ----------> on_changes --------+
    step, around a wrapper > wants_params ------+
    step, inside a wrapper > of_wrappers -------+
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.extend.core import get_opaque_trace_state

from lowbit_optax._step.seeds import Layer


@dataclasses.dataclass(frozen=True)
class StepContext:
    """The context of an ``init`` or a step.

    Args:
      start: function that ``init`` calls with the :class:`.engine.Lowbit` and the
        parameters, and whose result it returns. If None, each master equals its
        parameter.
      layer: the layer of stacked parameters that is updated; None for whole parameters.
      is_analysed: if True, the step is traced only to read its jaxpr. It uses XLA, and
        the jaxpr shows calls of functions that :func:`layerwise` marks.
      wants_params: if True, ``update`` only adds a marker to the trace; see
        :mod:`lowbit_optax._step.wrapped`.
      of_wrappers: arrays from the trace of a wrapper, which the inner update may
        contain as constants.
      group_of: function from the path of a leaf to its group, if the traced step will
        be divided into groups that run one after the other. Only leaves of one group
        share kernels, and the branches of all platforms are traced.
      report: function that is called with the step, the inner update and the
        implementation, instead of running the step; None for ordinary steps.
      on_changes: function that a step calls with the paths of its parameters, the
        parameters, and bitmaps of the changed weights; None if these are not wanted.
    """

    start: Callable[..., typing.Any] | None = None
    layer: Layer | None = None
    is_analysed: bool = False
    wants_params: bool = False
    of_wrappers: tuple = ()
    group_of: Callable[[str], typing.Any] | None = None
    report: Callable[..., None] | None = None
    on_changes: Callable[[Sequence, Sequence, Sequence], None] | None = None


_NOTHING = StepContext()
_CURRENT = contextvars.ContextVar("lowbit_optax_step", default=_NOTHING)


def current() -> StepContext:
    """Return the context of the step that is being traced.

    The fields are those that enclosing :func:`changed` blocks have set, and the
    defaults of :class:`StepContext` otherwise.
    """
    return _CURRENT.get()


@contextlib.contextmanager
def changed(**fields) -> Iterator[None]:
    """Set fields of :class:`StepContext` inside a ``with`` block."""
    token = _CURRENT.set(dataclasses.replace(current(), **fields))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def init_with(start: Callable, tx, shapes):
    """Return the shapes of ``tx.init``, in which ``start`` initializes each ``lowbit``.

    Args:
      start: see :class:`StepContext`. With :func:`without_masters`, the parameters may
        have other shapes than the masters of ``with_master``.
      tx: a transformation.
      shapes: tree of ShapeDtypeStructs.
    """
    with changed(start=start):
        # Wrap tx.init, because JAX may have cached its result outside of this context.
        return jax.eval_shape(lambda params: tx.init(params), shapes)


def without_masters(config, params):
    """Return the initial state of a ``lowbit`` whose masters equal its parameters."""
    return config.start(params, {})


def calling_frames() -> Iterator[types.FrameType]:
    """Yield the frames of all calling functions, starting with the innermost one.

    optax and JAX pass no information about a caller to the functions that they call.
    """
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


LAYERWISE = "lowbit_layerwise"
"""The name of the calls that :func:`layerwise` marks."""


def layerwise(function: Callable) -> Callable:
    """Mark a function that processes each layer of stacked arguments in the same way.

    For every layer ``i``, ``function(x)[i]`` must equal ``function(x[i])``. Arguments
    are arrays or None. Either all arrays are stacked along their first axis, or all
    belong to one layer. While a step is analyzed, the call appears in the jaxpr with
    the name ``LAYERWISE``, because the analysis cannot follow the packing of bits.
    """
    if not current().is_analysed:
        return function
    named = functools.partial(function)
    named.__name__ = LAYERWISE  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(named)


@contextlib.contextmanager
def reporting(what: str, measure: Callable) -> Iterator[dict[str, typing.Any]]:
    """Yield a dict. Steps in the ``with`` block add values to it instead of running.

    Args:
      what: the name of the calling function, for errors.
      measure: ``(step, inner update, implementation) -> dict by path``; see
        :mod:`lowbit_optax.reports.diagnostics`.
    """
    found, trace = {}, get_opaque_trace_state()

    def report(step, update: Callable, implementation) -> None:
        if get_opaque_trace_state() != trace:
            # Values cannot be returned from a conditional.
            raise ValueError(
                f"{what}: tx must not run lowbit inside a conditional, as "
                "optax.MultiSteps does. Pass the transformation that lowbit returned"
            )
        found.update(measure(step, update, implementation))

    with changed(report=report):
        yield found
