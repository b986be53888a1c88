"""Runs these tests with the trainers' own warnings and JAX's usual promotion."""

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before the quick run leaves these out
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("trainers")
            item.add_marker("standard_promotion")
            item.add_marker(pytest.mark.filterwarnings("default"))
