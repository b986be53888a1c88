"""Steps by kernels have the derivatives that they have by XLA.

The learning rate reaches a kernel as a word of a table, and so does the factor by which
gradients are clipped, which depends on all of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax

pytestmark = pytest.mark.standard_promotion

SHAPES = {"a": (8, 256), "b": (8, 256), "c": (40,)}


def loss(rate, params, grads, implementation):
    """Of what a clipped step makes of the parameters, and of a narrow leaf's ``mu``.

    ``a`` and ``b`` share a kernel.
    """
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(rate, eps=0.1))
    tx = lowbit_optax.lowbit(inner, moments="float32", implementation=implementation)
    params = params | {"narrow": jnp.ones((8, 256), jnp.bfloat16)}
    params, state = lowbit_optax.step(tx, params, tx.init(params), grads)
    mu = optax.tree.get(state.inner_state, "mu")
    wide = [params[name] for name in SHAPES] + [mu["narrow"]]
    return sum(jnp.sum(x**2) for x in wide)


@functools.cache
def derivatives(implementation):
    """By ``jax.grad`` of rate, parameters and gradients, and by ``jax.jvp`` of rate."""
    rng = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    params = {name: draw(shape) for name, shape in SHAPES.items()}
    grads = {name: draw(shape) for name, shape in SHAPES.items()}
    grads["narrow"] = draw((8, 256))
    of = functools.partial(loss, implementation=implementation)
    by_rate = lambda rate: of(rate, params, grads)
    forward = jax.jit(lambda rate: jax.jvp(by_rate, (rate,), (jnp.ones_like(rate),)))
    return *jax.jit(jax.grad(of, (0, 1, 2)))(0.25, params, grads), forward(0.25)


@pytest.mark.parametrize("implementation", ["pallas", "tpu"])
@pytest.mark.parametrize("by", range(4), ids=["rate", "params", "grads", "jvp of rate"])
def test_derivatives_are_those_of_xla(implementation, by):
    got, want = (jax.tree.leaves(derivatives(x)[by]) for x in (implementation, "xla"))
    assert all(np.any(x) for x in want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
