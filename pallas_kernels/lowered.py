"""Choose between two functions when a program is lowered for its devices and platforms.

XLA:TPU cannot partition kernels. While plain ``jax.jit`` traces a function, JAX does
not know yet whether the program will run on one device of the host or on all of them.
JAX knows this when it lowers the program, and only the lowering rule of a primitive can
find out. JAX documents ``jax.interpreters.mlir`` for such rules.
"""

import functools
import typing
import warnings
from collections.abc import Callable, Sequence

import jax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.operations import ClosedJaxpr

_chosen_p = Primitive("chosen_when_lowered")
_chosen_p.multiple_results = True


def lower_as(primitive: Primitive, function: Callable) -> None:
    """Lower a primitive with several results as the operations of a function."""
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True))


def for_one_device(
    alone: Callable, partitioned: Callable, message: str | None = None
) -> Callable:
    """Return a function that runs ``alone`` in programs for one device.

    In other programs, the returned function runs ``partitioned``. It cannot be
    differentiated or batched.

    Args:
      alone, partitioned: functions from trees of arrays to lists of arrays with the
        same shapes. ``partitioned`` is traced only if it is used, and must not close
        over arrays.
      message: text of a warning if ``partitioned`` is used; None for no warning.

    >>> import jax.numpy as jnp
    >>> chosen = for_one_device(lambda x: [x + 1], lambda x: [x - 1])
    >>> float(jax.jit(chosen)(jnp.zeros(()))[0])
    1.0
    """
    return _chosen(alone, partitioned, one_device=True, message=message)


def for_one_platform(kernel: Callable, portable: Callable) -> Callable:
    """Return a function that runs ``kernel`` in programs for one platform.

    In other programs, it runs ``portable``. ``jax.export`` can make a program for
    several platforms, and then JAX must be able to lower all of it for each platform.
    """
    return _chosen(kernel, portable, one_device=False, message=None)


def traced_when_lowered(
    function: Callable, avals: Sequence, arrays: Sequence, plain: bool = False
) -> list:
    """Call a function that is traced only if the program around it is lowered.

    It cannot be differentiated or batched, and must not close over arrays.

    Args:
      function: a function from arrays to a list of arrays.
      avals: the types of its results.
      arrays: its arguments.
      plain: if True, the types of its arguments list no axes of a ``jax.shard_map``.
    """
    static = {"avals": tuple(avals), "one_device": None, "message": None}
    first = _partitioned()
    return _chosen_p.bind(*arrays, first=first, other=function, plain=plain, **static)


def with_plain_types(function: Callable, results: Sequence, arrays: Sequence) -> list:
    """Call a function of arrays whose types do not list mesh axes.

    In a ``jax.shard_map`` with ``check_vma``, types list the axes over which arrays
    vary, and Pallas refuses references to such arrays. In this case, the function is
    called by :func:`traced_when_lowered`, with arrays without these types. So it is
    with ``jax.checking_leaks``, because JAX leaks tracers of every kernel for Mosaic
    GPU, and users look for leaks in their own code.

    Args:
      function: a function from arrays to a list of arrays.
      results: ShapeDtypeStructs of its results.
      arrays: its arguments.
    """
    is_varying = any(jax.typeof(x).manual_axis_type.varying for x in arrays)
    finds_leaks = jax.config.jax_check_tracer_leaks  # pyright: ignore[reportAttributeAccessIssue]
    if not (is_varying or finds_leaks):
        return function(*arrays)
    mesh = jax.sharding.get_abstract_mesh()
    avals = []
    for x in results:
        place = NamedSharding(mesh, PartitionSpec(*[None] * len(x.shape)))
        varying = {"sharding": place, "manual_axis_type": x.manual_axis_type}
        avals.append(ShapedArray(x.shape, x.dtype, **(varying if is_varying else {})))
    return traced_when_lowered(function, avals, arrays, plain=True)


@functools.cache
def _partitioned() -> ClosedJaxpr:
    """Return a jaxpr with a partitioned function.

    JAX passes devices to the lowering of a program only if it finds such a function.
    """
    same = custom_partitioning(lambda x: x)
    same.def_partition(None, sharding_rule="... -> ...")
    return jax.make_jaxpr(same)(0)


def _chosen(first: Callable, other: Callable, **static) -> Callable:
    def chosen(*args) -> typing.Any:
        leaves, structure = jax.tree.flatten(args)
        flat = lambda fn: lambda *flat: fn(*structure.unflatten(flat))
        closed = jax.make_jaxpr(flat(first))(*leaves)
        # With a jaxpr of JAX's future autodiff, a primitive would need more rules.
        is_high = getattr(closed.jaxpr, "is_high", False)
        run = jax.jit(jaxpr_as_fun(closed)) if is_high else closed
        avals = tuple(closed.out_avals)
        return _chosen_p.bind(
            *leaves, first=run, avals=avals, other=flat(other), plain=False, **static
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
    one_device: bool | None,
    message,
    plain: bool,
):
    del avals
    if plain:
        types = [ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
        ctx = ctx.replace(avals_in=types)
    # In a jax.shard_map, the context has no num_devices, and XLA partitions nothing.
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    is_alone = not one_device or devices == 1
    if not is_alone and message is not None:
        warnings.warn(message, stacklevel=2)
    is_first = is_alone and len(ctx.module_context.platforms) == 1
    is_first = is_first and one_device is not None
    kernel = jaxpr_as_fun(first) if isinstance(first, ClosedJaxpr) else first
    chosen = kernel if is_first else other
    return mlir.lower_fun(chosen, multiple_results=True)(ctx, *args)


mlir.register_lowering(_chosen_p, _lower)
