"""The launchers of kernels: Pallas' backends for GPUs, and for TPUs."""

import importlib
import typing
from collections.abc import Sequence

import jax

from pallas_kernels.fused_update import triton
from pallas_kernels.fused_update.sharded import Shard
from pallas_kernels.fused_update.spec import BlockBody, Body, Leaf

DEFAULT: typing.Literal["triton", "mosaic"] = "triton"
"""By which launcher kernels run where none is named.

Triton's take fewer instructions, and run on older GPUs and with older JAX too.
"""

_MIN_JAX_OF_MOSAIC = (0, 11)


class Launcher(typing.Protocol):
    """What a launcher's module defines."""

    def max_leaves(self, leaves: Sequence[Leaf]) -> int:
        """How many of these leaves a kernel should update at most."""
        ...

    def can_share(self, shards: Sequence[Shard]) -> bool:
        """Whether these leaves, or shards of leaves, can share a kernel."""
        ...

    def update(
        self,
        body: Body | BlockBody,
        shards: Sequence[Shard],
        table: jax.Array,
        rows: jax.Array | None = None,
        layer: jax.Array | None = None,
        *,
        when: int | None = None,
        interpret: bool = False,
    ) -> list[jax.Array]:
        """One kernel over a leaf, a shard of it, a layer of a stack, or many leaves."""
        ...


def launcher(implementation: str | None) -> Launcher:
    """The launcher of an implementation.

    Args:
      implementation: see :data:`pallas_kernels.platforms.Implementation`.

    Raises:
      NotImplementedError: if this JAX lacks what the launcher needs.
    """
    if implementation == "tpu":
        return typing.cast(Launcher, tpu_launcher())
    named = implementation in ("triton", "mosaic")
    chosen = implementation if named else DEFAULT
    if chosen == "triton":
        return triton
    if not has_mosaic():
        least = ".".join(map(str, _MIN_JAX_OF_MOSAIC))
        raise NotImplementedError(
            f"fused_update: implementation 'mosaic' needs JAX {least} or newer, not "
            f"{jax.__version__}"
        )
    # Older versions of JAX cannot import it.
    module = importlib.import_module("pallas_kernels.fused_update.mosaic")
    return typing.cast(Launcher, module)


def tpu_launcher():
    """The module of the launcher for TPUs, which is imported where it is needed."""
    return importlib.import_module("pallas_kernels.fused_update.tpu")


def has_mosaic() -> bool:
    """Whether this JAX has what Mosaic GPU's launcher needs."""
    return jax.__version_info__[:2] >= _MIN_JAX_OF_MOSAIC
