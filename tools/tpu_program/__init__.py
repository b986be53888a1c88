"""Programs compiled for TPUs on a machine without one, and what they move."""
