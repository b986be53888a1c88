"""Moments stored in a narrow float dtype."""

import dataclasses
import typing

import jax.numpy as jnp
import numpy as np

from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics import rounding as rounding_
from lowbit_optax.formats.base import MomentFormat

# Streams that moments which share words (RandomBits.halves) do not reach.
_WHOLE_WORDS = 64


@dataclasses.dataclass(frozen=True)
class Cast(MomentFormat):
    """Moments rounded to a narrow dtype, one array each.

    Args:
      dtype, rounding: see :func:`cast`.
    """

    dtype: np.dtype
    rounding: typing.Literal["nearest", "stochastic"] = "stochastic"

    def encode(self, moment, random, number):
        if self.rounding == "nearest":
            return rounding_.round_nearest(moment, self.dtype)
        if float_layouts.layout_of(self.dtype).same_exponent:
            # Always 16 bits are dropped; the other formats' subnormals drop more.
            words = random.halves(moment.shape, number) << jnp.uint32(16)
        else:
            words = random.words(moment.shape, _WHOLE_WORDS + number)
        return rounding_.round_stochastic(moment, self.dtype, words)

    def decode(self, stored, shape):
        del shape
        return rounding_.to_float32(stored)


def cast(
    dtype,
    *,
    rounding: typing.Literal["nearest", "stochastic"] = "stochastic",
) -> MomentFormat:
    """Store moments in bfloat16, float16 or float8.

    Args:
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2. Gradients squared easily
        leave float16's range: bfloat16 is the one to take.
      rounding: ``"stochastic"`` or ``"nearest"``. Under nearest rounding a bfloat16
        second moment stops moving: with b2 = 0.999 it changes by less than half of its
        last bit.

    Returns:
      A moment format. State: the dtype's bytes a moment.

    Raises:
      ValueError: if an argument is not one of these.

    >>> import jax.numpy as jnp
    >>> cast(jnp.bfloat16)
    Cast(dtype=dtype(bfloat16), rounding='stochastic')
    """
    dtype = np.dtype(dtype)
    if not float_layouts.is_narrow(dtype):
        names = ", ".join(d.name for d in float_layouts.NARROW_DTYPES)
        raise ValueError(
            f"cast: dtype is {dtype}, not one of {names}; leave a moment out to keep "
            "float32"
        )
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(
            f"cast: rounding is {rounding!r}, not 'nearest' or 'stochastic'"
        )
    return Cast(dtype, rounding)
