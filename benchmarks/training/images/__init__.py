"""Image classifiers: data, optimizers by name, training and its results."""
