"""Functions of arrays that JAX traces once for equal static arguments and shapes."""

import functools
from collections.abc import Callable

import jax


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
