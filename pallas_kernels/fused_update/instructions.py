"""The GPU's own instructions as functions of arrays, for kernels of Triton's.

Where Triton takes several instructions for one operation. They work on registers: of a
dtype of 16 bits, one register holds two neighbours.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from pallas_kernels.fused_update import operations


def multiply_add(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """``a * b + c`` in one instruction, which rounds once."""
    return assemble("fma.rn.f32 $0, $1, $2, $3;", [a, b, c], jnp.float32)[0]


def signed_byte(word: jax.Array, number: int, place: int) -> jax.Array:
    """int32 with a byte of a word at this place, its sign above it and 0 below.

    Args:
      word: uint32.
      number: of the byte, from the lowest.
      place: where it is to be, 0 to 3.
    """
    # Of 8 bytes, the word's and four that are 0. Those with 8 more are their signs.
    chosen = [4] * place + [number] + [8 + number] * (3 - place)
    return _permute(word, chosen, jnp.int32)


def to_float32(x: jax.Array) -> jax.Array:
    """bfloat16 as float32: a shift, where Triton's conversion permutes bytes too."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits << jnp.uint32(16), jnp.float32)


def round_to_bfloat16(x: jax.Array) -> jax.Array:
    """See :func:`.operations.round_to_bfloat16`; five instructions for a pair."""
    # The conversion's NaN is 0x7FFF. Only of that one does adding 1 set the sign, which
    # then is in all bits of its low byte, to clear those that NAN has not.
    (rounded,) = assemble_pairs(
        "{ .reg .b32 pair, next, sign, mask;"
        " cvt.rn.bf16x2.f32 pair, $2, $1;"
        " add.u32 next, pair, 0x00010001;"
        " lop3.b32 sign, next, pair, pair, 0x30;"  # next & ~pair
        " prmt.b32 mask, sign, 0, 0x4b49;"
        " lop3.b32 $0, pair, mask, 0x003f003f, 0x70; }",  # pair & ~(mask & 0x3f..)
        "=r,f,f",
        [x],
        jnp.bfloat16,
    )
    return rounded


def unless_rounded(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """See :func:`.operations.unless_rounded`; of two NaNs, always ``rounded``."""
    (chosen,) = assemble_pairs(
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
    )
    return chosen


def keep_nan(x: jax.Array) -> jax.Array:
    """See :func:`.operations.keep_nan`; of what arithmetic on the GPU gives.

    It knows one NaN, 0x7FFFFFFF.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(jnp.isnan(x), jnp.uint32(operations.LAST_NAN), bits)


def pattern_with_one_nan(x: jax.Array) -> jax.Array:
    """See :func:`.operations.pattern_with_one_nan`.

    The one NaN that the GPU's arithmetic gives, 0x7FFFFFFF, is the largest signed
    integer. So one minimum replaces it and nothing else.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    bits = jnp.minimum(bits, jnp.int32(operations.NAN << 16))
    return jax.lax.bitcast_convert_type(bits, jnp.uint32)


def ordered_pattern(x: jax.Array) -> jax.Array:
    """See :func:`.operations.ordered_pattern`.

    The one NaN that the GPU's arithmetic gives, 0x7FFFFFFF, is above infinity already.
    """
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def reverse_bytes(word: jax.Array) -> jax.Array:
    """See :func:`.operations.reverse_bytes`; one permutation of bytes (``prmt``)."""
    return reversed_and_shifted(word, 0)


def reversed_and_shifted(word: jax.Array, bytes_: int) -> jax.Array:
    """``reverse_bytes(word) >> 8 * bytes_``; the bytes from the top are 0."""
    chosen = [3 - i for i in range(bytes_, 4)] + [4] * bytes_
    return _permute(word, chosen, jnp.uint32)


def placed_byte(word: jax.Array, number: int, place: int) -> jax.Array:
    """uint32 with a byte of a word at this place, and 0 elsewhere."""
    chosen = [4] * place + [number] + [4] * (3 - place)
    return _permute(word, chosen, jnp.uint32)


def _permute(word: jax.Array, chosen: Sequence[int], dtype) -> jax.Array:
    """Bytes of a word, the lowest first; 4 is a byte of zeros, 8 + i has i's sign."""
    selector = sum(choice << 4 * i for i, choice in enumerate(chosen))
    (permuted,) = assemble(f"prmt.b32 $0, $1, 0, {selector};", [word], jnp.int32)
    return jax.lax.bitcast_convert_type(permuted, dtype)


def assemble(instructions: str, args: Sequence[jax.Array], dtype) -> list[jax.Array]:
    """For one element at a time, registers of 32 bits."""
    letter = "f" if dtype == jnp.float32 else "r"
    results = triton.elementwise_inline_asm(
        instructions,
        args=args,
        constraints=",".join(["=" + letter, *[letter] * len(args)]),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return list(results)


def assemble_pairs(
    instructions: str, constraints: str, args: Sequence[jax.Array], dtype
) -> list[jax.Array]:
    """For two elements at a time: two registers of 32 bits, or one of 16."""
    results = triton.elementwise_inline_asm(
        instructions,
        args=args,
        constraints=constraints,
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return list(results)


def opaque(x: jax.Array, mark: int) -> jax.Array:
    """The same array, by instructions that differ for different marks.

    LLVM cannot merge the branches that they are in.
    """
    bits = 8 * x.dtype.itemsize
    pattern = jax.lax.bitcast_convert_type(x, f"int{bits}")
    letter = "h" if bits == 16 else "r"
    (same,) = triton.elementwise_inline_asm(
        f"mov.b{bits} $0, $1; // {mark}",
        args=[pattern],
        constraints=f"={letter},{letter}",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, pattern.dtype)],
    )
    return jax.lax.bitcast_convert_type(same, x.dtype)
