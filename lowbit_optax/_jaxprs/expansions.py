"""Primitives that kernels do not have, in elementwise operations that they have.

The numbers are those of XLA's own expansions, but for products that are contracted with
sums.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Call

_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_PARITY = 0x1BD11BDA

_BY_INDEX = "jax_threefry_partitionable"
"""The setting with which bits do not depend on how many there are."""

# Giles 2012, "Approximating the erfinv function": below w = 5, and from there on.
_BELOW = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
_ABOVE = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)


def erf_inv(x: jax.Array) -> jax.Array:
    """``lax.erf_inv`` of float32.

    >>> float(erf_inv(jnp.float32(0.5)) - lax.erf_inv(jnp.float32(0.5)))
    0.0
    """
    w = -lax.log1p(-x * x)
    is_below = w < 5
    w = jnp.where(is_below, w - 2.5, lax.sqrt(w) - 3)
    total = jnp.zeros_like(x)
    for below, above in zip(_BELOW, _ABOVE, strict=True):
        # As Python's numbers they would be float64 with 64-bit types on.
        factor = jnp.where(is_below, jnp.float32(below), jnp.float32(above))
        total = factor + total * w
    return jnp.where(lax.abs(x) == 1, x * jnp.inf, total * x)


def threefry_bits(key: jax.Array, index: jax.Array) -> jax.Array:
    """The elements of ``jax.random.bits(key, shape)`` with these row-major indices.

    Args:
      key: of the implementation ``threefry2x32``.
      index: uint32.

    >>> key, index = jax.random.key(1), jnp.arange(6, dtype=jnp.uint32)
    >>> bool((threefry_bits(key, index) == jax.random.bits(key, (6,))).all())
    True
    """
    first, second = jax.random.key_data(key)
    keys = first, second, first ^ second ^ jnp.uint32(_PARITY)
    x, y = jnp.zeros_like(index) + keys[0], index + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ (y << jnp.uint32(distance) | y >> jnp.uint32(32 - distance))
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x ^ y


def is_erf_inv(call: Call) -> bool:
    """Whether :func:`erf_inv` computes a call."""
    is_float32 = call.outputs[0].aval.dtype == jnp.float32
    return call.primitive is p.erf_inv_p and is_float32


def is_threefry_bits(call: Call) -> bool:
    """Whether :func:`threefry_bits` computes a call from the indices of its result."""
    if call.primitive is not p.random_bits_p or call.params["bit_width"] != 32:
        return False
    (key,), (result,) = call.inputs, call.outputs
    is_small = result.aval.size <= 2**32
    by_index = getattr(jax.config, _BY_INDEX)
    if not (key.is_scalar and is_small and by_index):
        return False
    return key.aval.dtype == _threefry_dtype()


@functools.cache
def _threefry_dtype():
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype
