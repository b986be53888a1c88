"""A process that imports the package, and compiles a step for a platform.

    python -W error tests/helpers/processes/step_without_warnings.py cpu|cuda|tpu

It prints the program. A second argument is the implementation.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import optax

import lowbit_optax


def main(platform: str, implementation: str | None = None) -> None:
    """Compile the step, and print the program."""
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    tx = lowbit_optax.lowbit(inner, implementation=implementation)
    params = {
        "kernel": jax.ShapeDtypeStruct((256, 128), jnp.bfloat16),
        "bias": jax.ShapeDtypeStruct((72,), jnp.bfloat16),
    }
    arguments = params, jax.eval_shape(tx.init, params), params
    step = functools.partial(lowbit_optax.step, tx)
    if platform == "cpu":
        compiled = jax.jit(step).lower(*arguments).compile()
    else:
        from tools.gpu_program.targets import compile_for, gpu_mesh
        from tools.tpu_program.targets import tpu_mesh

        mesh = gpu_mesh() if platform == "cuda" else tpu_mesh()
        compiled = compile_for(mesh, step, *arguments)
    print(compiled.as_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
