"""Trainers of other libraries, with this one's optimizers."""
