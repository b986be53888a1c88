"""Moments as codes of 4 or 8 bits, with one scale per block of neighbors.

:mod:`lowbit_optax._numerics.codes` converts between values and codes. This module
chooses the code of each moment, and the arrays that store it.
"""

import collections
import dataclasses
import functools
import math
import operator
import typing

import jax
import jax.export

from lowbit_optax._arguments import check_choice, check_static_int
from lowbit_optax._numerics.codes import UNSIGNED, Code, Prepared, Sum, code_of
from lowbit_optax._numerics.random_bits import Draws
from lowbit_optax._numerics.rounding import to_float32
from lowbit_optax.formats.base import MomentFormat, Rounding
from pallas_kernels.bitfields import pack, unpack
from pallas_kernels.layout import (
    TILE_SIZE,
    block_maxima,
    check_block_size,
    layout_of,
    repeat_blocks,
)

CodeName = typing.Literal["linear", "companded", "dynamic", "sqrt", "log", "float"]


class QuantizedMoment(typing.NamedTuple):
    """Codes and scales of moments, as two trees with the structure of the parameters.

    The field names contain the version of :mod:`pallas_kernels.layout`. In a state, the
    class is a :meth:`BlockQuantized.container`, whose first name also contains the
    format. Therefore, a checkpoint in another format is not mistaken for this one.

    Args:
      codes_v2: for each moment, uint32 words with the shape ``packed_shape(shape,
        bits)``. A leaf that is too small to be quantized has its float32 moment here.
      scales_v2: for each moment, bfloat16 scales with the ``blocks_shape`` of its
        layout. A leaf that is too small has None here.
    """

    codes_v2: typing.Any
    scales_v2: typing.Any

    codes = property(operator.itemgetter(0), doc="The words.")
    scales = property(operator.itemgetter(1), doc="The scales.")

    def __reduce__(self):
        return _unpickled, (type(self)._fields[0], *self)


@functools.cache
def _container(codes: str) -> type[QuantizedMoment]:
    """Return the class of moments whose codes have this field name."""
    fields = collections.namedtuple("QuantizedMoment", [codes, "scales_v2"])
    made = type("QuantizedMoment", (fields, QuantizedMoment), {"__slots__": ()})
    name = f"lowbit_optax.QuantizedMoment.{codes}"
    return jax.export.register_namedtuple_serialization(made, serialized_name=name)


def _unpickled(codes: str, *trees) -> QuantizedMoment:
    is_named = codes != QuantizedMoment._fields[0]
    return (_container(codes) if is_named else QuantizedMoment)(*trees)


@dataclasses.dataclass(frozen=True)
class BlockQuantized(MomentFormat):
    """The format that :func:`block_quantized` returns.

    :meth:`for_field` sets ``signed``, and chooses the code and the rounding of
    orthogonalized moments. :meth:`for_sums` sets ``is_sum``.
    """

    bits: int = 8
    block_size: int = TILE_SIZE
    code: CodeName | None = None
    rounding: Rounding | None = None
    signed: bool = True
    is_sum: bool = False

    has_scales: typing.ClassVar[bool] = True

    @property
    def stored_as(self):
        bits, sign, code, size, scale = self._parts
        return f"{bits}-bit {sign} {code!r} codes, blocks of {size}, {scale} scales"

    @property
    def container(self) -> type[QuantizedMoment]:
        """The class of these moments in a state, which names their format."""
        bits, sign, code, size, scale = self._parts
        how = f"{bits}_bit_{sign}_{code}_{size}_{scale}"
        return _container(f"{QuantizedMoment._fields[0]}_{how}")

    @property
    def smallest_share(self):
        return self.codec.smallest_share

    @property
    def codec(self) -> Code:
        code = code_of(self._code_name, self.bits, self.signed)
        if not self.is_sum:
            return code
        code = dataclasses.replace(code, limit=math.inf)
        return Sum(self.bits, self.signed, code=code)

    @property
    def _code_name(self) -> CodeName:
        second = "float" if self.bits == 8 else "sqrt"
        return self.code or ("companded" if self.signed else second)

    @property
    def _parts(self):
        sign = "signed" if self.signed else "unsigned"
        return self.bits, sign, self._code_name, self.block_size, self.codec.scale

    def for_field(self, name, is_second, is_orthogonalized=False):
        if is_orthogonalized:
            code, rounding = self.code or "linear", self.rounding or "nearest"
            chosen = dataclasses.replace(self, code=code, rounding=rounding)
            return chosen.for_field(name, is_second)
        is_unsigned = self.code in UNSIGNED
        if is_unsigned and is_second is False:
            raise ValueError(
                f"block_quantized: code {self.code!r} cannot store {name!r}, which may "
                "be negative; omit code, or pass moments as a mapping from fields"
            )
        return dataclasses.replace(self, signed=not (is_second or is_unsigned))

    def for_sums(self) -> MomentFormat:
        return dataclasses.replace(super().for_sums(), is_sum=True)

    def for_leaf(self, shape: tuple[int, ...], min_size: int) -> MomentFormat | None:
        size = math.prod(shape)
        return self if shape and size and size >= min_size else None

    def encode(self, moment, draws, number):
        layout = layout_of(moment.shape)
        keys = block_maxima(self.magnitude_key(moment), layout, self.block_size)
        scales = self.scale_of(keys)
        prepared = self._prepared(scales, moment.shape)
        fields = self.encode_fields(moment, prepared, draws, number)
        return QuantizedMoment(pack(fields, self.bits), scales)

    def magnitude_key(self, x: jax.Array) -> jax.Array:
        """See :meth:`.Code.magnitude_key`."""
        return self.codec.magnitude_key(x)

    def scale_of(self, key: jax.Array, old: jax.Array | None = None) -> jax.Array:
        """Return the scales for maxima of keys, whatever the old scales are."""
        del old
        return self.codec.scale_of_key(key)

    def prepare(self, scale: jax.Array) -> Prepared:
        """Return the ``prepared`` argument of the code's methods for stored scales."""
        return self.codec.prepare(to_float32(scale))

    def encode_fields(
        self, moment: jax.Array, prepared: Prepared, draws: Draws, number: int
    ) -> jax.Array:
        """Return the uint32 fields of moments whose blocks have known scales.

        Args:
          moment: float32 array.
          prepared: the scales of its blocks, from :meth:`prepare`.
          draws, number: see :meth:`encode`.
        """
        words = None
        if self.rounding != "nearest":
            words = draws.twelve(moment.shape, number)
        return self.codec.encode_fields(moment, prepared, words)

    def decode(self, stored, shape):
        fields = unpack(stored.codes, self.bits, layout_of(shape))
        prepared = self._prepared(stored.scales, shape)
        return self.codec.decode_fields(fields, prepared)

    def _prepared(self, scales: jax.Array, shape: tuple[int, ...]):
        """Return the prepared scales, repeated for every element of their blocks."""
        layout, prepared = layout_of(shape), self.prepare(scales)
        return [repeat_blocks(x, layout, self.block_size) for x in prepared]


