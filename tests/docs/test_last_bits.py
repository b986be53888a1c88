"""Two compilations of a step differ in last bits (``docs/numerics.md``)."""

import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax


def _cast(grad):
    return grad.astype(jnp.float32)


def _train(tx, params, state, grads, inside):
    @jax.jit
    def step(params, state, grad):
        return lowbit_optax.step(tx, params, state, _cast(grad) if inside else grad)

    for grad in grads:
        params, state = step(params, state, grad if inside else _cast(grad))
    return params, state


@pytest.mark.standard_promotion
def test_exact_masters_are_as_close_to_optax_as_two_programs_of_optax():
    start = jax.random.normal(jax.random.key(0), (256, 256)) * 0.02
    grads = jax.random.normal(jax.random.key(1), (50, 256, 256)).astype(jnp.bfloat16)
    adamw, exact = optax.adamw(1e-3), lowbit_optax.extra_bits_adamw(1e-3)
    one, _ = _train(adamw, start, adamw.init(start), grads, inside=False)
    two, _ = _train(adamw, start, adamw.init(start), grads, inside=True)
    params, state = lowbit_optax.from_master(exact, start)
    params, state = _train(exact, params, state, grads, inside=True)
    masters = lowbit_optax.master_weights(params, state)
    moved = jnp.linalg.norm(two - start)
    assert jnp.linalg.norm(one - two) < 1e-6 * moved
    assert jnp.linalg.norm(masters - two) < 1e-6 * moved
