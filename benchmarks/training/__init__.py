"""Training runs of this package's own."""