def block_quantized(
    bits: int = 8,
    *,
    code: CodeName | None = None,
    block_size: int = TILE_SIZE,
    rounding: Rounding | None = None,
) -> MomentFormat:
    """Store moments in 8 or 4 bits, with one scale per block of 32 neighbors.

        x ~ s y(c)

    Each value x is stored as an integer c, its code, which represents the number y(c).
    The scale s of a block is a bfloat16 number, for ``"log"`` a power of two. It is as
    small as possible while all values of the block are in range. ``code`` chooses the
    function y. For 8 bits and positive values, it is one of:

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
    - ``"dynamic"``: Dettmers' dynamic exponent map, without its value +1.

    ``"float"``, ``"log"`` and ``"sqrt"`` cannot store negative values.
    All codes store second moments without a sign. A second moment that is not zero
    never becomes zero, because its root divides the update. ``lowbit`` knows the second
    moments of optax and of :func:`lowbit_optax.formats.register_moments`. In other
    states, it recognizes them by optax's names, such as ``nu``, ``v`` and
    ``exp_avg_sq``.

    With 8 bits, AdamW follows float32 even if one value of a block is 1,000 times as
    large as the others. Moments in 4 bits lose values below about 1/30 of the largest
    value in their block. Therefore, AdamW's updates next to large gradients are too
    short with 4 bits for ``mu`` and ``nu``. With 4 bits for ``mu`` alone, they would be
    many times too long, so ``init`` raises an error. The first moment
    of :func:`lowbit_optax.factored_adamw` has values of similar sizes, so 4 bits are
    enough for it.

    Infinities and NaNs do not change the scale, so the other values of their block are
    kept. In second moments, they become infinity, and the parameter no longer moves, as
    in float32. In other moments, they become the largest value of the block.

    Args:
      bits: 8 or 4.
      code: a code for all moments with this format. If None, second moments use
        ``"float"`` (``"sqrt"`` with 4 bits), Muon's momentum uses ``"linear"``, and
        other moments use ``"companded"``. In Muon's updates, all directions of a matrix
        have the same size, so noise in the weak directions matters. Equal steps have
        the least noise.
      block_size: number of values that share a scale, a power of two from 32 to 2048.
        32 values are 8 rows by 4 columns; see :mod:`pallas_kernels.layout`.
      rounding: ``"stochastic"`` or ``"nearest"``. Each step changes a moment only a
        little, so with nearest rounding, a second moment does not even decay. If None,
        Muon's momentum, whose gradients exceed the code's steps, is rounded to nearest,
        and other moments are rounded stochastically.

    Returns:
      A moment format. It needs ``bits/8 + 2/block_size`` bytes per value. Scalars and
      leaves smaller than ``lowbit``'s ``min_size`` stay float32.

    Raises:
      TypeError: if ``bits`` or ``block_size`` is not a static int.
      ValueError: if an argument has a wrong value. ``init`` raises it if first moments
        would have a code without negative values, or a coarser format than the second
        moments whose roots divide them.

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
    if bits not in (4, 8):
        raise ValueError(f"block_quantized: bits must be 4 or 8, got {bits}")
    check_block_size("block_quantized", block_size)
    check = functools.partial(check_choice, "block_quantized")
    check("code", code, typing.Literal[CodeName, None])
    check("rounding", rounding, typing.Literal[Rounding, None])
    return BlockQuantized(bits, block_size, code, rounding)
