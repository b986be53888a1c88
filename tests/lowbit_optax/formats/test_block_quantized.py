"""Block-wise quantised moments use the right codes, rounding and storage."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lowbit_optax._jaxprs.compiling import traced_once
from lowbit_optax._numerics import codes
from lowbit_optax._numerics.codes import RANDOM_BITS, Float, Linear, Log
from lowbit_optax._numerics.random_bits import Draws, random_bits
from lowbit_optax.formats.block_quantized import BlockQuantized
from pallas_kernels import layout_of, packed_shape
from tests.helpers.optimizers import assert_same_bits

pytestmark = pytest.mark.standard_promotion


class CodeByPrograms:
    """Jits each array function of a code, so that the tests run faster."""

    def __init__(self, code):
        self.code = code

    @property
    def __class__(self):
        return type(self.code)

    def __getattr__(self, name):
        value = getattr(self.code, name)
        return traced_once(value) if callable(value) else value


def code_of(*args):
    return CodeByPrograms(codes.code_of(*args))


SIGNED = ("linear", "companded", "dynamic")
UNSIGNED = ("linear", "companded", "dynamic", "sqrt", "log", "float")
CODES = {
    f"{name}_{'signed' if signed else 'unsigned'}_{bits}": code_of(name, bits, signed)
    for signed, names in ((True, SIGNED), (False, UNSIGNED))
    for name in names
    for bits in (8, 4)
}
each_code = pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
UNSIGNED_CODES = {name: code for name, code in CODES.items() if not code.signed}
each_unsigned_code = pytest.mark.parametrize(
    "code", UNSIGNED_CODES.values(), ids=UNSIGNED_CODES.keys()
)


def prepared(code, largest):
    """Returns the scale, and the prepared scale, for these largest values."""
    scale = code.scale_of_key(code.magnitude_key(jnp.float32(largest)))
    return scale, code.prepare(scale.astype(jnp.float32))


def finite_values(code, largest=3.3):
    """Returns the fields of finite values and their float64 values, by value."""
    fields = np.arange(2**code.bits, dtype=np.uint32)
    if not code.signed:
        fields = fields[: code.infinity_field]
    _, ready = prepared(code, largest)
    values = np.asarray(code.decode_fields(jnp.asarray(fields), ready), np.float64)
    order = np.argsort(values, kind="stable")
    return fields[order], values[order]


# The codes.


@each_code
def test_fields_stand_for_increasing_numbers(code):
    _, values = finite_values(code)
    steps = np.diff(values)
    # Signed codes have two zeros.
    assert np.all(steps >= 0)
    assert np.sum(steps == 0) <= 1
    assert np.all(values[np.flatnonzero(steps == 0)] == 0)


@each_code
def test_signed_codes_are_symmetric_and_zero_is_a_code(code):
    if isinstance(code, Float):
        pytest.skip("its smallest value is the base")
    fields, values = finite_values(code)
    assert 0.0 in values
    if code.signed:
        # A linear code does not use its most negative integer.
        used = values[fields != 0] if code.__class__.__name__ == "Linear" else values
        np.testing.assert_array_equal(used, -used[::-1])
    else:
        assert values.min() == 0.0
        assert fields[values == 0].tolist() == [0]


@each_code
def test_values_are_normal_and_scales_finite_in_blocks_of_any_size(code):
    if isinstance(code, Float):
        pytest.skip("its fields are sums with the block's base")
    for largest in (2.0**-126, 1e-37, 1e-30):
        _, values = finite_values(code, largest)
        sizes = np.sort(np.abs(values))
        # Signed codes have two zeros. CPUs may flush subnormal numbers.
        assert sizes[1 + code.signed] >= 2.0**-126
    scale, _ = prepared(code, 3.4028235e38)
    assert np.isfinite(float(scale))


@each_unsigned_code
def test_the_largest_of_a_block_is_never_rounded_to_infinity(code):
    if isinstance(code, Float):
        pytest.skip("its fields are sums with the block's base")
    # The quotient of a stored value and the unit may slightly exceed the exact value.
    _, ready = prepared(code, 3.3)
    top = code.decode_fields(jnp.uint32([code.largest_field]), ready)
    x = top * (1 + jnp.float32([0, 1, 4]) * 2.0**-23)
    for words in (None, jnp.uint32([0] * 3), jnp.uint32([2**32 - 1] * 3)):
        fields = code.encode_fields(x, ready, words)
        assert (fields < code.infinity_field).all()


@each_code
def test_nothing_changes_when_stored_values_are_stored_again(code):
    fields, values = finite_values(code)
    kept = (np.abs(values) > 0) & (fields > (code.__class__.__name__ == "Linear"))
    fields, values = fields[kept], values[kept].astype(np.float32)
    _, ready = prepared(code, 3.3)
    rng = np.random.default_rng(0)
    draws = rng.integers(0, 2**32, (64, len(fields)), np.uint32)
    encode = jax.jit(lambda x, words: code.encode_fields(x, ready, words))
    x = np.broadcast_to(values, draws.shape)
    for words in (None, draws):
        again = np.asarray(encode(x, words))
        np.testing.assert_array_equal(again, np.broadcast_to(fields, x.shape))


@each_code
def test_the_scale_covers_the_block_and_does_not_creep(code):
    rng = np.random.default_rng(1)
    largest = np.exp(rng.uniform(-60, 60, 4096)).astype(np.float32)
    scale, ready = prepared(code, largest)
    top = code.largest_field + (
        2 ** (code.bits - 1) if code.__class__.__name__ == "Linear" else 0
    )
    field = jnp.full(
        largest.shape, top if code.signed else code.largest_field, jnp.uint32
    )
    reach = np.asarray(code.decode_fields(field, ready))
    # The scale rounds up, except within the tolerance that prevents creeping.
    assert np.all(reach >= largest * (1 - 2.0**-20))
    spare = 1 + 2.0**-7 if code.scale == "bfloat16" else 2
    if isinstance(code, Float):
        spare = {8: 9 / 8, 4: 3 / 2}[code.bits]  # one step of the scale
    assert np.all(reach <= largest * spare * (1 + 2.0**-18))
    # The scale that decoded the values covers them,
    again = code.scale_of_key(code.magnitude_key(jnp.asarray(reach)))
    if not isinstance(code, Float):
        np.testing.assert_array_equal(again, scale)
        return
    # or the next scale covers them and stores them unchanged.
    ready = code.prepare(again.astype(jnp.float32))
    for draw in (0, 2**32 - 1):
        fields = code.encode_fields(jnp.asarray(reach), ready, jnp.uint32(draw))
        np.testing.assert_array_equal(code.decode_fields(fields, ready), reach)


@pytest.mark.parametrize("bits", [8, 4])
def test_no_finite_float_is_rounded_to_infinity(bits):
    code = code_of("float", bits, False)
    patterns = np.random.default_rng(0).integers(2**23, 2030 << 20, 4096)
    steps = np.arange(9, 2030) << 20  # numbers near the values of fields
    near = (steps + np.arange(-20, 21)[:, None]).ravel()
    patterns = np.concatenate([patterns, near])
    largest = patterns.astype(np.int32).view(np.float32)
    _, ready = prepared(code, largest)
    for more in (0, 16):
        x = (patterns + more).astype(np.int32).view(np.float32)
        fields = code.encode_fields(jnp.asarray(x), ready, jnp.uint32(2**32 - 1))
        decoded = np.asarray(code.decode_fields(fields, ready))
        assert np.all(np.isfinite(decoded))
        assert np.all(decoded >= x)
        assert np.all(decoded <= x * np.float64({8: 9 / 8, 4: 3 / 2}[bits]))


@each_code
def test_every_stochastic_code_is_unbiased_over_all_random_numbers(code):
    _, values = finite_values(code)
    reach = float(np.asarray(values.max()))
    rng = np.random.default_rng(2)
    # Cover the range between every pair of codes, including the smallest, evenly.
    values = np.unique(values[(values >= 0) & (values <= reach)])
    first = 0 if code.signed else 1
    at = rng.integers(first, len(values) - 1, 200)
    share = rng.uniform(0, 1, 200)
    x = (values[at] + share * (values[at + 1] - values[at])).astype(np.float32)
    if code.signed:
        x *= rng.choice([-1, 1], x.shape).astype(np.float32)
    _, ready = prepared(code, 3.3)
    numbers = np.arange(2**RANDOM_BITS, dtype=np.uint32) << (32 - RANDOM_BITS)
    # Most codes ignore the bits below. Some codes read them, so set them to the middle
    # of their range.
    numbers |= np.uint32(1 << (31 - RANDOM_BITS))

    @jax.jit
    def decoded(x, words):
        fields = code.encode_fields(x[None], ready, words[:, None])
        return code.decode_fields(fields, ready)

    mean = np.asarray(decoded(jnp.asarray(x), jnp.asarray(numbers)), np.float64)
    step = (values[at + 1] - values[at]).astype(np.float64)
    error = np.abs(mean.mean(0) - x) / step
    # The random numbers contribute 2^-13 of a step. Float32 rounds x / unit, which is
    # many steps above zero in codes with many steps.
    rounding = 2.0**-22 * np.abs(x) / step
    assert np.all(error <= 2.0 ** -(RANDOM_BITS + 1) + rounding), error.max()


@each_code
def test_zero_stays_zero_and_zero_blocks_have_no_scale(code):
    for largest in (0.0,) if isinstance(code, Float) else (0.0, 3.3):
        scale, ready = prepared(code, largest)
        assert (float(scale) == 0.0) == (largest == 0.0)
        words = jnp.uint32([0, 2**31, 2**32 - 1])
        for draws in (words, None):
            fields = code.encode_fields(jnp.zeros(3), ready, draws)
            np.testing.assert_array_equal(code.decode_fields(fields, ready), 0.0)


@each_unsigned_code
def test_no_positive_second_moment_becomes_zero(code):
    x = np.float32(3.3) * np.float32(10.0) ** -np.arange(0, 30, dtype=np.float32)
    _, ready = prepared(code, 3.3)
    for draw in (0, 2**32 - 1):
        words = jnp.full(x.shape, draw, jnp.uint32)
        fields = code.encode_fields(jnp.asarray(x), ready, words)
        assert np.all(np.asarray(code.decode_fields(fields, ready)) > 0)


@each_code
@pytest.mark.parametrize("draw", [0, 2**32 - 1])
def test_non_finite_values_have_their_own_field(code, draw):
    bad = np.array([np.inf, -np.inf, np.nan, -np.nan, 3.4e38], np.float32)
    _, ready = prepared(code, 3.3)
    words = jnp.full(bad.shape, draw, jnp.uint32)
    fields = code.encode_fields(jnp.asarray(bad), ready, words)
    assert np.all(np.asarray(fields) < 2**code.bits)
    decoded = np.asarray(code.decode_fields(fields, ready))
    if code.signed:
        reach = finite_values(code)[1].max()
        np.testing.assert_allclose(np.abs(decoded), reach, rtol=1e-6)
        assert decoded[0] > 0 > decoded[1]
    else:
        nans = [2, 3] if isinstance(code, Float) else [2]
        np.testing.assert_array_equal(decoded[[0, *nans]], np.inf)
        assert 0 < decoded[1] < 3.3


@each_unsigned_code
def test_a_negative_second_moment_is_the_smallest_code(code):
    _, ready = prepared(code, 3.3)
    x = -jnp.float32([1e-30, 0.1, 3.0, 1e30, 3e38])
    for words in (None, jnp.uint32(0), jnp.uint32(2**32 - 1)):
        if words is not None:
            words = jnp.broadcast_to(words, x.shape)
        fields = np.asarray(code.encode_fields(x, ready, words))
        np.testing.assert_array_equal(fields, 0 if isinstance(code, Float) else 1)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("bits", [8, 4])
def test_the_dynamic_map_is_the_published_one(bits, signed):
    """``create_dynamic_map`` of bitsandbytes, rewritten and checked by values below."""
    data = []
    for i in range(bits - 1):
        items = 2 ** (i if signed else i + 1) + 1
        bounds = np.linspace(0.1, 1, items)
        means = (bounds[:-1] + bounds[1:]) / 2
        data += list(10.0 ** (i - (bits - 2)) * means)
    published = np.sort([*data, *([-x for x in data] if signed else []), 0.0])
    if (bits, signed) == (8, True):
        assert len(published) == 255
        np.testing.assert_allclose(published[-1], 0.9929687)
        np.testing.assert_allclose(published[128:131], [5.5e-7, 3.25e-6, 7.75e-6])
    code = code_of("dynamic", bits, signed)
    # With a scale of 1, the decoded values are the values of the map.
    _, values = finite_values(code, largest=published[-1])
    np.testing.assert_allclose(np.unique(values), published, rtol=2e-6)


def test_segments_double_their_steps():
    # Eight segments of sixteen steps form the mu-law of ITU-T G.711. Its segments start
    # at 31, 95, 223, ..., 4063, on a scale with a bias of 33 and steps of 2.
    telephony = CodeByPrograms(Log(8, True, 3))
    _, values = finite_values(telephony, largest=247.0)
    positive = values[values >= 0][1:]
    np.testing.assert_array_equal(positive[::16], 2.0 ** np.arange(8) - 1)
    assert (32 * (positive[::16][1:] + 1) - 33).tolist() == [
        31, 95, 223, 479, 991, 2015, 4063
    ]  # fmt: skip
    steps = np.diff(positive)
    np.testing.assert_array_equal(steps[::16], 2.0 ** np.arange(8) / 16)
    companded = CodeByPrograms(Log(8, True, 4))
    _, values = finite_values(companded, largest=61439.0)
    positive = values[values >= 0][1:]
    np.testing.assert_array_equal(positive[::8], 2.0 ** np.arange(16) - 1)
    assert positive[-1] == 61439


# Storage.


def encode(format_, x, *, number=0, step=0):
    @jax.jit
    def run(x, step):
        (random,) = random_bits(jnp.uint32(0), step, [0])
        return format_.encode(x, Draws(random), number)

    return run(jnp.asarray(x), jnp.uint32(step))


def decode(format_, stored, shape):
    return jax.jit(lambda stored: format_.decode(stored, shape))(stored)


class LinearByPowersOfTwo(Linear):
    scale = "power_of_two"


class ByPowersOfTwo(BlockQuantized):
    """Has a scale that does not change when decoded values are encoded again."""

    @property
    def codec(self):
        return LinearByPowersOfTwo(self.bits, self.signed)


SHAPES = [(64,), (270,), (5,), (64, 8), (3, 3, 40), (100, 7), (2, 33, 65), (9, 3, 5)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("bits", "block_size"), [(8, 32), (4, 32), (8, 64)])
def test_partial_blocks_have_the_shapes_and_errors_of_whole_blocks(
    shape, bits, block_size
):
    format_ = ByPowersOfTwo(bits, block_size, "linear", "nearest")
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    x += np.sign(x)  # zero padding would be the smallest
    stored = encode(format_, x)
    assert stored.codes.dtype == jnp.uint32
    assert stored.codes.shape == packed_shape(shape, bits)
    assert stored.scales.dtype == jnp.bfloat16
    assert stored.scales.shape == layout_of(shape).blocks_shape(block_size)
    decoded = np.asarray(decode(format_, stored, shape))
    assert decoded.shape == shape
    # Errors are at most half a step of a block whose largest value has the largest
    # code.
    reach = 2 ** (bits - 1) - 1
    bound = 2.01 * np.abs(x).max() / (2 * reach)
    assert np.abs(decoded - x).max() <= bound
    again = encode(format_, decoded)
    assert_same_bits(again, stored)
