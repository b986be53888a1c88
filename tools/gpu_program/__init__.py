"""Compile training steps for GPUs without a GPU, and read or execute the programs."""
