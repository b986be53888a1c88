"""Trains in one process, and sends weight patches to a sampler in another one.

python examples/weight_patches.py
"""

import functools
import multiprocessing

import jax
import jax.numpy as jnp
import optax

import lowbit_optax
from lowbit_optax import patches

STEPS = 20


def begun():
    """Return the weights at the start, which both processes could load from a file."""
    master = {"w": 0.02 * jax.random.normal(jax.random.key(0), (256, 256))}
    tx = lowbit_optax.lowbit(optax.adam(3e-6))
    return tx, *lowbit_optax.from_master(tx, master, jnp.bfloat16)


# --8<-- [start:trainer]
def train(connection):
    tx, params, state = begun()
    train_step = jax.jit(functools.partial(patches.step, tx), donate_argnums=(0, 1))
    stamp = patches.start(params)
    for number in range(STEPS):
        noise = jax.random.normal(jax.random.key(number), (256, 256))
        grads = {"w": noise.astype(jnp.bfloat16)}
        params, state, changed = train_step(params, state, grads)
        patch, stamp = patches.pack(params, changed, stamp)
        connection.send_bytes(patch)
    connection.send(patches.start(params))
    # --8<-- [end:trainer]
    print(f"the last patch has {len(patch) / params['w'].nbytes:.1%} of the bytes")


# --8<-- [start:sampler]
def sample(connection):
    _, params, _ = begun()
    stamp = patches.start(params)
    for _ in range(STEPS):
        params, stamp = patches.apply(params, connection.recv_bytes(), stamp)
        # Sample with params here.
    assert patches.start(params) == connection.recv()  # all bits are equal
    # --8<-- [end:sampler]
    print(f"{stamp.number} patches, and the weights of both processes are equal")


def main():
    here, there = multiprocessing.Pipe()
    sampler = multiprocessing.get_context("spawn").Process(target=sample, args=(there,))
    sampler.start()
    train(here)
    sampler.join()


if __name__ == "__main__":
    main()
