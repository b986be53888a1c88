"""``lax.scan`` under the name of what it is for."""

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
    """``jax.lax.scan`` over parameters that a release updates layer by layer.

    Outside of :func:`lowbit_optax.release.value_and_update` it is ``jax.lax.scan``.
    Inside, ``jax.lax.scan`` itself and flax's ``nn.scan`` are released just as well.

    For the backward pass, whatever the derivative of the body needs is kept for every
    layer, unless the body is under ``jax.checkpoint`` (with a policy, to keep some of
    it). Parameters that the body uses uncast take no memory there: they are read again.

    Args:
      body: ``(carry, x) -> (carry, y)``. Cast parameters in here.
      init: the first carry.
      xs: tree of stacks: of parameters, and of other things such as random keys.
      length, reverse, unroll: as in ``jax.lax.scan``.

    Returns:
      ``(carry, ys)``.

    >>> import jax.numpy as jnp
    >>> scan(lambda total, x: (total + x, None), jnp.float32(0), jnp.arange(4.0))
    (Array(6., dtype=float32), None)
    """
    return jax.lax.scan(body, init, xs, length, reverse, unroll)
