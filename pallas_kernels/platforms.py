"""Where a computation will run, as far as that is known."""

from collections.abc import Iterable

import jax
import jax.core


def is_elsewhere(arrays: Iterable[jax.Array]) -> bool:
    """Whether these are arrays at hand, not traced ones, and none is on a GPU.

    >>> import jax.numpy as jnp
    >>> is_elsewhere([jnp.ones(3)]) or jax.default_backend() == "gpu"
    True
    """
    return all(
        not isinstance(x, jax.core.Tracer)
        and all(d.platform != "gpu" for d in getattr(x, "devices", set)())
        for x in arrays
    )
