"""Training runs to read from top to bottom and to copy."""
