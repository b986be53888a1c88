"""Reductions of many arrays, each to one number, in two kernels."""

from pallas_kernels.reductions.api import (
    MIN_ARRAYS,
    largest_magnitudes,
    sums_of_squares,
)

__all__ = ["MIN_ARRAYS", "largest_magnitudes", "sums_of_squares"]
