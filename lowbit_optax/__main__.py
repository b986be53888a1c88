"""Check an installation: print versions and the device, and test each format.

python -m lowbit_optax
"""

import argparse
import importlib.metadata
import sys

import jax
import jax.numpy as jnp
import numpy as np

import lowbit_optax
from pallas_kernels.platforms import launcher_name, refused_gpu

_ALIASES = ("lowbit_adamw", "extra_bits_adamw", "kahan_adamw", "sr_adamw")
_RATE = 1e-2
_PACKAGES = ("lowbit-optax", "jax", "jaxlib", "optax", "flax", "numpy")


def main() -> int:
    """Print the report, and return 0 if each format matches a float32 step."""
    for package in _PACKAGES:
        print(f"{package:12} {_version(package)}")
    device = jax.devices()[0]
    print(f"{'device':12} {device.device_kind} ({jax.default_backend()})")
    print(f"{'steps by':12} {_steps_by()}")
    results = {name: _check(getattr(lowbit_optax, name)(_RATE)) for name in _ALIASES}
    for name, error in results.items():
        print(f"{name:17} {'ok' if error is None else error}")
    return int(any(results.values()))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _steps_by() -> str:
    backend = jax.default_backend()
    if backend == "tpu":
        return "TPU kernels"
    if backend != "gpu":
        return "XLA; only GPUs and TPUs have kernels"
    refusal = refused_gpu()
    if refusal:
        return f"XLA: {refusal}"
    return f"kernels, launched with {launcher_name(None)}"


def _check(tx) -> str | None:
    """Run one step, and return an error message, or None if the step is correct."""
    weights = jnp.asarray(np.linspace(0.5, 1.5, 64 * 128, dtype=np.float32))
    weights = weights.reshape(64, 128)
    params, state = lowbit_optax.from_master(tx, weights)
    before = lowbit_optax.master_weights(params, state)
    step = jax.jit(lambda *arguments: lowbit_optax.step(tx, *arguments))
    after = lowbit_optax.master_weights(*step(params, state, jnp.ones_like(params)))
    # Adam's first step has the size of the learning rate. Weight decay adds 0.01%.
    moved = float(jnp.mean(after - before)) / -_RATE
    return None if abs(moved - 1) < 0.05 else f"WRONG: {moved:.2f} of the step"


if __name__ == "__main__":
    argparse.ArgumentParser("python -m lowbit_optax", description=__doc__).parse_args()
    sys.exit(main())
