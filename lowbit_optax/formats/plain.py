"""Formats that store only the parameter, or also the whole float32 master."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._arguments import check_choice, check_type
from lowbit_optax._numerics import float_layouts, rounding
from lowbit_optax._numerics.float_format import FloatFormat
from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax._numerics.random_bits import PARAM_STREAM, RESIDUAL_STREAM
from lowbit_optax._numerics.rounding import where_known, words_toward
from lowbit_optax.formats.base import Rounding, WeightFormat
from pallas_kernels import operations

_BFLOAT16_BITS = 7


@dataclasses.dataclass(frozen=True)
class Significand:
    """Rounds to the numbers of ``FloatFormat(8, m)``, stored in bfloat16.

    Args:
      bits: the number m of mantissa bits.
      saturates: whether values past the largest number become this number instead of
        infinity.
    """

    bits: int
    saturates: bool

    def round(self, x: jax.Array, words: jax.Array | None = None) -> jax.Array:
        """Round a float32 array to bfloat16 numbers with ``bits`` mantissa bits.

        Args:
          x: float32 array.
          words: uint32 array with the shape of x, whose leading ``23 - bits`` bits are
            used to round stochastically. None rounds to nearest even.

        >>> Significand(2, saturates=False).round(jnp.float32([1.1, 1.2, -1.2]))
        Array([1, 1.25, -1.25], dtype=bfloat16)
        """
        drop = 23 - self.bits
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        magnitude = bits & jnp.uint32(0x7FFFFFFF)
        infinity = 0x7F800000
        kept = jnp.uint32(0xFFFFFFFF >> drop << drop)
        rounded = float_layouts.rounded_before_shift(magnitude, drop, words) & kept
        past = infinity - (1 << drop) if self.saturates else infinity
        rounded = jnp.where(rounded < jnp.uint32(infinity), rounded, jnp.uint32(past))
        is_nan = magnitude > jnp.uint32(infinity)
        special = jnp.where(is_nan, jnp.uint32(0x7FC00000), magnitude)
        rounded = jnp.where(magnitude < jnp.uint32(infinity), rounded, special)
        pattern = rounded | (bits & jnp.uint32(0x80000000))
        return float_layouts.from_bits(pattern >> jnp.uint32(16), jnp.bfloat16)


def rounded(
    significand: Significand | None,
    x: jax.Array,
    dtype: jnp.dtype,
    words: jax.Array | None = None,
) -> jax.Array:
    """Round float32 to the numbers of a significand or, if it is None, of a dtype.

    Args:
      significand: rounding for bfloat16 only; see :func:`why_not`.
      x: float32 array.
      dtype: narrow dtype.
      words: random words to round stochastically. None rounds to nearest even.
    """
    if significand is not None:
        return significand.round(x, words)
    return rounding.round_stochastic(x, dtype, words)


def significand_of(name: str, float_format: typing.Any) -> Significand | None:
    """Return a Significand that rounds to a format, or None without a format.

    Args:
      name: name of the weight format, for errors.
      float_format: a :class:`lowbit_optax.precision.FloatFormat`, or None.

    Raises:
      TypeError, ValueError: if the format does not fit in bfloat16.
    """
    if float_format is None:
        return None
    accepted = f"FloatFormat(8, m) with m from 1 to {_BFLOAT16_BITS} and any overflow"
    check_type(f"{name}: float_format", float_format, FloatFormat, accepted)
    bits, overflow = float_format.mantissa_bits, float_format.overflow
    fits = 1 <= bits <= _BFLOAT16_BITS
    if not fits or float_format != FloatFormat(8, bits, overflow=overflow):
        raise ValueError(
            f"{name}: float_format must be {accepted}, so that it fits in bfloat16 "
            f"with all its exponents, got {float_format}"
        )
    return Significand(bits, overflow == "saturate")


def why_not(significand: Significand | None, dtype: jnp.dtype) -> str | None:
    """Return why leaves of a dtype do not support a significand, or None if they do."""
    if significand is None or dtype == jnp.bfloat16:
        return None
    return (
        f"parameters must be bfloat16 for float_format=FloatFormat(8, "
        f"{significand.bits}), got {jnp.dtype(dtype).name}"
    )


@dataclasses.dataclass(frozen=True)
class Nearest(WeightFormat):
    """Stores the master rounded to nearest, and no residual."""

    significand: Significand | None = None

    def check(self, dtype):
        return why_not(self.significand, dtype)

    def round(self, master, dtype, random):
        return rounded(self.significand, master, dtype)


@dataclasses.dataclass(frozen=True)
class StochasticRounding(WeightFormat):
    """Stores the master rounded stochastically, and no residual."""

    sum_rounding: Rounding = "nearest"
    significand: Significand | None = None
    # A field can override this property, because it is only read.
    error_feedback: str | None = None  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def stores_sum(self) -> bool:
        return self.sum_rounding == "nearest" and self.error_feedback is None

    def check(self, dtype):
        return why_not(self.significand, dtype)

    def spare_stream(self, dtype):
        is_bfloat16 = float_layouts.layout_of(dtype).same_exponent
        is_plain = is_bfloat16 and self.significand is None
        # A stochastic sum reads the bits that rounding does not use.
        return PARAM_STREAM if is_plain and self.sum_rounding == "nearest" else None

    def sum_stream(self, dtype):
        if self.sum_rounding == "nearest":
            return None
        # Rounding to bfloat16 leaves enough unused bits in its words for the sum.
        is_bfloat16 = float_layouts.layout_of(dtype).same_exponent
        shares = is_bfloat16 and self.significand is None
        return PARAM_STREAM if shares else RESIDUAL_STREAM

    def round(self, master, dtype, random):
        return rounded(self.significand, master, dtype, random.words(master.shape))

    def advance(
        self, param, residual, update, random, landing: Landing = REPLACE, ahead=None
    ):
        if ahead is None:
            return super().advance(param, residual, update, random, landing)
        master = self.sum(param, residual, update, random)
        new = self.toward(master, ahead, param.dtype, random)
        new, result = landing.land(param, new)
        return new, None, result

    def toward(self, master, ahead, dtype: jnp.dtype, random):
        """Return the neighbor of a master that is nearer to ``master + ahead``."""
        layout, significand = float_layouts.layout_of(dtype), self.significand
        bits = layout.mantissa_bits if significand is None else significand.bits
        words = words_toward(master, ahead, layout, bits)
        words = where_known(words, ahead, random.words(master.shape))
        return rounded(significand, master, dtype, words)


@dataclasses.dataclass(frozen=True)
class MasterCopyFormat(WeightFormat):
    """Stores the master as a residual, which is valid if it rounds to the parameter."""

    @property
    def residual_name(self):
        return "master"

    def is_exact(self, dtype):
        return True

    def init(self, param):
        return rounding.to_float32(param)

    def join(self, param, residual):
        # If the parameter was changed outside of the optimizer, the master does not
        # round to it. Then return the parameter.
        if param.dtype == jnp.bfloat16:
            return operations.unless_rounded(residual, param)
        is_own = _same(rounding.round_nearest(residual, param.dtype), param)
        return jnp.where(is_own, residual, rounding.to_float32(param))

    def round(self, master, dtype, random):
        return rounding.round_nearest(master, dtype)

    def residual(self, master, param, random):
        return master


def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return whether narrow numbers have the same bit pattern or are both 0."""
    layout = float_layouts.layout_of(a.dtype)
    a, b = float_layouts.to_bits(a), float_layouts.to_bits(b)
    # The signs of a parameter of 0 and its master may differ; see landing.py. In
    # float8, this master may be as large as 2^-10. In bfloat16, it is at most 2^-134,
    # so join ignores this case.
    return (a == b) | (((a | b) & jnp.uint32(layout.largest)) == 0)


