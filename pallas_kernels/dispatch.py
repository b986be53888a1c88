"""Kernels and references: which of them runs, and how they are transformed."""

import importlib
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_kernels.platforms import Implementation, is_elsewhere, launcher_name


def by_platform(
    implementation: Implementation,
    reference: Callable,
    arguments: Sequence,
    *,
    interpreted: Callable,
    cuda: Callable | None = None,
    tpu: Callable | None = None,
):
    """The results of the kernel for the platform, or of the reference.

    Args:
      implementation: see :data:`pallas_kernels.platforms.Implementation`.
      reference: a function of array operations.
      arguments: arrays, and perhaps trees of more of them.
      interpreted: the kernel's operations run by XLA.
      cuda, tpu: kernels that compute the same, or None.
    """
    if implementation in ("triton", "mosaic") and cuda is not None:
        return cuda(*arguments)
    branches = {"cuda": cuda, "tpu": tpu}
    branches = {name: kernel for name, kernel in branches.items() if kernel is not None}
    if implementation in ("xla", "tpu") or not branches:
        return reference(*arguments)
    default = interpreted if implementation == "pallas" else reference
    if is_elsewhere(x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)):
        return default(*arguments)
    return lax.platform_dependent(*arguments, default=default, **branches)


def launcher_module(package: str, implementation: str | None, interpret: bool = False):
    """The module of an implementation's launcher for GPUs.

    It is imported when it is needed: older versions of JAX cannot import Mosaic's, and
    Pallas takes a tenth of the time that this package takes to import.

    Args:
      package: that has a module for each launcher.
      implementation: see :data:`Implementation`.
      interpret: whether XLA runs its operations, on any platform. It can run Triton's.
    """
    name = "triton" if interpret else launcher_name(implementation)
    return importlib.import_module(f"{package}.{name}")


def transformable(kernel: Callable, reference: Callable) -> Callable:
    """The kernel, with the reference's derivatives and batches.

    Args:
      kernel: from trees of arrays to a tree of arrays.
      reference: a function of array operations that computes the same.
    """

    @custom_vmap
    def run(*args):
        return kernel(*args)

    @run.def_vmap
    def _(axis_size, batched, *args):
        axes = jax.tree.map(lambda each: 0 if each else None, batched)
        out = jax.vmap(reference, in_axes=axes, axis_size=axis_size)(*args)
        return out, jax.tree.map(lambda _: True, out)

    differentiable = jax.custom_jvp(lambda *args: run(*args))

    @differentiable.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda *args: reference(*args), primals, tangents)

    return differentiable
