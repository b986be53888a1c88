"""Weights of 4 to 16 bits as a pytree node, which :func:`quantize_params` creates.

:mod:`lowbit_optax._numerics.linear_code` converts values to codes, and
:mod:`pallas_kernels.bitfields` packs the codes. A quantized weight must be dequantized
before use.
"""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics.dtypes import float_dtype
from lowbit_optax._numerics.linear_code import QuantizedFields
from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax._numerics.rounding import narrow_or_cast
from pallas_kernels.bitfields import pack, unpack_with
from pallas_kernels.layout import Layout, block_maxima, with_length

_REMEDY = (
    "call lowbit_optax.lpmm.dequantize(weight) first; for stacked layers, call it in "
    "the body of the scan"
)


class NotAnArray:
    """An object that raises an error with advice if it is used as an array.

    Arithmetic and functions of ``jax.numpy`` and NumPy raise a TypeError. Methods of
    arrays, such as ``astype``, raise an AttributeError.
    """

    def _refusal(self, what: str) -> str:
        """Return a message that says ``what`` is wrong, and what to do instead."""
        raise NotImplementedError

    def _refuse(self, *_, **__) -> typing.NoReturn:
        raise TypeError(self._refusal("cannot be used as an array"))

    if not typing.TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name: str):
            raise AttributeError(self._refusal(f"has no attribute {name!r}"))

    __jax_array__ = __array__ = __float__ = __getitem__ = __iter__ = _refuse
    __neg__ = __pos__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _refuse
    __matmul__ = __rmatmul__ = _refuse


class QuantizedWeight(NotAnArray):
    """A weight that must be dequantized before it is used in computations."""

    def __post_init__(self):
        _register_with_flax(type(self))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized array."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """The rank of the dequantized array."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the dequantized array."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> jnp.dtype:
        """float32, in which all values are exact."""
        return jnp.dtype(jnp.float32)

    @property
    def stored_as(self) -> str:
        """A description of the stored values; see ``storage_formats``."""
        raise NotImplementedError

    @property
    def stored_in(self) -> str:
        """A short description of the stored values, for tables."""
        raise NotImplementedError

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """Return the values as an array of a float dtype."""
        raise NotImplementedError

    def quantized(self, x: jax.Array) -> "QuantizedWeight":
        """Round a float32 array to nearest, and store it like this weight."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise a ValueError unless the arrays and static fields match."""
        raise NotImplementedError

    def _refusal(self, what: str) -> str:
        return f"a quantized weight of shape {list(self.shape)} {what}; {_REMEDY}"


@functools.cache
def _register_with_flax(kind: type) -> None:
    """Register a class of weights with ``flax.serialization`` if flax is installed.

    flax treats unknown pytree nodes as leaves, and looks up classes when it serializes.
    You may import flax after all weights are created, so this function imports it when
    the first weight is created. The import takes a tenth of the time of importing this
    package.
    """
    try:
        from flax import serialization
    except Exception:  # flax is not installed, or does not support this JAX
        return
    serialization.register_serialization_state(
        kind, _to_state_dict, _from_state_dict, override=True
    )


def _arrays(weight) -> list[str]:
    fields = dataclasses.fields(weight)
    return [x.name for x in fields if not x.metadata.get("static")]


def _to_state_dict(weight) -> dict:
    return {name: getattr(weight, name) for name in _arrays(weight)}


