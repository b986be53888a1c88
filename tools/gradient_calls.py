"""Count the calls that hold the gradient, from a step to the launch of its kernel.

    python -m tools.gradient_calls [IMPLEMENTATION]

A call holds the gradient if an argument is this very array, or contains it in a tuple,
a list, a mapping or a record. The fewer such calls, the shorter is the way that a
reader has to follow.
"""

import collections
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp

import lowbit_optax

ROOT = pathlib.Path(lowbit_optax.__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("lowbit_optax", "pallas_kernels"))
DEPTH = 4


def count(implementation: str) -> list[tuple[str, str]]:
    """Return the file and the name of each call that holds the gradient."""
    params = {"w": jnp.ones((256, 512), jnp.bfloat16)}
    tx = lowbit_optax.lowbit_adamw(1e-3, implementation=implementation)
    state = jax.eval_shape(tx.init, params)
    calls: list[tuple[str, str]] = []

    def step(params, state, grads):
        (gradient,) = jax.tree.leaves(grads)

        def watch(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event != "call" or not code.co_filename.startswith(PACKAGES):
                return
            # When a call begins, its locals are its arguments.
            if any(_holds(x, gradient, DEPTH) for x in frame.f_locals.values()):
                name = code.co_filename.removeprefix(f"{ROOT}/")
                calls.append((name, code.co_qualname))

        sys.setprofile(watch)
        try:
            return lowbit_optax.step(tx, params, state, grads)
        finally:
            sys.setprofile(None)

    jax.jit(step).trace(params, state, params)
    return calls


def _holds(value: Any, gradient: Any, depth: int) -> bool:
    if value is gradient:
        return True
    if depth == 0:
        return False
    if isinstance(value, tuple | list):
        parts = value
    elif isinstance(value, Mapping):
        parts = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, x.name, None) for x in dataclasses.fields(value)]
    elif isinstance(value, functools.partial):
        parts = [*value.args, *value.keywords.values()]
    else:
        return False
    return any(_holds(x, gradient, depth - 1) for x in parts)


def main() -> None:
    calls = count(sys.argv[1] if len(sys.argv) > 1 else "triton")
    for name, number in collections.Counter(name for name, _ in calls).items():
        print(f"{number:4}  {name}")
    print(f"{len(calls)} calls in {len({name for name, _ in calls})} files")


if __name__ == "__main__":
    main()
