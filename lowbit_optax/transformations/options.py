"""Options that every optimizer of this package passes to ``lowbit``."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable

from lowbit_optax._step.param_shardings import ParamShardings
from pallas_kernels.platforms import Implementation

_Function = typing.TypeVar("_Function", bound=Callable)


class Options(typing.TypedDict, total=False):
    """Options of :func:`lowbit_optax.lowbit`; None selects the default."""

    seed: int | None
    min_size: int | None
    implementation: Implementation
    param_shardings: ParamShardings
    warn: bool | None
    match_grad_dtype: bool | None


def takes_options(function: _Function) -> _Function:
    """Name each option in the signature of a function with ``**options``.

    ``optax.inject_hyperparams`` and ``help`` read the signature.

    >>> @takes_options
    ... def sgd(learning_rate, **options: typing.Unpack[Options]):
    ...     return options
    >>> list(inspect.signature(sgd).parameters)[:3]
    ['learning_rate', 'seed', 'min_size']
    """
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter(name, keyword, default=None, annotation=kind.__forward_arg__)
        for name, kind in Options.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *options])
    return function
