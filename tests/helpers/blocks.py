"""Bodies with maxima over blocks, and their numpy models."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Operand, Result, fused_update, layout_of
from tests.helpers.kernels import Mixture, fields_of, row_major, words_of

BLOCKS = {
    32: (8, 4),
    64: (8, 8),
    128: (16, 8),
    256: (16, 16),
    512: (32, 16),
    1024: (32, 32),
    2048: (64, 32),
}


def blocks_of(shape, block_size):
    """The shape of an array with one element per block, and each element's position."""
    height, width = BLOCKS[block_size]
    axis = layout_of(shape).axis
    places = list(np.indices(shape))
    counts = list(shape)
    if axis == -1:
        rows, columns = divmod(places[-1], 32)
        places[-1] = rows // height * (32 // width) + columns // width
        counts[-1] = math.ceil(math.ceil(shape[-1] / 32) / height) * (32 // width)
    else:
        places[axis] = places[axis] // height
        places[-1] = places[-1] // width
        counts[axis] = math.ceil(counts[axis] / height)
        counts[-1] = math.ceil(counts[-1] / width)
    return tuple(counts), tuple(places)


@dataclasses.dataclass(frozen=True)
class Maxima:
    """A body of integers whose results all depend on maxima over blocks.

    The operands are an array and, for each size, a number per block. The results are
    new versions of the operands. A number per block becomes the sum of the old number
    and the block's maximum. Each element of the array adds the new numbers of its
    blocks, each times a different factor.
    """

    sizes: tuple[int, ...]

    @property
    def block_sizes(self):
        return self.sizes

    kept = 1

    def before(self, block_values):
        return tuple(block_values)

    def statistics(self, values, scalars, index, before):
        return [values[0] + old for old in before]

    def after(self, maxima, block_values):
        new = [old + x for old, x in zip(block_values, maxima, strict=True)]
        return new, tuple(new)

    def __call__(self, values, scalars, index, before, after):
        total = values[0]
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            total = total + (new - old) * jnp.int32(10**number)
        return [total]

    def arrays(self, shape, seed=0):
        """An array of this shape, and a number per block of each size."""
        random = np.random.default_rng(seed)
        draw = lambda shape: random.integers(0, 1000, shape).astype(np.int32)
        layout = layout_of(shape)
        return [draw(shape), *(draw(layout.blocks_shape(size)) for size in self.sizes)]

    def update(self, arrays, implementation=None, **options):
        operands = [Operand(arrays[0])]
        operands += [
            Operand(x, block_size=size)
            for x, size in zip(arrays[1:], self.sizes, strict=True)
        ]
        results = [
            Result("int32", overwrites=n, block_size=operand.block_size)
            for n, operand in enumerate(operands)
        ]
        options |= {"implementation": implementation}
        return fused_update(self, operands, results, **options)

    def jitted(self, implementation):
        return jax.jit(functools.partial(self.update, implementation=implementation))

    def want(self, arrays):
        """The results, computed block by block."""
        x, *numbers = arrays
        total, new = x.copy(), []
        for place, (size, old) in enumerate(zip(self.sizes, numbers, strict=True)):
            _, block = blocks_of(x.shape, size)
            largest = np.zeros(old.shape, np.int32)
            np.maximum.at(largest, block, x)
            # The body adds a block's old number to its elements before the maximum.
            total += (largest + old)[block] * 10**place
            new.append(largest + 2 * old)
        return [total, *new]


@dataclasses.dataclass(frozen=True)
class BlockMixture(Mixture):
    """A body of integers whose results depend on the maxima over the element's block.

    Operands are fields, a plain array, and one value per block. Results are their new
    versions, written in place, and the index.
    """

    block_size: int

    @property
    def bits(self):
        return self.widths[0]

    @property
    def block_sizes(self):
        return [self.block_size] * 2

    kept = 2

    def before(self, block_values):
        (old,) = block_values
        return (old * jnp.uint32(5),)

    def statistics(self, values, scalars, index, before):
        field, plain = values
        mixed = (field ^ plain ^ before[0] ^ scalars[0]) & jnp.uint32(0xFFFF)
        # The second statistic is negative in half of the smallest blocks, and counts as
        # 0 there.
        return mixed.astype(jnp.int32), mixed.astype(jnp.int32) - 0xFA00

    def after(self, maxima, block_values):
        del block_values
        first, second = (x.astype(jnp.uint32) for x in maxima)
        return [first * jnp.uint32(3) + second], (first, second)

    def __call__(self, values, scalars, index, before, after):
        field, plain = values
        first, second = after
        index = row_major(index, plain)
        new = (field * jnp.uint32(3) + first + before[0]) & jnp.uint32(2**self.bits - 1)
        return [new, plain ^ (first + second * jnp.uint32(7) + scalars[1]), index]

    def operands(self, arrays):
        words, plain, old = arrays
        return [
            Operand(words, self.bits),
            Operand(plain),
            Operand(old, None, self.block_size),
        ]

    @property
    def results(self):
        return [
            Result(jnp.uint32, self.bits, 0),
            Result(jnp.uint32, None, 1),
            Result(jnp.uint32, None, 2, self.block_size),
            Result(jnp.uint32),
        ]

    def arrays(self, shape, seed=0):
        """The operands, and the numbers that they contain."""
        count, _ = blocks_of(shape, self.block_size)
        held = [
            fields_of(shape, self.bits, seed),
            fields_of(shape, 32, seed),
            fields_of(count, 32, seed + 1),
        ]
        words = words_of(held[0], self.bits)
        return [jnp.asarray(x) for x in (words, *held[1:])], held

    def want(self, held, scalars, index):
        """The stored results, computed in numpy."""
        field, plain, old = (x.astype(np.uint32) for x in held)
        _, places = blocks_of(field.shape, self.block_size)
        before = (old * np.uint32(5))[places]
        mixed = ((field ^ plain ^ before ^ scalars[0]) & 0xFFFF).astype(np.int32)
        first, second = np.zeros(old.shape, np.int32), np.zeros(old.shape, np.int32)
        np.maximum.at(first, places, mixed)
        np.maximum.at(second, places, mixed - 0xFA00)
        first, second = first.astype(np.uint32), second.astype(np.uint32)
        new = field * np.uint32(3) + first[places] + before
        new = new & np.uint32(2**self.bits - 1)
        mixed = first[places] + second[places] * np.uint32(7) + scalars[1]
        of_blocks = first * np.uint32(3) + second
        return [words_of(new, self.bits), plain ^ mixed, of_blocks, index]
