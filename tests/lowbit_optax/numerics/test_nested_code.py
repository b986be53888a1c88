"""Second moments' nested logarithmic grid has the right values, steps and rounding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowbit_optax._numerics.nested_code import Nested

pytestmark = pytest.mark.standard_promotion

SIX = Nested(6, False)
LARGEST = float(np.finfo(np.float32).max)
ALL_WORDS = np.arange(4096, dtype=np.uint32) << 20 | 1 << 19
ENDS = (0, 2**32 - 1)
"""Random words with which every value rounds down, or up."""

SPANS = np.array([0.02, 0.9, 3, 7, 14, 28, 58])[:, None]  # in octaves
STEPS = np.array([1 / 16, 1 / 16, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1])
"""The finest steps with which 62 values cover a block of each span."""


def blocks():
    """Returns one block of 32 values per row, covering its span from end to end."""
    places = np.random.default_rng(0).uniform(-0.49, 0.49, (len(SPANS), 32))
    places[:, :2] = 0.49, -0.49
    return (1.3 * 2.0 ** (places * SPANS)).astype(np.float32)


BLOCKS = blocks()


@functools.partial(jax.jit, static_argnums=0)
def prepared(code, x):
    """Prepares the scales of blocks, which are rows."""
    keys = [jnp.max(jnp.maximum(key, 0), 1, keepdims=True) for key in code.keys(x)]
    return code.prepare(code.scale_of_keys(keys).astype(jnp.float32))


@functools.partial(jax.jit, static_argnums=0)
def stored(code, ready, x, words):
    """Returns the fields of values and the decoded fields."""
    words = None if words is None else jnp.broadcast_to(words, x.shape)
    fields = code.encode_fields(x, ready, words)
    return fields, code.decode_fields(fields, ready)


@functools.partial(jax.jit, static_argnums=0)
def all_values(code, ready):
    """Decodes every field except the fields of 0 and infinity."""
    fields = jnp.arange(1, 2**code.bits - 1, dtype=jnp.uint32)
    shape = ready[0].shape[0], fields.size
    return code.decode_fields(jnp.broadcast_to(fields, shape), ready)


def octaves_apart(x, y):
    return np.abs(np.log2(np.asarray(x) / np.asarray(y)))


def test_the_step_is_the_finest_that_covers_the_block():
    ready = prepared(SIX, BLOCKS)
    np.testing.assert_array_equal(2.0 ** (np.ravel(ready[1]) - 23.0), STEPS)
    values = np.asarray(all_values(SIX, ready))
    for row, block in zip(values, BLOCKS, strict=True):
        assert np.all(np.diff(row[row < LARGEST]) > 0)
        assert row[0] <= block.min()
        assert row[-1] >= block.max()
    # The first step of an octave, a factor of 1 + 2^-m, is slightly longer.
    for word in ENDS:
        _, got = stored(SIX, ready, BLOCKS, jnp.uint32(word))
        assert np.all(octaves_apart(got, BLOCKS) <= 1.45 * STEPS[:, None])


@pytest.mark.parametrize("octaves", [60, 63, 64, 115, 220, 250])
def test_the_coarsest_step_is_an_octave_and_smaller_values_are_raised(octaves):
    block = np.float32([[2.0**125, 2.0 ** (125 - octaves), 2.0**100, 0.0]])
    ready = prepared(SIX, block)
    assert np.ravel(ready[1]) == 23
    for word in ENDS:
        _, values = stored(SIX, ready, block, jnp.uint32(word))
        block[0, 1] = 2.0 ** (125 - min(octaves, 61))
        np.testing.assert_array_equal(values, block)


@pytest.mark.parametrize("bits", [6, 8])
def test_nothing_changes_when_stored_values_are_stored_again(bits):
    code = Nested(bits, False)
    words = np.random.default_rng(1).integers(0, 2**32, BLOCKS.shape, np.uint32)
    ready = prepared(code, BLOCKS)
    fields, values = stored(code, ready, BLOCKS, words)
    for word in ENDS:
        again, _ = stored(code, ready, values, jnp.uint32(word))
        np.testing.assert_array_equal(again, fields)
        # The scale of the stored values may be finer.
        _, new = stored(code, prepared(code, values), values, jnp.uint32(word))
        np.testing.assert_array_equal(new, values)


def test_rounding_keeps_the_mean_of_the_logarithm():
    ready = prepared(SIX, BLOCKS)
    _, values = stored(
        SIX, ready, np.repeat(BLOCKS[None], 4096, 0), ALL_WORDS[:, None, None]
    )
    logs = np.log2(np.asarray(values, np.float64)).mean(0)
    # Errors are in octaves, and random numbers have 12 bits. Rounding that preserved
    # the mean of x would be off by up to 0.086 octaves, or by 0.086 longer steps.
    error = np.abs(logs - np.log2(BLOCKS))
    assert np.all(error <= 0.01 + STEPS[:, None] * 2.0**-12)


def test_zero_and_non_finite_values_have_their_own_fields():
    block = np.float32([1e-30, 2e-30, 0.0, np.inf, np.nan, -np.nan, -1.0, 1e-45])
    rows = np.stack([block, np.zeros(8, np.float32)])
    ready = prepared(SIX, rows)
    below, dropped = (np.ravel(x)[1] for x in ready)
    assert below + (1 << dropped) == 0  # the base
    for words in (None, *map(np.uint32, ENDS)):
        fields, values = map(np.asarray, stored(SIX, ready, rows, words))
        assert fields[0].tolist()[2:6] == [0, 63, 63, 63]
        # In the scale, 1e-45 counts as the smallest normal number.
        assert values[0].tolist()[6:] == [2.0**-126] * 2
        np.testing.assert_array_equal(values[1], 0.0)


def test_numbers_near_overflow_stay_finite():
    rows = np.float32([[LARGEST, x, 3.3e38] for x in (3e38, 1e37, 1e30, 1e22)])
    ready = prepared(SIX, rows)
    for word in ENDS:
        _, values = stored(SIX, ready, rows, jnp.uint32(word))
        assert np.all(np.isfinite(values))
        steps = 2.0 ** (np.asarray(ready[1]) - 23.0)
        assert np.all(octaves_apart(values, rows) <= 1.45 * steps)


# Choice of the step.


def test_one_value_more_than_fits_needs_the_next_step():
    """Use 62 and 63 numbers from end to end with a step of 1/16."""
    rows = np.ones_like(BLOCKS)
    for row, number in zip(rows, (62, 63), strict=False):
        pattern = np.float32(1).view(np.int32) + ((number - 1) << 19)
        row[0] = np.int32(pattern).view(np.float32)
    ready = prepared(SIX, rows)
    assert (np.ravel(ready[1])[:2] - 19).tolist() == [0, 1]
    _, values = stored(SIX, ready, rows, jnp.uint32(ENDS[1]))
    assert np.all(np.asarray(values)[:, 0] >= rows[:, 0])
