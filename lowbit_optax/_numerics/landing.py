"""Exact landing: what optax applies is what the residual belongs to, always.

optax adds an update as ``(p + u).astype(p.dtype)``. The update that takes a narrow p to
a chosen p' is ``u = float32(p') - float32(p)``: the float32 sum then rounds to p'
exactly, unless p' is smaller than p by more than 2^16 (a near-total cancellation), is a
zero of the other sign, or one of them is infinite. So the parameter that the sum really
gives is computed first, and the residual against that one.
"""

import jax
import jax.numpy as jnp

from lowbit_optax._numerics.rounding import narrow_or_cast, to_float32


def stay(old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """No landing: the new parameter replaces the old one (``lowbit_optax.step``)."""
    del old
    return new, new


def land(old: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The update from ``old`` to ``new``, and the parameter it lands on.

    Args:
      old, new: arrays of one narrow dtype.

    Returns:
      ``(landed, update)`` with ``landed == round(float32(old) + update)`` in every bit,
      and ``landed == new`` but for the cases in the module's docstring.

    >>> import jax.numpy as jnp
    >>> land(jnp.bfloat16(1.0), jnp.bfloat16(0.5))
    (Array(0.5, dtype=bfloat16), Array(-0.5, dtype=float32))
    """
    update = difference(old, new)
    return narrow_or_cast(to_float32(old) + update, old.dtype), update


def difference(old: jax.Array, new: jax.Array) -> jax.Array:
    """The float32 update from ``old`` to ``new``.

    Of a parameter that :func:`land` gave, it is an update that lands there again.
    """
    before, after = to_float32(old), to_float32(new)
    # Equal values need no update: infinity minus infinity would be NaN.
    return jnp.where(before == after, jnp.float32(0), after - before)


def apply_leaf(param: jax.Array, update: jax.Array) -> jax.Array:
    """``(param + update)`` rounded to the parameter's dtype, as optax applies it."""
    return narrow_or_cast(to_float32(param) + update.astype(jnp.float32), param.dtype)
