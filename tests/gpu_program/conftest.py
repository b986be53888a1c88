"""Optimizers as users run them: optax's Adam raises a float to an integer power."""

import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    """Not here."""
