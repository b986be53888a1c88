"""A body with maxima over blocks of several sizes, and its numpy model."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Operand, Result, fused_update, layout_of
from pallas_kernels.layout import block_shape


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
    def maxima(self):
        return self.sizes

    def before(self, block_values):
        return tuple(block_values)

    def statistics(self, values, scalars, index, multiply_add, before):
        return [values[0] + old for old in before]

    def after(self, maxima, block_values):
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

    def update(self, arrays, implementation=None):
        operands = [Operand(arrays[0])]
        operands += [
            Operand(x, block_size=size)
            for x, size in zip(arrays[1:], self.sizes, strict=True)
        ]
        results = [
            Result("int32", overwrites=n, block_size=operand.block_size)
            for n, operand in enumerate(operands)
        ]
        return fused_update(self, operands, results, implementation=implementation)

    def jitted(self, implementation):
        return jax.jit(functools.partial(self.update, implementation=implementation))

    def want(self, arrays):
        """The results, computed block by block."""
        x, *numbers = arrays
        total, new = x.copy(), []
        for place, (size, old) in enumerate(zip(self.sizes, numbers, strict=True)):
            block = block_numbers(x.shape, size)
            largest = np.zeros(old.size, np.int32)
            np.maximum.at(largest, block, x)
            # The body adds a block's old number to its elements before the maximum.
            added = largest + old.reshape(-1)
            total += added[block] * 10**place
            new.append(old + added.reshape(old.shape))
        return [total, *new]


def block_numbers(shape, size):
    """The number of each element's block, counted in the order of the blocks' array."""
    layout, (height, width) = layout_of(shape), block_shape(size)
    blocks = layout.blocks_shape(size)
    places = list(np.indices(shape))
    if layout.is_folded:
        row, column = np.divmod(places[-1], 32)
        places[-1] = row // height * (32 // width) + column // width
    else:
        places[layout.row_axis] //= height
        places[-1] //= width
    assert math.prod(blocks) > max(x.max() for x in places)
    return np.ravel_multi_index(places, blocks)
