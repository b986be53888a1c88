"""Training runs that compare formats, optimizers and precision assignments."""
