"""Arithmetic on split arrays, computed in float32 and stored as (param, residual).

    z = split(op(join(x), join(y)))

References:
  Lewandowski and Kosson 2023, section 3.1, overload addition, multiplication, division
  and their combinations in this way.
"""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._arguments import check_static_int, check_type
from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics.dtypes import dtype_of
from lowbit_optax._numerics.float_layouts import NARROW_DTYPES, is_narrow
from lowbit_optax._numerics.landing import REPLACE
from lowbit_optax._numerics.random_bits import RandomBits, random_bits
from lowbit_optax._numerics.straight_through import widened
from lowbit_optax._step.leaf import advanced
from lowbit_optax._step.seeds import seed_of
from lowbit_optax.formats.base import WeightFormat
from lowbit_optax.formats.leaves import join_leaf, split_leaf
from lowbit_optax.formats.quantized_weights import QuantizedWeights
from lowbit_optax.states.masters import check_range

Operand = typing.Union["SplitArray", jax.typing.ArrayLike]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SplitArray:
    """An array stored as a narrow parameter and the residual of a weight format.

    Create it with :func:`split_array`. The operators ``+ - * /`` with SplitArrays,
    arrays and numbers, and the methods below, compute in float32 and return the result
    in the format of this array.

    Args:
      param: the narrow array, which you can also use without the residual.
      residual: the residual in the layout of the weight format, or None.
      random_state: uint32 array ``[seed, number of previous operations]``.
      weight_format: the format, which is static.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> x = split_array(jnp.ones(2), jnp.bfloat16, lowbit_optax.extra_bits(16))
    >>> for _ in range(100):
    ...     x = x - 1e-4
    >>> x.param, join_array(x)
    (Array([0.988281, 0.988281], dtype=bfloat16),
     Array([0.98999834, 0.98999834], dtype=float32))
    """

    param: jax.Array
    residual: jax.Array | None
    random_state: jax.Array
    weight_format: WeightFormat = dataclasses.field(metadata={"static": True})

    # NumPy then calls the operators of this class instead of looping over elements.
    __array_ufunc__ = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.param.shape

    @property
    def dtype(self):
        """The dtype of the narrow parameter."""
        return self.param.dtype

    def __add__(self, other: Operand) -> "SplitArray":
        # Kahan's summation differs from joining, adding and splitting.
        return self._plus(_float32(other))

    def __sub__(self, other: Operand) -> "SplitArray":
        return self._plus(-_float32(other))

    def __mul__(self, other: Operand) -> "SplitArray":
        return self._split(join_array(self) * _float32(other))

    def __truediv__(self, other: Operand) -> "SplitArray":
        return self._split(join_array(self) / _float32(other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: Operand) -> "SplitArray":
        return self._split(_float32(other) - join_array(self))

    def __rtruediv__(self, other: Operand) -> "SplitArray":
        return self._split(_float32(other) / join_array(self))

    def __neg__(self) -> "SplitArray":
        return self._split(-join_array(self))

    def addcmul(self, a: Operand, b: Operand, value: Operand = 1.0) -> "SplitArray":
        """Return ``self + value * a * b``."""
        return self._plus(_float32(value) * _float32(a) * _float32(b))

    def addcdiv(self, a: Operand, b: Operand, value: Operand = 1.0) -> "SplitArray":
        """Return ``self + value * a / b``."""
        return self._plus(_float32(value) * _float32(a) / _float32(b))

    def lerp(self, end: Operand, weight: Operand) -> "SplitArray":
        """Return ``self + weight * (end - self)``."""
        return self._plus(_float32(weight) * (_float32(end) - join_array(self)))

    def sqrt(self) -> "SplitArray":
        """Return the square root."""
        return self._split(jnp.sqrt(join_array(self)))

    # jit compiles one program for the operation, also in eager code.
    @jax.jit
    def _plus(self, update: jax.Array) -> "SplitArray":
        if jnp.broadcast_shapes(self.shape, update.shape) != self.shape:
            return self._split(join_array(self) + update)
        update = jnp.broadcast_to(update, self.shape)
        random = _random(self.random_state)
        arguments = REPLACE, self.param, self.residual, update, None, random
        param, residual, _ = advanced(self.weight_format, *arguments)
        return SplitArray(param, residual, _next(self.random_state), self.weight_format)

    @jax.jit
    def _split(self, value: jax.Array) -> "SplitArray":
        return _split_into(value, self.dtype, self.weight_format, self.random_state)


def split_array(
    x: jax.typing.ArrayLike,
    dtype: jax.typing.DTypeLike,
    weight_format: WeightFormat,
    *,
    seed: int = 0,
) -> SplitArray:
    """Split a float32 array into a narrow parameter and its residual.

        x ~ join(param, residual),  param = round(x)

    Args:
      x: array of any shape and float dtype, which is converted to float32 first.
      dtype: the dtype of the parameter: bfloat16, float16, float8_e4m3fn or
        float8_e5m2.
      weight_format: a weight format, such as ``lowbit_optax.extra_bits(8)``. Scalars
        get a float32 master.
      seed: seed for stochastic rounding.

    Returns:
      A :class:`SplitArray` with the shape of x.

    Raises:
      ValueError: if ``dtype`` is not one of these, if the format does not support it,
        or if a number of x is too large for it.
      TypeError: if ``dtype`` is not a dtype, or ``x`` is complex.

    References:
      Lewandowski and Kosson 2023, section 3.1.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> split = split_array(jnp.ones((64, 4)), jnp.bfloat16, lowbit_optax.extra_bits(8))
    >>> split.param.dtype, split.residual.shape
    (dtype(bfloat16), (16, 4))
    """
    dtype = dtype_of("split_array: dtype", dtype)
    if not is_narrow(dtype):
        raise ValueError(
            f"split_array: dtype must be one of {', '.join(map(str, NARROW_DTYPES))}, "
            f"got {dtype}"
        )
    accepted = "a weight format, such as lowbit_optax.kahan()"
    check_type("split_array: weight_format", weight_format, WeightFormat, accepted)
    if not isinstance(seed, jax.Array):
        check_static_int("split_array", "seed", seed, 0, 2**32 - 1)
    why = weight_format.check(dtype)
    if isinstance(weight_format, QuantizedWeights):
        why = "weight_format must split arrays, which quantized_weights does not do"
    if why:
        raise ValueError(f"split_array: {why}")
    check_range("split_array: x", traced_once(_float32)(x), dtype)
    return traced_once(_first_split, dtype, weight_format)(x, jnp.uint32(seed))


def _first_split(dtype, weight_format: WeightFormat, x, seed) -> SplitArray:
    x = _float32(x)
    state = jnp.stack([seed_of(seed, [x]), jnp.uint32(0)])
    return _split_into(x, dtype, weight_format, state)


def _split_into(x, dtype, weight_format: WeightFormat, state: jax.Array) -> SplitArray:
    """Split a float32 array, with random bits for this state."""
    # The size of the array decides whether its residual is packed.
    format_ = weight_format.for_leaf(x.shape, dtype, min_size=0)
    param, residual = split_leaf(format_, x, dtype, _random(state))
    return SplitArray(param, residual, _next(state), format_)


def join_array(split: SplitArray) -> jax.Array:
    """Return the float32 array that a :class:`SplitArray` stores.

    Args:
      split: a result of :func:`split_array`.

    Returns:
      float32 array with the same shape.

    >>> import jax.numpy as jnp, lowbit_optax
    >>> join_array(split_array(0.1, jnp.float16, lowbit_optax.extra_bits(13)))
    Array(0.1, dtype=float32)
    """
    check_type("join_array: split", split, SplitArray, "a SplitArray")
    return traced_once(join_leaf, split.weight_format)(split.param, split.residual)


def _random(state: jax.Array) -> RandomBits:
    return random_bits(state[0], state[1], [0])[0]


def _next(state: jax.Array) -> jax.Array:
    """Return the random state after one more operation."""
    return state + jnp.array([0, 1], jnp.uint32)


def _float32(x: Operand) -> jax.Array:
    if isinstance(x, SplitArray):
        return join_array(x)
    x = jnp.asarray(x)
    if jnp.iscomplexobj(x):
        raise TypeError(
            f"SplitArray: operands must be real, got {x.dtype}{list(x.shape)}"
        )
    return widened(x)
