"""Extra bits: the parameter, and the next k bits of its master in packed words.

If all bits of float32 are kept (k = 16 for bfloat16, 13 for float16 in its normal
range), the master is the float32 master, bit for bit. The only exceptions are some
NaNs: float32 has 2^24 - 2 NaNs, but the 2^8 - 2 NaNs of bfloat16 make only 2^24 - 2^17
pairs with a 16-bit residual. The other 2^17 - 2 NaNs become a neighboring NaN.
Otherwise, the parameter of a NaN master could be a number.
"""

import dataclasses
import functools
import math
import re
import typing

import jax
import jax.numpy as jnp

from lowbit_optax._arguments import check_choice, check_static_int
from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics import rounding as rounding_
from lowbit_optax._numerics.random_bits import PARAM_STREAM, RESIDUAL_STREAM
from lowbit_optax.formats.base import Rounding, WeightFormat, rounding_words
from lowbit_optax.formats.plain import MasterCopyFormat
from pallas_kernels.bitfields import pack, unpack
from pallas_kernels.layout import VERSION, layout_of

_NAME = re.compile(rf"(nearest|toward_zero|stochastic)_(\d+|most)_bits_v{VERSION}")


def extra_bits_named(name: str, param, residual) -> WeightFormat | None:
    """Return the extra-bits format whose residuals have this name, or None."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    if residual.dtype == jnp.float32:
        return MasterCopyFormat()
    bits = None if found[2] == "most" else int(found[2])
    rounding = typing.cast(rounding_.Rounding, found[1])
    return ExtraBits(bits, rounding).for_leaf(param.shape, param.dtype, 0)


@dataclasses.dataclass(frozen=True)
class ExtraBits(WeightFormat):
    """The format of :func:`extra_bits`. If not packed, residuals are uint32 fields.

    If ``bits`` is None, the number of bits depends on the leaf's dtype. Then only
    :meth:`check`, :meth:`for_leaf` and ``residual_name`` can be used.
    """

    bits: int | None = None
    rounding: rounding_.Rounding = "nearest"
    residual_rounding: rounding_.Rounding = "stochastic"
    sum_rounding: Rounding = "nearest"
    packed: bool = True

    @property
    def residual_name(self):
        if self.bits == 0:
            return None
        bits = "most" if self.bits is None else self.bits
        return f"{self.rounding}_{bits}_bits_v{VERSION}"

    @property
    def width(self) -> int:
        """Stored bits per parameter."""
        return rounding_.stored_bits(self._bits, self.rounding)

    @property
    def _bits(self) -> int:
        if self.bits is None:
            raise TypeError(
                "extra_bits: bits is None, so the number of bits depends on the dtype; "
                "call for_leaf(shape, dtype, min_size) for the format of a leaf"
            )
        return self.bits

    def spare_stream(self, dtype):
        layout = float_layouts.layout_of(dtype)
        if not layout.same_exponent:
            return None  # subnormal numbers drop more bits
        # A stochastic sum reads 16 more bits.
        is_short = self.stores_sum or layout.max_extra_bits - self._bits <= 8
        return RESIDUAL_STREAM if is_short else None

    def check(self, dtype):
        limit = float_layouts.layout_of(dtype).max_extra_bits
        if self.bits is not None and self.bits > limit:
            return f"bits must be from 0 to {limit} for {dtype}, got {self.bits}"
        return None

    def is_exact(self, dtype):
        return self._bits == float_layouts.layout_of(dtype).max_extra_bits

    def for_leaf(self, shape, dtype, min_size):
        size = math.prod(shape)
        if self.bits != 0 and (not shape or not size or size < min_size):
            return MasterCopyFormat()
        if self.bits is not None:
            return self
        bits = float_layouts.layout_of(dtype).max_extra_bits
        return dataclasses.replace(self, bits=bits)

    @property
    def stores_sum(self) -> bool:
        return self.sum_rounding == "nearest"

    def sum_stream(self, dtype):
        if self.stores_sum:
            return None
        # If rounding the master drops at most 16 bits, its words have enough unused
        # bits for the sum.
        is_bfloat16 = float_layouts.layout_of(dtype).same_exponent
        return RESIDUAL_STREAM if is_bfloat16 else PARAM_STREAM

    def on_fields(self):
        return dataclasses.replace(self, packed=False)

    def init(self, param):
        if not self.width:
            return None
        # The zeros have the sharding of the parameter, and so do the words.
        zeros = jnp.zeros_like(param, dtype=jnp.uint32)
        return traced_once(self._stored)(zeros)

    def join(self, param, residual):
        if self.width and self.packed:
            residual = unpack(residual, self.width, layout_of(param.shape))
        return rounding_.join(param, residual, self._bits, self.rounding)

    def round(self, master, dtype, random):
        return self._split(master, dtype, random)[0]

    def residual(self, master, param, random):
        if not self.width:
            return None
        given = master, param.dtype, self._bits, self.rounding
        of_residual = self._of_residual(random, master.shape)
        sign, pattern = rounding_.pattern_of(*given, of_residual)
        fields = rounding_.residual_of(sign, pattern, param, self._bits, self.rounding)
        return self._stored(fields)

    def split(self, master, dtype, random):
        param, fields = self._split(master, dtype, random)
        return param, None if fields is None else self._stored(fields)

    def _split(self, master, dtype, random):
        """Return the parameter, and the residual before it is packed."""
        shape, rounding = master.shape, self.rounding if self._bits else "nearest"
        words = rounding_words(rounding, random, shape, PARAM_STREAM)
        given = master, dtype, self._bits, self.rounding
        return rounding_.split(*given, words, self._of_residual(random, shape))

    def _of_residual(self, random, shape) -> float_layouts.RoundingBits:
        if self.residual_rounding == "toward_zero":
            return float_layouts.TOWARD_ZERO
        return rounding_words(self.residual_rounding, random, shape, RESIDUAL_STREAM)

    def _stored(self, fields: jax.Array) -> jax.Array:
        return pack(fields, self.width) if self.packed else fields


def extra_bits(
    bits: int | None = None,
    *,
    rounding: rounding_.Rounding = "nearest",
    residual_rounding: rounding_.Rounding = "stochastic",
    sum_rounding: Rounding = "nearest",
) -> WeightFormat:
    """Keep k more bits of each weight in packed uint32 words.

    The master is first rounded to the parameter's dtype with k more mantissa bits
    (``residual_rounding``), and then split into the parameter and a k-bit residual
    (``rounding``); see :mod:`lowbit_optax._numerics.rounding` for the formulas.

    Args:
      bits: k, from 0 to 16 for bfloat16, 13 for float16, 20 for float8_e4m3fn or 21 for
        float8_e5m2. The largest number keeps every bit of float32 in the range of the
        dtype. None uses the largest number for the dtype of each leaf.
      rounding: how the parameter is rounded: ``"nearest"``, ``"toward_zero"``, or
        ``"stochastic"``, which stores k + 1 bits.
      residual_rounding: how the master is rounded to k more bits; with the largest k,
        it is not rounded. ``"stochastic"`` keeps the mean. ``"nearest"`` loses every
        update below half of the last kept bit (with 8 bits and a bfloat16 weight of
        1.0, below 2^-16 if it increases the weight, and below 2^-17 if it decreases the
        weight). ``"toward_zero"`` drops all bits after the last kept bit. If an
        update is smaller than this bit, it is lost if it points away from zero, and
        enlarged to the size of the bit if it points toward zero. With
        ``rounding="toward_zero"``, this is the paper's base scheme: the leading 16 bits
        of a float32 master are its bfloat16 parameter, and the next k bits are the
        residual.
      sum_rounding: how the float32 sum of master and update is rounded, before any
        other rounding. ``"nearest"``, as in float32 training, loses updates below 2^-25
        of the weight. ``"stochastic"`` keeps their mean at any learning rate (see
        :mod:`lowbit_optax._numerics.rounding`), and adds 17 machine instructions per
        parameter to the kernel of ``lowbit_adamw``, compiled for an H200.

    Returns:
      A weight format. It needs k/8 bytes per parameter, or (k + 1)/8 bytes with
      ``rounding="stochastic"``. Scalars and leaves smaller than
      ``lowbit``'s ``min_size`` have a float32 master instead.

    Raises:
      TypeError: if ``bits`` is neither None nor a static int.
      ValueError: if an argument has a wrong value.

    References:
      Lewandowski and Kosson 2023, section 3.1.

    >>> extra_bits(8).width, extra_bits(8, rounding="stochastic").width
    (8, 9)
    >>> extra_bits().for_leaf((64, 64), jnp.dtype("float16"), min_size=4096).width
    13
    """
    if bits is not None:
        check_static_int("extra_bits", "bits", bits)
    if bits is not None and not 0 <= bits <= 21:
        raise ValueError(
            "extra_bits: bits must be from 0 to 16 for bfloat16, 13 for float16, 20 "
            f"for float8_e4m3fn or 21 for float8_e5m2, got {bits}"
        )
    check = functools.partial(check_choice, "extra_bits")
    check("rounding", rounding, rounding_.Rounding)
    check("residual_rounding", residual_rounding, rounding_.Rounding)
    check("sum_rounding", sum_rounding, Rounding)
    return ExtraBits(bits, rounding, residual_rounding, sum_rounding)
