"""The options of ``lowbit`` that every optimizer of this package takes as well."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable

from lowbit_optax._step.param_shardings import ParamShardings
from pallas_kernels.platforms import Implementation

_Function = typing.TypeVar("_Function", bound=Callable)


class Options(typing.TypedDict, total=False):
    """Options that are passed to :func:`lowbit_optax.lowbit`, which documents them.

    None stands for the default of ``lowbit``.
    """

    seed: int | None
    min_size: int | None
    implementation: Implementation
    param_shardings: ParamShardings
    warn: bool | None
    match_grad_dtype: bool | None


def takes_options(function: _Function) -> _Function:
    """A function with ``**options``, once its signature names each of them.

    ``optax.inject_hyperparams`` reads the signature, and so does ``help``.

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
