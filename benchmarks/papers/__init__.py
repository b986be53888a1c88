"""Small versions of the experiments of the papers behind this package."""
