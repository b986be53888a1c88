"""Derivatives of functions that round: rounding counts as the identity.

Rounding is integer arithmetic in this package (:mod:`lowbit_optax._numerics.rounding`),
and the derivative of integer arithmetic is zero. Therefore, the functions that join,
split and update whole leaves have the derivatives of the real arithmetic that they
approximate:

    d join(param, residual)            = d param
    d split(master)                    = d master, 0
    d advance(param, residual, update) = d param + d update, 0

Residuals have no tangents, because packed residuals are integers. Between two steps, a
derivative is stored in the dtype of the parameter.
"""

from collections.abc import Callable

import jax
from jax.custom_derivatives import zero_from_primal

from lowbit_optax._numerics import rounding


def _first(x: jax.Array, *_) -> jax.Array:
    return x


def straight_through(function: Callable, tangent: Callable = _first) -> Callable:
    """Return ``function`` with the derivative that it would have without rounding.

    If the first argument is a quantized tensor, the derivative does not change.

    Args:
      function: maps trees of arrays to a tree of arrays. It must not close over arrays.
      tangent: linear function from the tangents of the arguments to the tangent of the
        first array of the result. The tangents of all other arrays are zero. By
        default, it returns the tangent of the first argument.

    >>> import jax.numpy as jnp
    >>> rounded = lambda x: rounding.round_to_precision(x, jnp.bfloat16)
    >>> float(jax.grad(rounded)(0.3))
    0.0
    >>> float(jax.grad(straight_through(rounded))(0.3))
    1.0
    """
    differentiable = jax.custom_jvp(function)

    @differentiable.defjvp
    def _(primals, tangents):
        results = differentiable(*primals)
        leaves, structure = jax.tree.flatten(results)
        moved = tangent(*tangents).astype(leaves[0].dtype)
        return results, structure.unflatten([moved, *zero_from_primal(leaves[1:])])

    def run(x, *args):
        is_array = jax.tree_util.all_leaves([x])
        return (differentiable if is_array else function)(x, *args)

    return run


@jax.custom_jvp
def with_tangent_of(x, y):
    """Return y, with the derivative of x cast to the dtype of y."""
    del x
    return y


@with_tangent_of.defjvp
def _(primals, tangents):
    return primals[1], tangents[0].astype(primals[1].dtype)


def widened(x: jax.Array) -> jax.Array:
    """Apply :func:`.rounding.to_float32` with the derivative of a cast."""
    return straight_through(rounding.to_float32)(x)


def narrowed(dtype: jax.typing.DTypeLike, x: jax.Array) -> jax.Array:
    """Apply :func:`.rounding.narrow_or_cast` with the derivative of a cast."""
    narrow = lambda x: rounding.narrow_or_cast(x, dtype)
    return straight_through(narrow)(x)
