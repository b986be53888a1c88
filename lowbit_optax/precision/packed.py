"""Arrays of 16 bits at rest in fewer: the patterns of a float format, packed.

:class:`FloatFormat` turns numbers into patterns, and
:mod:`pallas_kernels.bitfields` packs those.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics.float_format import FloatFormat
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.rounding import narrow_or_cast, to_float32
from pallas_kernels import bitfields
from pallas_kernels.layout import Layout, layout_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedFloats:
    """An array as packed patterns of a float format; :func:`pack` makes it.

    It is a pytree node of one array. The static fields describe only the axis of the
    rows, counted from the end, so slices of a stack (``lax.scan`` over layers) are
    PackedFloats of one layer.

    Args:
      words: uint32, of the ``words_shape`` of :class:`pallas_kernels.layout.Layout`.
      float_format: of the patterns.
      dtype: of the array.
      axis: the axis of the rows; -1 if the last axis is folded into rows.
      length: the array's size along that axis.
    """

    words: jax.Array
    float_format: FloatFormat = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        shape = list(self.words.shape)
        shape[self.axis] = self.length
        return tuple(shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the words."""
        return 4 * self.words.size

    def unpack(self) -> jax.Array:
        """The array.

        Raises:
          ValueError: if the words do not fit the static fields.
        """
        return traced_once(_unpacked)(self)


def pack(tree: typing.Any, float_format: FloatFormat) -> typing.Any:
    """Store arrays as packed patterns of a float format, between steps or in a file.

    Weights that ``nearest``, ``stochastic_rounding`` or ``kahan`` keep in the same
    ``float_format``, and the compensations of ``kahan``, come back bit for bit. All
    other numbers are rounded to nearest by ``float_format.round``. NaN stays NaN where
    the format has it.

    Args:
      tree: of arrays: parameters, or ``state.residual``.
      float_format: of the patterns, such as ``FloatFormat(8, 5)`` for 14 bits.

    Returns:
      The tree with :class:`PackedFloats` in place of its bfloat16, float16 and float8
      arrays that have more bits than the format; scalars and all other leaves stay.
      They take ``float_format.bits`` bits per number, and up to 31 rows of padding.

    Raises:
      TypeError: if ``float_format`` is not a FloatFormat.

    >>> import jax.numpy as jnp
    >>> weights = {"w": jnp.ones((64, 64), jnp.bfloat16), "norm": jnp.ones(64)}
    >>> packed = pack(weights, FloatFormat(8, 3))
    >>> packed["w"].nbytes / 64**2, packed["norm"].dtype
    (1.5, dtype('float32'))
    >>> unpack(packed)["w"].dtype
    dtype(bfloat16)
    """
    if not isinstance(float_format, FloatFormat):
        raise TypeError(f"pack: float_format is {float_format!r}, not a FloatFormat")

    def convert(x):
        dtype = getattr(x, "dtype", np.dtype(bool))
        is_wider = is_narrow(dtype) and 8 * dtype.itemsize > float_format.bits
        if not is_wider or not x.ndim or not x.size:
            return x
        return traced_once(_packed, float_format)(x)

    return jax.tree.map(convert, tree, is_leaf=_is_packed)


def unpack(tree: typing.Any) -> typing.Any:
    """The tree of arrays that :func:`pack` took, or a part of it, as one layer.

    Args:
      tree: of PackedFloats and other leaves, which stay as they are.

    Raises:
      ValueError: if words do not fit what is stored about them.
    """
    convert = lambda x: x.unpack() if _is_packed(x) else x
    return jax.tree.map(convert, tree, is_leaf=_is_packed)


def _is_packed(x) -> bool:
    return isinstance(x, PackedFloats)


def _packed(float_format: FloatFormat, x: jax.Array) -> PackedFloats:
    patterns = float_format.encode(float_format.round(to_float32(x)))
    layout = layout_of(x.shape)
    words = bitfields.pack(patterns.astype(jnp.uint32), float_format.bits, layout)
    axis = layout.axis
    return PackedFloats(words, float_format, x.dtype, axis, x.shape[axis])


def _unpacked(packed: PackedFloats) -> jax.Array:
    def decode(fields: jax.Array) -> jax.Array:
        return narrow_or_cast(packed.float_format.decode(fields), packed.dtype)

    layout = Layout(packed.shape, packed.axis)
    return bitfields.unpack_with(decode, packed.words, packed.float_format.bits, layout)
