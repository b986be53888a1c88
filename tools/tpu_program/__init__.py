"""Compile programs for TPUs on a machine without one, and read what they move."""
