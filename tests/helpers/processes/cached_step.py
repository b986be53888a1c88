"""Processes that run a step, or lower it for a GPU, and print one line.

    python tests/helpers/processes/cached_step.py run FOLDER
    python tests/helpers/processes/cached_step.py lower

The first prints the cache misses and hits of a step, and the second prints a digest of
its program for a GPU.
"""

import functools
import hashlib
import sys

import jax
import jax.numpy as jnp

import lowbit_optax
from tests.helpers.places import printed_by


def main(action: str, folder: str = "") -> None:
    """Run the action and print a line."""
    tx = lowbit_optax.lowbit_adamw(1e-3)
    shapes = ((256, 64), (64,), (96, 64), (32,))
    params = {f"{n}": jnp.ones(shape, jnp.bfloat16) for n, shape in enumerate(shapes)}
    step = functools.partial(lowbit_optax.step, tx)
    if action == "lower":
        from tools.gpu_program.targets import gpu_mesh, lower_for

        params = jax.eval_shape(lambda: params)
        state = jax.eval_shape(tx.init, params)
        text = lower_for(gpu_mesh(), step, params, state, params).as_text()
        print(hashlib.sha256(text.encode()).hexdigest())
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events: list[str] = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
    # With a single CPU device, leaves are updated as if they were one leaf.
    one_device = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
    with jax.set_mesh(one_device):
        state = jax.jit(tx.init)(params)
        jax.block_until_ready(jax.jit(step)(params, state, params))
    ends = ("cache_misses", "cache_hits")
    print(*(sum(name.endswith(end) for name in events) for end in ends))


def printed(hash_seed: int, *arguments: str) -> str:
    """The output of a process that orders strings in sets differently."""
    output = printed_by(__file__, *arguments, PYTHONHASHSEED=str(hash_seed))
    return output.strip()


if __name__ == "__main__":
    main(*sys.argv[1:])
