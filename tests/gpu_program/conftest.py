"""What tests of programs compiled for GPUs share."""

import pytest

from pallas_kernels import platforms


@pytest.fixture
def by_triton(monkeypatch):
    """Kernels by Triton in every version of JAX, for bounds that are written for them.

    ``test_launchers.py`` compares Mosaic's kernels with Triton's.
    """
    monkeypatch.setattr(platforms, "DEFAULT_LAUNCHER", "triton")
