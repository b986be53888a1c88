"""Moments as codes of 4, 6 or 8 bits, with a scale per block of neighbours.

:mod:`lowbit_optax._numerics.codes` turns a value and a scale into a code. Here it is
decided what is stored where, and which code a moment gets.
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
"""``relative_to`` of formats that choose by the moment's field and the bits."""


class QuantizedMoment(typing.NamedTuple):
    """Moments as :func:`block_quantized` stores them: two trees like the parameters.

    The fields are named after the version of :mod:`pallas_kernels.layout`, so that a
    checkpoint of another layout is not read as one of this.

    Args:
      codes_v2: for each moment, uint32 words of ``packed_shape(shape, bits)``; for a
        leaf that is too small to be coded, its float32 moment.
      scales_v2: for each moment, bfloat16 of its layout's ``blocks_shape``; None for a
        leaf that is too small.
    """

    codes_v2: typing.Any
    scales_v2: typing.Any

    codes = property(operator.itemgetter(0), doc="The words.")
    scales = property(operator.itemgetter(1), doc="The scales.")


class RelativeMoment(typing.NamedTuple):
    """Moments stored relative to the root of another: two trees like the parameters.

    It has the arrays of :class:`QuantizedMoment` under other names, so that a
    checkpoint of the one is not read as one of the other.
    """

    relative_codes_v2: typing.Any
    relative_scales_v2: typing.Any

    codes = property(operator.itemgetter(0), doc="The words.")
    scales = property(operator.itemgetter(1), doc="The scales.")


