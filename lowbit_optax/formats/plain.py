"""Formats whose parameter is all there is, or that keep the whole master beside it."""

import dataclasses
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._numerics import float_layouts, rounding
from lowbit_optax._numerics.random_bits import RandomBits
from lowbit_optax.formats.base import WeightFormat
from pallas_kernels.fused_update import operations


class NoResidual(typing.NamedTuple):
    """The residuals of a format that keeps none."""

    @staticmethod
    def format_of(param, residual) -> WeightFormat:
        """A format that joins and splits leaves with such residuals."""
        del param, residual
        return Nearest()


class MasterCopy(typing.NamedTuple):
    """Residuals of :func:`master_copy`: float32 arrays of the parameters' shapes."""

    master: typing.Any

    @staticmethod
    def format_of(param, residual) -> WeightFormat:
        """A format that joins and splits leaves with such residuals."""
        del param, residual
        return MasterCopyFormat()


@dataclasses.dataclass(frozen=True)
class Nearest(WeightFormat):
    """The parameter is the master rounded to nearest, and nothing else is kept."""

    container: typing.ClassVar[type] = NoResidual

    def round(self, master, dtype, random):
        del random
        return rounding.round_nearest(master, dtype)


@dataclasses.dataclass(frozen=True)
class StochasticRounding(WeightFormat):
    """The parameter is the master rounded at random, and nothing else is kept."""

    container: typing.ClassVar[type] = NoResidual

    def round(self, master: jax.Array, dtype: jnp.dtype, random: RandomBits):
        words = random.words(master.shape)
        return rounding.round_stochastic(master, dtype, words)


@dataclasses.dataclass(frozen=True)
class MasterCopyFormat(WeightFormat):
    """The residual is the master, in float32."""

    container: typing.ClassVar[type] = MasterCopy

    def init(self, param):
        return rounding.to_float32(param)

    def join(self, param, residual):
        # A parameter that was set by hand is no rounding of the master, and wins.
        if param.dtype == jnp.bfloat16:
            return operations.unless_rounded(residual, param)
        rounded = rounding.round_nearest(residual, param.dtype)
        return jnp.where(_same(rounded, param), residual, rounding.to_float32(param))

    def round(self, master, dtype, random):
        del random
        return rounding.round_nearest(master, dtype)

    def residual(self, master, param, random):
        del param, random
        return master


def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether narrow numbers have the same pattern, or both are 0."""
    layout = float_layouts.layout_of(a.dtype)
    a, b = float_layouts.to_bits(a), float_layouts.to_bits(b)
    # Exact landing may give 0 the other sign than the master's. The master may be as
    # large as 2^-10 in float8; in bfloat16 it is at most 2^-134, and not looked for.
    return (a == b) | (((a | b) & jnp.uint32(layout.largest)) == 0)


def nearest() -> WeightFormat:
    """No residual, round to nearest even: plain 16-bit training.

    The baseline that loses updates: one smaller than half the spacing of the parameter
    is cancelled, every time (Zamirai et al. 2020, theorem 1). State: 0 bytes.

    >>> nearest()
    Nearest()
    """
    return Nearest()


def stochastic_rounding() -> WeightFormat:
    """No residual; the parameter is rounded stochastically, so its mean is right.

    ``p' = SR(float32(p) + update)``. State: 0 bytes. An update smaller than 2^-25 of
    the parameter is lost in the float32 sum, as it is in float32 training.

    References:
      Zamirai et al. 2020, Algorithms 2 and 4 (the circled minus).

    >>> stochastic_rounding()
    StochasticRounding()
    """
    return StochasticRounding()


def master_copy() -> WeightFormat:
    """A float32 master beside the parameter: the usual mixed precision. State: 4 bytes.

    References:
      Micikevicius et al. 2018, as in OpenSeq2Seq's optimizer wrapper.

    >>> master_copy()
    MasterCopyFormat()
    """
    return MasterCopyFormat()
