"""Training runs: formats, optimizers and precision assignments compared."""
