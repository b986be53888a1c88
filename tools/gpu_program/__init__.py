"""Compiles training steps for GPUs without one, and reads and runs the programs."""
