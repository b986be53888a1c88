"""What surrounds a step and cannot be passed to it as an argument.

Between the code that knows these things and the functions that need them stand optax's
wrappers: ``masked``, ``chain``, ``MultiSteps``, ``partition``. They pass on ``grads``,
``state`` and ``params`` and nothing else, so all else travels in one context variable:

    masters.from_master ---> initial_masters ---+
    release, in its loop --> one_layer ---------+--> [wrappers] --> current()
    release, before it ----> analysis ----------+
    step, around a wrapper > params_wanted -----+
"""

import contextlib
import contextvars
import dataclasses
import typing
from collections.abc import Iterator, Mapping

import jax

if typing.TYPE_CHECKING:
    from lowbit_optax._step.stacks import Layer


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What surrounds an ``init`` or a step.

    Args:
      masters: float32 weights by the parameters' paths, from which ``init`` makes the
        residuals of these parameters. At all other paths the parameter is the master.
      layer: the layer of stacked parameters that is updated; None where the arguments
        are whole parameters.
      is_analysed: whether the step is traced only to read its jaxpr.
      wants_params: whether ``update`` shall return new parameters instead of updates,
        see :mod:`lowbit_optax._step.direct`.
    """

    masters: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    layer: "Layer | None" = None
    is_analysed: bool = False
    wants_params: bool = False


_NOTHING = StepContext()
_CURRENT: contextvars.ContextVar[StepContext] = contextvars.ContextVar(
    "lowbit_optax_step", default=_NOTHING
)


def current() -> StepContext:
    """The context of the call that is running."""
    return _CURRENT.get()


def initial_masters(masters: Mapping[str, jax.Array]):
    """Within it, ``init`` takes these masters, by path, instead of the parameters."""
    return _changed(masters=masters)


def one_layer(layer: "Layer"):
    """Within it, transformations are called with this layer of stacked parameters."""
    return _changed(layer=layer)


def analysis():
    """Within it, steps run on XLA, and their jaxprs show the calls of ``marked_layerwise``."""
    return _changed(is_analysed=True)


def params_wanted(wanted: bool = True):
    """Within it, ``update`` returns new parameters, or again updates."""
    return _changed(wants_params=wanted)


@contextlib.contextmanager
def _changed(**fields) -> Iterator[None]:
    token = _CURRENT.set(dataclasses.replace(current(), **fields))
    try:
        yield
    finally:
        _CURRENT.reset(token)
