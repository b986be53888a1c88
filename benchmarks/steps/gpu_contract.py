"""Do the fused kernels compute what the XLA path computes, on this device?"""

import functools
import importlib.util
import math
import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lowbit_optax
from benchmarks.steps.gpu_timing import Budget, run_all

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TESTS = ("tests/test_fused_update.py", "tests/test_implementations.py")
STEPS = 3

FORMATS = {
    "nearest": lowbit_optax.nearest(),
    "stochastic_rounding": lowbit_optax.stochastic_rounding(),
    "kahan": lowbit_optax.kahan(),
    "kahan_nearest": lowbit_optax.kahan(residual_rounding="nearest"),
    "kahan_stochastic": lowbit_optax.kahan(rounding="stochastic"),
    "kahan_param": lowbit_optax.kahan(arithmetic="param"),
    "extra_bits_16": lowbit_optax.extra_bits(16),
    "extra_bits_8": lowbit_optax.extra_bits(8),
    "extra_bits_5_nearest": lowbit_optax.extra_bits(5, residual_rounding="nearest"),
    "extra_bits_8_toward_zero": lowbit_optax.extra_bits(8, rounding="toward_zero"),
    "extra_bits_11_stochastic": lowbit_optax.extra_bits(11, rounding="stochastic"),
    "master_copy": lowbit_optax.master_copy(),
}
SMALL = ((64, 64), (4097,), (33, 130), (40,))
LARGE = (*SMALL, (1024, 1024), (1000, 257), (7, 5, 640), (3, 3, 64, 65), (100_003,))


def _trees(shapes):
    keys = jax.random.split(jax.random.key(7), 2 * len(shapes))
    draw = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16)
    half = len(shapes)
    params = [draw(*each) for each in zip(keys[:half], shapes, strict=True)]
    return params, [draw(*each) for each in zip(keys[half:], shapes, strict=True)]


def _train(weights, implementation: str, params, grads):
    """Parameters and state after a few steps whose every product is exact."""
    tx = lowbit_optax.lowbit(
        optax.sgd(2.0**-10, momentum=0.5),
        weights=weights,
        moments=lowbit_optax.cast(jnp.bfloat16),
        min_size=0,
        implementation=implementation,
    )
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    state = tx.init(params)
    for _ in range(STEPS):
        params, state = step(params, state, grads)
    return jax.block_until_ready((params, state))


def _differing(got, want) -> int:
    """How many elements of two trees differ in any bit."""
    count = 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.atleast_1d(np.asarray(a)), np.atleast_1d(np.asarray(b))
        unsigned = f"u{a.dtype.itemsize}"
        count += int(np.count_nonzero(a.view(unsigned) != b.view(unsigned)))
    return count


def _check(name: str, shapes) -> dict:
    params, grads = _trees(shapes)
    (got, got_state), (want, want_state) = (
        _train(FORMATS[name], each, params, grads) for each in ("pallas", "xla")
    )
    return {
        "format": name,
        "elements": sum(map(math.prod, shapes)),
        "parameters": _differing(got, want),
        "residuals": _differing(got_state.residual, want_state.residual),
        "moments": _differing(got_state.inner_state, want_state.inner_state),
    }


def check_formats(names, large: bool, budget: Budget) -> dict:
    """Differing elements between both implementations, by weight format.

    Args:
      names: of :data:`FORMATS`.
      large: whether to add shapes that take long where kernels are interpreted.
      budget: formats that have not begun when it is spent are left out.
    """
    shapes = LARGE if large else SMALL
    jobs = [functools.partial(_check, name, shapes) for name in names]
    rows = []
    for name, row in zip(names, run_all(jobs, budget, "contract"), strict=True):
        if row is None:
            row = {"format": name, "skipped": "no time left"}
        elif isinstance(row, Exception):
            row = {"format": name, "error": f"{type(row).__name__}: {row}"[:2000]}
        rows.append(row)
    same = [row.get("parameters") == row.get("residuals") == 0 for row in rows]
    done = [row for row in rows if "skipped" not in row]
    return {
        "steps": STEPS,
        "shapes": [list(shape) for shape in shapes],
        "ok": bool(done) and sum(same) == len(done),
        "rows": rows,
    }


def run_tests(platform: str, budget: Budget) -> dict:
    """The kernels' own tests on this device, in another process."""
    missing = [m for m in ("pytest", "chex") if importlib.util.find_spec(m) is None]
    if missing:
        return {"status": "skipped", "reason": f"not installed: {', '.join(missing)}"}
    files = [name for name in TESTS if (REPOSITORY / name).exists()]
    if not files:
        return {"status": "skipped", "reason": f"no {' or '.join(TESTS)}"}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", *files]
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=child_environment(JAX_PLATFORMS=platform),
            capture_output=True,
            text=True,
            timeout=max(1.0, budget.left),
        )
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        out = out.decode(errors="replace") if isinstance(out, bytes) else out
        return {"status": "out of time", "files": files, "output": out[-4000:]}
    return {
        "status": "passed" if done.returncode == 0 else "failed",
        "files": files,
        "returncode": done.returncode,
        "seconds": time.perf_counter() - start,
        "output": (done.stdout + done.stderr)[-4000:],
    }


def child_environment(**variables: str) -> dict[str, str]:
    """For processes beside this one, which holds most of the device's memory."""
    paths = [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **variables,
    }
