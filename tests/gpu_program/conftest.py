"""What tests of programs compiled for GPUs share."""

import pytest

from pallas_kernels.fused_update import launchers


@pytest.fixture
def by_triton(monkeypatch):
    """Kernels by Triton in every version of JAX, for bounds that are written for them.

    ``test_launchers.py`` compares Mosaic's kernels with Triton's.
    """
    monkeypatch.setattr(launchers, "DEFAULT", "triton")
