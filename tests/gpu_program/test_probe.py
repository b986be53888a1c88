"""The cost of a probe in a step, compiled for an H200."""

import jax
import jax.numpy as jnp

import lowbit_optax
from lowbit_optax.reports import probe
from tools.gpu_program.targets import compile_for, gpu_mesh
from tools.hlo import kernels

SHAPE = (2048, 4096)
PARAMETERS = 2048 * 4096


def test_a_probe_moves_few_bytes_and_stores_fewer():
    tx = lowbit_optax.lowbit_adamw(1e-3)
    params = {"w": jnp.zeros(SHAPE, jnp.bfloat16)}
    state = tx.init(params)
    sample = probe(tx, params, state)
    stored = sum(x.nbytes for x in jax.tree.leaves(sample)) / PARAMETERS
    assert stored <= 0.1

    def step(params, state, grads):
        return lowbit_optax.step(tx, params, state, grads)

    def probed(params, state, grads, sample):
        after = sample.follow(tx, params, state, grads)
        return lowbit_optax.step(tx, params, state, grads), after

    moved, kept = [], []
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        (params, state, params, sample),
    )
    for function, given in ((step, arguments[:3]), (probed, arguments)):
        donate = tuple(i for i in range(len(given)) if i != 2)
        compiled = compile_for(gpu_mesh(), function, *given, donate=donate)
        moved.append(sum(size for _, size in kernels(compiled)) / PARAMETERS)
        kept.append(compiled.memory_analysis().temp_size_in_bytes / PARAMETERS)
    # The kernel that reads some blocks of the bfloat16 gradient counts all of it.
    read = 2 * sample.twins[0].masters[0].size / PARAMETERS
    assert moved[1] - 2 + read - moved[0] <= 0.02 * moved[0], moved
    assert kept[1] <= 0.02, kept
