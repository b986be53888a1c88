"""The launchers of kernels: Pallas' backends for GPUs, and for TPUs."""

import importlib
import typing
from collections.abc import Sequence

import jax
from jax import lax

from pallas_kernels.fused_update.launch import Call
from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.spec import Leaf
from pallas_kernels.platforms import has_mosaic, target_gpu

Name = typing.Literal["triton", "mosaic"]

DEFAULT: Name | None = None
"""By which launcher kernels run where none is named; if None, :func:`default_name`."""

_CAPABILITIES_OF_MOSAIC = (9, 10)


class Launcher(typing.Protocol):
    """What a launcher's module defines, for one of Pallas' backends."""

    def max_leaves(self, leaves: Sequence[Leaf]) -> int:
        """How many of these leaves a kernel should update at most."""
        ...

    def can_share(self, shards: Sequence[Shard]) -> bool:
        """Whether these leaves, or shards of leaves, can share a kernel."""
        ...

    def update(self, call: Call) -> list[jax.Array]:
        """The results of a call's kernel, of one leaf after the other."""
        ...


def launcher(implementation: str | None, *, interpret: bool = False) -> Launcher:
    """The launcher of an implementation.

    Args:
      implementation: see :data:`pallas_kernels.platforms.Implementation`.
      interpret: whether XLA runs its operations, on any platform.
    """
    if implementation == "tpu":
        return typing.cast(Launcher, tpu_launcher())
    # XLA can run operations of Triton's kernels only.
    name = "triton" if interpret else name_of(implementation)
    # Imported where it is needed: older versions of JAX cannot import Mosaic's, and
    # Pallas takes a tenth of the time of importing this package.
    module = importlib.import_module(f"pallas_kernels.fused_update.{name}")
    return typing.cast(Launcher, module)


def tpu_launcher():
    """The module of the launcher for TPUs, which is imported where it is needed."""
    return importlib.import_module("pallas_kernels.fused_update.tpu")


def name_of(implementation: str | None) -> Name:
    """The name of an implementation's launcher for GPUs.

    Args:
      implementation: see :data:`pallas_kernels.platforms.Implementation`.
    """
    if implementation == "triton" or implementation == "mosaic":
        return implementation
    return default_name()


def default_name() -> Name:
    """Which launcher's kernels run on GPUs where none is named.

    Mosaic GPU's on Hopper and Blackwell, if this JAX has it. There JAX deprecates
    Triton's, which run on older GPUs, with older JAX, and in a ``jax.shard_map`` that
    checks how arrays vary (``check_vma``).
    """
    if DEFAULT is not None:
        return DEFAULT
    gpu = target_gpu()
    is_for_mosaic = gpu is not None and gpu.major in _CAPABILITIES_OF_MOSAIC
    if has_mosaic() and is_for_mosaic and not _is_typed():
        return "mosaic"
    return "triton"


def _is_typed() -> bool:
    """Whether this is in a ``jax.shard_map`` whose arrays' types say how they vary.

    Mosaic GPU takes no references of such types.
    """
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return bool(axes and jax.typeof(lax.axis_index(axes)).manual_axis_type.varying)
