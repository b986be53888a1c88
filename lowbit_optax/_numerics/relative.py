"""First moments in units of the square root of the second moments.

    r = mu / root(nu)        mu' = r root(nu')        nu': nu after rounding

By the Cauchy-Schwarz inequality, Adam's ``|mu| / sqrt(nu)`` is below a constant for any
gradients: 7.27 for ``b1 = 0.9`` and ``b2 = 0.999``. Therefore, all r of a block
have similar sizes, even if the gradients are not. An error of r changes the
update by this error times the learning rate.

The division uses the root of nu before it is rounded, and the multiplication uses the
root of the stored nu'. Therefore, rounding changes mu' and root(nu') by the same
factor, and ``mu' / root(nu')``, which is the update if no gradient follows, is r.
Rounding nu does not affect it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics.codes import radicand


def quotient(mu: jax.Array, nu: jax.Array) -> jax.Array:
    """Return ``mu / root(nu)``, or 0 if the second moment nu is infinite.

    >>> import jax.numpy as jnp
    >>> quotient(jnp.float32([3.0, 0.0, jnp.inf]), jnp.float32([4.0, 0.0, jnp.inf]))
    Array([1.5, 0. , 0. ], dtype=float32)
    """
    positive, finite = radicand(nu)
    # Infinity times 0 is a NaN whose sign depends on the machine.
    return jnp.where(finite, mu * lax.rsqrt(positive), jnp.float32(0))


def product(r: jax.Array, nu: jax.Array) -> jax.Array:
    """Return ``r root(nu)``, which inverts :func:`quotient` if the quotient is not 0.

    The root is clipped to the range from 2^-63 to 2^64. Therefore, mu is kept if nu has
    underflowed to 0. If nu is infinite, r and mu are 0.

    >>> import jax.numpy as jnp
    >>> product(jnp.float32([1.5, 1.0, 0.0]), jnp.float32([4.0, 0.0, jnp.inf])).tolist()
    [3.0, 1.0842021724855044e-19, 0.0]
    """
    return product_by(r, radicand(nu)[0])


def product_by(r: jax.Array, positive: jax.Array) -> jax.Array:
    """Return :func:`product`, given the first result of :func:`.codes.radicand`."""
    return r * jnp.sqrt(positive)