def _from_state_dict(weight, state: dict):
    for name in _arrays(weight):
        want = getattr(weight, name).shape
        if name not in state or state[name].shape != want:
            found = list(state[name].shape) if name in state else "no array"
            raise ValueError(
                f"{type(weight).__name__}: {name} must have shape {list(want)}, but "
                f"the checkpoint has {found}; was it saved with other bits, another "
                "block_size, another axis or another version of the layout?"
            )
    return dataclasses.replace(weight, **{x: state[x] for x in _arrays(weight)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor(QuantizedWeight):
    """An array stored as packed k-bit codes and a step size per block of neighbors.

    :func:`quantize_params` creates it. Its arrays are uint32, so that ``update`` of
    :func:`lowbit_optax.lpmm_sgd` can return differences modulo 2^32, which
    ``optax.apply_updates`` adds exactly.

    The static fields describe only the axis of the rows, counted from the end.
    Therefore, slices of a stack of layers (in ``lax.scan`` or ``jax.vmap``) are
    QuantizedTensors of one layer.

    The names of two fields end with the version of :mod:`pallas_kernels.layout`, so
    that a checkpoint with another layout is not mistaken for this one. :attr:`codes`
    and :attr:`scales` are shorter names for them.

    Args:
      codes_v2: uint32 words, with the ``words_shape`` of
        :class:`pallas_kernels.Layout`.
      scales_v2: uint32 bit patterns of float32 step sizes, with the ``blocks_shape`` of
        the layout.
      bits: k, the bits of a code.
      block_size: number of values that share a step size, a power of two.
      axis: the axis of the rows, or -1 if the last axis is folded into rows.
      length: the length of the array along this axis.

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

    @property
    def codes(self) -> jax.Array:
        """The packed codes."""
        return self.codes_v2

    @property
    def scales(self) -> jax.Array:
        """The bit patterns of the step sizes."""
        return self.scales_v2

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized array."""
        return with_length(self.codes.shape, self.axis, self.length)

    @property
    def layout(self) -> Layout:
        """The layout of codes and scales."""
        return Layout(self.shape, self.axis)

    @property
    def nbytes(self) -> int:
        """The total number of bytes of codes and scales."""
        return 4 * (self.codes.size + self.scales.size)

    @property
    def stored_as(self) -> str:
        return f"{self.bits}-bit codes, blocks of {self.block_size}"

    @property
    def stored_in(self) -> str:
        return f"{self.bits} bits"

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """Return the values as an array.

        Args:
          dtype: any float dtype. Values are exact in float32, and rounded to nearest in
            other dtypes.

        Raises:
          TypeError: if ``dtype`` is not a float dtype.
          ValueError: if the shapes of codes and scales do not match the static fields.
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
                    f"QuantizedTensor: {name} must be uint32, got {part.dtype}"
                )
        if codes.ndim >= -self.axis:
            layout = self.layout
            parts = layout.words_shape(self.bits), layout.blocks_shape(self.block_size)
            if (codes.shape, scales.shape) == parts:
                return
        raise ValueError(
            f"QuantizedTensor: codes of shape {list(codes.shape)} and scales of shape "
            f"{list(scales.shape)} do not match {self.stored_as}, axis {self.axis} "
            f"of length {self.length}; to slice layers, pass stacked to quantize_params"
        )


def _dequantized(dtype: jnp.dtype, tensor: QuantizedTensor) -> jax.Array:
    """Implement :meth:`QuantizedTensor.dequantize`."""
    code = QuantizedFields(tensor.bits, tensor.block_size)
    prepared = code.prepare_values(tensor.scales, tensor.layout)

    def decode(fields: jax.Array, *prepared: jax.Array) -> jax.Array:
        return narrow_or_cast(code.decode(fields, prepared), dtype)

    return unpack_with(decode, tensor.codes, tensor.bits, tensor.layout, *prepared)


def quantize(
    bits: int,
    block_size: int,
    axis: int,
    x: jax.Array,
    random: RandomBits | None,
    old: jax.Array | None = None,
    ahead: jax.Array | None = None,
) -> QuantizedTensor:
    """Store one float32 array as a :class:`QuantizedTensor`.

    Args:
      bits, block_size: see :func:`quantize_params`.
      axis: see :class:`QuantizedTensor`.
      x: float32 array of rank 1 or more.
      random: random bits of the leaf. None rounds to nearest.
      old: the previous scales of the array, which are kept if they fit.
      ahead: see :meth:`.QuantizedFields.encode`.
    """
    layout = Layout(x.shape, axis)
    code = QuantizedFields(bits, block_size)
    keys = block_maxima(code.magnitude_key(x), layout, block_size)
    scales = code.scale_of(keys, old)
    fields = code.encode(x, code.prepare_values(scales, layout), random, ahead)
    codes = pack(fields, bits, layout)
    return QuantizedTensor(codes, scales, bits, block_size, axis, x.shape[axis])


def requantize(
    x: jax.Array,
    old: QuantizedTensor,
    random: RandomBits | None,
    ahead: jax.Array | None = None,
) -> QuantizedTensor:
    """Store a float32 array like ``old``, with its step sizes if they fit."""
    return quantize(old.bits, old.block_size, old.axis, x, random, old.scales, ahead)


def is_quantized(x) -> bool:
    """Return whether ``x`` is a quantized weight."""
    return isinstance(x, QuantizedWeight)
