"""Precision assignment: a floating-point format for each tensor of a training step.

    FloatFormat -> the numbers of fp(e, m, b), and rounding to them in float32

References:
  Lee, Sharma and Aiken 2023, "Training with Mixed-Precision Floating-Point
    Assignments".
"""

from lowbit_optax.precision.float_format import FloatFormat

__all__ = ["FloatFormat"]
