"""Weights of 4 to 16 bits as a pytree node, which :func:`quantize_params` makes.

:mod:`lowbit_optax._numerics.linear_code` turns values into codes, and
:mod:`pallas_kernels.bitfields.xla` packs the codes.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics import linear_code
from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._numerics.rounding import narrow_or_cast
from lowbit_optax._numerics.streams import PARAM_STREAM
from lowbit_optax.formats.quantized_leaf import QuantizedWeight
from pallas_kernels.bitfields.fields import GROUP
from pallas_kernels.bitfields.xla import pack, pack_axis, unpack

Rounding = typing.Literal["nearest", "stochastic"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor(QuantizedWeight):
    """An array stored as packed k-bit codes and a step size per block of neighbours.

    :func:`quantize_params` makes it. Its arrays are uint32. So ``update`` of
    :func:`lowbit_optax.lpmm_sgd` can return differences modulo 2^32, with which
    ``optax.apply_updates`` lands exactly.

    The static fields describe only the packed axis, counted from the end. So slices of
    a stack (``lax.scan`` over layers, ``jax.vmap``) are QuantizedTensors of one layer.

    Args:
      codes: uint32 words, of the array's shape with the packed axis ``n -> ceil(n/32)
        bits``.
      scales: uint32 patterns of float32 step sizes, of the array's shape with the
        packed axis ``n -> ceil(n / block_size)``.
      bits: k, the bits of a code.
      block_size: number of values that share a step size, a multiple of 32.
      axis: the packed axis, -1 or -2.
      length: n, the array's size along that axis.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> x = jnp.linspace(-1, 1, 8192).reshape(2, 64, 64)
    >>> w = lowbit_optax.quantize_params(x, bits=12)
    >>> w.shape, w.codes.shape, w.scales.shape
    ((2, 64, 64), (2, 24, 64), (2, 1, 64))
    >>> w.dequantize(jnp.bfloat16).dtype
    dtype(bfloat16)
    """

    codes: jax.Array
    scales: jax.Array
    bits: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    length: int = dataclasses.field(metadata={"static": True})

    def __post_init__(self):
        _register_with_flax()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised array."""
        shape = list(self.codes.shape)
        shape[self.axis] = self.length
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The rank of the dequantised array."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """The number of elements of the dequantised array."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """float32, in which all values are exact."""
        return jnp.dtype(jnp.float32)

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales together."""
        return 4 * (self.codes.size + self.scales.size)

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """The values as an array.

        Args:
          dtype: any float dtype. The values are exact in float32, and rounded to
            nearest in other dtypes.

        Raises:
          ValueError: if the shapes of codes and scales do not fit the static fields.
        """
        check_parts(self)
        fields = _unpack(self.codes, self.bits, self.shape, self.axis)
        values = linear_code.decode(fields, _steps(self), self.bits)
        return narrow_or_cast(values, dtype)


def quantize(
    x: jax.Array,
    bits: int,
    block_size: int,
    axis: int,
    random: RandomBits | None,
) -> QuantizedTensor:
    """Store one float32 array as a :class:`QuantizedTensor`.

    Args:
      x: float32, rank 1 or more.
      bits, block_size: as in :func:`quantize_params`.
      axis: the axis to pack along: -1, or -2 if ``pack_axis`` chooses it.
      random: the leaf's random bits; None rounds to nearest.
    """
    size = jnp.abs(x)
    size = jnp.where(size < jnp.float32(jnp.inf), size, jnp.float32(0))
    at = axis % x.ndim
    widths = [(0, -x.shape[axis] % block_size if i == at else 0) for i in range(x.ndim)]
    blocks = jnp.pad(size, widths).reshape(
        *x.shape[:at], -1, block_size, *x.shape[at + 1 :]
    )
    delta = linear_code.delta_of(jnp.max(blocks, axis=at + 1), bits)
    steps = _repeat(delta, block_size, axis, x.shape[axis])
    words = None if random is None else random.words(x.shape, PARAM_STREAM)
    fields = linear_code.encode(x, steps, bits, words)
    scales = lax.bitcast_convert_type(delta, jnp.uint32)
    codes = _pack(fields, bits, axis)
    return QuantizedTensor(codes, scales, bits, block_size, axis, x.shape[axis])


