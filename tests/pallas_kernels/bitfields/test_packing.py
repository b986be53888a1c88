"""Packing k-bit fields into uint32 words, compared with Python's unbounded integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    get_field,
    layout_of,
    pack,
    packed_shape,
    period,
    put_fields,
    unpack,
)
from tests.helpers.kernels import QUICK
from tests.helpers.packing import reference_pack

# Quick compilation matters most, because there are hundreds of shapes and widths.
pack_ = jax.jit(pack, static_argnums=1, compiler_options=QUICK)


def random_fields(shape, bits, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**bits, shape, np.uint64).astype(np.uint32)


BY_HAND = {
    8: ([1, 2, 3, 4, 5, 6, 7, 8], ["04030201", "08070605"]),
    # 0x...456|123|DEF|ABC: the third field's low byte ends the first word.
    12: ([0xABC, 0xDEF, 0x123, 0x456], ["23defabc", "00004561", "00000000"]),
}


@pytest.mark.parametrize("bits", BY_HAND)
def test_fields_lie_in_words_with_the_first_lowest(bits):
    fields, want = BY_HAND[bits]
    column = jnp.zeros((32, 1), jnp.uint32).at[: len(fields), 0].set(jnp.uint32(fields))
    words = pack_(column, bits).ravel()[: len(want)]
    assert [f"{int(word):08x}" for word in words] == want


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((5,), -1),
        ((0,), -1),
        ((64, 3), -2),
        ((8, 32), -2),
        ((3, 64), -2),  # 3 rows are padded to 8; 64 columns would be padded to 256
        ((3, 256), -1),
        ((31, 1000), -2),  # one row of padding is below a quarter
        ((13, 1024), -2),  # 16 / 13 = 1.23
        ((12, 1024), -1),  # 16 / 12 = 1.33
        ((1, 1), -2),
        ((7, 4096, 512), -2),
        ((768, 12, 64), -3),  # the heads of an attention kernel are not rows
        ((4096, 32, 128), -3),  # not even if they are divisible
        ((128, 64, 8, 16), -3),  # 64 rows are enough
        ((128, 63, 8, 16), -4),
        ((12, 64, 768), -2),
        ((24, 32, 512), -2),
        ((7, 7, 3, 64), -3),
        ((3, 3, 128, 64), -2),
        ((0, 64), -2),
        ((64, 0), -2),
    ],
)
def test_rows_are_the_last_axis_before_the_columns_that_wastes_little(shape, axis):
    assert layout_of(shape).axis == axis


@pytest.mark.parametrize(
    ("shape", "bits", "packed"),
    [
        ((4096, 512), 8, (1024, 512)),
        ((4096, 512), 12, (1536, 512)),
        ((20, 512), 8, (5, 512)),  # 4 rows per word
        ((20, 512), 12, (9, 512)),  # 8 rows per three words
        ((20, 512), 5, (5, 512)),
        ((7, 512), 8, (2, 512)),
        ((1024,), 8, (256,)),
        ((768, 12, 64), 8, (192, 12, 64)),
        ((2, 3, 0, 64), 5, (2, 3, 0, 64)),
        ((0,), 5, (0,)),
    ],
)
def test_the_packed_shape_has_the_words_of_whole_periods_of_rows(shape, bits, packed):
    assert packed_shape(shape, bits) == packed
    fields = jax.ShapeDtypeStruct(shape, jnp.uint32)
    words = jax.eval_shape(lambda f: pack(f, bits), fields)
    assert words.shape == packed
    back = jax.eval_shape(lambda w: unpack(w, bits, shape), words)
    assert back.shape == shape


def test_words_of_another_shape_are_refused_with_the_shape_they_should_have():
    words = pack_(jnp.zeros((64, 3), jnp.uint32), 8)
    for bits, shape in ((7, (64, 3)), (8, (64, 4)), (8, (65, 3)), (8, (64, 3, 1))):
        expected = str(packed_shape(shape, bits))
        with pytest.raises(ValueError, match=r"words must have shape .*, got") as error:
            unpack(words, bits, shape)
        assert expected in str(error.value)


# The row primitives.


@pytest.mark.parametrize("bits", range(1, 33))
def test_a_period_is_the_fewest_rows_that_fill_whole_words(bits):
    rows, words = period(bits)
    assert rows * bits == words * 32
    assert not any(fewer * bits % 32 == 0 for fewer in range(1, rows))
    assert 32 % rows == 0


@pytest.mark.parametrize("bits", range(1, 33))
def test_rows_of_any_width_come_back_from_the_words_they_were_put_in(bits):
    for count in (32, period(bits)[0]):
        fields = random_fields((count, 16), bits, seed=bits)
        fields[:, 0] = 2**bits - 1  # with all bits set, a wrong width would show
        words = put_fields([jnp.asarray(row) for row in fields], bits)
        padded = np.zeros((32, 16), np.uint32)
        padded[:count] = fields
        expected = reference_pack(padded, bits, -2)[: count * bits // 32]
        np.testing.assert_array_equal(jnp.stack(words), expected)
        back = jnp.stack([get_field(words, row, bits) for row in range(count)])
        np.testing.assert_array_equal(back, fields)


def test_rows_that_leave_a_word_unfinished_are_refused():
    rows = [jnp.uint32(0)] * 7
    with pytest.raises(ValueError, match=r"12-bit fields .* multiple of 8, got 7"):
        put_fields(rows, 12)
