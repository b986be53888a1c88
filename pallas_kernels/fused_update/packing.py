"""Pack arrays of k-bit fields into words, and unpack them, on any device."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import bitfields
from pallas_kernels.fused_update.api import fused_update
from pallas_kernels.fused_update.spec import Operand, Result
from pallas_kernels.layout import layout_of
from pallas_kernels.platforms import Implementation


def pack(
    fields: jax.Array, bits: int, *, implementation: Implementation = None
) -> jax.Array:
    """Pack an array of k-bit fields into uint32 words.

    :mod:`pallas_kernels.layout` defines the word and the bits of each field.

    Args:
      fields: uint32 array of rank 1 or more with values below ``2**bits``.
      bits: width k of a field, 1 to 32.
      implementation: None uses kernels on CUDA devices and XLA elsewhere. For other
        values, see :func:`pallas_kernels.fused_update`.

    Returns:
      uint32 words of shape ``packed_shape(fields.shape, bits)``; padding fields are 0.

    Raises:
      ValueError: if ``bits`` is out of range, or ``fields`` is a scalar or not uint32.

    >>> import jax.numpy as jnp
    >>> words = pack(jnp.arange(64, dtype=jnp.uint32).reshape(32, 2), bits=8)
    >>> words.shape, hex(int(words[0, 0]))
    ((8, 2), '0x6040200')
    """
    bitfields.check(bits, fields.dtype)
    layout_of(fields.shape)
    return _converted(fields, None, bits, fields.shape, implementation)


def unpack(
    words: jax.Array,
    bits: int,
    shape: tuple[int, ...],
    *,
    implementation: Implementation = None,
) -> jax.Array:
    """Unpack uint32 words into an array of k-bit fields, the inverse of :func:`pack`.

    Args:
      words: uint32 array of shape ``packed_shape(shape, bits)``.
      bits: width k of a field, 1 to 32.
      shape: shape of the packed array.
      implementation: see :func:`pack`.

    Returns:
      A uint32 array of shape ``shape``.

    Raises:
      ValueError: if ``words`` does not match ``bits`` and ``shape``, or is not uint32.

    >>> import jax.numpy as jnp
    >>> words = pack(jnp.arange(50, dtype=jnp.uint32), bits=7)
    >>> bool((unpack(words, 7, (50,)) == jnp.arange(50)).all())
    True
    """
    bitfields.check_words(words, bits, layout_of(shape))
    return _converted(words, bits, None, tuple(shape), implementation)


# Jitted, so that calls outside of jit run one program instead of one per operation.
@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _converted(
    x: jax.Array,
    bits: int | None,
    new_bits: int | None,
    shape: tuple[int, ...],
    implementation: Implementation,
) -> jax.Array:
    (new,) = fused_update(
        _same,
        [Operand(x, bits)],
        [Result(jnp.uint32, new_bits)],
        shape=shape,
        implementation=implementation,
    )
    return new


def _same(values, scalars, index):
    del scalars, index
    return values
