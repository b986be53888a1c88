"""Moments as codes of 4, 6 or 8 bits, with one scale per block of neighbours.

:mod:`lowbit_optax._numerics.codes` converts between values and codes. This module
chooses the code of each moment, and the arrays that store it.
"""

import dataclasses
import math
import operator
import typing

import jax

from lowbit_optax._arguments import check_static_int
from lowbit_optax._numerics.code_kinds import code_of
from lowbit_optax._numerics.codes import Code, multiply_add
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax._numerics.sum_code import Sum
from lowbit_optax.formats.base import (
    BlockMomentFormat,
    MomentFormat,
    Rounding,
    check_rounding,
)
from pallas_kernels.bitfields import pack, unpack
from pallas_kernels.layout import (
    TILE_SIZE,
    block_maxima,
    check_block_size,
    layout_of,
    repeat_blocks,
)

CodeName = typing.Literal[
    "linear", "companded", "dynamic", "sqrt", "log", "float", "nested"
]
_CODES = typing.get_args(CodeName)
_UNSIGNED = ("sqrt", "log", "float", "nested")
_BITS_OF_NESTED = (6, 8)
_SCALES = ("bfloat16", "power_of_two")

AUTO: typing.Final = "auto"
"""The ``relative_to`` that depends on the moment's field and the bits."""


class QuantizedMoment(typing.NamedTuple):
    """Codes and scales of moments, as two trees with the structure of the parameters.

    The field names end with the version of :mod:`pallas_kernels.layout`, so that a
    checkpoint with another layout is not mistaken for this one.

    Args:
      codes_v2: for each moment, uint32 words with the shape ``packed_shape(shape,
        bits)``. A leaf that is too small to be quantised has its float32 moment here.
      scales_v2: for each moment, bfloat16 scales with the ``blocks_shape`` of its
        layout. A leaf that is too small has None here.
    """

    codes_v2: typing.Any
    scales_v2: typing.Any

    codes = property(operator.itemgetter(0), doc="The words.")
    scales = property(operator.itemgetter(1), doc="The scales.")


class RelativeMoment(typing.NamedTuple):
    """Codes and scales of moments that are divided by the root of another moment.

    The arrays are the same as in :class:`QuantizedMoment`. The field names differ, so
    that a checkpoint of one class is not mistaken for the other.
    """

    relative_codes_v2: typing.Any
    relative_scales_v2: typing.Any

    codes = property(operator.itemgetter(0), doc="The words.")
    scales = property(operator.itemgetter(1), doc="The scales.")


