"""What rounding a weight loses goes into its momentum, and comes back from there.

With w the weight, m its momentum, and what the inner update is in both of them,

    w' = a w + c m + ...        m' = b m + ...

``w + c m / (a - b)`` is what the two become in the end. It stays the same if an error
``e = w' - round(w')`` leaves the weight and ``e (a - b) / c`` enters the momentum. For
Adam c is ``-eta b1 / ((1 - b1^t) (sqrt(v / (1 - b2^t)) + eps))``, b is b1, and a is
``1 - eta lambda``. Here a, b and c are read off the graph of the inner update.

Where the two will end, ``w + c m / (a - b)``, is known before the weight is rounded. Of
its two neighbours it takes the one that is nearer to that. A neighbour drawn at random
is one step of the momentum from the other, so the weight would change between the two
all the time: for a weight that should stand still the mean square of the error would be
a sixth of the squared spacing, and not a twelfth.

What is in the momentum is in units of the learning rate. If that is more than doubled,
the momentum would move the weight by several times what was lost. The next c of a
schedule is known: it is that of a second inner update, by the same gradient.
"""

import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp

MOST_GROWTH = 2.0
"""By which factor the learning rate may grow in a step before momentum is shortened."""


class Feedback(typing.NamedTuple):
    """Where a leaf's rounding errors go; nodes, or their values.

    Args:
      part: which part of the inner state takes them.
      rate: by how much the part must change for a unit of error, ``(a - b) / c``.
      growth: ``MOST_GROWTH c / c_next``, infinite or NaN if the next update needs no
        momentum.
      reach: ``c / (a - b)``, by how much a unit of the part will still move the weight.
    """

    part: int
    rate: typing.Any
    growth: typing.Any
    reach: typing.Any


def ahead_of(moment: jax.Array, reach: jax.Array) -> jax.Array:
    """How far a new momentum will still move the weight, ``c m / (a - b)``.

    It is NaN where :func:`fed` adds no error.

    >>> import jax.numpy as jnp
    >>> ahead_of(jnp.float32([1.0, 0.0]), jnp.float32(-0.25))
    Array([-0.25,  nan], dtype=float32)
    """
    ahead = moment * reach
    return jnp.where(ahead == jnp.float32(0), jnp.float32(jnp.nan), ahead)


def ahead_of_leaves(feedback: Sequence[Feedback | None], parts: Sequence) -> list:
    """:func:`ahead_of` of the parts that take errors; None for the other leaves."""
    return [x and ahead_of(parts[x.part], x.reach) for x in feedback]


def fed(
    moment: jax.Array, error: jax.Array, rate: jax.Array, growth: jax.Array
) -> jax.Array:
    """A new float32 momentum with what rounding its weight has lost.

    >>> import jax.numpy as jnp
    >>> one = jnp.float32(1)
    >>> fed(one, jnp.float32(0.5), -4 * one, 2 * one)  # of 1/2, in steps of -1/4
    Array(-1., dtype=float32)
    >>> fed(one, jnp.float32(0.0), -4 * one, one / 5)  # ten times as large a step next
    Array(0.2, dtype=float32)
    """
    change = error * rate
    # A learning rate of 0 has no unit in which the momentum could take it. Where there
    # was no gradient, as in rows of an embedding, Adam's unit is 1 / eps: what codes of
    # few bits make of it would move the weight by far more than was lost.
    is_known = (jnp.abs(change) < jnp.float32(jnp.inf)) & (moment != jnp.float32(0))
    moment = jnp.where(is_known, moment + change, moment)
    factor = jnp.abs(growth)
    return moment * jnp.where(factor < jnp.float32(1), factor, jnp.float32(1))
