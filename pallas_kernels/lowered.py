"""Choices made when a program is lowered: whether it is for one device or platform.

XLA:TPU cannot partition kernels. Under plain ``jax.jit`` nothing says while a function
is traced whether the program will be for one of a host's devices or for all of them.
The lowering knows. JAX lets nothing ask it but the lowering
rule of a primitive, for which ``jax.interpreters.mlir`` is the documented module.
"""

import typing
import warnings
from collections.abc import Callable

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from pallas_kernels.operations import ClosedJaxpr

_chosen_p = Primitive("chosen_when_lowered")
_chosen_p.multiple_results = True


def for_one_device(
    alone: Callable, partitioned: Callable, message: str | None = None
) -> Callable:
    """A function that is ``alone`` in a program for one device, else ``partitioned``.

    It can neither be differentiated nor batched.

    Args:
      alone, partitioned: from trees of arrays to lists of arrays, of the same shapes.
        ``partitioned`` is traced only where it is needed, and closes over no arrays.
      message: what to warn of where ``partitioned`` is taken; None for no warning.

    >>> import jax.numpy as jnp
    >>> chosen = for_one_device(lambda x: [x + 1], lambda x: [x - 1])
    >>> float(jax.jit(chosen)(jnp.zeros(()))[0])
    1.0
    """
    return _chosen(alone, partitioned, one_device=True, message=message)


def for_one_platform(kernel: Callable, portable: Callable) -> Callable:
    """``kernel`` in a program for one platform, and ``portable`` in any other program.

    ``jax.export`` makes programs for several platforms, and each platform must be able
    to lower the whole program. See :func:`for_one_device`.
    """
    return _chosen(kernel, portable, one_device=False, message=None)


def _chosen(first: Callable, other: Callable, **static) -> Callable:
    def chosen(*args) -> typing.Any:
        leaves, structure = jax.tree.flatten(args)
        flat = lambda fn: lambda *flat: fn(*structure.unflatten(flat))
        closed = jax.make_jaxpr(flat(first))(*leaves)
        # JAX's coming autodiff asks more of a primitive with a jaxpr of its own kind.
        is_high = getattr(closed.jaxpr, "is_high", False)
        run = jax.jit(jaxpr_as_fun(closed)) if is_high else closed
        avals = tuple(closed.out_avals)
        return _chosen_p.bind(
            *leaves, first=run, avals=avals, other=flat(other), **static
        )

    return chosen


@_chosen_p.def_abstract_eval
def _results(*operands, avals, **static):
    del operands, static
    return list(avals)


@_chosen_p.def_impl
def _run(*args, **params):
    return jax.jit(lambda *args: _chosen_p.bind(*args, **params))(*args)


def _lower(
    ctx,
    *args,
    first: ClosedJaxpr | Callable,
    avals,
    other: Callable,
    one_device: bool,
    message,
):
    del avals
    # A context without a number is a jax.shard_map's, where XLA partitions nothing.
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    is_alone = not one_device or devices == 1
    if not is_alone and message is not None:
        warnings.warn(message, stacklevel=2)
    is_first = is_alone and len(ctx.module_context.platforms) == 1
    kernel = jaxpr_as_fun(first) if isinstance(first, ClosedJaxpr) else first
    chosen = kernel if is_first else other
    return mlir.lower_fun(chosen, multiple_results=True)(ctx, *args)


mlir.register_lowering(_chosen_p, _lower)