@dataclasses.dataclass(frozen=True)
class BlockQuantized(BlockMomentFormat):
    """The format that :func:`block_quantized` returns.

    :meth:`for_field` sets ``signed``, replaces ``relative_to="auto"``, and chooses the
    code and the rounding of orthogonalised moments. :meth:`for_sums` sets ``is_sum``.
    """

    bits: int = 8
    block_size: int = TILE_SIZE
    code: CodeName | None = None
    rounding: Rounding | None = None
    scale: typing.Literal["bfloat16", "power_of_two"] | None = None
    relative_to: str | None = None
    signed: bool = True
    is_sum: bool = False

    @property
    def container(self):
        return QuantizedMoment if self.reference is None else RelativeMoment

    @property
    def reference(self):
        return None if self.relative_to == AUTO else self.relative_to

    @property
    def stored_as(self):
        code, scale = self._code_and_scale
        sign = "signed" if self.signed else "unsigned"
        text = f"{self.bits}-bit {sign} {code!r} codes, blocks of {self.block_size}, "
        text += f"{scale} scales"
        return text + (f", over the root of {self.reference}" if self.reference else "")

    @property
    def codec(self) -> Code:
        name, scale = self._code_and_scale
        code = code_of(name, self.bits, self.signed, scale)
        if not self.is_sum:
            return code
        code = dataclasses.replace(code, limit=math.inf)
        return Sum(self.bits, self.signed, scale, code=code)

    @property
    def _code_and_scale(self):
        second = {8: "float", 4: "sqrt"}.get(self.bits, "nested")
        code = self.code or ("companded" if self.signed else second)
        # Powers of two make division exact, and they are not coarser for "log".
        return code, self.scale or ("power_of_two" if code == "log" else "bfloat16")

    def for_field(self, name, is_second, bound=None, is_orthogonalized=False):
        if is_orthogonalized:
            code, rounding = self.code or "linear", self.rounding or "nearest"
            chosen = dataclasses.replace(self, code=code, rounding=rounding)
            return chosen.for_field(name, is_second, bound)
        signed = not is_second
        code = self.code or ("nested" if self.bits == 6 else None)
        if code in _UNSIGNED:
            if is_second is False:
                instead = "use 4 or 8 bits" if self.bits == 6 else "omit code"
                raise ValueError(
                    f"block_quantized: code {code!r} is for second moments and "
                    f"cannot store {name!r}, which may be negative; {instead}, or "
                    "pass moments as a mapping from fields to formats"
                )
            signed = False
        relative_to = self.relative_to if signed else None
        if relative_to == AUTO:
            relative_to = bound if self.bits == 4 else None
        return dataclasses.replace(self, signed=signed, relative_to=relative_to)

    def for_sums(self) -> MomentFormat:
        return dataclasses.replace(super().for_sums(), is_sum=True)

    def for_leaf(self, shape: tuple[int, ...], min_size: int) -> MomentFormat | None:
        size = math.prod(shape)
        return self if shape and size and size >= min_size else None

    def encode(self, moment, draws, number):
        codec = self.codec
        layout = layout_of(moment.shape)
        keys = [block_maxima(x, layout, self.block_size) for x in codec.keys(moment)]
        scales = codec.scale_of_keys(keys)
        prepared = self._prepared(scales, moment.shape)
        fields = self.encode_fields(moment, prepared, draws, number)
        return self.container(pack(fields, self.bits), scales)

    def encode_fields(self, moment, prepared, draws, number, multiply_add=multiply_add):
        words = None
        if self.rounding != "nearest":
            draw = draws.even if self.codec.rounds_evenly else draws.twelve
            words = draw(moment.shape, number)
        return self.codec.encode_fields(moment, prepared, words, multiply_add)

    def decode(self, stored, shape):
        fields = unpack(stored.codes, self.bits, layout_of(shape))
        prepared = self._prepared(stored.scales, shape)
        return self.codec.decode_fields(fields, prepared)

    def _prepared(self, scales: jax.Array, shape: tuple[int, ...]):
        """Return the prepared scales, repeated for every element of their blocks."""
        layout = layout_of(shape)
        unit, inverse = (
            repeat_blocks(x, layout, self.block_size)
            for x in self.codec.prepare(to_float32(scales))
        )
        return unit, inverse


@dataclasses.dataclass(frozen=True)
class LowMoments(MomentFormat):
    """The format for ``moments="low"``.

    Second moments have 6 bits. First moments have 4 bits, relative to the root of a
    second moment of the same state that bounds them, or 8 bits if the state has none.
    """

    def for_field(self, name, is_second, bound=None, is_orthogonalized=False):
        first = BlockQuantized(4 if bound else 8, relative_to=bound)
        chosen = first.for_field(name, is_second, bound, is_orthogonalized)
        if chosen.signed:
            return chosen
        return BlockQuantized(6).for_field(name, is_second, bound)


