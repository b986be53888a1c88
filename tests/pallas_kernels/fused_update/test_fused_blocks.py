"""``fused_update`` with values per block equals a numpy model, bit for bit.

The model numbers the blocks of :mod:`pallas_kernels.layout` as the layout defines them:
it computes each element's block from the element's position.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.blocks import BlockMixture, Maxima
from tests.helpers.kernels import (
    EACH,
    assert_equal,
    assert_layer_written,
    index_of,
    stacks_of,
)

SCALARS = np.array([0x12345678, 0x9ABCDEF0], np.uint32)

CASES = [
    ((64, 512), 32, 8),
    ((70, 33), 32, 8),
    ((70, 33), 32, 5),
    ((9, 5), 32, 12),
    ((1, 1), 32, 8),
    ((1000,), 32, 8),
    ((33,), 32, 12),
    ((5, 40, 24), 32, 16),
    ((3, 40, 9), 32, 5),
    ((12, 13, 40), 32, 8),
    ((24, 3, 10), 32, 8),
    ((3, 3, 3, 64), 32, 4),
    ((2, 3, 16, 2, 9), 32, 8),
    ((70, 33), 64, 5),
    ((1000,), 64, 8),
    ((70, 33), 128, 8),
    ((20, 3, 40), 256, 12),
    ((1000,), 256, 8),
    ((130, 70), 2048, 8),
    ((3000,), 2048, 8),
    ((24, 3, 10), 2048, 4),
    ((70, 2, 2, 2, 40), 2048, 8),
]


@EACH
@pytest.mark.parametrize(("shape", "block_size", "bits"), CASES, ids=str)
def test_results_are_those_of_the_model(shape, block_size, bits, implementation):
    mixture = BlockMixture((bits,), block_size)
    arrays, held = mixture.arrays(shape)
    update = mixture.jitted(shape, implementation)
    got = update(arrays, dict(scalars=jnp.asarray(SCALARS)))
    assert_equal(got, mixture.want(held, SCALARS, index_of(shape)))


@EACH
def test_a_layer_of_a_stack_is_updated_in_its_place(implementation):
    mixture, shape = BlockMixture((8,), 32), (20, 9)
    stacks, held = stacks_of(mixture, shape)
    options = dict(scalars=jnp.asarray(SCALARS), layer=jnp.int32(1))
    got = mixture.jitted(shape, implementation)(stacks, options)
    # The index counts elements of the whole stack.
    want = mixture.want(held[1], SCALARS, index_of((3, *shape))[1])
    assert_layer_written(got, stacks, 1, want)


def test_blocks_higher_than_a_tile_beside_odd_widths_are_left_to_the_reference():
    shape, block_size = (70, 33), 128
    mixture = BlockMixture((5,), block_size)
    arrays, held = mixture.arrays(shape)
    options = dict(scalars=jnp.asarray(SCALARS))
    got = mixture.jitted(shape, None)(arrays, options)
    assert_equal(got, mixture.want(held, SCALARS, index_of(shape)))
    with pytest.raises(
        ValueError, match=r"fields of \[5\] bits with blocks of \[128\]"
    ):
        mixture.jitted(shape, "pallas")(arrays, options)


# Blocks of several sizes.


BLOCKS = [
    ((128, 64), (32, 2048)),
    ((100, 70), (64, 1024)),
    ((70, 261), (32, 128, 2048)),
    ((5, 72, 24), (512, 256)),
    ((3, 3, 24, 40), (2048, 64)),
    ((3000,), (32, 256)),
    ((3, 2), (32, 2048)),
]


@EACH
@pytest.mark.parametrize(("shape", "sizes"), BLOCKS)
def test_maxima_are_those_of_blocks_of_each_size(shape, sizes, implementation):
    body = Maxima(sizes)
    arrays = body.arrays(shape)
    assert_equal(body.jitted(implementation)(arrays), body.want(arrays))
