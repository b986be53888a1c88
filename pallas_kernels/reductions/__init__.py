"""Reductions of many arrays, each to one number, in two kernels."""

from pallas_kernels.reductions.api import largest_magnitudes, sums_of_squares

__all__ = ["largest_magnitudes", "sums_of_squares"]
