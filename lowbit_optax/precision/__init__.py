"""Precision assignments: a float format for each tensor of a training step.

    trace ---> the tensors of a loss, in groups between matrix products
    demote, uniform, operator_based ---> an assignment: a format for each tensor
    apply ---> a loss that rounds its tensors and cotangents, and reports overflows
    products ---> the dtypes in which its matrix products can run
    promote ---> the assignment, with overflowing tensors in the high format
    pack, unpack ---> arrays as packed bit patterns of a float format, and back

References:
  Lee, Sharma, Aiken 2023, "Training with Mixed-Precision Floating-Point Assignments".
"""

from lowbit_optax._numerics.float_format import FP32, FloatFormat
from lowbit_optax.precision.assignment import (
    FLOAT8,
    HFP8,
    Assignment,
    Formats,
    PrecisionPlan,
    Tensor,
    load,
)
from lowbit_optax.precision.choosing import (
    demote,
    operator_based,
    promote,
    trace,
    uniform,
)
from lowbit_optax.precision.packed import PackedFloats, pack, unpack
from lowbit_optax.precision.products import Product, products
from lowbit_optax.precision.rounded import apply

__all__ = [
    "FLOAT8",
    "FP32",
    "HFP8",
    "Assignment",
    "FloatFormat",
    "Formats",
    "PackedFloats",
    "PrecisionPlan",
    "Product",
    "Tensor",
    "apply",
    "demote",
    "load",
    "operator_based",
    "pack",
    "products",
    "promote",
    "trace",
    "uniform",
    "unpack",
]