@dataclasses.dataclass(frozen=True)
class BlockQuantized(BlockMomentFormat):
    """See :func:`block_quantized`.

    :meth:`for_field` sets ``signed``, replaces ``relative_to="auto"``, and chooses code
    and rounding of what is orthogonalised;
    :meth:`for_sums` sets ``is_sum``.
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
        # Powers of two cost "log" no precision, and division by them is exact.
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
                instead = "take 4 or 8 bits" if self.bits == 6 else "leave code out"
                raise ValueError(
                    f"block_quantized: code {code!r} is for second moments and "
                    f"holds no negative values, but {name!r} may be negative; "
                    f"{instead}, or give each moment its format by name"
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
        """The prepared scales of the blocks, repeated for every element."""
        layout = layout_of(shape)
        unit, inverse = (
            repeat_blocks(x, layout, self.block_size)
            for x in self.codec.prepare(to_float32(scales))
        )
        return unit, inverse


@dataclasses.dataclass(frozen=True)
class LowMoments(MomentFormat):
    """What ``moments="low"`` stands for.

    Second moments take 6 bits. First moments take 4 where a second moment of the same
    state bounds them, to whose root they are relative, and 8 elsewhere.
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
    """Store moments in 8, 6 or 4 bits, with a scale per block of 32 neighbours.

    A value x of a block with scale s is stored as a field that stands for y, where
    ``x ~ s y`` and s is the smallest scale with which every value of the block is in
    range. With 8 bits, the magnitude field c stands for this y:

    - ``"linear"``: equal steps, ``c/127``. Values far below the largest of their block
      are lost between the steps.
    - ``"companded"``: segments of 8 equal steps, which are twice those of the segment
      below: ``(2^j (1 + i/8) - 1) / 61439`` with ``c = 8 j + i``, j = 0..15. A step is
      at most 1/8 of y + 1/61439.
    - ``"float"``: no negative values; floats with 3 bits of mantissa,
      ``2^(j - 31.75) (1 + i/8)`` with ``c = 8 j + i``, for a scale that is a power of
      two. A step is 1/16 to 1/8 of y, down to 2^-31.75. Nothing below that is stored:
      zero becomes this smallest value, unless its whole block is zero. With 4 bits the
      mantissa has 1 bit, and the range is 2^-7. It takes the fewest instructions.
    - ``"log"``: the steps of ``"float"`` down to 2^-30, less the smallest value:
      ``(2^j (1 + i/8) - 1) / 2^30``. So zero is stored exactly.
    - ``"sqrt"``: no negative values, linear in the root, ``(c/254)^2``.
    - ``"nested"``: no negative values; numbers a step apart in the logarithm, 1/16,
      1/8, ... or 1 octave: the smallest step with which 254 numbers (62 with 6 bits)
      cover all positive values of the block. With 6 bits, values more than 61 octaves
      below the largest become the smallest of these numbers. Zero is stored exactly. It
      is rounded so that the mean of the logarithm is kept, and not that of x: then
      updates are neither too long nor too short on average. It is the only code of 6
      bits, and not one of 4.
    - ``"dynamic"``: Dettmers' dynamic exponent map, without its value +1.

    With ``code=None``, second moments are stored as ``"float"`` (``"nested"`` with 6
    bits, ``"sqrt"`` with 4), Muon's momentum as ``"linear"``, and other moments as
    ``"companded"``. Muon makes all directions of a matrix equally large, so that noise
    in the weak ones counts, and equal steps have the least. Second moments are
    those of optax's states and of :func:`lowbit_optax.formats.register_moments`, and in
    other states the fields that have optax's names, such as ``nu``, ``v`` and
    ``exp_avg_sq``. All codes store them without a sign. A second moment that is not
    zero never becomes zero, because its root divides the update.

    8 bits follow float32's AdamW even where one value of a block is 1,000 times the
    others. 4 bits of ``mu`` do too beside 8 bits of ``nu``, with noise of a quarter of
    the update, because they are stored relative to its root:

        mu = r sqrt(nu)

    where nu is the stored second moment; the root that divides mu is that of nu before
    it is rounded, so that the rounding cancels in the update. Adam's ``|r|`` is at most
    7.27 for b1 = 0.9 and b2 = 0.999, so that all r of a block are of one size, whatever
    its gradients are. 4 bits of a moment without such a second moment, as SGD's and
    Lion's, lose values that are below about 1/30 of the largest in their block, and 4
    bits of ``nu`` make the updates beside large gradients too short; 6 bits do not.
    ``lowbit(..., moments="low")`` chooses 6 and 4 bits where they follow float32.

    Values that are not finite do not enter the scale, so the other values of the block
    are kept. In second moments infinity and NaN become infinity, and the parameter
    stays where it is, as in float32. In other moments they become the largest value of
    the block.

    Args:
      bits: 8, 4, or, for second moments alone, 6.
      code: one of the above, for all moments that this format stores; None chooses by
        the moment's field.
      block_size: number of values that share a scale, a power of two from 32 to 2048.
        :mod:`pallas_kernels.layout` says which: 8 rows by 4 columns if 32.
      rounding: ``"stochastic"`` or ``"nearest"``. Every step reads a moment, changes it
        a little and stores it again. Under nearest rounding a second moment does not
        even decay. None rounds Muon's momentum to nearest, whose gradients are larger
        than a step, and the others stochastically.
      scale: ``"bfloat16"``; or ``"power_of_two"``, which is stored as bfloat16 too and
        is up to twice as coarse, but by which division is exact; or None for powers of
        two with ``"log"`` and bfloat16 with other codes. ``"nested"`` takes only None.
      relative_to: the field of the second moment whose root divides first moments
        before they are stored, such as ``"nu"``; it must be in the same state. None
        stores them as they are. ``"auto"`` is that field with 4 bits, where it is known
        to bound them (optax's Adam, AMSGrad, Yogi, AdEMAMix' fast average, Prodigy,
        Momo), and none elsewhere. Second moments are never relative.

    Returns:
      A moment format. State: ``bits/8 + 2/block_size`` bytes per value of a moment.
      Scalars and leaves smaller than ``lowbit``'s ``min_size`` stay float32.

    Raises:
      TypeError: if ``bits`` or ``block_size`` is not a static int, or ``relative_to``
        is not a name.
      ValueError: if an argument is not one of these; in ``init``, if a first moment is
        given a code without negative values or 6 bits, or the state has no moments in
        the field ``relative_to``.

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
        raise ValueError(f"block_quantized: bits is {bits}, not 4, 6 or 8")
    if code is not None and code not in _CODES:
        raise ValueError(
            f"block_quantized: code is {code!r}, not None or one of {', '.join(_CODES)}"
        )
    _check_nested(bits, code, scale)
    check_block_size("block_quantized", block_size)
    if rounding is not None:
        check_rounding("block_quantized: rounding", rounding)
    if scale is not None and scale not in _SCALES:
        raise ValueError(
            f"block_quantized: scale is {scale!r}, not None, 'bfloat16' or "
            "'power_of_two'"
        )
    if relative_to is not None and not isinstance(relative_to, str):
        raise TypeError(
            f"block_quantized: relative_to is {relative_to!r}, not 'auto', None or the "
            "name of a field, such as 'nu'"
        )
    return BlockQuantized(bits, block_size, code, rounding, scale, relative_to)


def _check_nested(bits: int, code: CodeName | None, scale: str | None) -> None:
    if bits == 6 and code not in (None, "nested"):
        raise ValueError(
            f"block_quantized: bits is 6 and code {code!r}; accepted with 6 bits are "
            "None and 'nested'"
        )
    if code == "nested" and bits not in _BITS_OF_NESTED:
        raise ValueError(
            f"block_quantized: code is 'nested' and bits is {bits}, not "
            f"{' or '.join(map(str, _BITS_OF_NESTED))}"
        )
    if (bits == 6 or code == "nested") and scale is not None:
        raise ValueError(
            f"block_quantized: scale is {scale!r}, but code 'nested' has its own; "
            "accepted is None"
        )
