"""Formats that store only the parameter, or the whole float32 master as well."""

import dataclasses
import typing

import jax
import jax.numpy as jnp
from jax import lax

from lowbit_optax._numerics import float_layouts, rounding
from lowbit_optax._numerics.chosen_neighbour import words_toward
from lowbit_optax._numerics.float_format import FloatFormat
from lowbit_optax._numerics.landing import REPLACE, Landing
from lowbit_optax._numerics.random_bits import PARAM_STREAM, RESIDUAL_STREAM
from lowbit_optax.formats.base import Rounding, WeightFormat, check_rounding
from pallas_kernels import operations

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

    def round(self, x: jax.Array, words: jax.Array | None = None) -> jax.Array:
        """Round float32 to a bfloat16 number.

        Args:
          x: float32.
          words: uint32 of x's shape, whose leading ``23 - bits`` bits are used to round
            stochastically; None rounds to nearest even.

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
    """Round float32 to a significand's numbers, or with None to all of a dtype.

    Args:
      significand: for bfloat16 alone, as checked by :func:`why_not`.
      x: float32.
      dtype: narrow.
      words: random words to round stochastically; None rounds to nearest even.
    """
    if significand is not None:
        return significand.round(x, words)
    return rounding.round_stochastic(x, dtype, words)


def significand_of(name: str, float_format: typing.Any) -> Significand | None:
    """The significand of a format that fits in bfloat16; None for bfloat16 itself.

    Args:
      name: of the weight format, for the error.
      float_format: a :class:`lowbit_optax.precision.FloatFormat`, or None.

    Raises:
      TypeError, ValueError: if it does not fit.
    """
    if float_format is None:
        return None
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


@dataclasses.dataclass(frozen=True)
class Nearest(WeightFormat):
    """The parameter is the master rounded to nearest; nothing else is stored."""

    significand: Significand | None = None

    def check(self, dtype):
        return why_not(self.significand, dtype)

    def round(self, master, dtype, random):
        return rounded(self.significand, master, dtype)


@dataclasses.dataclass(frozen=True)
class StochasticRounding(WeightFormat):
    """The parameter is the master rounded stochastically; nothing else is stored."""

    sum_rounding: Rounding = "nearest"
    significand: Significand | None = None
    # It is only read, where a field serves as a property does.
    error_feedback: str | None = None  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def stores_sum(self) -> bool:
        return self.sum_rounding == "nearest" and self.error_feedback is None

    def check(self, dtype):
        return why_not(self.significand, dtype)

    def spare_stream(self, dtype):
        is_bfloat16 = float_layouts.layout_of(dtype).same_exponent
        is_plain = is_bfloat16 and self.significand is None
        # A sum reads the bits that rounding leaves.
        return PARAM_STREAM if is_plain and self.sum_rounding == "nearest" else None

    def sum_stream(self, dtype):
        if self.sum_rounding == "nearest":
            return None
        # Rounding to bfloat16 leaves the sum's bits of its words.
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
        """The neighbour of a master that is nearer to ``master + ahead``."""
        layout, significand = float_layouts.layout_of(dtype), self.significand
        bits = layout.mantissa_bits if significand is None else significand.bits
        words = words_toward(master, ahead, layout, bits)
        # With explicit axes a selection takes no indices, which are not sharded.
        lost = jnp.where(jnp.isnan(ahead), jnp.uint32(2**32 - 1), jnp.uint32(0))
        words = (words & ~lost) | (random.words(master.shape) & lost)
        return rounded(significand, master, dtype, words)


@dataclasses.dataclass(frozen=True)
class MasterCopyFormat(WeightFormat):
    """The residual is the float32 master, valid while it rounds to the parameter."""

    @property
    def residual_name(self):
        return "master"

    def is_exact(self, dtype):
        return True

    def init(self, param):
        return rounding.to_float32(param)

    def join(self, param, residual):
        # If the user has set the parameter since, the master does not round to it, and
        # the parameter is used.
        if param.dtype == jnp.bfloat16:
            return operations.unless_rounded(residual, param)
        is_own = _same(rounding.round_nearest(residual, param.dtype), param)
        return jnp.where(is_own, residual, rounding.to_float32(param))

    def round(self, master, dtype, random):
        return rounding.round_nearest(master, dtype)

    def residual(self, master, param, random):
        return master


def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether narrow numbers have the same pattern or are both 0."""
    layout = float_layouts.layout_of(a.dtype)
    a, b = float_layouts.to_bits(a), float_layouts.to_bits(b)
    # With exact landing, a parameter of 0 may have another sign than its master. In
    # float8 such a master may be as large as 2^-10. In bfloat16 it is at most 2^-134,
    # so there the case is ignored.
    return (a == b) | (((a | b) & jnp.uint32(layout.largest)) == 0)


