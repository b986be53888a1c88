"""Strict dtype promotion in every test, and eight CPU devices to shard over."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
