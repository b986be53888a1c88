"""Weights as float8 codes with a power of two per block: MXFP8 (e4m3, 32, e8m0).

    x ~ code * 2^e,    e the smallest integer with max |x| <= 448 * 2^e over the block

448 is the largest number of float8_e4m3fn, so no value saturates. (With the exponent of
the OCP specification, floor(log2 max |x|) - 8, scaled values up to 512 become 448.)

Scales are at least 2^-96. Products of a code and its scale, even with 20 extra bits,
are then normal float32 numbers, and therefore exact.

NaNs and infinities do not change the scale of their block. Their codes are NaN, because
float8_e4m3fn has no infinity.

A weight format of float8 weights applies to these weights too:

    e from the new master's blocks,    master / 2^e --split--> codes, residual
    (codes, residual) --join--> master / 2^e

The quotients are exact. Therefore, residuals are in units of the scale, and everything
that is exact for float8_e4m3fn is exact for BlockScaledTensors too.

References:
  OCP Microscaling Formats (MX) Specification 1.0, sections 5.2, 5.3 and 6.3.
"""

import dataclasses
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.float_layouts import BIAS, INFINITY, MANTISSA, magnitude_of
from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax._numerics.rounding import narrow_or_cast, round_nearest, to_float32
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.kahan import KahanFormat
from lowbit_optax.formats.plain import Nearest, StochasticRounding
from lowbit_optax.formats.quantized_tensor import QuantizedWeight
from lowbit_optax.formats.quantized_weights import QuantizedWeights, result_of
from pallas_kernels.layout import merge_axes, split_axis, with_length

BLOCK = 32
"""The number of values that share a scale."""

E4M3, E8M0 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e8m0fnu)
"""The dtypes of codes and scales."""

