"""First moments in units of the root of the second.

    r = mu / root(nu)        mu' = r root(nu')        nu': nu as it is stored

By the inequality of Cauchy and Schwarz Adam's ``|mu| / sqrt(nu)`` is below a constant,
7.27 for ``b1 = 0.9`` and ``b2 = 0.999``, whatever the gradients were. So all r of a
block are of one size, even where its gradients are not. An error of r is an error of
the update, in units of the learning rate.

The root that divides is that of nu before it is rounded, and the root that multiplies
is that of the stored nu'. So mu' is off by the factor by which root(nu') is, and
``mu' / root(nu')``, the update where no gradient follows, is r: the rounding of nu does
not show in it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics.codes import radicand


def quotient(mu: jax.Array, nu: jax.Array) -> jax.Array:
    """``mu / root(nu)``, and 0 where the second moment nu is infinite.

    >>> import jax.numpy as jnp
    >>> quotient(jnp.float32([3.0, 0.0, jnp.inf]), jnp.float32([4.0, 0.0, jnp.inf]))
    Array([1.5, 0. , 0. ], dtype=float32)
    """
    positive, finite = radicand(nu)
    # Infinity times 0 is a NaN, whose sign depends on the machine.
    return jnp.where(finite, mu * lax.rsqrt(positive), jnp.float32(0))


def product(r: jax.Array, nu: jax.Array) -> jax.Array:
    """``r root(nu)``, the inverse of :func:`quotient` where that is not 0.

    The root is kept within 2^-63 and 2^64: a mu whose nu vanished in float32 is kept,
    and the mu of an infinite nu is 0.

    >>> import jax.numpy as jnp
    >>> product(jnp.float32([1.5, 1.0, 0.0]), jnp.float32([4.0, 0.0, jnp.inf])).tolist()
    [3.0, 1.0842021724855044e-19, 0.0]
    """
    return product_by(r, radicand(nu)[0])


def product_by(r: jax.Array, positive: jax.Array) -> jax.Array:
    """:func:`product`, from the positive numbers of nu's :func:`.codes.radicand`."""
    return r * jnp.sqrt(positive)
