"""The base class of quantized weights, which must be dequantized before use."""

import dataclasses
import functools
import math
import typing

import jax
import jax.numpy as jnp

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
