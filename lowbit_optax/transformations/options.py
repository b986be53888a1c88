"""Options that every optimizer of this package passes to ``lowbit``."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable

import jax
import jax.numpy as jnp

from lowbit_optax._arguments import brief
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

    ``optax.inject_hyperparams`` and ``help`` read the signature. The result raises a
    TypeError if ``inject_hyperparams`` has turned an argument that must be static, such
    as a mask or a flag, into an array.

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
    parameters = [*own, *options]
    numbers = re.compile(r"\b(float|ScalarOrSchedule|DTypeLike)\b")
    static = {x.name for x in parameters if not numbers.search(str(x.annotation))}

    @functools.wraps(function)
    def checked(*args, **kwargs):
        names = [x.name for x in parameters]
        for name, value in (dict(zip(names, args, strict=False)) | kwargs).items():
            if name not in names:
                raise TypeError(
                    f"{function.__name__}: arguments must be among {', '.join(names)}, "
                    f"got {name}. For other formats, use lowbit_optax.lowbit"
                )
            is_array = isinstance(value, jax.Array) and name in static
            # A mask that is called with a count, as a schedule is, returns a bool.
            if is_array or (name == "mask" and isinstance(value, bool)):
                given = jax.typeof(value) if is_array else value
                raise TypeError(
                    f"{function.__name__}: {name} cannot be {given}. "
                    "optax.inject_hyperparams calls functions as schedules, and turns "
                    f"numbers into arrays, so add {name} to its static_args"
                )
            is_flag = lambda x: jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.bool_)
            is_mask = callable(value) or all(map(is_flag, jax.tree.leaves(value)))
            if name == "mask" and not is_mask:
                raise TypeError(
                    f"{function.__name__}: mask must be a tree of bools, a function of "
                    f"the parameters that returns one, or None, got {brief(value)}"
                )
        return function(*args, **kwargs)

    signature = signature.replace(parameters=parameters)
    checked.__signature__ = signature  # pyright: ignore[reportAttributeAccessIssue]
    return typing.cast(typing.Any, checked)
