"""Choose the launcher that an implementation uses."""

import importlib
import typing

from pallas_kernels.platforms import launcher_name


def launcher_of(implementation: str | None, interpret: bool = False) -> typing.Any:
    """Return the module of a launcher, which implements :class:`.spec.Launcher`.

    The module is imported on first use, because older versions of JAX cannot import
    Mosaic GPU, and Pallas would take a tenth of this package's import time.

    Args:
      implementation: see :data:`pallas_kernels.platforms.Implementation`.
      interpret: if True, kernels run as ordinary operations on any platform. GPU
        kernels then always use Triton, because JAX cannot interpret Mosaic GPU.
    """
    if implementation == "tpu":
        name = "tpu.kernel"
    else:
        name = f"gpu.{'triton' if interpret else launcher_name(implementation)}"
    return importlib.import_module(f"pallas_kernels.fused_update.{name}")
