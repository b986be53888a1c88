"""Precision assignments: which tensors of a training step are in which float format.

    trace ---> the tensors of a loss, in groups between matrix products
    demote, uniform, operator_based ---> an assignment: a format for each tensor
    apply ---> the loss with tensors and cotangents rounded; how much overflowed
    promote ---> the assignment with what overflowed in the high format

References:
  Lee, Sharma, Aiken 2023, "Training with Mixed-Precision Floating-Point Assignments".
"""

from lowbit_optax.precision.assignment import HFP8, Assignment, Formats, load
from lowbit_optax.precision.choosing import demote, operator_based, promote, uniform
from lowbit_optax.precision.float_format import FP32, FloatFormat
from lowbit_optax.precision.plan import PrecisionPlan, trace
from lowbit_optax.precision.rounded import apply
from lowbit_optax.precision.tensors import Tensor

__all__ = [
    "FP32",
    "HFP8",
    "Assignment",
    "FloatFormat",
    "Formats",
    "PrecisionPlan",
    "Tensor",
    "apply",
    "demote",
    "load",
    "operator_based",
    "promote",
    "trace",
    "uniform",
]
