"""Memory-efficient training for JAX, as optax gradient transformations.

The modules ``emulation``, ``loss_scaling``, ``lpmm``, ``precision``, ``release`` and
``training`` are attributes of the package; those that the rest does not need are
imported when they are first used. ``training`` needs the ``flax`` extra.
"""

import importlib as _importlib
import typing as _typing
from importlib import metadata as _metadata

from lowbit_optax import aliases as _aliases
from lowbit_optax import formats as _formats
from lowbit_optax._step.kept_float32 import param_dtypes
from lowbit_optax._step.state import LowbitState
from lowbit_optax.aliases import *
from lowbit_optax.block_scaling import block_scale
from lowbit_optax.formats import *
from lowbit_optax.formats.block_scaled_tensor import BlockScaledTensor
from lowbit_optax.formats.moment_fields import register_moments
from lowbit_optax.loss_scaling import (
    LossScaleState,
    backoff_scale,
    current_loss_scale,
    log_normal_scale,
    scaled_value_and_grad,
    static_scale,
    with_loss_scale,
)
from lowbit_optax.lpmm import (
    QuantizedTensor,
    accumulate_gradients,
    dequantize,
    lpmm_adam,
    lpmm_sgd,
    quantize_params,
)
from lowbit_optax.reports.diagnostics import LeafReport, cancelled_updates, step_report
from lowbit_optax.reports.explaining import explain
from lowbit_optax.reports.memory import MemoryReport, memory_report
from lowbit_optax.reports.planning import Plan, PlannedFormats, plan
from lowbit_optax.reports.step_memory import StepMemory, step_memory
from lowbit_optax.split_array import SplitArray, join_array, split_array
from lowbit_optax.states.conversion import convert
from lowbit_optax.states.masters import (
    from_master,
    master_weights,
    with_master,
)
from lowbit_optax.states.sharding import state_shardings
from lowbit_optax.transformations.averaging import ema_of_params
from lowbit_optax.transformations.direct import DirectUpdate, direct_updates
from lowbit_optax.transformations.lowbit import (
    apply_updates,
    lowbit,
    step,
)
from lowbit_optax.transformations.regularization import regularize

if _typing.TYPE_CHECKING:
    from lowbit_optax import emulation as emulation
    from lowbit_optax import loss_scaling as loss_scaling
    from lowbit_optax import lpmm as lpmm
    from lowbit_optax import precision as precision
    from lowbit_optax import release as release
    from lowbit_optax import training as training

_MODULES = ("emulation", "loss_scaling", "lpmm", "precision", "release", "training")

try:
    __version__ = _metadata.version("lowbit-optax")
except _metadata.PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0+unknown"

__all__ = [
    "BlockScaledTensor",
    "DirectUpdate",
    "LeafReport",
    "LossScaleState",
    "LowbitState",
    "MemoryReport",
    "Plan",
    "PlannedFormats",
    "QuantizedTensor",
    "SplitArray",
    "StepMemory",
    "accumulate_gradients",
    "apply_updates",
    "backoff_scale",
    "block_scale",
    "cancelled_updates",
    "convert",
    "current_loss_scale",
    "dequantize",
    "direct_updates",
    "ema_of_params",
    "explain",
    "from_master",
    "join_array",
    "log_normal_scale",
    "lowbit",
    "lpmm_adam",
    "lpmm_sgd",
    "master_weights",
    "memory_report",
    "param_dtypes",
    "plan",
    "quantize_params",
    "register_moments",
    "regularize",
    "scaled_value_and_grad",
    "split_array",
    "state_shardings",
    "static_scale",
    "step",
    "step_memory",
    "step_report",
    "with_loss_scale",
    "with_master",
]
__all__ += _aliases.__all__
__all__ += _formats.__all__


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        # So that hasattr and inspect.getmembers work without the flax extra.
        raise AttributeError(str(error)) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
