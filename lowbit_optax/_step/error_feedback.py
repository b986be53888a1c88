"""Error feedback: the rounding error of a weight is added to its momentum.

Backends and kernels use these functions for formats with ``error_feedback``. Let w be a
weight, and m its momentum. The inner update is linear in both:

    w' = a w + c m + ...        m' = b m + ...

Over time, the momentum moves the weight to the target ``w + c m / (a - b)``. The
target does not change if the error ``e = w' - round(w')`` is removed from the weight
and ``e (a - b) / c`` is added to the momentum. For Adam, c is ``-eta b1 / ((1 - b1^t)
(sqrt(v / (1 - b2^t)) + eps))``, b is b1, and a is ``1 - eta lambda``.
:meth:`.InnerUpdate.feedback` derives a, b and c from the graph.

The target is known before the weight is rounded, and the weight is rounded to the
neighbor that is nearer to the target. If the neighbor were chosen at random, the
weight would keep changing between both neighbors, because one step of the momentum
leads from one to the other. For a weight that should not move, the mean squared error
would be a sixth of the squared spacing instead of a twelfth.

If the learning rate falls, the momentum moves the weight less than this. If c is the
same for all elements, as in SGD, and falls to ``c r`` in the next step, the target is
``w + c r m / (a - b r)``, which is exact if c falls by the same ratio in every later
step. For Adam, r counts as 1, which loses the share ``(1 - r) / (1 - b r)`` of each
error.

The momentum stores errors in units of the learning rate. If the learning rate more than
doubles, the momentum would move the weight by several times the error, so :func:`fed`
reduces the momentum. A second inner update with the same gradient returns the next c.
"""

import typing
from collections.abc import Mapping

import jax
import jax.numpy as jnp

MOST_GROWTH = 2.0
"""The factor by which the learning rate may grow before the momentum is reduced."""


class Feedback(typing.NamedTuple):
    """How the rounding errors of a leaf enter a moment, as nodes or their values.

    Args:
      part: the part of the inner state to which errors are added.
      rate: the change of the part per unit of error, ``1 / reach``.
      growth: ``MOST_GROWTH c / c_next``; infinite or NaN if the next update does not
        depend on the momentum.
      reach: the distance by which one unit of the part will still move the weight,
        ``c r / (a - b r)``.
    """

    part: int
    rate: typing.Any
    growth: typing.Any
    reach: typing.Any

    def with_values(self, values: Mapping) -> "Feedback":
        """Return the feedback with the values of its nodes, given a dict by node."""
        return Feedback(self.part, *(values[node] for node in self[1:]))


def ahead_of(moment: jax.Array, reach: jax.Array) -> jax.Array:
    """Return how far a new momentum will still move the weight, ``c m / (a - b)``.

    The result is 0 where :func:`fed` adds no error.

    >>> import jax.numpy as jnp
    >>> ahead_of(jnp.float32([1.0, 0.5]), jnp.float32(-0.25))
    Array([-0.25 , -0.125], dtype=float32)
    """
    return moment * reach


def fed(
    moment: jax.Array, error: jax.Array, rate: jax.Array, growth: jax.Array
) -> jax.Array:
    """Return a new float32 momentum to which the rounding error of its weight is added.

    >>> import jax.numpy as jnp
    >>> one = jnp.float32(1)
    >>> fed(one, jnp.float32(0.5), -4 * one, 2 * one)  # 1/2 is two steps of -1/4
    Array(-1., dtype=float32)
    >>> fed(one, jnp.float32(0.0), -4 * one, one / 5)  # a 10 times larger next step
    Array(0.2, dtype=float32)
    """
    change = error * rate
    # With a learning rate of 0, the change is infinite or NaN. If a weight has had no
    # gradient yet, as in unused rows of an embedding, Adam multiplies the moment by 1 /
    # eps, so a low-bit moment would move the weight much further than the error.
    largest = jnp.float32(jnp.finfo(jnp.float32).max)
    is_known = (jnp.abs(change) <= largest) & (moment != jnp.float32(0))
    moment = jnp.where(is_known, moment + change, moment)
    factor = jnp.abs(growth)
    return moment * jnp.where(factor < jnp.float32(1), factor, jnp.float32(1))
