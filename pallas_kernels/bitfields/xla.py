"""Arrays of k-bit fields packed along one axis, with the array's rank kept, by XLA.

With pack axis ``a`` and ``n = shape[a]`` the words have the array's shape with
``n -> ceil(n/32) * k``. Groups of 32 run down the pack axis, so a leading axis can be
sliced, a PartitionSpec of the array is a PartitionSpec of the words, and neighbouring
threads of a kernel read neighbouring columns.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.bitfields.fields import GROUP, get_field, period, put_fields

# A second-to-last axis is preferred even when padding it to whole groups stores up to
# this many times the fields: it keeps the last axis contiguous for the hardware.
_TOLERATED_PADDING = 1.25


def pack_axis(shape: tuple[int, ...]) -> int:
    """The axis along which an array of this shape is packed.

    The second-to-last, where padding it to a multiple of 32 costs little (at most a
    quarter more, or no more than padding the last axis would); else the last.

    Args:
      shape: of the array to be packed, rank 1 or more.

    Returns:
      A non-negative axis.

    Raises:
      ValueError: for rank 0, which has no axis to pack along.

    >>> pack_axis((4096, 512)), pack_axis((3, 3, 3, 64)), pack_axis((10,))
    (0, 3, 0)
    """
    rank = len(shape)
    if rank == 0:
        raise ValueError("a scalar cannot be packed; keep it as float32")
    if rank == 1:
        return 0

    def padding(axis: int) -> float:
        n = shape[axis]
        return math.ceil(n / GROUP) * GROUP / n if n else 1.0

    rows, columns = padding(rank - 2), padding(rank - 1)
    return rank - 2 if rows <= max(_TOLERATED_PADDING, columns) else rank - 1


def packed_shape(shape: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """The shape of the uint32 words that hold an array of k-bit fields.

    Args:
      shape: of the array, rank 1 or more.
      bits: width k of a field, 1 to 32.

    >>> packed_shape((4096, 512), 8), packed_shape((3, 3, 3, 64), 12)
    ((1024, 512), (3, 3, 3, 24))
    """
    axis = pack_axis(shape)
    words = math.ceil(shape[axis] / GROUP) * bits
    return (*shape[:axis], words, *shape[axis + 1 :])


def pack(fields: jax.Array, bits: int) -> jax.Array:
    """Pack an array of k-bit fields into uint32 words.

    Args:
      fields: uint32, rank 1 or more, any size, each value below ``2**bits``.
      bits: width k of a field, 1 to 32.

    Returns:
      uint32 words of shape :func:`packed_shape`; fields of the padding are 0.

    Raises:
      ValueError: if ``bits`` is out of range, ``fields`` is a scalar, or not uint32.

    >>> import jax.numpy as jnp
    >>> words = pack(jnp.arange(64, dtype=jnp.uint32), bits=8)
    >>> words.shape, hex(int(words[0]))
    ((16,), '0x3020100')
    """
    check(bits, fields.dtype)
    axis = pack_axis(fields.shape)
    size = fields.shape[axis]
    padding = -size % GROUP
    if padding:
        widths = [(0, 0)] * fields.ndim
        widths[axis] = (0, padding)
        fields = jnp.pad(fields, widths)
    rows, _ = period(bits)
    blocks = _split(fields, axis, rows)
    taken = [lax.index_in_dim(blocks, row, axis + 1, False) for row in range(rows)]
    return _merge(jnp.stack(put_fields(taken, bits), axis=axis + 1), axis)


def unpack(words: jax.Array, bits: int, shape: tuple[int, ...]) -> jax.Array:
    """Unpack uint32 words into an array of k-bit fields, the inverse of :func:`pack`.

    Args:
      words: uint32 of shape ``packed_shape(shape, bits)``.
      bits: width k of a field, 1 to 32.
      shape: of the array that was packed.

    Returns:
      uint32 fields of that shape.

    Raises:
      ValueError: if ``words`` has another dtype or shape than these arguments imply.

    >>> import jax.numpy as jnp
    >>> words = pack(jnp.arange(50, dtype=jnp.uint32), bits=7)
    >>> bool((unpack(words, 7, (50,)) == jnp.arange(50)).all())
    True
    """
    check_words(words, bits, shape)
    axis = pack_axis(shape)
    rows, count = period(bits)
    blocks = _split(words, axis, count)
    if count == 1:
        # One shift of a broadcast word fuses where a concatenation of rows does not.
        widths = [1] * blocks.ndim
        widths[axis + 1] = rows
        shifts = (lax.iota(jnp.uint32, rows) * jnp.uint32(bits)).reshape(widths)
        stacked = (blocks >> shifts) & jnp.uint32((1 << bits) - 1)
    else:
        taken = [lax.index_in_dim(blocks, w, axis + 1, False) for w in range(count)]
        taken = [get_field(taken, row, bits) for row in range(rows)]
        stacked = jnp.stack(taken, axis=axis + 1)
    fields = _merge(stacked, axis)
    return lax.slice_in_dim(fields, 0, shape[axis], axis=axis)


def check_words(words: jax.Array, bits: int, shape: tuple[int, ...]) -> None:
    """Raise unless these words can hold an array of this shape."""
    check(bits, words.dtype)
    expected = packed_shape(shape, bits)
    if words.shape != expected:
        raise ValueError(
            f"words of shape {words.shape} do not hold {bits}-bit fields of an array "
            f"of shape {shape}: they would have shape {expected}"
        )


def check(bits: int, dtype: jnp.dtype) -> None:
    """Raise unless fields of so many bits can be packed into words of this dtype."""
    if not 1 <= bits <= 32:
        raise ValueError(f"bits is {bits}; a field in a uint32 word has 1 to 32")
    if dtype != jnp.uint32:
        raise ValueError(f"packed words and their fields are uint32, not {dtype}")


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return x.reshape(shape)


def _merge(x: jax.Array, axis: int) -> jax.Array:
    shape = (*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])
    return x.reshape(shape)
