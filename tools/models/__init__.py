"""Models that the tests and benchmarks compile and train."""
