"""A GPT on the sources of Python: text, flags, memory of its steps."""
