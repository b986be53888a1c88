"""Fused updates as kernels for TPUs."""
