"""A choice made when a program is lowered: whether it is for one device.

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

_by_devices_p = Primitive("by_devices")
_by_devices_p.multiple_results = True


def for_one_device(
    alone: Callable, partitioned: Callable, message: str | None = None
) -> Callable:
    """A function that is ``alone`` in a program for one device, else ``partitioned``.

    It can neither be differentiated nor batched.

    Args:
      alone, partitioned: from trees of arrays to lists of arrays, of the same shapes.
      message: what to warn of where ``partitioned`` is taken; None for no warning.

    >>> import jax.numpy as jnp
    >>> chosen = for_one_device(lambda x: [x + 1], lambda x: [x - 1])
    >>> float(jax.jit(chosen)(jnp.zeros(()))[0])
    1.0
    """

    def chosen(*args) -> typing.Any:
        leaves, structure = jax.tree.flatten(args)

        def traced(fn: Callable) -> ClosedJaxpr:
            return jax.make_jaxpr(lambda *flat: fn(*structure.unflatten(flat)))(*leaves)

        return _by_devices_p.bind(
            *leaves,
            alone=traced(alone),
            partitioned=traced(partitioned),
            message=message,
        )

    return chosen


@_by_devices_p.def_abstract_eval
def _results(*avals, alone: ClosedJaxpr, partitioned: ClosedJaxpr, message):
    del avals, partitioned, message
    return list(alone.out_avals)


@_by_devices_p.def_impl
def _run(*args, **params):
    return jax.jit(lambda *args: _by_devices_p.bind(*args, **params))(*args)


def _lower(ctx, *args, alone: ClosedJaxpr, partitioned: ClosedJaxpr, message):
    # A context without a number is a jax.shard_map's, where XLA partitions nothing.
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if devices != 1 and message is not None:
        warnings.warn(message, stacklevel=2)
    chosen = alone if devices == 1 else partitioned
    return mlir.lower_fun(jaxpr_as_fun(chosen), multiple_results=True)(ctx, *args)


mlir.register_lowering(_by_devices_p, _lower)
