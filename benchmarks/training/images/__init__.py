"""Training of image classifiers: data, optimizers, the loop and its results."""
