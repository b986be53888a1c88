"""What all quantised weights share: they are not arrays until they are dequantised."""

import typing

import jax
import jax.numpy as jnp

_REMEDY = (
    "call lowbit_optax.dequantize(weight) to compute with it (for one layer of a "
    "stack: in the body of the scan)"
)


class QuantizedWeight:
    """A weight that must be dequantised before it is used in computations.

    Using it as an array, in arithmetic, by ``jax.numpy`` or by NumPy, raises a
    TypeError that says so. Calling an array's method, such as ``astype``, raises an
    AttributeError.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised array."""
        raise NotImplementedError

    def dequantize(self, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
        """The values of the weight, as an array of a float dtype."""
        raise NotImplementedError

    def _refuse(self, *_, **__) -> typing.NoReturn:
        raise TypeError(
            f"a quantised weight of shape {list(self.shape)} is used as an array: "
            f"{_REMEDY}"
        )

    if not typing.TYPE_CHECKING:  # type checkers know the attributes that are there

        def __getattr__(self, name: str):
            raise AttributeError(
                f"a quantised weight has no attribute {name!r}: {_REMEDY}"
            )

    __jax_array__ = __array__ = __float__ = __getitem__ = __iter__ = _refuse
    __neg__ = __pos__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _refuse
    __matmul__ = __rmatmul__ = _refuse
