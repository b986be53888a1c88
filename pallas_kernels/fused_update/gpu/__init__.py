"""Fused updates as kernels for GPUs, by Pallas' backends Triton and Mosaic GPU."""
