"""What training takes and loses: memory, planned and compiled, and rounding errors."""
