"""A body with maxima over blocks of several sizes, and its numpy model."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Operand, Result, fused_update, layout_of

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
    """The shape of an array with one element per block, and each element's place."""
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
    """A body of integers whose every result depends on maxima over blocks.

    The operands are an array and, for each size, a number per block. The results
    are new versions of all: the numbers become the sum of the old one and the block's
    maximum, and the array adds to itself the new numbers of its blocks, each times
    another factor.
    """

    sizes: tuple[int, ...]

    @property
    def rounds(self):
        return [self.sizes]

    kept = 1

    def before(self, block_values):
        return tuple(block_values)

    def statistics(self, number, values, scalars, index, multiply_add, before, after):
        return [values[0] + old for old in before]

    def after(self, maxima, block_values, scalars):
        del scalars
        new = [old + x for old, x in zip(block_values, maxima, strict=True)]
        return new, tuple(new)

    def __call__(self, values, scalars, index, multiply_add, before, after):
        total = values[0]
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            total = total + (new - old) * jnp.int32(10**number)
        return [total]

    def arrays(self, shape, seed=0):
        """Arguments: an array of this shape, and a number per block of each size."""
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
