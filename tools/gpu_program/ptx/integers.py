"""Integer arithmetic of PTX, on numpy arrays of the instruction's type."""

import numpy as np

from tools.gpu_program.ptx.bits import integers, unsigned, width
from tools.gpu_program.ptx.parser import Instruction


def product(instruction: Instruction, x, y):
    """Execute ``mul``, which returns half of a product's bits or all of them."""
    (part,) = instruction.modifiers
    if part == "lo":
        return x * y
    kind = instruction.types[-1]
    bits = width(kind)
    wide = integers(f"{kind[0]}{2 * bits}")
    whole = x.astype(wide) * y.astype(wide)
    return whole if part == "wide" else (whole >> wide(bits)).astype(x.dtype)


def shifted_left(x, count):
    """Execute ``shl``. The result is 0 if the count is at least the width."""
    bits = 8 * x.dtype.itemsize
    moved = x << np.minimum(count, bits - 1).astype(x.dtype)
    return np.where(count < bits, moved, x.dtype.type(0))


def shifted_right(x, count):
    """Execute ``shr``. Large counts return 0, or copies of the sign in signed types."""
    bits = 8 * x.dtype.itemsize
    moved = x >> np.minimum(count, bits - 1).astype(x.dtype)
    if x.dtype.kind == "i":
        return moved
    return np.where(count < bits, moved, x.dtype.type(0))


def funnel(instruction: Instruction, low, high, count):
    """Execute ``shf``, which shifts two adjacent words and returns one of them."""
    count = (count & np.uint32(31)).astype(np.uint64)
    both = high.astype(np.uint64) << np.uint64(32) | low
    is_right = "r" in instruction.modifiers
    moved = both >> count if is_right else both << count >> np.uint64(32)
    return moved.astype(np.uint32)


def extracted(instruction: Instruction, x, start, length):
    """Execute ``bfe``, which extracts a bit field and sign-extends signed types."""
    kind = instruction.types[-1]
    word = x.view(unsigned(width(kind)))
    start, length = start & np.uint32(255), length & np.uint32(255)
    end = np.minimum(start + length, np.uint32(width(kind)))
    mask = _ones(word, np.maximum(end, start) - start)
    field = shifted_right(word, start) & mask
    if kind[0] == "u":
        return field
    top = np.maximum(end, 1) - np.uint32(1)
    negative = (length > 0) & (shifted_right(word, top) & word.dtype.type(1) == 1)
    return np.where(negative, field | ~mask, field).view(x.dtype)


def _ones(like, count):
    """Return masks with the lowest ``count`` bits set, in the type of ``like``."""
    return ~shifted_left(np.full_like(like, np.iinfo(like.dtype).max), count)


def permuted(low, high, selectors):
    """Execute ``prmt``, which selects 4 of the 8 bytes of two words, or their signs."""
    both = high.astype(np.uint64) << np.uint64(32) | low
    result = np.zeros_like(low)
    for number in range(4):
        selector = (selectors >> np.uint32(4 * number) & 15).astype(np.uint64)
        byte = (both >> (8 * (selector & 7)) & 255).astype(np.uint32)
        signs = np.where(byte & 128, np.uint32(255), np.uint32(0))
        chosen = np.where(selector & 8, signs, byte)
        result |= chosen << np.uint32(8 * number)
    return result


def looked_up(a, b, c, table):
    """Execute ``lop3``, which applies a truth table to the bits of three words."""
    result = np.zeros_like(a)
    for number in range(8):
        x, y, z = (p if number >> i & 1 else ~p for p, i in ((a, 2), (b, 1), (c, 0)))
        result |= np.where(table >> np.uint32(number) & 1 == 1, x & y & z, 0)
    return result


def leading_zeros(x):
    """Execute ``clz``, which counts leading zeros."""
    bits = 8 * x.dtype.itemsize
    zeros = np.full(x.shape, bits, np.uint32)
    for place in range(bits):
        reaches = shifted_right(x, np.uint32(place)) != 0
        zeros = np.where(reaches, bits - 1 - place, zeros)
    return zeros.astype(np.uint32)
