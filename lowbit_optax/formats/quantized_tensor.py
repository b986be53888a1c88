"""Weights of 4 to 16 bits as a pytree node: what :func:`quantize_params` makes.

How a value becomes a code is in :mod:`lowbit_optax._numerics.linear_code`, how codes
are packed in :mod:`pallas_kernels.bitfields.xla`.
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
    """An array as packed k-bit codes and the step of every group of neighbours.

    Made by :func:`quantize_params`. The arrays in it are uint32, so that modular
    differences of them, which ``update`` of :func:`lowbit_optax.lpmm_sgd` returns, land
    exactly by ``optax.apply_updates``.

    What is static describes the packed axis alone, counted from the end. So slices of a
    stack (``lax.scan`` over layers, ``jax.vmap``) are QuantizedTensors of one layer.

    Args:
      codes: uint32 words, of the array's shape with the packed axis ``n -> ceil(n/32)
        bits``.
      scales: uint32 patterns of float32 steps, of the array's shape with the packed
        axis ``n -> ceil(n / block_size)``.
      bits: k, of a code.
      block_size: values that share a step, a multiple of 32.
      axis: the packed axis, -1 or -2.
      length: n, the array's size along it.

    >>> import jax.numpy as jnp
    >>> w = quantize_params(jnp.linspace(-1, 1, 8192).reshape(2, 64, 64), bits=12)
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
        """Of the array that it stands for."""
        shape = list(self.codes.shape)
        shape[self.axis] = self.length
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The array's rank."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """The array's elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """float32, in which all of its values are exact."""
        return jnp.dtype(jnp.float32)

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return 4 * (self.codes.size + self.scales.size)

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """The array, exact in float32, rounded to nearest in other float dtypes.

        Raises:
          ValueError: if codes and scales are not of one array with these static sizes.
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
    """One float32 array as a :class:`QuantizedTensor`.

    Args:
      x: float32, rank 1 or more.
      bits, block_size: as in :func:`quantize_params`.
      axis: to pack along: -1, or -2 where ``pack_axis`` says so.
      random: random bits of the leaf; None to round to nearest.
    """
    size = jnp.abs(x)
    size = jnp.where(size < jnp.float32(jnp.inf), size, jnp.float32(0))
    at = axis % x.ndim
    widths = [(0, -x.shape[axis] % block_size if i == at else 0) for i in range(x.ndim)]
    groups = jnp.pad(size, widths).reshape(
        *x.shape[:at], -1, block_size, *x.shape[at + 1 :]
    )
    delta = linear_code.delta_of(jnp.max(groups, axis=at + 1), bits)
    steps = _repeat(delta, block_size, axis, x.shape[axis])
    words = None if random is None else random.words(x.shape, PARAM_STREAM)
    fields = linear_code.encode(x, steps, bits, words)
    scales = lax.bitcast_convert_type(delta, jnp.uint32)
    codes = _pack(fields, bits, axis)
    return QuantizedTensor(codes, scales, bits, block_size, axis, x.shape[axis])


def requantize(
    x: jax.Array, old: QuantizedTensor, random: RandomBits | None
) -> QuantizedTensor:
    """A float32 array stored like ``old``, with steps of its own."""
    return quantize(x, old.bits, old.block_size, old.axis, random)


def is_quantized(x) -> bool:
    """Whether this is a weight that has to be dequantised to be read."""
    return isinstance(x, QuantizedWeight)


@functools.cache
def _register_with_flax() -> None:
    """Tell flax, where it is installed, how to serialize a QuantizedTensor.

    ``flax.serialization`` takes an unknown pytree node for a leaf, and looks types up
    when it is called. It may be imported after the last tensor was made, so it is
    imported here with the first one: a tenth of what importing this package takes.
    """
    try:
        from flax import serialization
    except Exception:  # absent, or not of this JAX: then nobody serializes with it
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
                f"{list(want)}: was it saved with other bits or groups?"
            )
    return dataclasses.replace(tensor, **{k: state[k] for k in ("codes", "scales")})


def check_parts(tensor: QuantizedTensor) -> None:
    """Raise unless codes and scales are of one array with these static sizes."""
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
    """Groups' numbers for every element."""
    at = axis % delta.ndim
    shape = delta.shape
    wide = jnp.broadcast_to(
        jnp.expand_dims(delta, at + 1), (*shape[: at + 1], block_size, *shape[at + 1 :])
    )
    wide = wide.reshape(*shape[:at], -1, *shape[at + 1 :])
    return lax.slice_in_dim(wide, 0, length, axis=at)


def _view(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """A shape that ``pack`` packs along ``axis``, with the same elements."""
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