def requantize(
    x: jax.Array, old: QuantizedTensor, random: RandomBits | None
) -> QuantizedTensor:
    """A float32 array stored in the layout of ``old``, with its own step sizes."""
    return quantize(x, old.bits, old.block_size, old.axis, random)


def is_quantized(x) -> bool:
    """Whether ``x`` is a weight that must be dequantised to be read."""
    return isinstance(x, QuantizedWeight)


@functools.cache
def _register_with_flax() -> None:
    """Tell flax, where it is installed, how to serialize a QuantizedTensor.

    ``flax.serialization`` treats unknown pytree nodes as leaves, and looks types up
    when it is called. The user may import flax after the last tensor is made, so it is
    imported here when the first one is. That takes a tenth of the time of importing
    this package.
    """
    try:
        from flax import serialization
    except Exception:  # absent or not made for this JAX, so nobody serializes with it
        return
    serialization.register_serialization_state(
        QuantizedTensor, _to_state_dict, _from_state_dict, override=True
    )


def _to_state_dict(tensor: QuantizedTensor) -> dict:
    return {"codes": tensor.codes, "scales": tensor.scales}


def _from_state_dict(tensor: QuantizedTensor, state: dict) -> QuantizedTensor:
    for name in ("codes", "scales"):
        want = getattr(tensor, name).shape
        if name not in state or state[name].shape != want:
            given = list(state[name].shape) if name in state else "missing"
            raise ValueError(
                f"QuantizedTensor: {name} of the checkpoint are {given}, not "
                f"{list(want)}: was it saved with other bits or another block_size?"
            )
    return dataclasses.replace(tensor, **{k: state[k] for k in ("codes", "scales")})


def check_parts(tensor: QuantizedTensor) -> None:
    """Raise a ValueError unless codes and scales fit the static fields."""
    codes, scales = tensor.codes, tensor.scales
    for name, part in (("codes", codes), ("scales", scales)):
        if part.dtype != jnp.uint32:
            raise ValueError(f"QuantizedTensor: {name} are {part.dtype}, not uint32")
    want_codes, want_scales = list(codes.shape), list(codes.shape)
    if codes.ndim >= -tensor.axis:
        want_codes[tensor.axis] = math.ceil(tensor.length / GROUP) * tensor.bits
        want_scales[tensor.axis] = math.ceil(tensor.length / tensor.block_size)
        if codes.shape == tuple(want_codes) and scales.shape == tuple(want_scales):
            return
    raise ValueError(
        f"QuantizedTensor: codes {list(codes.shape)} and scales {list(scales.shape)} "
        f"are not of {tensor.bits}-bit codes along axis {tensor.axis} of size "
        f"{tensor.length} with blocks of {tensor.block_size}. Was the packed axis "
        "sliced? See stacked= of quantize_params"
    )


def _steps(tensor: QuantizedTensor) -> jax.Array:
    delta = lax.bitcast_convert_type(tensor.scales, jnp.float32)
    return _repeat(delta, tensor.block_size, tensor.axis, tensor.length)


def _repeat(delta: jax.Array, block_size: int, axis: int, length: int) -> jax.Array:
    """The step size of every element, from those of the blocks."""
    at = axis % delta.ndim
    shape = delta.shape
    wide = jnp.broadcast_to(
        jnp.expand_dims(delta, at + 1), (*shape[: at + 1], block_size, *shape[at + 1 :])
    )
    wide = wide.reshape(*shape[:at], -1, *shape[at + 1 :])
    return lax.slice_in_dim(wide, 0, length, axis=at)


def _view(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """A shape of the same elements that ``pack`` packs along ``axis``."""
    if pack_axis(shape) - len(shape) == axis:
        return shape
    return (*shape[:-1], 1, shape[-1])


def _pack(fields: jax.Array, bits: int, axis: int) -> jax.Array:
    shape = list(fields.shape)
    shape[axis] = math.ceil(shape[axis] / GROUP) * bits
    return pack(fields.reshape(_view(fields.shape, axis)), bits).reshape(shape)


def _unpack(words: jax.Array, bits: int, shape: tuple[int, ...], axis: int):
    view = _view(shape, axis)
    if view != shape:
        words = words.reshape(*words.shape[:-1], 1, words.shape[-1])
    return unpack(words, bits, view).reshape(shape)
