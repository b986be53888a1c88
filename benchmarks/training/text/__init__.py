"""Training of a GPT on Python's standard library: text, rows and PyTorch."""
