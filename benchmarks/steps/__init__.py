"""Benchmarks that time optimizer and training steps on this machine."""
