"""Branches, and functions of arrays written with PTX instructions, for GPU kernels.

The functions replace operations that Triton or Mosaic GPU compiles to several
instructions. A 32-bit register contains one float32 or two neighboring elements of a
16-bit dtype.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from pallas_kernels import operations

Rules = Mapping[Callable | core.Primitive, Callable]
"""Functions that replace operations or primitives.

A primitive's rule also receives its parameters. An operation without a rule runs as
defined in :mod:`.operations`.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Byte:
    """A field of 8 bits that is still a byte of a word of 32 bits.

    Args:
      word: array of words.
      number: index of the byte, counted from the least significant one.
    """

    word: jax.Array
    number: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Difference:
    """A field of 1 bit that is still two elements of 16 bits, which may differ."""

    old: jax.Array
    new: jax.Array


class Instructions:
    """Elementwise operations of a launcher's kernels, written with PTX instructions.

    Args:
      assembler: function that emits elementwise inline assembly, with the signature of
        ``jax.experimental.pallas.triton.elementwise_inline_asm``.
      rules: more rules, for primitives that the launcher's backend lowers badly or
        cannot lower.
    """

    def __init__(self, assembler: Callable, rules: Rules | None = None):
        self._assembler = assembler
        self.rules: Rules = {
            operations.multiply_add: self.multiply_add,
            operations.round_to_bfloat16: self.round_to_bfloat16,
            operations.unless_rounded: self.unless_rounded,
            operations.differing: Difference,
            operations.keep_nan: self.keep_nan,
            operations.pattern_with_one_nan: self.pattern_with_one_nan,
            operations.ordered_pattern: self.ordered_pattern,
            operations.smaller: self.smaller,
            operations.power_of_five: self.power_of_five,
            **(rules or {}),
        }

    def elementwise(
        self, instructions: str, constraints: str, args, dtype, pack: int = 1
    ) -> jax.Array:
        """Apply inline assembly to ``pack`` neighboring elements at a time.

        Args:
          instructions: PTX in which ``$0``, ``$1``, ... are the result's registers,
            followed by the arguments' registers.
          constraints: LLVM constraints of these registers, which have 16 or 32 bits.
          args: arrays with equal shapes.
          dtype: dtype of the result.
          pack: number of neighboring elements that the instructions process.
        """
        (result,) = self._assembler(
            instructions,
            args=args,
            constraints=constraints,
            pack=pack,
            result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
        )
        return result

    def multiply_add(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        """See :func:`.operations.multiply_add`. Rounds once."""
        return self.assemble("fma.rn.f32 $0, $1, $2, $3;", [a, b, c], jnp.float32)

    def high_product(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the upper 32 bits of the 64-bit product of two uint32 arrays."""
        product = self.assemble("mul.hi.u32 $0, $1, $2;", [x, y], jnp.int32)
        return lax.bitcast_convert_type(product, jnp.uint32)

    def to_float32(self, x: jax.Array) -> jax.Array:
        """Convert bfloat16 to float32 with a shift; Triton would also permute bytes."""
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)

    def round_to_bfloat16(self, x: jax.Array) -> jax.Array:
        """See :func:`.operations.round_to_bfloat16`. Uses 5 instructions per pair."""
        # cvt returns 0x7FFF for every NaN. Adding 1 sets the sign of this pattern only.
        # prmt fills the low byte with the sign, to clear the bits that are 0 in NAN.
        return self.elementwise(
            "{ .reg .b32 pair, next, sign, mask;"
            " cvt.rn.bf16x2.f32 pair, $2, $1;"
            " add.u32 next, pair, 0x00010001;"
            " lop3.b32 sign, next, pair, pair, 0x30;"  # next & ~pair
            " prmt.b32 mask, sign, 0, 0x4b49;"
            " lop3.b32 $0, pair, mask, 0x003f003f, 0x70; }",  # pair & ~(mask & 0x3f..)
            "=r,f,f",
            [x],
            jnp.bfloat16,
            pack=2,
        )

    def unless_rounded(self, x: jax.Array, rounded: jax.Array) -> jax.Array:
        """See :func:`.operations.unless_rounded`. Returns ``rounded`` for two NaNs."""
        return self.elementwise(
            "{ .reg .b32 pair, low, high; .reg .pred first, second;"
            " cvt.rn.bf16x2.f32 pair, $3, $2;"
            " xor.b32 pair, pair, $4;"
            " and.b32 low, pair, 0xffff;"
            " setp.eq.u32 first, low, 0;"
            " and.b32 high, pair, 0xffff0000;"
            " setp.eq.u32 second, high, 0;"
            " shl.b32 low, $4, 16;"
            " and.b32 high, $4, 0xffff0000;"
            " selp.b32 low, $2, low, first;"
            " selp.b32 high, $3, high, second;"
            " mov.b32 $0, low;"
            " mov.b32 $1, high; }",
            "=r,=r,r,r,r",
            [x, rounded],
            jnp.float32,
            pack=2,
        )

    def keep_nan(self, x: jax.Array) -> jax.Array:
        """See :func:`.operations.keep_nan`.

        The GPU's arithmetic returns only one NaN, 0x7FFFFFFF.
        """
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        return jnp.where(jnp.isnan(x), jnp.uint32(operations.LAST_NAN), bits)

    def pattern_with_one_nan(self, x: jax.Array) -> jax.Array:
        """See :func:`.operations.pattern_with_one_nan`.

        The GPU's arithmetic returns only one NaN, 0x7FFFFFFF, which is the largest
        signed integer, so a minimum replaces it and leaves all numbers unchanged.
        """
        bits = lax.bitcast_convert_type(x, jnp.int32)
        bits = jnp.minimum(bits, jnp.int32(operations.NAN << 16))
        return lax.bitcast_convert_type(bits, jnp.uint32)

    def ordered_pattern(self, x: jax.Array) -> jax.Array:
        """See :func:`.operations.ordered_pattern`.

        The GPU's arithmetic returns only one NaN, 0x7FFFFFFF, which is above infinity.
        """
        return lax.bitcast_convert_type(x, jnp.int32)

    def smaller(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """See :func:`.operations.smaller`. Hopper has a minimum of three integers."""
        bits = (lax.bitcast_convert_type(a, jnp.int32) for a in (x, y))
        return lax.bitcast_convert_type(jnp.minimum(*bits), jnp.float32)

    def larger_before(
        self, number: int, end: jax.Array, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        """Return int32 ``max(x, y)`` where ``number < end``, and ``x`` elsewhere.

        A select would need one more instruction.
        """
        return self.assemble(
            f"{{ .reg .pred exists; setp.gt.s32 exists, $1, {number};"
            " mov.b32 $0, $2; @exists max.s32 $0, $2, $3; }",
            [end, x, y],
            jnp.int32,
        )

    def lowest_bits(self, count: jax.Array) -> jax.Array:
        """Return uint32 words in which the lowest ``count`` bits are set."""
        # A shift by 32 or more returns 0 in PTX, so counts above 32 set all bits.
        mask = self.assemble(
            "{ .reg .b32 low; max.s32 low, $1, 0;"
            " shl.b32 low, -1, low; not.b32 $0, low; }",
            [count],
            jnp.int32,
        )
        return lax.bitcast_convert_type(mask, jnp.uint32)

    def power_of_five(self, n: jax.Array) -> jax.Array:
        """See :func:`.operations.power_of_five`. Looks up both bytes in tables."""
        powers = [0, *(5**i for i in range(7))]
        low, high = (
            [
                sum((power >> shift & 255) << 8 * i for i, power in enumerate(four))
                for four in (powers[:4], powers[4:])
            ]
            for shift in (0, 8)
        )
        # prmt uses the hexadecimal digits of n as selectors. All digits except the
        # lowest are 0 or 8, and select bytes that are 0.
        power = self.assemble(
            "{ .reg .b32 low, high;"
            f" prmt.b32 low, {low[0]}, {low[1]}, $1;"
            f" prmt.b32 high, {high[0]}, {high[1]}, $1;"
            " prmt.b32 $0, low, high, 0x5540; }",
            [n],
            jnp.int32,
        )
        return power.astype(jnp.float32)

    def put_bytes(self, fields: Sequence[Byte]) -> jax.Array:
        """Return uint32 words of four fields each, the lowest byte first."""
        a, b, c, d = (field.number for field in fields)
        # The digits select bytes: 0 to 3 from the first word, and 4 to 7 from the next.
        word = self.assemble(
            "{ .reg .b32 low, high;"
            f" prmt.b32 low, $1, $2, 0x{b + 4}{a};"
            f" prmt.b32 high, $3, $4, 0x{d + 4}{c};"
            " prmt.b32 $0, low, high, 0x5410; }",
            [field.word for field in fields],
            jnp.int32,
        )
        return lax.bitcast_convert_type(word, jnp.uint32)

    def put_differences(self, fields: Sequence[Difference]) -> jax.Array:
        """Return int16 fields with a bit for each of up to 8 rows.

        Two columns need one difference, two comparisons and two conditional additions
        of a bit. Otherwise, each weight would first need a register of its own.
        """
        to_int16 = lambda x: lax.bitcast_convert_type(x, jnp.int16)
        marks = jnp.zeros(fields[0].old.shape, jnp.int16)
        for row, field in enumerate(fields):
            marks = self.elementwise(
                "{ .reg .b32 both, low; .reg .pred first, second;"
                " xor.b32 both, $2, $3;"
                " and.b32 low, both, 0xffff;"
                " setp.ne.u32 first, low, 0;"
                " setp.gt.u32 second, both, 0xffff;"
                " mov.b32 $0, $1;"
                f" @first or.b32 $0, $0, {1 << row};"
                f" @second or.b32 $0, $0, {1 << row + 16}; }}",
                "=r,r,r,r",
                [marks, to_int16(field.old), to_int16(field.new)],
                jnp.int16,
                pack=2,
            )
        return marks

    def opaque(self, x: jax.Array, mark: int) -> jax.Array:
        """Copy an array with an instruction whose text contains ``mark``.

        LLVM does not merge branches that contain different marks.
        """
        pattern = lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")
        bits = max(16, 8 * x.dtype.itemsize)  # PTX has no mov of 8 bits
        letter = "h" if bits == 16 else "r"
        same = self.elementwise(
            f"mov.b{bits} $0, $1; // {mark}",
            f"={letter},{letter}",
            [pattern.astype(f"int{bits}")],
            jnp.dtype(f"int{bits}"),
        )
        return lax.bitcast_convert_type(same.astype(pattern.dtype), x.dtype)

    def assemble(
        self, instructions: str, args: Sequence[jax.Array], dtype
    ) -> jax.Array:
        """Apply inline assembly to one element at a time, in 32-bit registers."""
        letter = "f" if dtype == jnp.float32 else "r"
        constraints = ",".join(["=" + letter, *[letter] * len(args)])
        return self.elementwise(instructions, constraints, args, dtype)


def by_branches(
    number: jax.Array | np.int32, choices: range, function: Callable, *args
):
    """Return ``function(number, *args)``, with one branch for each possible number.

    The branches form a binary tree, and each calls the function with a static number.
    Triton compiles ``lax.switch`` to a chain of branches, which takes several times as
    long to compile.

    Args:
      number: int32 scalar.
      choices: the possible values of ``number``.
      function: called with an int from ``choices`` and with ``args``.
      *args: arrays.
    """
    if len(choices) == 1:
        return function(choices[0], *args)
    half = len(choices) // 2
    branch = lambda part: functools.partial(by_branches, number, part, function)
    is_left = lax.lt(number, np.int32(choices[half]))
    return lax.cond(is_left, branch(choices[:half]), branch(choices[half:]), *args)
