"""Jaxprs as graphs of values."""
