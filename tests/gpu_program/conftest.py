"""Fixtures for tests of programs compiled for GPUs."""

from pathlib import Path

import pytest

from pallas_kernels import platforms
from tools import is_installed
from tools.gpu_program.machine_code.compilation import missing_tools

NEED_NO_PLUGIN = ("test_hlo.py", "test_first_device_rehearsed.py")


def pytest_collection_modifyitems(items):
    if is_installed("jax_plugins.xla_cuda12"):
        return
    skip = pytest.mark.skip(reason="needs the gpu-program extra")
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and item.path.name not in NEED_NO_PLUGIN:
            item.add_marker(skip)


@pytest.fixture
def by_triton(monkeypatch):
    """Use Triton in every version of JAX, because many bounds are for its kernels.

    ``test_launchers.py`` compares Mosaic's kernels with Triton's.
    """
    monkeypatch.setattr(platforms, "DEFAULT_LAUNCHER", "triton")


@pytest.fixture
def launcher(request, monkeypatch):
    """Use the launcher that a test is parametrised with."""
    monkeypatch.setattr(platforms, "DEFAULT_LAUNCHER", request.param)
    return request.param


@pytest.fixture
def disassembler():
    """Skip tests that read machine code if the tools for it are not installed."""
    if missing_tools():
        pytest.skip(missing_tools())
