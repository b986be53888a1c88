"""Functions of arrays that JAX traces once for all that is alike."""

import functools
from collections.abc import Callable

import jax


@functools.lru_cache(maxsize=4096)
def traced_once(function: Callable, *static) -> Callable:
    """``function(*static, ...)`` as a function of arrays that JAX traces once.

    Leaves of one shape and format then take little time to trace, and outside of jit
    little time to compile: one program each, not one per operation.

    Args:
      function: of hashable things and then of trees of arrays; a function of a module,
        or a method of something hashable.
      *static: the hashable things.
    """
    return jax.jit(functools.partial(function, *static))
