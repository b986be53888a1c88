"""Exact landing: what optax applies is what the residual belongs to, always.

optax adds an update as ``(p + u).astype(p.dtype)``. The update that takes a narrow p to
a chosen p' is ``u = float32(p') - float32(p)``: the float32 sum then rounds to p'
exactly, unless p' is smaller than p by more than 2^16 (a near-total cancellation), is a
zero of the other sign, or one of them is infinite. So the parameter that the sum really
gives is computed first, and the residual is computed against that one.

``lowbit_optax.step`` needs no update: there the new parameter replaces the old one.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.rounding import narrow_or_cast, to_float32


@dataclasses.dataclass(frozen=True)
class Replacement:
    """The new parameter replaces the old one, as in ``lowbit_optax.step``."""

    is_direct = True

    def land(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``(the parameter that will be there, what the step returns)``."""
        del old
        return new, new

    def result(self, old: jax.Array, landed: jax.Array) -> jax.Array:
        """What the step returns for a parameter that :meth:`land` gave."""
        del old
        return landed


@dataclasses.dataclass(frozen=True)
class Addition:
    """optax adds an update to the old parameter, as in ``optax.apply_updates``.

    >>> import jax.numpy as jnp
    >>> Addition().land(jnp.bfloat16(1.0), jnp.bfloat16(0.5))
    (Array(0.5, dtype=bfloat16), Array(-0.5, dtype=float32))
    """

    is_direct = False

    def land(self, old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``(the parameter that will be there, the update that takes it there)``.

        Args:
          old, new: arrays of one narrow dtype.

        Returns:
          ``(landed, update)`` with ``landed == round(float32(old) + update)`` in every
          bit, and ``landed == new`` except in the cases of the module's docstring.
        """
        update = difference(old, new)
        return narrow_or_cast(to_float32(old) + update, old.dtype), update

    def result(self, old: jax.Array, landed: jax.Array) -> jax.Array:
        """The update that takes ``old`` to a parameter that :meth:`land` gave."""
        return difference(old, landed)


Landing = Replacement | Addition

REPLACE = Replacement()
ADD = Addition()


def difference(old: jax.Array, new: jax.Array) -> jax.Array:
    """The float32 update from ``old`` to ``new``.

    From a parameter that :meth:`Addition.land` gave, the update lands there again.
    """
    before, after = to_float32(old), to_float32(new)
    # Equal values need no update: infinity minus infinity would be NaN.
    return jnp.where(before == after, jnp.float32(0), after - before)


def apply_leaf(param: jax.Array, update: jax.Array) -> jax.Array:
    """``(param + update)`` rounded to the parameter's dtype, as optax applies it."""
    return narrow_or_cast(to_float32(param) + update.astype(jnp.float32), param.dtype)
