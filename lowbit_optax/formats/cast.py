"""Moments in a narrow float dtype."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lowbit_optax._arguments import check_choice
from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics import rounding as rounding_
from lowbit_optax._numerics.dtypes import dtype_of
from lowbit_optax.formats.base import MomentFormat, Rounding


@dataclasses.dataclass(frozen=True)
class Cast(MomentFormat):
    """Stores moments rounded to a narrow dtype.

    Args:
      dtype, rounding: see :func:`cast`.
    """

    dtype: np.dtype
    rounding: Rounding = "stochastic"

    @property
    def stored_as(self):
        return self.dtype.name

    @property
    def smallest_share(self):
        return float(jnp.finfo(self.dtype).smallest_subnormal)

    def encode(self, moment, draws, number):
        if self.rounding == "nearest":
            return rounding_.round_nearest(moment, self.dtype)
        if float_layouts.layout_of(self.dtype).same_exponent:
            # bfloat16 always drops 16 bits; subnormals of other dtypes drop more.
            words = draws.halves(moment.shape, number) << jnp.uint32(16)
        else:
            words = draws.words(moment.shape, number)
        return rounding_.round_stochastic(moment, self.dtype, words)

    def decode(self, stored, shape):
        return rounding_.to_float32(stored)


def cast(
    dtype: jax.typing.DTypeLike, *, rounding: Rounding = "stochastic"
) -> MomentFormat:
    """Store moments in bfloat16, float16 or float8.

        m' = round(m, dtype)

    Args:
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2. bfloat16 is the usual
        choice. ``lowbit`` raises an error in ``init`` for second moments in float16 or
        float8, in which those of small gradients are 0, and for first moments in
        float8 that the root of a second moment divides, as in Adam.
      rounding: ``"stochastic"`` or ``"nearest"``. With nearest rounding, a bfloat16
        second moment stops moving: with b2 = 0.999, a step changes it by less than half
        of its last bit.

    Returns:
      A moment format. Each value of a moment needs as many bytes as the dtype has.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    >>> import jax.numpy as jnp
    >>> cast(jnp.bfloat16)
    Cast(dtype=dtype(bfloat16), rounding='stochastic')
    """
    dtype = dtype_of("cast: dtype", dtype)
    if not float_layouts.is_narrow(dtype):
        names = ", ".join(d.name for d in float_layouts.NARROW_DTYPES)
        raise ValueError(
            f"cast: dtype must be one of {names}, got {dtype}; to keep a moment in "
            'float32, pass "float32" instead of a format'
        )
    check_choice("cast", "rounding", rounding, Rounding)
    return Cast(dtype, rounding)
