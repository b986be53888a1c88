"""Exact arithmetic on the bit patterns of floating-point numbers."""