def nearest(*, float_format: FloatFormat | None = None) -> WeightFormat:
    """Store only the parameter, rounded to nearest even: plain 16-bit training.

        p' = round(float32(p) + update)

    This is a baseline. It loses every update that is smaller than half the distance
    between the parameter and the next number.

    Args:
      float_format: ``FloatFormat(8, m)`` from :mod:`lowbit_optax.precision` with m from
        1 to 7. bfloat16 parameters are then rounded to its numbers, which need 9 + m
        bits. A step still stores them in bfloat16, so it saves no memory. To save them
        in 9 + m bits, use :func:`lowbit_optax.precision.pack`. None uses all numbers of
        the dtype.

    Returns:
      A weight format. It needs no memory besides the parameter.

    Raises:
      TypeError, ValueError: if ``float_format`` does not fit in bfloat16.

    References:
      Zamirai et al. 2020, theorem 1; figure 10 (fewer than 16 bits).

    >>> nearest()
    Nearest(significand=None)
    """
    return Nearest(significand_of("nearest", float_format))


def stochastic_rounding(
    *,
    sum_rounding: Rounding = "nearest",
    float_format: FloatFormat | None = None,
    error_feedback: str | None = None,
) -> WeightFormat:
    """Store only the parameter, rounded stochastically, which keeps its mean.

        p' = SR(float32(p) + update)

    With ``error_feedback="mu"``, the rounding error e is added to the first moment,
    which returns it to the parameter over the next steps. The parameter is then not
    rounded at random, but to the neighbor that is nearer to where the moment will move
    it:

        e = p + update - p';    mu' = mu - e (a - b1) / (eta b1),    a = 1 - eta lambda
        p' nearest to p + update - mu (eta b1) / (a - b1)

    Here, eta is the step per unit of mu, and lambda is the weight decay. Both are
    computed from the inner update, which may be any update that is linear in the
    moment.

    Args:
      sum_rounding: how the float32 sum is rounded. ``"nearest"``, as in float32
        training, loses updates below 2^-25 of the parameter. ``"stochastic"`` keeps
        their mean at any learning rate; see :func:`lowbit_optax.extra_bits`.
      float_format: see :func:`lowbit_optax.nearest`.
      error_feedback: the field of the inner state that receives the rounding error:
        ``"mu"`` for Adam and similar optimizers, ``"trace"`` for SGD with momentum.
        Updates that are too small for float32 also accumulate in it. The learning rate
        may fall: SGD still returns the whole error if it falls by a constant factor r
        in each step, and Adam loses the share ``(1 - r) / (1 - b1 r)`` of each error.
        If a schedule more than doubles it in one step, or
        raises it from 0, this step scales the moment down in proportion. If you set
        the learning rate yourself between two steps, do not double it. Leaves of rank 0
        do not use error feedback.

    Returns:
      A weight format. It needs no memory besides the parameter.

    Raises:
      TypeError, ValueError: if an argument has a wrong type or value. ``init`` raises a
        ValueError for leaves without such a moment, and the first step raises one if
        the update is not linear in each element of the moment, as in Muon and Lion.

    References:
      Zamirai et al. 2020, Algorithms 2 and 4 (the circled minus); figure 10. ECO, 2026
        (arXiv 2601.22101), for errors in the momentum.

    >>> stochastic_rounding()
    StochasticRounding(sum_rounding='nearest', significand=None, error_feedback=None)
    """
    name = "stochastic_rounding"
    check_choice(name, "sum_rounding", sum_rounding, Rounding)
    check_field(name, error_feedback)
    significand = significand_of(name, float_format)
    return StochasticRounding(sum_rounding, significand, error_feedback)


def check_field(name: str, error_feedback: typing.Any) -> None:
    """Raise a TypeError unless a format's ``error_feedback`` is a name or None."""
    accepted = "None or the name of a moment, such as 'mu'"
    check_type(f"{name}: error_feedback", error_feedback, str | None, accepted)


def master_copy() -> WeightFormat:
    """Store a float32 master next to the parameter, as in ordinary mixed precision.

        w' = w + update;  p' = round(w')

    Returns:
      A weight format. It needs 4 bytes per parameter.

    References:
      Micikevicius et al. 2018, as in OpenSeq2Seq's optimizer wrapper.

    >>> master_copy()
    MasterCopyFormat()
    """
    return MasterCopyFormat()
