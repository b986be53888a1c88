"""First moments in units of the root of the stored second moment.

    r = mu / root(nu)        mu = r root(nu)

By the inequality of Cauchy and Schwarz Adam's ``|mu| / sqrt(nu)`` is below a constant,
7.27 for ``b1 = 0.9`` and ``b2 = 0.999``, whatever the gradients were. So all r of a
block are of one size, even where its gradients are not. The nu is the stored one,
because only that is there when mu is read. An error of r is an error of the update, in
units of the learning rate.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics.codes import radicand


def quotient(mu: jax.Array, nu: jax.Array) -> jax.Array:
    """``mu / root(nu)``, and 0 where the stored second moment nu is infinite.

    >>> import jax.numpy as jnp
    >>> quotient(jnp.float32([3.0, 0.0, jnp.inf]), jnp.float32([4.0, 0.0, jnp.inf]))
    Array([1.5, 0. , 0. ], dtype=float32)
    """
    return quotient_by(mu, *radicand(nu))


def product(r: jax.Array, nu: jax.Array) -> jax.Array:
    """``r root(nu)``, the inverse of :func:`quotient` where that is not 0.

    The root is kept within 2^-63 and 2^64: a mu whose nu vanished in float32 is kept,
    and the mu of an infinite nu is 0.

    >>> import jax.numpy as jnp
    >>> product(jnp.float32([1.5, 1.0, 0.0]), jnp.float32([4.0, 0.0, jnp.inf])).tolist()
    [3.0, 1.0842021724855044e-19, 0.0]
    """
    return product_by(r, *radicand(nu))


def quotient_by(mu: jax.Array, positive: jax.Array, finite: jax.Array) -> jax.Array:
    """:func:`quotient`, from the :func:`.codes.radicand` of nu."""
    # Infinity times 0 is a NaN, whose sign depends on the machine.
    return jnp.where(finite, mu * lax.rsqrt(positive), jnp.float32(0))


def product_by(r: jax.Array, positive: jax.Array, finite: jax.Array) -> jax.Array:
    """:func:`product`, from the :func:`.codes.radicand` of nu."""
    del finite  # the r of an infinite nu is 0
    return r * jnp.sqrt(positive)
