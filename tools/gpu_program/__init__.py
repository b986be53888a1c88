"""Compiles training steps for GPUs on a machine without one, and reads the programs."""
