"""Functions that keep tracing and compilation short, and change no values."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer


@functools.lru_cache(maxsize=4096)
def traced_once(function: Callable, *static) -> Callable:
    """Return ``function(*static, ...)`` as a function of arrays that JAX traces once.

    This makes tracing fast for leaves with the same shape and format. Outside of jit it
    also makes compiling fast, with one program per leaf instead of one per operation.

    Args:
      function: a module-level function, or a method of a hashable object. Its arguments
        are hashable objects, followed by trees of arrays.
      *static: values of the hashable arguments.
    """
    return jax.jit(functools.partial(function, *static))


def not_folded(x):
    """Hide the values of a traced float array from XLA's constant folding.

    Otherwise, XLA would compute the codes of zeros during compilation, one element at a
    time, which takes nine seconds for a matrix of 1024 x 1024 and prints a warning. The
    function needs no additional memory.
    """
    if not (isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.floating)):
        return x
    is_taken = jax.lax.optimization_barrier(jnp.asarray(True))
    return jnp.where(is_taken, x, jnp.ones_like(x))


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
