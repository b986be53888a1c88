"""bfloat16 with a shorter significand: the numbers of ``FloatFormat(8, m)``."""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._numerics import rounding

_BFLOAT16_BITS = 7


@dataclasses.dataclass(frozen=True)
class Significand:
    """Rounding to the numbers of ``FloatFormat(8, m)``, kept in bfloat16.

    Args:
      bits: m, of the mantissa.
      saturates: whether values past the largest number become it, and not infinity.
    """

    bits: int
    saturates: bool

    def round(
        self, x: jax.Array, dtype: jnp.dtype, words: jax.Array | None = None
    ) -> jax.Array:
        """Round float32 to a bfloat16 number, or stochastically by random words."""
        del dtype  # as checked by :func:`why_not`
        return rounding.round_significand(x, self.bits, words, self.saturates)


def significand_of(name: str, float_format: typing.Any) -> Significand | None:
    """The significand of a format that fits in bfloat16; None for bfloat16 itself.

    Args:
      name: of the weight format, for the error.
      float_format: a :class:`lowbit_optax.precision.FloatFormat`, or None.

    Raises:
      TypeError, ValueError: if it is none that fits.
    """
    if float_format is None:
        return None
    # Here, so that ``precision`` is imported only by those who use it.
    from lowbit_optax.precision.float_format import FloatFormat

    accepted = (
        f"accepted is FloatFormat(8, m) with m from 1 to {_BFLOAT16_BITS}, of any "
        "overflow"
    )
    if not isinstance(float_format, FloatFormat):
        raise TypeError(f"{name}: float_format is {float_format!r}; {accepted}")
    bits, overflow = float_format.mantissa_bits, float_format.overflow
    fits = 1 <= bits <= _BFLOAT16_BITS
    if not fits or float_format != FloatFormat(8, bits, overflow=overflow):
        raise ValueError(
            f"{name}: float_format is {float_format}, which does not fit in bfloat16 "
            f"with all its exponents; {accepted}"
        )
    return Significand(bits, overflow == "saturate")


def why_not(significand: Significand | None, dtype: jnp.dtype) -> str | None:
    """Why leaves of a dtype cannot hold such numbers; None if they can."""
    if significand is None or dtype == jnp.bfloat16:
        return None
    return (
        f"float_format=FloatFormat(8, {significand.bits}) is for bfloat16 parameters, "
        f"not {jnp.dtype(dtype).name}"
    )
