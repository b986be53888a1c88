"""TPU kernels for fused updates; :mod:`.kernel` is the launcher."""
