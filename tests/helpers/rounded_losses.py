"""Losses with rounded tensors, for tests of precision assignments."""

import jax
import jax.numpy as jnp
from jax.extend import core

from lowbit_optax import precision
from lowbit_optax._jaxprs.graph import in_todays_terms


def mlp(w, x):
    """A loss with three matrices."""
    h = jax.nn.relu(x @ w["in"])
    h = jax.nn.relu(h @ w["mid"])
    return jnp.sum(jnp.square(h @ w["out"]))


def uniform(loss_fn, *args, **formats):
    """An assignment for a loss with all tensors low, except weight gradients."""
    return precision.uniform(precision.trace(loss_fn, *args), **formats)


def gradient(loss_fn, assignment, **options):
    """A function, to be jitted, that returns the loss, its aux and its gradient."""
    rounded = precision.apply(loss_fn, assignment, **options)
    return jax.value_and_grad(rounded, has_aux=True)


def equations(jaxpr, runs=1):
    """The equations of a jaxpr and of all its calls, and how often scans run each."""
    for eqn in map(in_todays_terms, jaxpr.eqns):
        yield eqn, runs
        for inner in core.jaxprs_in_params(eqn.params):
            yield from equations(inner, runs * eqn.params.get("length", 1))
