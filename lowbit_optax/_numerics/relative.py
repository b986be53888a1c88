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

_SMALLEST = 2.0**-126  # float32's smallest normal number
_LARGEST_ROOT = 2.0**64


def root(nu: jax.Array) -> jax.Array:
    """The unit of the first moments that belong to stored second moments.

    Args:
      nu: float32, not negative.

    Returns:
      ``sqrt(nu)``, kept within 2^-63 and 2^64: a mu whose nu vanished in float32 is
      kept, and the mu of an infinite nu, which is stored as 0, is 0.

    >>> import jax.numpy as jnp
    >>> root(jnp.float32([4.0, 0.0, jnp.inf])).tolist()
    [2.0, 1.0842021724855044e-19, 1.8446744073709552e+19]
    """
    return jnp.minimum(jnp.sqrt(_positive(nu)), jnp.float32(_LARGEST_ROOT))


def inverse_root(nu: jax.Array) -> jax.Array:
    """One over :func:`root`, and 0 where the second moment is infinite.

    >>> import jax.numpy as jnp
    >>> inverse_root(jnp.float32([4.0, 0.0, jnp.inf])).tolist()
    [0.5, 9.223372036854776e+18, 0.0]
    """
    return lax.rsqrt(_positive(nu))


def _positive(nu: jax.Array) -> jax.Array:
    return jnp.maximum(nu, jnp.float32(_SMALLEST))
