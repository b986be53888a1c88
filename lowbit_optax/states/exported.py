"""Register the states of this package for functions that ``jax.export`` serializes."""

import jax.export

from lowbit_optax._step.state import LowbitState
from lowbit_optax.aliases.factored import FactoredAdamState
from lowbit_optax.aliases.muon import MomentumState
from lowbit_optax.formats.base import Residuals
from lowbit_optax.formats.block_quantized import QuantizedMoment
from lowbit_optax.loss_scaling.log_normal import LogNormalState
from lowbit_optax.loss_scaling.transformation import LossScaleState
from lowbit_optax.transformations.averaging import EmaOfParamsState

STATES = (
    LowbitState, Residuals, QuantizedMoment, FactoredAdamState, MomentumState,
    LossScaleState, LogNormalState, EmaOfParamsState,
)  # fmt: skip

for _state in STATES:
    _name = f"lowbit_optax.{_state.__name__}"
    jax.export.register_namedtuple_serialization(_state, serialized_name=_name)