def block_quantized(
    bits: int = 8,
    *,
    code: CodeName | None = None,
    block_size: int = TILE_SIZE,
    rounding: Rounding | None = None,
    scale: typing.Literal["bfloat16", "power_of_two"] | None = None,
    relative_to: str | None = AUTO,
) -> MomentFormat:
    """Store moments in 8, 6 or 4 bits, with one scale per block of 32 neighbours.

        x ~ s y(c)

    Each value x is stored as an integer c, its code, which represents the number y(c).
    The scale s of a block is as small as possible while all values of the block are in
    range. ``code`` chooses the function y. For 8 bits and positive values, it is one
    of:

    - ``"linear"``: ``c / 127``. The steps are equal, so values far below the largest
      value of their block are lost.
    - ``"companded"``: ``(2^j (1 + i/8) - 1) / 61439`` with ``c = 8 j + i``, j = 0..15.
      Each j has 8 equal steps, twice as large as the steps of j - 1. A step is at most
      ``(y + 1/61439) / 8``.
    - ``"float"``: ``2^(j - 31.75) (1 + i/8)`` with ``c = 8 j + i``, if s is a power of
      two. These are floats with 3 mantissa bits, so a step is 1/16 to 1/8 of y. Smaller
      values become the smallest one, 2^-31.75, and so does zero unless its whole block
      is zero. With 4 bits, the mantissa has 1 bit, and the values span a factor of 2^7.
      This code needs the fewest instructions.
    - ``"log"``: ``(2^j (1 + i/8) - 1) / 2^30``, the values of ``"float"`` down to
      2^-30, minus the smallest one. Zero is stored exactly.
    - ``"sqrt"``: ``(c / 254)^2``. The steps of the root are equal.
    - ``"nested"``: numbers whose logarithms have equal distances. The distance is the
      smallest of 1/16, 1/8, ... and 1 octave with which 254 numbers (62 with 6 bits)
      cover all positive values of the block. With 6 bits, values more than 61 octaves
      below the largest become the smallest of these numbers. Zero is stored exactly.
      Rounding keeps the mean of the logarithm instead of the mean of x, so that updates
      are neither too long nor too short on average. This code supports 8 and 6 bits.
    - ``"dynamic"``: Dettmers' dynamic exponent map, without its value +1.

    ``"float"``, ``"log"``, ``"sqrt"`` and ``"nested"`` cannot store negative values.
    All codes store second moments without a sign. A second moment that is not zero
    never becomes zero, because its root divides the update. ``lowbit`` knows the second
    moments of optax and of :func:`lowbit_optax.formats.register_moments`. In other
    states, it recognises them by optax's names, such as ``nu``, ``v`` and
    ``exp_avg_sq``.

    With 8 bits, AdamW follows float32 even if one value of a block is 1,000 times as
    large as the others. With 4 bits for ``mu`` and 8 bits for ``nu``, it also follows
    float32, with noise of a quarter of the update, because the 4 bits store the ratio
    of ``mu`` to the root of ``nu``:

        r = mu / sqrt(nu),  mu' = r sqrt(nu'),  nu' the stored second moment

    The rounding error of nu' cancels in the update. In Adam with b1 = 0.9 and b2 =
    0.999, ``|r|`` is at most 7.27, so all r of a block have similar sizes for any
    gradients. Without such a second moment, as in SGD and Lion, moments in 4 bits lose
    values below about 1/30 of the largest value in their block. 4 bits for ``nu`` make
    updates next to large gradients too short; 6 bits do not. ``lowbit(...,
    moments="low")`` uses 6 and 4 bits where they follow float32.

    Infinities and NaNs do not change the scale, so the other values of their block are
    kept. In second moments, they become infinity, and the parameter no longer moves, as
    in float32. In other moments, they become the largest value of the block.

    Args:
      bits: 8, 4, or, for second moments only, 6.
      code: a code for all moments with this format. If None, second moments use
        ``"float"`` (``"nested"`` with 6 bits, ``"sqrt"`` with 4), Muon's momentum uses
        ``"linear"``, and other moments use ``"companded"``. In Muon's updates, all
        directions of a matrix have the same size, so noise in the weak directions
        matters. Equal steps have the least noise.
      block_size: number of values that share a scale, a power of two from 32 to 2048.
        32 values are 8 rows by 4 columns; see :mod:`pallas_kernels.layout`.
      rounding: ``"stochastic"`` or ``"nearest"``. Each step changes a moment only a
        little, so with nearest rounding, a second moment does not even decay. If None,
        Muon's momentum, whose gradients exceed the code's steps, is rounded to nearest,
        and other moments are rounded stochastically.
      scale: ``"bfloat16"``, or ``"power_of_two"``, which is up to twice as coarse, but
        makes division exact. Both are stored in bfloat16. If None, ``"log"`` uses
        powers of two, and other codes use bfloat16. ``"nested"`` supports only None.
      relative_to: the field of the second moment whose root divides first moments
        before they are stored, such as ``"nu"``. It must be in the same state. None
        stores first moments directly. ``"auto"`` uses the second moment if ``bits`` is
        4 and it is known to bound the first moments (optax's Adam, AMSGrad, Yogi,
        Prodigy, ``momo_adam`` and AdEMAMix' fast average), and None otherwise. Second
        moments are never relative.

    Returns:
      A moment format. It needs ``bits/8 + 2/block_size`` bytes per value. Scalars and
      leaves smaller than ``lowbit``'s ``min_size`` stay float32.

    Raises:
      TypeError: if ``bits`` or ``block_size`` is not a static int, or ``relative_to``
        is not a name.
      ValueError: if an argument has a wrong value. ``init`` raises it if first moments
        would have 6 bits or a code without negative values, or if the state has no
        moments in the field ``relative_to``.

    References:
      Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
      Gupta et al. 2025, "Effective Quantization of Muon Optimizer States", for
        ``"linear"`` in Muon.
      Li et al. 2023, "Memory Efficient Optimizers with 4-bit States".
      ITU-T G.711, "Pulse code modulation of voice frequencies".

    >>> import jax.numpy as jnp, optax, lowbit_optax
    >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    >>> tx = lowbit_optax.lowbit(optax.adamw(1e-3), moments=block_quantized(8))
    >>> nu = tx.init(params).inner_state[0].nu
    >>> nu.codes["w"].shape, nu.scales["w"].shape
    ((16, 64), (8, 16))
    """
    check_static_int("block_quantized", "bits", bits)
    check_static_int("block_quantized", "block_size", block_size)
    if bits not in (4, 6, 8):
        raise ValueError(f"block_quantized: bits must be 4, 6 or 8, got {bits}")
    if code is not None and code not in _CODES:
        raise ValueError(
            f"block_quantized: code must be None or one of {', '.join(_CODES)}, got "
            f"{code!r}"
        )
    _check_nested(bits, code, scale)
    check_block_size("block_quantized", block_size)
    if rounding is not None:
        check_rounding("block_quantized: rounding", rounding)
    if scale is not None and scale not in _SCALES:
        raise ValueError(
            "block_quantized: scale must be None, 'bfloat16' or 'power_of_two', got "
            f"{scale!r}"
        )
    if relative_to is not None and not isinstance(relative_to, str):
        raise TypeError(
            "block_quantized: relative_to must be 'auto', None or the name of a field, "
            f"such as 'nu', got {relative_to!r}"
        )
    return BlockQuantized(bits, block_size, code, rounding, scale, relative_to)


def _check_nested(bits: int, code: CodeName | None, scale: str | None) -> None:
    if bits == 6 and code not in (None, "nested"):
        raise ValueError(
            f"block_quantized: code must be None or 'nested' if bits is 6, got {code!r}"
        )
    if code == "nested" and bits not in _BITS_OF_NESTED:
        raise ValueError(
            f"block_quantized: bits must be {' or '.join(map(str, _BITS_OF_NESTED))} "
            f"if code is 'nested', got {bits}"
        )
    if (bits == 6 or code == "nested") and scale is not None:
        raise ValueError(
            "block_quantized: scale must be None for the code 'nested', which has its "
            f"own scales, got {scale!r}"
        )
