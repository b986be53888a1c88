"""Strict dtype promotion in every test, and eight CPU devices to shard over."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def strict_promotion():
    """No dtype is promoted by accident; a fixture, so that doctests stay a user's."""
    with jax.numpy_dtype_promotion("strict"):
        yield
