"""Other libraries' trainers with the optimizers of this package."""
