"""Updates of transformations with few-bit moments, compared with float32 moments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import lowbit_optax


def transformation(moments, inner):
    """``lowbit`` with float32 weights; ``moments`` may be the items of a dict."""
    moments = dict(moments) if isinstance(moments, tuple) else moments
    return lowbit_optax.lowbit(inner, moments=moments, implementation="xla", min_size=0)


@functools.partial(jax.jit, static_argnums=(0, 3))
def updates(moments, grads, b2=0.999, inner=None):
    """The updates of all steps, for Adam with a rate of 1 or for ``inner``."""
    tx = transformation(moments, inner or optax.adam(1.0, b2=b2))
    params = jnp.zeros(grads.shape[1:])

    def step(state, grads):
        updates, state = tx.update(grads, state, params)
        return state, updates

    return lax.scan(step, tx.init(params), grads)[1]


def compared(got, want):
    """The largest update and the norm, relative to those of ``want``; the cosine."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    norms = np.linalg.norm(got), np.linalg.norm(want)
    cosine = np.vdot(got, want) / (norms[0] * norms[1])
    return np.abs(got).max() / np.abs(want).max(), norms[0] / norms[1], cosine
