"""What kernels for GPUs share: instructions, branches, and Mosaic's registers."""
