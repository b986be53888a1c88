"""Shared code of the GPU kernels: PTX instructions, branches, and Mosaic registers."""
