"""Weights as float8 codes with a power of two per block: MXFP8 (e4m3, 32, e8m0).

    x ~ code * 2^e,    e the smallest integer with max |x| <= 448 * 2^e over the block

448 is the largest number of float8_e4m3fn, so nothing saturates. (The rule of the OCP
specification, e = floor(log2 max |x|) - 8, makes 448 of what lies between 448 and 512.)

A scale is 2^-96 at least. Then neither a code's value nor one of 20 extra bits is below
float32's normal numbers, and products by the scales are exact.

NaNs and infinities stay out of their block's scale, and their codes are NaN:
float8_e4m3fn has no infinity.

References:
  OCP Microscaling Formats (MX) Specification 1.0, sections 5.2, 5.3 and 6.3.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._jaxprs.traced_once import traced_once
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.float_layouts import BIAS, INFINITY, MANTISSA, magnitude_of
from lowbit_optax._numerics.rounding import narrow_or_cast, round_nearest, to_float32
from lowbit_optax.formats.quantized_leaf import QuantizedWeight, register_with_flax
from pallas_kernels.layout import merge_axes, split_axis

BLOCK = 32
"""The values that share a scale."""

E4M3, E8M0 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e8m0fnu)
"""The dtypes of codes and scales."""

_NAN, _LEAST = 128, -96
"""The exponent of e8m0's NaN, and the smallest that a scale is given."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockScaledTensor(QuantizedWeight):
    """An array stored as float8 codes and a power of two per 32 values along an axis.

    :func:`block_scale` makes it. :attr:`codes` and :attr:`scales` are what products of
    block-scaled arrays take, such as ``jax.lax.scaled_dot``. They are stored as bytes.
    So ``update`` of :func:`lowbit_optax.lowbit` can return differences modulo 2^8, with
    which ``optax.apply_updates`` lands exactly.

    The axis of the blocks is counted from the end. So slices of a stack (``lax.scan``
    over layers, ``jax.vmap``) are BlockScaledTensors of one layer.

    Args:
      codes_e4m3: uint8 patterns of float8_e4m3fn, of the array's shape.
      scales_e8m0: uint8 patterns of float8_e8m0fnu; along the axis 32 times shorter.
      axis: the axis of the blocks, negative.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> w = lowbit_optax.block_scaling.block_scale(jnp.ones((64, 128)))
    >>> w.codes.dtype, w.scales.dtype, w.scales.shape
    (dtype(float8_e4m3fn), dtype(float8_e8m0fnu), (2, 128))
    >>> w.dequantize(jnp.bfloat16).dtype
    dtype(bfloat16)
    """

    codes_e4m3: jax.Array
    scales_e8m0: jax.Array
    axis: int = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        register_with_flax(BlockScaledTensor)

    @property
    def codes(self) -> jax.Array:
        """The codes, float8_e4m3fn."""
        return lax.bitcast_convert_type(self.codes_e4m3, E4M3)

    @property
    def scales(self) -> jax.Array:
        """The scales, float8_e8m0fnu."""
        return lax.bitcast_convert_type(self.scales_e8m0, E8M0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised array, and of the codes."""
        return self.codes_e4m3.shape

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales together."""
        return self.size + math.prod(self.scales_e8m0.shape)

    @property
    def stored_as(self) -> str:
        return f"e4m3 codes, e8m0 scales of {BLOCK} along axis {self.axis}"

    @property
    def stored_in(self) -> str:
        return "mxfp8"

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """The values as an array.

        Args:
          dtype: any float dtype. The values are exact in float32, but those below its
            normal numbers, which only scales below 2^-117 have, may be 0. In other
            dtypes they are rounded to nearest.

        Raises:
          TypeError: if ``dtype`` is not a float dtype.
          ValueError: if the shapes of codes and scales do not belong together.
        """
        self.check()
        return traced_once(_dequantized, float_dtype("dequantize: dtype", dtype))(self)

    def quantized(self, x: jax.Array) -> "BlockScaledTensor":
        return traced_once(quantize, self.axis)(x)

    def check(self) -> None:
        for name, part in (("codes", self.codes_e4m3), ("scales", self.scales_e8m0)):
            if part.dtype != jnp.uint8:
                raise ValueError(
                    f"BlockScaledTensor: {name} are stored as {part.dtype}, not uint8"
                )
        shape, scales = tuple(self.shape), tuple(self.scales_e8m0.shape)
        check_axis(shape, self.axis)
        if scales != scales_shape(shape, self.axis):
            raise ValueError(
                f"BlockScaledTensor: scales {list(scales)} are not of codes "
                f"{list(shape)} in blocks of {BLOCK} along axis {self.axis}"
            )


def check_axis(shape: tuple[int, ...], axis: int) -> None:
    """Raise a ValueError unless an array of this shape has whole blocks along an axis.

    ``axis`` is negative.
    """
    if len(shape) < -axis:
        raise ValueError(f"shape {list(shape)} has no axis {axis} for blocks")
    if shape[axis] % BLOCK:
        raise ValueError(
            f"axis {axis} of shape {list(shape)} does not divide into blocks of {BLOCK}"
        )


def scales_shape(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape of the scales of an array whose blocks lie along a negative axis."""
    found = list(shape)
    found[axis] //= BLOCK
    return tuple(found)


def quantize(axis: int, x: jax.Array) -> BlockScaledTensor:
    """Round float32 to a :class:`BlockScaledTensor`, to nearest.

    Args:
      axis: negative; whole blocks lie along it.
      x: float32.
    """
    check_axis(x.shape, axis)
    exponents = exponents_of(x, axis)
    return of_codes(round_nearest(scaled(x, -exponents, axis), E4M3), exponents, axis)


def of_codes(codes: jax.Array, exponents: jax.Array, axis: int) -> BlockScaledTensor:
    """The tensor of float8_e4m3fn codes and the exponents of their scales."""
    scales = (exponents + BIAS).astype(jnp.uint8)
    return BlockScaledTensor(lax.bitcast_convert_type(codes, jnp.uint8), scales, axis)


def exponents_of(x: jax.Array, axis: int) -> jax.Array:
    """The exponents of the scales of float32 values, int32, one per block."""
    magnitude = magnitude_of(x)
    finite = jnp.where(magnitude < jnp.uint32(INFINITY), magnitude, jnp.uint32(0))
    at = x.ndim + axis
    largest = split_axis(finite, at, BLOCK).max(at + 1)
    # 448 is 1.75 * 2^8: past a significand of 1.75 the exponent is one more.
    past = jnp.uint32((1 << MANTISSA) // 4 - 1)
    stored = (largest + past >> jnp.uint32(MANTISSA)).astype(jnp.int32) - 8
    return jnp.maximum(stored - BIAS, _LEAST)


def exponents(tensor: BlockScaledTensor) -> jax.Array:
    """The exponents of a tensor's scales; 128 for a scale that is NaN."""
    return tensor.scales_e8m0.astype(jnp.int32) - BIAS


def scaled(x: jax.Array, exponents: jax.Array, axis: int) -> jax.Array:
    """``x 2^e`` for float32 values and the exponents of their blocks.

    Exact where the result is a normal float32 or 0, which it may be below these.
    """
    at = x.ndim + axis
    blocks = split_axis(x, at, BLOCK)
    # A float32 of 2^e may be subnormal, but not one of half the exponent.
    half = exponents >> 1
    first = jnp.where(exponents == _NAN, jnp.float32(jnp.nan), _power(half))
    for factor in (first, _power(exponents - half)):
        blocks = blocks * jnp.expand_dims(factor, at + 1)
    return merge_axes(blocks, at)


def _power(exponent: jax.Array) -> jax.Array:
    """``2^e`` for int32 from -126 to 127."""
    return lax.bitcast_convert_type(exponent + BIAS << MANTISSA, jnp.float32)


def _dequantized(dtype: jnp.dtype, tensor: BlockScaledTensor) -> jax.Array:
    """See :meth:`BlockScaledTensor.dequantize`."""
    values = scaled(to_float32(tensor.codes), exponents(tensor), tensor.axis)
    return narrow_or_cast(values, dtype)
