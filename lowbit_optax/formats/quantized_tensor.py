"""Weights of 4 to 16 bits as a pytree node, which :func:`quantize_params` makes.

:mod:`lowbit_optax._numerics.linear_code` turns values into codes, and
:mod:`pallas_kernels.bitfields` packs the codes.
"""

import dataclasses

import jax
import jax.numpy as jnp

from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics import linear_code
from lowbit_optax._numerics.codes import MultiplyAdd, as_fields, float_of, multiply_add
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.random_bits import PARAM_STREAM, RandomBits
from lowbit_optax._numerics.rounding import narrow_or_cast
from lowbit_optax.formats.base import Rounding, rounding_words
from lowbit_optax.formats.quantized_leaf import QuantizedWeight, register_with_flax
from pallas_kernels.bitfields import pack, unpack_with
from pallas_kernels.layout import Layout, block_maxima, repeat_blocks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor(QuantizedWeight):
    """An array stored as packed k-bit codes and a step size per block of neighbours.

    :func:`quantize_params` makes it. Its arrays are uint32. So ``update`` of
    :func:`lowbit_optax.lpmm_sgd` can return differences modulo 2^32, with which
    ``optax.apply_updates`` lands exactly.

    The static fields describe only the axis of the rows, counted from the end. So
    slices of a stack (``lax.scan`` over layers, ``jax.vmap``) are QuantizedTensors of
    one layer.

    Two fields are named after the version of :mod:`pallas_kernels.layout`, so that a
    checkpoint of another layout is not read as one of this. :attr:`codes` and
    :attr:`scales` are shorter names for them.

    Args:
      codes_v2: uint32 words, of the ``words_shape`` of :class:`pallas_kernels.Layout`.
      scales_v2: uint32 patterns of float32 step sizes, of its ``blocks_shape``.
      bits: k, the bits of a code.
      block_size: number of values that share a step size, a power of two.
      axis: the axis of the rows; -1 if the last axis is folded into rows.
      length: the array's size along that axis.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> x = jnp.linspace(-1, 1, 8192).reshape(2, 64, 64)
    >>> w = lowbit_optax.lpmm.quantize_params(x, bits=12)
    >>> w.shape, w.codes.shape, w.scales.shape
    ((2, 64, 64), (2, 24, 64), (2, 1, 2))
    >>> w.dequantize(jnp.bfloat16).dtype
    dtype(bfloat16)
    """

    codes_v2: jax.Array
    scales_v2: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        register_with_flax(QuantizedTensor)

    @property
    def codes(self) -> jax.Array:
        """The packed codes."""
        return self.codes_v2

    @property
    def scales(self) -> jax.Array:
        """The patterns of the step sizes."""
        return self.scales_v2

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised array."""
        shape = list(self.codes.shape)
        shape[self.axis] = self.length
        return tuple(shape)

    @property
    def layout(self) -> Layout:
        """Where codes and scales lie."""
        return Layout(self.shape, self.axis)

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales together."""
        return 4 * (self.codes.size + self.scales.size)

    @property
    def stored_as(self) -> str:
        return f"{self.bits}-bit codes, blocks of {self.block_size}"

    @property
    def stored_in(self) -> str:
        return f"{self.bits} bits"

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """The values as an array.

        Args:
          dtype: any float dtype. The values are exact in float32, and rounded to
            nearest in other dtypes.

        Raises:
          TypeError: if ``dtype`` is not a float dtype.
          ValueError: if the shapes of codes and scales do not fit the static fields.
        """
        self.check()
        return traced_once(_dequantized, float_dtype("dequantize: dtype", dtype))(self)

    def quantized(self, x: jax.Array) -> "QuantizedTensor":
        return quantize(self.bits, self.block_size, self.axis, x, None)

    def check(self) -> None:
        codes, scales = self.codes, self.scales
        for name, part in (("codes", codes), ("scales", scales)):
            if part.dtype != jnp.uint32:
                raise ValueError(
                    f"QuantizedTensor: {name} are {part.dtype}, not uint32"
                )
        if codes.ndim >= -self.axis:
            layout = self.layout
            parts = layout.words_shape(self.bits), layout.blocks_shape(self.block_size)
            if (codes.shape, scales.shape) == parts:
                return
        raise ValueError(
            f"QuantizedTensor: codes {list(codes.shape)} and scales "
            f"{list(scales.shape)} are not of {self.bits}-bit codes along axis "
            f"{self.axis} of size {self.length} with blocks of {self.block_size}. Was "
            "the axis of the rows sliced? See stacked= of quantize_params"
        )


