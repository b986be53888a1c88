"""Store arrays as packed bit patterns of a float format.

:class:`FloatFormat` converts numbers to bit patterns, and
:mod:`pallas_kernels.bitfields` packs the patterns.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._arguments import check_type
from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics.float_format import FloatFormat
from lowbit_optax._numerics.float_layouts import is_narrow
from lowbit_optax._numerics.rounding import narrow_or_cast, to_float32
from pallas_kernels import bitfields
from pallas_kernels.layout import Layout, layout_of, with_length


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedFloats:
    """An array that :func:`pack` stored as packed bit patterns of a float format.

    It is a pytree with one array. ``lax.scan`` can loop over a stack of layers.

    Args:
      words: uint32 array of packed patterns, as :mod:`pallas_kernels.layout` describes.
      float_format: the format of the patterns.
      dtype: the dtype of the array.
      axis: the axis that the layout uses as rows, counted from the end; -1 if the last
        axis is folded into rows.
      length: the size of the array along that axis.
    """

    words: jax.Array
    float_format: FloatFormat = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return with_length(self.words.shape, self.axis, self.length)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the packed patterns."""
        return 4 * self.words.size

    def unpack(self) -> jax.Array:
        """Return the array.

        Raises:
          ValueError: if the shape of ``words`` does not match the other fields.
        """
        return traced_once(_unpacked)(self)


def pack(tree: typing.Any, float_format: FloatFormat) -> typing.Any:
    """Pack arrays as bit patterns of a float format, between steps or for a file.

    Packing is exact for weights that ``nearest``, ``stochastic_rounding`` or ``kahan``
    store in the same ``float_format``, and for the compensations of ``kahan``. Other
    numbers are rounded to nearest. NaN stays NaN if the format has NaN.

    Args:
      tree: tree of arrays, such as parameters or ``state.residual``.
      float_format: the format, such as ``FloatFormat(8, 5)`` for 14 bits.

    Returns:
      The tree, in which :class:`PackedFloats` replace bfloat16, float16 and float8
      arrays with more bits than the format. They need ``float_format.bits`` bits per
      number, and up to 31 rows of padding. All other leaves do not change.

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
    check_type("pack: float_format", float_format, FloatFormat, "a FloatFormat")

    def convert(x):
        dtype = getattr(x, "dtype", np.dtype(bool))
        is_wider = is_narrow(dtype) and 8 * dtype.itemsize > float_format.bits
        if not is_wider or not x.ndim or not x.size:
            return x
        return traced_once(_packed, float_format)(x)

    return jax.tree.map(convert, tree, is_leaf=_is_packed)


def unpack(tree: typing.Any) -> typing.Any:
    """Return the arrays that :func:`pack` packed.

    Args:
      tree: a tree from :func:`pack`, or a part of it. Other leaves do not change.

    Raises:
      ValueError: if the ``words`` of a leaf do not match its other fields.
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
