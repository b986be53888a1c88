"""Where a computation will run, as far as that is known, and by what."""

import typing
from collections.abc import Iterable

import jax
import jax.core

Implementation = typing.Literal["xla", "pallas", "triton", "mosaic"] | None
"""By what a function of kernels runs.

- ``"xla"``: by XLA's own operations, the reference.
- ``"pallas"``: by kernels; elsewhere than on CUDA their operations run one by one.
- ``"triton"``, ``"mosaic"``: by kernels of this backend of Pallas', in programs for
  CUDA only.
- None: by kernels on CUDA, and by XLA elsewhere.
"""

_NAMES = ("xla", "pallas", "triton", "mosaic")


def check_implementation(where: str, implementation) -> None:
    """Raise a ValueError if there is no such implementation.

    Args:
      where: the function that was called.
      implementation: what it was given.

    >>> check_implementation("lowbit", "cuda")
    Traceback (most recent call last):
    ValueError: lowbit: implementation is 'cuda', not None, 'xla', 'pallas', 'triton' or
    'mosaic'
    """
    if implementation not in (None, *_NAMES):
        *names, last = map(repr, _NAMES)
        raise ValueError(
            f"{where}: implementation is {implementation!r}, not None, "
            f"{', '.join(names)} or {last}"
        )


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