_NAN, _LEAST = 128, -96
"""The exponent of e8m0's NaN, and the smallest exponent of a scale."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockScaledTensor(QuantizedWeight):
    """An array stored as float8 codes and a power of two per 32 values along an axis.

    :func:`block_scale` creates it. Pass :attr:`codes` and :attr:`scales` to products of
    block-scaled arrays, such as ``jax.lax.scaled_dot``. Both are stored as bytes, so
    that ``update`` of :func:`lowbit_optax.lowbit` can return differences modulo 2^8,
    which ``optax.apply_updates`` adds exactly.

    The axis of the blocks is counted from the end. Therefore, slices of a stack of
    layers (in ``lax.scan`` or ``jax.vmap``) are BlockScaledTensors of one layer.

    Args:
      codes_e4m3: uint8 bit patterns of float8_e4m3fn, with the shape of the array.
      scales_e8m0: uint8 bit patterns of float8_e8m0fnu; along ``axis`` 32 times
        shorter.
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

    @property
    def codes(self) -> jax.Array:
        """The codes as float8_e4m3fn."""
        return lax.bitcast_convert_type(self.codes_e4m3, E4M3)

    @property
    def scales(self) -> jax.Array:
        """The scales as float8_e8m0fnu."""
        return lax.bitcast_convert_type(self.scales_e8m0, E8M0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized array, and of the codes."""
        return self.codes_e4m3.shape

    @property
    def nbytes(self) -> int:
        """The total number of bytes of codes and scales."""
        return self.size + math.prod(self.scales_e8m0.shape)

    @property
    def stored_as(self) -> str:
        return f"e4m3 codes, e8m0 scales of {BLOCK} along axis {self.axis}"

    @property
    def stored_in(self) -> str:
        return "mxfp8"

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """Return the values as an array.

        Args:
          dtype: any float dtype. Values are exact in float32, except that values below
            its normal numbers, which need scales below 2^-117, may become 0. In other
            dtypes, they are rounded to nearest.

        Raises:
          TypeError: if ``dtype`` is not a float dtype.
          ValueError: if the shapes of codes and scales do not match.
        """
        self.check()
        return traced_once(_dequantized, float_dtype("dequantize: dtype", dtype))(self)

    def quantized(self, x: jax.Array) -> "BlockScaledTensor":
        return traced_once(quantize, self.axis)(x)

    def check(self) -> None:
        for name, part in (("codes", self.codes_e4m3), ("scales", self.scales_e8m0)):
            if part.dtype != jnp.uint8:
                raise ValueError(
                    f"BlockScaledTensor: {name} must be uint8, got {part.dtype}"
                )
        shape, scales = tuple(self.shape), tuple(self.scales_e8m0.shape)
        check_axis(shape, self.axis)
        if scales != with_length(shape, self.axis, shape[self.axis] // BLOCK):
            raise ValueError(
                f"BlockScaledTensor: scales of shape {list(scales)} do not match codes "
                f"of shape {list(shape)} in blocks of {BLOCK} along axis {self.axis}"
            )


def check_axis(shape: tuple[int, ...], axis: int) -> None:
    """Raise a ValueError unless a negative axis divides into whole blocks."""
    if len(shape) < -axis:
        raise ValueError(f"axis {axis} is out of range for shape {list(shape)}")
    if shape[axis] % BLOCK:
        raise ValueError(
            f"the length of axis {axis} must be a multiple of {BLOCK}, got shape "
            f"{list(shape)}"
        )


def quantize(axis: int, x: jax.Array) -> BlockScaledTensor:
    """Round a float32 array to the nearest :class:`BlockScaledTensor`.

    Args:
      axis: the axis of the blocks, negative; its length is a multiple of 32.
      x: float32 array.
    """
    check_axis(x.shape, axis)
    exponents = exponents_of(x, axis)
    return of_codes(round_nearest(scaled(x, -exponents, axis), E4M3), exponents, axis)


def of_codes(codes: jax.Array, exponents: jax.Array, axis: int) -> BlockScaledTensor:
    """Return the tensor with float8_e4m3fn codes and the exponents of its scales."""
    scales = (exponents + BIAS).astype(jnp.uint8)
    return BlockScaledTensor(lax.bitcast_convert_type(codes, jnp.uint8), scales, axis)


def exponents_of(x: jax.Array, axis: int) -> jax.Array:
    """Return the int32 exponents of the scales of float32 values, one per block."""
    magnitude = magnitude_of(x)
    finite = jnp.where(magnitude < jnp.uint32(INFINITY), magnitude, jnp.uint32(0))
    at = x.ndim + axis
    largest = split_axis(finite, at, BLOCK).max(at + 1)
    # 448 is 1.75 * 2^8, so a significand above 1.75 needs the next exponent.
    past = jnp.uint32((1 << MANTISSA) // 4 - 1)
    stored = (largest + past >> jnp.uint32(MANTISSA)).astype(jnp.int32) - 8
    return jnp.maximum(stored - BIAS, _LEAST)


def exponents(tensor: BlockScaledTensor) -> jax.Array:
    """Return the exponents of a tensor's scales, with 128 for a scale of NaN."""
    return tensor.scales_e8m0.astype(jnp.int32) - BIAS


def scaled(x: jax.Array, exponents: jax.Array, axis: int) -> jax.Array:
    """Return ``x 2^e`` for float32 values and the exponents of their blocks.

    Results are exact, except that results below the normal float32 numbers may be 0.
    """
    at = x.ndim + axis
    blocks = split_axis(x, at, BLOCK)
    # 2^e may be a subnormal float32 number, but 2^(e/2) is a normal one.
    half = exponents >> 1
    first = jnp.where(exponents == _NAN, jnp.float32(jnp.nan), _power(half))
    for factor in (first, _power(exponents - half)):
        blocks = blocks * jnp.expand_dims(factor, at + 1)
    return merge_axes(blocks, at)


def _power(exponent: jax.Array) -> jax.Array:
    """Return ``2^e`` for int32 exponents from -126 to 127."""
    return lax.bitcast_convert_type(exponent + BIAS << MANTISSA, jnp.float32)


def _dequantized(dtype: jnp.dtype, tensor: BlockScaledTensor) -> jax.Array:
    """Implement :meth:`BlockScaledTensor.dequantize`."""
    values = scaled(to_float32(tensor.codes), exponents(tensor), tensor.axis)
    return narrow_or_cast(values, dtype)


@dataclasses.dataclass(frozen=True)
class BlockScaledWeights(WeightFormat):
    """Updates BlockScaledTensors.

    Args:
      format: a weight format for float8_e4m3fn.
      axis: the axis of the blocks.
    """

    format: WeightFormat
    axis: int

    @property
    def residual_name(self):
        return self.format.residual_name

    @property
    def stores_sum(self) -> bool:
        return self.format.stores_sum

    @property
    def error_feedback(self):
        return self.format.error_feedback

    def sum_stream(self, dtype):
        return self.format.sum_stream(E4M3)

    def is_exact(self, dtype):
        return self.format.is_exact(E4M3)

    def widen(self, param: typing.Any):
        return param.dequantize()

    def init(self, param: typing.Any):
        return self.format.init(param.codes)

    def join(self, param: typing.Any, residual):
        units = self.format.join(param.codes, residual)
        return scaled(units, exponents(param), self.axis)

    def round(self, master, dtype, random) -> typing.Any:
        return self.split(master, dtype, random)[0]

    def residual(self, master, param: typing.Any, random):
        units = scaled(master, -exponents(param), self.axis)
        return self.format.residual(units, param.codes, random)

    def split(self, master, dtype, random) -> tuple[typing.Any, typing.Any]:
        exponents = exponents_of(master, self.axis)
        units = scaled(master, -exponents, self.axis)
        codes, residual = self.format.split(units, E4M3, random)
        return of_codes(codes, exponents, self.axis), residual

    def advance(
        self, param: typing.Any, residual, update, random, landing=REPLACE, ahead=None
    ) -> tuple[typing.Any, typing.Any, typing.Any]:
        if ahead is None:
            return super().advance(param, residual, update, random, landing)
        master = self.sum(param, residual, update, random)
        exponents = exponents_of(master, self.axis)
        over = lambda x: scaled(x, -exponents, self.axis)
        format_ = typing.cast(StochasticRounding, self.format)
        codes = format_.toward(over(master), over(ahead), E4M3, random)
        new: typing.Any = of_codes(codes, exponents, self.axis)
        return new, None, result_of(param, new, landing)

    def store(
        self, param: typing.Any, master, random, landing: Landing = REPLACE
    ) -> tuple[typing.Any, typing.Any, typing.Any]:
        new, residual = self.split(master, E4M3, random)
        return new, residual, result_of(param, new, landing)


def for_tensor(
    weights: WeightFormat, param: BlockScaledTensor, min_size: int
) -> BlockScaledWeights:
    """Return the format that updates a tensor in a transformation with ``weights``.

    Args:
      weights: see :func:`lowbit_optax.lowbit`.
      param: a tensor of arrays or shapes.
      min_size: see :meth:`.WeightFormat.for_leaf`.

    Raises:
      ValueError: if the format does not support the tensor.
    """
    if isinstance(weights, QuantizedWeights):
        is_random = weights.rounding == "stochastic" or weights.error_feedback
        into = weights.error_feedback
        weights = StochasticRounding(error_feedback=into) if is_random else Nearest()
    # Kahan summation would add updates and codes with different scales.
    if isinstance(weights, KahanFormat):
        raise ValueError(
            "weights must be extra_bits, stochastic_rounding, master_copy or nearest "
            f"for a BlockScaledTensor, got {weights}"
        )
    why_not = weights.check(E4M3)
    if why_not:
        raise ValueError(why_not)
    return BlockScaledWeights(weights.for_leaf(param.shape, E4M3, min_size), param.axis)
