"""What tests and benchmarks of this repository share; not installed."""
