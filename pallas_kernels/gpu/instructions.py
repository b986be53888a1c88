"""The GPU's own instructions as functions of arrays, and branches, for kernels.

They are for operations that take Triton or Mosaic several instructions. They work on
registers: one register holds two neighbours of a 16-bit dtype.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from pallas_kernels import operations
from pallas_kernels.operations import Operation

Rules = Mapping[Operation | core.Primitive, Callable | None]
"""Functions of arrays that replace operations, or primitives with their parameters.

None stands for what an operation is defined to be.
"""


class Instructions:
    """What a launcher's kernels compute by instructions of their own choice.

    Args:
      assembler: writes inline assembly, elementwise; called as
        ``jax.experimental.pallas.triton.elementwise_inline_asm``.
      rules: for primitives that the launcher lacks or lowers badly.
    """

    def __init__(self, assembler: Callable, rules: Rules | None = None):
        self._assembler = assembler
        self.rules: Rules = {
            operations.round_to_bfloat16: self.round_to_bfloat16,
            operations.unless_rounded: self.unless_rounded,
            operations.keep_nan: self.keep_nan,
            operations.pattern_with_one_nan: self.pattern_with_one_nan,
            operations.ordered_pattern: self.ordered_pattern,
            operations.pattern_above: None,
            operations.smaller: self.smaller,
            operations.power_of_five: self.power_of_five,
            **(rules or {}),
        }

    def elementwise(
        self, instructions: str, constraints: str, args, dtype, pack: int = 1
    ) -> jax.Array:
        """Inline assembly, for ``pack`` neighbouring elements at a time.

        Args:
          instructions: PTX in which ``$0``, ``$1``, ... are results and arguments.
          constraints: LLVM's, of each register of 16 or 32 bits.
          args: arrays of one shape.
          dtype: of the result.
          pack: how many elements.
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
        """``a * b + c`` in one instruction, which rounds once."""
        return self.assemble("fma.rn.f32 $0, $1, $2, $3;", [a, b, c], jnp.float32)

    def high_product(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """uint32 with the upper half of the product of two uint32, in 64 bits."""
        product = self.assemble("mul.hi.u32 $0, $1, $2;", [x, y], jnp.int32)
        return lax.bitcast_convert_type(product, jnp.uint32)

    def to_float32(self, x: jax.Array) -> jax.Array:
        """bfloat16 as float32: a shift; Triton's conversion permutes bytes too."""
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
        return lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)

    def round_to_bfloat16(self, x: jax.Array) -> jax.Array:
        """See :func:`.operations.round_to_bfloat16`; five instructions for a pair."""
        # The conversion's NaN is 0x7FFF. Only of that one does adding 1 set the sign,
        # which then is in all bits of its low byte, to clear those that NAN has not.
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
        """See :func:`.operations.unless_rounded`; two NaNs always give ``rounded``."""
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

        The GPU's arithmetic gives one NaN only, 0x7FFFFFFF.
        """
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        return jnp.where(jnp.isnan(x), jnp.uint32(operations.LAST_NAN), bits)

    def pattern_with_one_nan(self, x: jax.Array) -> jax.Array:
        """See :func:`.operations.pattern_with_one_nan`.

        The one NaN that the GPU's arithmetic gives, 0x7FFFFFFF, is the largest signed
        integer. So one minimum replaces it and nothing else.
        """
        bits = lax.bitcast_convert_type(x, jnp.int32)
        bits = jnp.minimum(bits, jnp.int32(operations.NAN << 16))
        return lax.bitcast_convert_type(bits, jnp.uint32)

    def ordered_pattern(self, x: jax.Array) -> jax.Array:
        """See :func:`.operations.ordered_pattern`.

        The one NaN that the GPU's arithmetic gives, 0x7FFFFFFF, is above infinity.
        """
        return lax.bitcast_convert_type(x, jnp.int32)

    def smaller(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """See :func:`.operations.smaller`; Hopper takes the least of three integers."""
        bits = (lax.bitcast_convert_type(a, jnp.int32) for a in (x, y))
        return lax.bitcast_convert_type(jnp.minimum(*bits), jnp.float32)

    def larger_before(
        self, number: int, end: jax.Array, x: jax.Array, y: jax.Array
    ) -> jax.Array:
        """int32 with the larger one where ``number < end``, and ``x`` elsewhere.

        A selection would be an instruction more.
        """
        return self.assemble(
            f"{{ .reg .pred exists; setp.gt.s32 exists, $1, {number};"
            " mov.b32 $0, $2; @exists max.s32 $0, $2, $3; }",
            [end, x, y],
            jnp.int32,
        )

    def lowest_bits(self, count: jax.Array) -> jax.Array:
        """uint32 whose lowest ``count`` bits are set: none below 0, all from 32 on."""
        # PTX shifts by 32 and more as far as that is.
        mask = self.assemble(
            "{ .reg .b32 low; max.s32 low, $1, 0;"
            " shl.b32 low, -1, low; not.b32 $0, low; }",
            [count],
            jnp.int32,
        )
        return lax.bitcast_convert_type(mask, jnp.uint32)

    def power_of_five(self, n: jax.Array) -> jax.Array:
        """See :func:`.operations.power_of_five`; two bytes from two tables."""
        powers = [0, *(5**i for i in range(7))]
        low, high = (
            [
                sum((power >> shift & 255) << 8 * i for i, power in enumerate(four))
                for four in (powers[:4], powers[4:])
            ]
            for shift in (0, 8)
        )
        # Of n as a selector, all digits but the lowest are 0 or 8: bytes of zeros.
        power = self.assemble(
            "{ .reg .b32 low, high;"
            f" prmt.b32 low, {low[0]}, {low[1]}, $1;"
            f" prmt.b32 high, {high[0]}, {high[1]}, $1;"
            " prmt.b32 $0, low, high, 0x5540; }",
            [n],
            jnp.int32,
        )
        return power.astype(jnp.float32)

    def opaque(self, x: jax.Array, mark: int) -> jax.Array:
        """The same array, by instructions that differ for different marks.

        LLVM cannot merge the branches that they are in.
        """
        bits = 8 * x.dtype.itemsize
        pattern = lax.bitcast_convert_type(x, f"int{bits}")
        letter = "h" if bits == 16 else "r"
        same = self.elementwise(
            f"mov.b{bits} $0, $1; // {mark}",
            f"={letter},{letter}",
            [pattern],
            pattern.dtype,
        )
        return lax.bitcast_convert_type(same, x.dtype)

    def assemble(
        self, instructions: str, args: Sequence[jax.Array], dtype
    ) -> jax.Array:
        """Inline assembly for one element at a time, in registers of 32 bits."""
        letter = "f" if dtype == jnp.float32 else "r"
        constraints = ",".join(["=" + letter, *[letter] * len(args)])
        return self.elementwise(instructions, constraints, args, dtype)


def by_branches(
    number: jax.Array | np.int32, choices: range, function: Callable, *args
):
    """``function(choice, *args)`` with a static choice, by a tree of branches.

    A ``lax.switch`` becomes a chain of branches on Triton's backend, which takes
    several times as long to compile.

    Args:
      number: int32 scalar, the choice.
      choices: what it can be.
      function: of a choice, an int, and of arrays.
      *args: arrays.
    """
    if len(choices) == 1:
        return function(choices[0], *args)
    half = len(choices) // 2
    branch = lambda part: functools.partial(by_branches, number, part, function)
    is_left = lax.lt(number, np.int32(choices[half]))
    return lax.cond(is_left, branch(choices[:half]), branch(choices[half:]), *args)
