"""Memory-efficient training for JAX, as optax gradient transformations.

This namespace contains the names that most programs need. The modules ``formats``,
``loss_scaling``, ``lpmm``, ``block_scaling``, ``reports``, ``release``, ``precision``,
``emulation``, ``patches`` and ``training`` contain all other names. ``training`` needs
the ``flax`` extra.
"""

import importlib as _importlib
import typing as _typing
from importlib import metadata as _metadata

from lowbit_optax import aliases as _aliases
from lowbit_optax._step.float32_params import param_dtypes
from lowbit_optax._step.state import LowbitState
from lowbit_optax.aliases import *
from lowbit_optax.formats import (
    block_quantized,
    cast,
    extra_bits,
    kahan,
    master_copy,
    nearest,
    stochastic_rounding,
)
from lowbit_optax.loss_scaling import scaled_value_and_grad, with_loss_scale
from lowbit_optax.lpmm import accumulate_gradients, lpmm_adam, lpmm_sgd
from lowbit_optax.reports import explain, memory_report, plan, step_report
from lowbit_optax.split_array import SplitArray, join_array, split_array
from lowbit_optax.states import exported as _exported  # noqa: F401
from lowbit_optax.states.conversion import convert
from lowbit_optax.states.host_shardings import host_shardings
from lowbit_optax.states.masters import from_master, master_weights, with_master
from lowbit_optax.states.sharding import state_shardings
from lowbit_optax.transformations.averaging import ema_of_params
from lowbit_optax.transformations.direct import direct_updates
from lowbit_optax.transformations.lowbit import lowbit
from lowbit_optax.transformations.step import apply_updates, step

if _typing.TYPE_CHECKING:
    from lowbit_optax import block_scaling as block_scaling
    from lowbit_optax import emulation as emulation
    from lowbit_optax import formats as formats
    from lowbit_optax import loss_scaling as loss_scaling
    from lowbit_optax import lpmm as lpmm
    from lowbit_optax import patches as patches
    from lowbit_optax import precision as precision
    from lowbit_optax import release as release
    from lowbit_optax import reports as reports
    from lowbit_optax import training as training
    from lowbit_optax import transformations as transformations
else:

    def __getattr__(name: str):
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return _importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            # hasattr and inspect.getmembers must work without the flax extra.
            raise AttributeError(str(error)) from error


_MODULES = ("block_scaling", "emulation", "patches", "precision", "release", "training")
"""The modules that are imported on first use."""

try:
    __version__ = _metadata.version("lowbit-optax")
except _metadata.PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "LowbitState",
    "SplitArray",
    "accumulate_gradients",
    "apply_updates",
    "block_quantized",
    "cast",
    "convert",
    "direct_updates",
    "ema_of_params",
    "explain",
    "extra_bits",
    "from_master",
    "host_shardings",
    "join_array",
    "kahan",
    "lowbit",
    "lpmm_adam",
    "lpmm_sgd",
    "master_copy",
    "master_weights",
    "memory_report",
    "nearest",
    "param_dtypes",
    "plan",
    "scaled_value_and_grad",
    "split_array",
    "state_shardings",
    "step",
    "step_report",
    "stochastic_rounding",
    "with_loss_scale",
    "with_master",
]
__all__ += _aliases.__all__


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
