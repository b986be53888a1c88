"""Packed fields, written from the definition of the layout."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import Operand, Result, fused_update

PERIODS = {
    bits: next(r for r in range(1, 33) if r * bits % 32 == 0) for bits in range(1, 33)
}


def pack(fields, bits, implementation=None):
    """`pallas_kernels.pack` by a kernel."""
    return _copied(fields, None, bits, fields.shape, implementation)


def unpack(words, bits, shape, implementation=None):
    """`pallas_kernels.unpack` by a kernel."""
    return _copied(words, bits, None, shape, implementation)


def _copied(x, bits, new_bits, shape, implementation):
    copied = fused_update(
        lambda values, *_: values,
        [Operand(x, bits)],
        [Result(jnp.uint32, new_bits)],
        shape=shape,
        implementation=implementation,
    )
    return copied[0]


def reference_pack(fields, bits, axis):
    """The fields of a period as one big integer each, cut into 32-bit digits.

    Python integers in object arrays cannot overflow with a wrong width, shift or mask.
    The code follows the layout's definition, and uses nothing from the library.

    Args:
      axis: rows' axis, counted from the end; -1 folds the last axis into rows of 32.
    """
    fields = np.asarray(fields)
    if axis == -1:
        length = fields.shape[-1]
        fields = np.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, -length % 32)])
        rows = fields.reshape(*fields.shape[:-1], -1, 32)
        words = reference_pack(rows, bits, -2)
        return words.reshape(*words.shape[:-2], -1)
    fields = np.moveaxis(fields, axis, 0).astype(object)
    period, count = PERIODS[bits], PERIODS[bits] * bits // 32
    words = []
    for first in range(0, len(fields), period):
        total = np.zeros(fields.shape[1:], object)
        for row, value in enumerate(fields[first : first + period]):
            total = total + value * 2 ** (row * bits)
        words += [total // 2 ** (32 * word) % 2**32 for word in range(count)]
    shape = (len(words), *fields.shape[1:])
    words = np.array(words, object).reshape(shape).astype(np.uint32)
    return np.moveaxis(words, 0, axis)
