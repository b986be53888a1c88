"""One step of a wrapped transformation."""
