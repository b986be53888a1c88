"""Choose the launcher that an implementation uses."""

import importlib
import typing

from pallas_kernels.platforms import launcher_name


def launcher_of(implementation: str | None, interpret: bool = False) -> typing.Any:
    """The module of an implementation's launcher, which is a :class:`.spec.Launcher`.

    It is imported when it is needed: older versions of JAX cannot import Mosaic's, and
    Pallas takes a tenth of the time that this package takes to import.

    Args:
      implementation: see :data:`pallas_kernels.platforms.Implementation`.
      interpret: whether kernels run as ordinary operations, on any platform. JAX can
        interpret only Triton's kernels for GPUs.
    """
    if implementation == "tpu":
        name = "tpu.kernel"
    else:
        name = f"gpu.{'triton' if interpret else launcher_name(implementation)}"
    return importlib.import_module(f"pallas_kernels.fused_update.{name}")
