"""``not_fused`` keeps XLA's CPU compiler from computing scalars in every loop."""

import jax
import jax.numpy as jnp
from jax import lax


def not_fused(*words: jax.Array) -> tuple[jax.Array, ...]:
    """Compute uint32 arrays once in a program for CPUs.

    Otherwise, XLA's CPU compiler copies the operations that compute a scalar into each
    loop that reads it, once for every field of a packed word. LLVM then needs minutes
    for a matrix. On other platforms, the arrays are returned unchanged.
    """
    return lax.platform_dependent(*words, cpu=_apart, default=lambda *words: words)


def _apart(*words: jax.Array) -> tuple[jax.Array, ...]:
    # JAX 0.10 drops barriers on CPUs. XLA keeps this conditional, because it cannot
    # prove that no number is below minus infinity.
    number = lax.bitcast_convert_type(words[0].ravel()[0], jnp.float32)
    flipped = lambda: tuple(~x for x in words)
    return lax.cond(number < -jnp.inf, flipped, lambda: words)
