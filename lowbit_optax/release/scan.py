"""``lax.scan`` under the name by which a release knows it."""

from collections.abc import Callable

import jax


def scan(
    body: Callable,
    init,
    xs=None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
):
    """``jax.lax.scan``, over whose parameters a release updates layer by layer.

    Outside of :func:`lowbit_optax.release.value_and_update` it is ``jax.lax.scan``, and
    inside of it the same holds of ``jax.lax.scan`` itself and of flax's ``nn.scan``.

    What a body computes for its derivative is kept for every layer, unless the body is
    under ``jax.checkpoint`` (with a policy, if some of it is to be kept). Parameters
    that are kept as they are cost nothing: they are read again.

    Args:
      body: ``(carry, x) -> (carry, y)``. Casts of parameters belong in here.
      init: the first carry.
      xs: tree of stacks, parameters and others (keys of layers, say).
      length, reverse, unroll: as in ``jax.lax.scan``.

    Returns:
      ``(carry, ys)``.

    >>> import jax.numpy as jnp
    >>> scan(lambda total, x: (total + x, None), jnp.float32(0), jnp.arange(4.0))
    (Array(6., dtype=float32), None)
    """
    return jax.lax.scan(body, init, xs, length, reverse, unroll)
