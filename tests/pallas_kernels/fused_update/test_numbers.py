"""GPU kernels divide by the numbers of shapes, and read them from a table."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fused_update.gpu.tiling import Divisor, Number, Table

LARGEST = 2**31 - 1
DIVISORS = sorted(
    {*range(1, 300), LARGEST, LARGEST - 1}
    | {2**bit + k for bit in range(8, 31) for k in (-1, 0, 1)}
    | {3, 7, 641, 1000, 50257, 65537, 715827883}
)


class HighProduct:
    """A numpy version of the only launcher instruction that a divisor needs."""

    @staticmethod
    def high_product(x, y):
        wide = np.asarray(x, np.uint64) * np.asarray(y, np.uint64)
        return jnp.asarray((wide >> 32).astype(np.uint32))


def test_a_product_and_a_shift_divide_exactly():
    # An error would occur at a multiple of the divisor, or one below it.
    for by in DIVISORS:
        word, *reciprocal = Number(by, divides=True).words
        assert word == by
        most = LARGEST // by
        multiples = {k * by for k in (0, 1, 2, 3, most // 2, most - 1, most) if k >= 0}
        x = sorted({n + k for n in multiples for k in (-1, 0, 1)} | {LARGEST})
        x = np.asarray([n for n in x if 0 <= n <= LARGEST], np.int32)
        divisor = Divisor(
            jnp.int32(by), tuple(map(jnp.uint32, reciprocal)), HighProduct
        )
        quotient, rest = divisor.divide(jnp.asarray(x))
        np.testing.assert_array_equal(quotient, x // by, err_msg=str(by))
        np.testing.assert_array_equal(rest, x % by, err_msg=str(by))


@pytest.mark.parametrize("by", [1, 7])
def test_a_constant_divides_too(by):
    x = jnp.arange(50, dtype=jnp.int32)
    quotient, rest = Divisor(np.int32(by)).divide(x)
    np.testing.assert_array_equal(quotient, x // by)
    np.testing.assert_array_equal(rest, x % by)


def test_each_program_finds_its_leaf_and_its_numbers():
    leaves = [
        {"rows": Number(24, multiple=8), "columns": Number(5, divides=True)},
        {"rows": Number(16, multiple=8), "columns": Number(9, divides=True)},
        {"rows": Number(80, multiple=8), "columns": Number(1, divides=True)},
    ]
    programs = [2, 1, 3]
    table, words = Table.of(leaves), Table.words(leaves, programs)
    expected = [(i, n) for i, count in enumerate(programs) for n in range(count)]
    for program, place in enumerate(expected):
        leaf, own, exists = table.find(words, jnp.int32(program))
        assert (int(leaf), int(own), bool(exists)) == (*place, True)
        numbers = table.read(words, leaf, None)
        assert int(numbers["rows"]) == leaves[place[0]]["rows"].value
        assert int(numbers["columns"].by) == leaves[place[0]]["columns"].value
    assert not table.find(words, jnp.int32(len(expected)))[2]
