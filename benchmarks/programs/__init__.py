"""Measurements of programs that are compiled for GPUs and TPUs and not run."""