def _dequantized(dtype: jnp.dtype, tensor: QuantizedTensor) -> jax.Array:
    """See :meth:`QuantizedTensor.dequantize`."""
    code = QuantizedFields(tensor.bits, tensor.block_size)
    prepared = code.prepare_values(tensor.scales, tensor.layout)

    def decode(fields: jax.Array, *prepared: jax.Array) -> jax.Array:
        return narrow_or_cast(code.decode(fields, prepared), dtype)

    return unpack_with(decode, tensor.codes, tensor.bits, tensor.layout, *prepared)


@dataclasses.dataclass(frozen=True)
class QuantizedFields:
    """The elementwise functions between values and the fields of a QuantizedTensor::

        magnitude_key(x) --> maximum over the block --> scale_of, with the old scale
        prepare(scale) --> once per block, what encode and decode take

    Args:
      bits, block_size: of the QuantizedTensor.
      rounding: of :meth:`encode`.
    """

    bits: int
    block_size: int
    rounding: Rounding = "stochastic"

    def magnitude_key(self, x: jax.Array) -> jax.Array:
        """Integers whose maxima over blocks :meth:`scale_of` takes."""
        return linear_code.magnitude_key(x)

    def scale_of(self, key: jax.Array, old: jax.Array | None = None) -> jax.Array:
        """The uint32 scales of blocks, from the maxima of keys.

        Old scales are kept where they fit.
        """
        maximum = linear_code.magnitude_of(key)
        if old is None:
            return as_fields(linear_code.delta_of(maximum, self.bits))
        return as_fields(linear_code.kept_delta(maximum, float_of(old), self.bits))

    def prepare(self, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What :meth:`encode` and :meth:`decode` take for a uint32 scale."""
        return linear_code.prepare(float_of(scale))

    def prepare_values(self, scales: jax.Array, layout: Layout) -> list[jax.Array]:
        """The prepared scales of blocks, repeated for every value."""
        prepared = self.prepare(scales)
        return [repeat_blocks(x, layout, self.block_size) for x in prepared]

    def encode(
        self,
        x: jax.Array,
        prepared,
        random: RandomBits | None,
        multiply_add: MultiplyAdd = multiply_add,
    ) -> jax.Array:
        """The fields of float32 values; without random bits they are the nearest."""
        words = rounding_words(self.rounding, random, x.shape, PARAM_STREAM)
        return linear_code.encode(x, prepared, self.bits, words, multiply_add)

    def decode(self, fields: jax.Array, prepared) -> jax.Array:
        """The float32 values of fields."""
        return linear_code.decode(fields, prepared, self.bits)


def quantize(
    bits: int,
    block_size: int,
    axis: int,
    x: jax.Array,
    random: RandomBits | None,
    old: jax.Array | None = None,
) -> QuantizedTensor:
    """Store one float32 array as a :class:`QuantizedTensor`.

    Args:
      bits, block_size: as in :func:`quantize_params`.
      axis: as in :class:`QuantizedTensor`.
      x: float32, rank 1 or more.
      random: the leaf's random bits; None rounds to nearest.
      old: the scales that the array had, which are kept where they fit.
    """
    layout = Layout(x.shape, axis)
    code = QuantizedFields(bits, block_size)
    keys = block_maxima(code.magnitude_key(x), layout, block_size)
    scales = code.scale_of(keys, old)
    fields = code.encode(x, code.prepare_values(scales, layout), random)
    codes = pack(fields, bits, layout)
    return QuantizedTensor(codes, scales, bits, block_size, axis, x.shape[axis])


def requantize(
    x: jax.Array, old: QuantizedTensor, random: RandomBits | None
) -> QuantizedTensor:
    """A float32 array in the layout of ``old``, with its step sizes where they fit."""
    return quantize(old.bits, old.block_size, old.axis, x, random, old.scales)


def is_quantized(x) -> bool:
    """Whether ``x`` is a weight that must be dequantised to be read."""
    return isinstance(x, QuantizedWeight)
