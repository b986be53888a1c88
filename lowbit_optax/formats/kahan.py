"""Kahan summation of updates, with a 16-bit compensation.

    y = update - c                       Zamirai et al. 2020, Algorithm 3, line 7
    s = round(w + y)                     line 8
    c = (s - w) - y                      line 9
    w = s                                line 10

In float32, ``s - w`` is exact, and ``w + y`` is exact except for the rounding of
float32. The only other loss is the rounding of the compensation c to 16 bits.
"""

import dataclasses
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowbit_optax._arguments import check_choice
from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics import rounding as rounding_
from lowbit_optax._numerics.float_format import FloatFormat
from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax._numerics.random_bits import PARAM_STREAM, RESIDUAL_STREAM, RandomBits
from lowbit_optax.formats.base import Rounding, WeightFormat, rounding_words
from lowbit_optax.formats.plain import Significand, rounded, significand_of, why_not

Arithmetic = typing.Literal["float32", "param"]
_NAME = re.compile(r"(wide_)?compensation(?:_of_(\d+)_bits)?")

_EXPONENT = np.uint32(0x7F800000)
"""The exponent's bits in the pattern of a float32 number."""


def kahan_named(name: str, param, residual) -> WeightFormat | None:
    """Return the Kahan format whose residuals have this name, or None.

    The name of a wide compensation does not record how its parameters were rounded. The
    returned format assumes stochastic rounding, whose errors are the largest.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    rounding = "stochastic" if found[1] else "nearest"
    if found[2] is not None:
        significand = Significand(int(found[2]) - 9, saturates=False)
        return KahanFormat(rounding, significand=significand)
    same = found[1] and residual.dtype == param.dtype
    return KahanFormat(rounding, arithmetic="param" if same else "float32")


@dataclasses.dataclass(frozen=True)
class KahanFormat(WeightFormat):
    """Stores a master as a parameter w and a compensation c; the master is ``w - c``.

    Args:
      rounding, residual_rounding, arithmetic: see :func:`kahan`.
      significand: rounding to ``float_format``, or None for all numbers of the dtypes.
    """

    rounding: Rounding = "nearest"
    residual_rounding: Rounding = "stochastic"
    arithmetic: Arithmetic = "float32"

    significand: Significand | None = None

    @property
    def residual_name(self):
        # Weights with fewer bits have larger compensations.
        name = "compensation" if self._is_half else "wide_compensation"
        if self.significand is None:
            return name
        return f"{name}_of_{9 + self.significand.bits}_bits"

    @property
    def _is_half(self) -> bool:
        """Whether no compensation is larger than half a spacing of its weight."""
        return self.rounding == "nearest" and self.arithmetic == "float32"

    def check(self, dtype):
        return why_not(self.significand, dtype)

    @property
    def stores_sum(self) -> bool:
        return False

    def init(self, param):
        return jnp.zeros_like(param, dtype=self._residual_dtype(param.dtype))

    def join(self, param, residual):
        weight = rounding_.to_float32(param)
        return weight - self._error_of(weight, residual, param.dtype)

    def inner_weight(self, param, residual):
        # Line 4 of Algorithm 3 decays w instead of w - c.
        if self.arithmetic == "param":
            return rounding_.to_float32(param)
        return self.join(param, residual)

    def round(self, master, dtype, random):
        words = rounding_words(self.rounding, random, master.shape, PARAM_STREAM)
        return rounded(self.significand, master, dtype, words)

    def residual(self, master, param, random):
        dtype = self._residual_dtype(param.dtype)
        return self._compensation(rounding_.to_float32(param) - master, dtype, random)

    def advance(
        self, param, residual, update, random, landing: Landing = REPLACE, ahead=None
    ):
        dtype = param.dtype
        is_wide = self.arithmetic == "float32"

        def keep(x: jax.Array) -> jax.Array:
            if is_wide:
                return x
            return rounding_.to_float32(rounded(self.significand, x, dtype))

        w = rounding_.to_float32(param)
        c = self._error_of(w, residual, dtype)
        y = keep(keep(update) - c)
        new = self.round(w + y, dtype, random)
        # An update of 0 must change nothing, even if c is half a spacing, which is a
        # tie. The test uses y, because another use of the update would change how XLA
        # contracts the product that computes it.
        is_still = y == -c
        if is_wide:
            new = jnp.where(is_still, param, new)
        new, difference = landing.land(param, new)
        error = keep(rounding_.to_float32(new) - w) - y
        compensation = self._compensation(error, residual.dtype, random)
        if is_wide:
            compensation = jnp.where(is_still, residual, compensation)
        return new, compensation, difference

    def _error_of(self, weight: jax.Array, residual: jax.Array, dtype: jnp.dtype):
        """Return the compensation as float32, or 0 if it cannot belong to this weight.

        If the compensation is larger than any rounding error of the weight, the weight
        was changed outside of the optimizer. The spacing of weights depends on the
        power of two below them.
        """
        layout = float_layouts.layout_of(dtype)
        bits = self.significand.bits if self.significand else layout.mantissa_bits
        spacing = 2.0**-bits  # relative to a power of two
        smallest = 2.0 ** (1 - layout.bias - layout.mantissa_bits)
        if self._is_half:
            # The limit is half a spacing, plus errors of float32 and the compensation.
            of_error = self.significand.bits if self.significand else 7
            spacing, smallest = spacing * (0.5 + 0.5 * 2.0**-of_error), smallest / 2
        exponent = lax.bitcast_convert_type(weight, jnp.uint32) & _EXPONENT
        power = lax.bitcast_convert_type(exponent, jnp.float32)
        largest = power * jnp.float32(spacing)
        if not layout.same_exponent:
            largest = jnp.maximum(largest, jnp.float32(smallest))
        error = rounding_.to_float32(residual)
        belongs = jnp.abs(error) <= largest
        if self.significand is not None:
            # The master of a saturated weight may be far above the largest number.
            belongs = belongs & jnp.isfinite(weight - error)
        return jnp.where(belongs, error, jnp.float32(0))

    def _residual_dtype(self, dtype):
        # The paper's 16-bit unit has one format. In float32 arithmetic, the
        # compensation is bfloat16, whose range includes the rounding errors of small
        # float16 and float8 weights.
        return dtype if self.arithmetic == "param" else jnp.dtype(jnp.bfloat16)

    def _compensation(
        self, error: jax.Array, dtype: jnp.dtype, random: RandomBits
    ) -> jax.Array:
        # If the parameter overflows, its error cannot be compensated.
        error = jnp.where(jnp.isfinite(error), error, jnp.float32(0))
        rounding, shape = self.residual_rounding, error.shape
        words = rounding_words(rounding, random, shape, RESIDUAL_STREAM)
        return rounded(self.significand, error, dtype, words)


def kahan(
    *,
    rounding: Rounding = "nearest",
    residual_rounding: Rounding | None = None,
    arithmetic: typing.Literal["float32", "param"] = "float32",
    float_format: FloatFormat | None = None,
) -> WeightFormat:
    """Store a 16-bit compensation that collects the rounding errors of each weight.

        y = u - c;  w' = round(w + y);  c' = (w' - w) - y

    for a weight w, its update u and its compensation c. The master is ``w - c``.

    Args:
      rounding: how w is rounded. ``"stochastic"`` combines both methods of the paper.
      residual_rounding: how c is rounded. ``"nearest"``, as in the paper, loses every
        update smaller than about 2^-18 of a bfloat16 weight, because c also has only 8
        significant bits. ``"stochastic"`` keeps the mean of such updates, and is the
        default with ``arithmetic="float32"``.
      arithmetic: ``"float32"`` rounds only stored values. ``"param"`` rounds after
        every operation of the summation, like hardware that computes in the parameter's
        dtype, and stores c in this dtype.
      float_format: the format of w and c; see :func:`lowbit_optax.nearest`.

    Returns:
      A weight format. It needs 2 bytes per parameter, for a bfloat16 compensation.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value.

    References:
      Zamirai et al. 2020, Algorithms 1, 3 and 5; figure 10 (14, 12 and 10 bits).

    >>> kahan().residual_rounding
    'stochastic'
    """
    check_choice("kahan", "rounding", rounding, Rounding)
    check_choice("kahan", "arithmetic", arithmetic, Arithmetic)
    if residual_rounding is None:
        residual_rounding = "nearest" if arithmetic == "param" else "stochastic"
    check_choice("kahan", "residual_rounding", residual_rounding, Rounding)
    significand = significand_of("kahan", float_format)
    return KahanFormat(rounding, residual_rounding, arithmetic, significand)