def nearest(*, float_format: FloatFormat | None = None) -> WeightFormat:
    """No residual, round to nearest even: plain 16-bit training.

        p' = round(float32(p) + update)

    This is the baseline, which loses updates: one that is smaller than half the spacing
    at the parameter is always lost.

    Args:
      float_format: ``FloatFormat(8, m)`` of :mod:`lowbit_optax.precision`, with m from
        1 to 7, to round bfloat16 parameters to its numbers: weights of 9 + m bits.
        They are still stored in bfloat16, so no memory is saved in a step;
        :func:`lowbit_optax.precision.pack` stores them in 9 + m bits at rest. None
        takes all numbers of the parameter's dtype.

    Returns:
      A weight format. State: 0 bytes per parameter.

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
    """No residual; the parameter is rounded stochastically, which keeps its mean.

        p' = SR(float32(p) + update)

    With ``error_feedback="mu"`` what rounding has lost is not noise that stays, because
    the first moment takes it and gives it back over the next steps. Then p' is the one
    of the two neighbours that is nearer to where weight and moment will end:

        e = p + update - p';    mu' = mu - e (a - b1) / (eta b1),    a = 1 - eta lambda
        p' nearest to p + update - mu (eta b1) / (a - b1)

    with eta the step that a unit of mu makes and lambda the weight decay. They are read
    off the inner update; for any that is linear in the moment it is like that.

    Args:
      sum_rounding: of the float32 sum. ``"nearest"``, as in float32 training, loses
        updates below 2^-25 of the parameter. ``"stochastic"`` keeps the mean at any
        learning rate; see :func:`lowbit_optax.extra_bits`.
      float_format: as for :func:`lowbit_optax.nearest`.
      error_feedback: the field of the moments in the inner state that takes the
        rounding error: ``"mu"`` of Adam and its like, ``"trace"`` of SGD with
        momentum. Updates below float32's resolution add up there as well. A learning
        rate may fall as it likes. Where a schedule more than doubles it in one step,
        from 0 as well, the moment is shortened in proportion, at this one step. If you
        set it by hand, between two steps, do not double it. Leaves of rank 0 are
        rounded as without it.

    Returns:
      A weight format. State: 0 bytes per parameter.

    Raises:
      TypeError, ValueError: if an argument is not one of these. ``init`` raises a
        ValueError for leaves that have no such moment, and the first step for updates
        that are not linear in it, element by element, as Muon's and Lion's.

    References:
      Zamirai et al. 2020, Algorithms 2 and 4 (the circled minus); figure 10. ECO, 2026
      (arXiv 2601.22101), for errors in the momentum.

    >>> stochastic_rounding()
    StochasticRounding(sum_rounding='nearest', significand=None, error_feedback=None)
    """
    check_rounding("stochastic_rounding: sum_rounding", sum_rounding)
    if error_feedback is not None and not isinstance(error_feedback, str):
        raise TypeError(
            f"stochastic_rounding: error_feedback is {error_feedback!r}, and must be "
            "None or the name of a moment, such as 'mu'"
        )
    significand = significand_of("stochastic_rounding", float_format)
    return StochasticRounding(sum_rounding, significand, error_feedback)


def master_copy() -> WeightFormat:
    """A float32 master beside the parameter, as in ordinary mixed precision.

        w' = w + update;  p' = round(w')

    Returns:
      A weight format. State: 4 bytes per parameter.

    References:
      Micikevicius et al. 2018, as in OpenSeq2Seq's optimizer wrapper.

    >>> master_copy()
    MasterCopyFormat()
    """
    return MasterCopyFormat()
