"""Emulated formats match ml_dtypes and lists of their numbers."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from lowbit_optax._numerics.float_format import FP32, grid_of, round_to_grid
from lowbit_optax.precision import FloatFormat
from tests.helpers.patterns import assert_same, cast, float_casts

NATIVE = {
    "float32": FP32,
    "bfloat16": FloatFormat(8, 7),
    "float16": FloatFormat(5, 10, specials="ieee"),
    "float8_e5m2": FloatFormat(5, 2, specials="ieee"),
    "float8_e5m2fnuz": FloatFormat(5, 2, 1),
    "float8_e4m3": FloatFormat(4, 3, specials="ieee"),
    "float8_e4m3fn": FloatFormat(4, 3, specials="nan"),
    "float8_e4m3fnuz": FloatFormat(4, 3, 1),
    "float8_e4m3b11fnuz": FloatFormat(4, 3, 4),
    "float8_e3m4": FloatFormat(3, 4, specials="ieee"),
    "float6_e3m2fn": FloatFormat(3, 2),
    "float6_e2m3fn": FloatFormat(2, 3),
    "float4_e2m1fn": FloatFormat(2, 1),
}
NATIVE = {name: fmt for name, fmt in NATIVE.items() if hasattr(jnp, name)}
NARROW = [name for name in NATIVE if name != "float32"]
each_narrow = pytest.mark.parametrize("name", NARROW)

FORMATS = [
    *(fmt for fmt in NATIVE.values() if fmt != FP32),
    FloatFormat(6, 9),
    FloatFormat(5, 2),
    FloatFormat(8, 0),
    FloatFormat(8, 0, specials="nan"),
    FloatFormat(8, 1),
    FloatFormat(8, 3),
    FloatFormat(8, 5),
    FloatFormat(8, 5, subnormals=False),
    FloatFormat(7, 4, 63),
    FloatFormat(7, 4, -63),
    FloatFormat(5, 0),
    FloatFormat(5, 0, specials="ieee"),
    FloatFormat(3, 4, 2),
    FloatFormat(2, 1, -3),
    FloatFormat(2, 11, 100),
    FloatFormat(2, 0, specials="nan"),
    FloatFormat(4, 3, 4, subnormals=False),
    FloatFormat(6, 9, subnormals=False),
    FloatFormat(5, 10, specials="ieee", subnormals=False),
]
each_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
each_overflow = pytest.mark.parametrize("overflow", ["saturate", "infinity"])


def in_float32(values):
    return cast(values, np.float32)


def all_numbers(name):
    """Returns every pattern of a dtype and its value, from ml_dtypes and numpy."""
    width = ml_dtypes.finfo(name).bits
    patterns = np.arange(2**width, dtype=f"uint{max(width, 8)}")
    return patterns, in_float32(patterns.view(jnp.dtype(name)))


def numbers_of(fmt):
    """Returns the non-negative numbers in ascending order, and which of them are even.

    The last entry is not part of the format: it is where the next number would be.
    """
    e, m = fmt.exponent_bits, fmt.mantissa_bits
    bias = 2 ** (e - 1) - 1 + fmt.bias
    exponents, mantissas = np.divmod(np.arange(2 ** (e + m) + 1), 2**m)
    normal = np.ldexp(1 + mantissas / 2**m, exponents - bias)
    subnormal = np.ldexp(mantissas / 2**m, 1 - bias)
    values = np.where(exponents > 0, normal, subnormal)
    # As in IEEE 754, ties without an even significand round to the larger magnitude.
    even = mantissas % 2 == 0 if m else values == 0
    numbers = {"none": 2 ** (e + m), "nan": 2 ** (e + m) - 1}
    numbers["ieee"] = (2**e - 1) * 2**m
    end = numbers[fmt.specials] + 1
    kept = np.full(end, True)
    if not fmt.subnormals:
        kept[1 : 2**m] = False
    return values[:end][kept], even[:end][kept]


def nearest_of_list(fmt, x):
    """Rounds by searching the list of the format's numbers."""
    values, even = numbers_of(fmt)
    largest, magnitude = values[-2], np.abs(cast(x, np.float64))
    above = np.clip(np.searchsorted(values, magnitude), 1, values.size - 1)
    low, high = values[above - 1], values[above]
    to_low = magnitude - low, high - magnitude
    up = (to_low[0] > to_low[1]) | ((to_low[0] == to_low[1]) & ~even[above - 1])
    rounded = np.where(up, high, low)
    past = np.inf if fmt.overflow == "infinity" else largest
    rounded = np.where(rounded > largest, past, rounded)
    infinite = np.inf if fmt.specials == "ieee" else past
    rounded = np.where(np.isinf(x), infinite, rounded)
    rounded = np.where(np.isnan(x), np.nan, rounded)
    return in_float32(np.where(np.signbit(x), -rounded, rounded))


def boundaries(fmt):
    """Returns a format's numbers, their midpoints, and float32's neighbours of both."""
    values = numbers_of(fmt)[0]
    middles = (values[1:] + values[:-1]) / 2
    values, middles = in_float32(values), in_float32(middles)
    infinity = np.float32(np.inf)
    x = np.concatenate(
        [
            values,
            middles,
            np.nextafter(middles, infinity),
            np.nextafter(middles, -infinity),
            np.float32([0, 2**-149, 2**-126, 3e38, np.inf, np.nan]),
        ]
    )
    return np.concatenate([x, -x])


def samples():
    """Returns all bfloat16 and float16 numbers and random float32 numbers."""
    every = np.arange(2**16, dtype=np.uint16)
    words = np.random.default_rng(0).integers(0, 2**32, 2**17, np.uint32)
    parts = every.view(jnp.bfloat16), every.view(np.float16), words.view(np.float32)
    return np.concatenate([in_float32(part) for part in parts])


@pytest.mark.parametrize("name", NATIVE)
def test_a_dtype_and_its_format_name_each_other(name):
    fmt, info = NATIVE[name], ml_dtypes.finfo(name)
    assert FloatFormat.of(name) == FloatFormat.of(getattr(jnp, name)) == fmt
    assert fmt.dtype == jnp.dtype(name)
    assert fmt.bits == info.bits
    assert fmt.largest == float(info.max)
    assert fmt.smallest_normal == float(info.smallest_normal)
    assert fmt.smallest == float(info.smallest_subnormal)
    assert dataclasses.replace(fmt, subnormals=False).dtype is None


@each_format
def test_largest_and_smallest_are_those_of_the_list(fmt):
    values, _ = numbers_of(fmt)
    assert fmt.largest == values[-2]
    assert fmt.smallest == values[1]
    bias = 2 ** (fmt.exponent_bits - 1) - 1 + fmt.bias
    assert fmt.smallest_normal == 2.0 ** (1 - bias)


@each_format
@each_overflow
def test_nearest_is_found_in_the_list_of_numbers(fmt, overflow):
    fmt = dataclasses.replace(fmt, overflow=overflow)
    x = np.concatenate([samples(), boundaries(fmt)])
    want = nearest_of_list(fmt, x)
    assert_same(jax.jit(fmt.round)(x), want)
    # Numbers of the format stay unchanged for all random words.
    own, drawn = want[np.isfinite(want)], jax.jit(fmt.round)
    for word in (0, 0xFFFFFFFF):
        assert_same(drawn(own, np.full(own.shape, word, np.uint32)), own)
    past = ~(np.abs(cast(x, np.float64)) <= fmt.largest)  # counts NaN too
    np.testing.assert_array_equal(jax.jit(fmt.overflows)(x), past)
    _, overflowed = jax.jit(lambda x: round_to_grid(x, grid_of(fmt)))(x)
    np.testing.assert_array_equal(overflowed, past)


def test_float32_stays_as_it_is_bit_for_bit():
    x = np.concatenate([samples(), boundaries(FloatFormat(8, 7))])
    got = np.asarray(jax.jit(FP32.round)(x))
    np.testing.assert_array_equal(got.view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize("bits", range(1, 23))
def test_fewer_bits_of_float32_are_the_integer_formula(bits):
    # This includes subnormals, because float32 patterns are ordered by magnitude.
    x = np.concatenate([samples(), boundaries(FloatFormat(8, 5))])
    u, drop = x.view(np.uint32), np.uint32(23 - bits)
    odd = (u >> drop) & np.uint32(1)
    half = np.uint32((1 << (drop - 1)) - 1)
    expected = ((u + half + odd) >> drop << drop).view(np.float32)
    expected = np.where(np.isnan(x), x, expected)
    fmt = FloatFormat(8, bits, overflow="infinity")
    assert_same(jax.jit(fmt.round)(x), expected)


def rounded_many_times(fmt, x, random):
    return np.asarray(jax.jit(fmt.round)(np.full(random.shape, x), random))


STOCHASTIC = [
    (FloatFormat(4, 3, 4), 1.01171875),
    (FloatFormat(4, 3, 4), -29.0625),
    (FloatFormat(4, 3, 4), 1.3125 * 2.0**-12),  # subnormal
    (FloatFormat(4, 3, 4), 0.7109375 * 2.0**-13),  # below the smallest
    (FloatFormat(4, 3, 4), 1.5 * 2.0**-22),  # far below it
    (FloatFormat(4, 3, 4, subnormals=False), 0.7109375 * 2.0**-10),
    (FloatFormat(4, 3, 4, subnormals=False), -1.5 * 2.0**-20),
    (FloatFormat(8, 5), 1.0078125 * 2.0**-126),
    (FloatFormat(8, 5), 1.3125 * 2.0**-131),  # float32's own subnormals
    (FloatFormat(8, 5), -0.375 * 2.0**-131),
    (FloatFormat(8, 5, subnormals=False), 0.375 * 2.0**-126),
    (FloatFormat(5, 2, specials="ieee"), 1.15625 * 2.0**-15),
    (FloatFormat(6, 9), 1.000244140625),
    (FloatFormat(5, 0), 1.25),
]


@pytest.mark.parametrize(("fmt", "x"), STOCHASTIC, ids=str)
def test_the_mean_over_all_random_words_is_the_number(fmt, x):
    # Use all leading 16 bits. x is a whole number of 2^-16 of the distance between its
    # neighbours, so the noise in the lower bits does not matter.
    noise = np.random.default_rng(0).integers(0, 2**16, 2**16, np.uint32)
    random = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | noise
    rounded = rounded_many_times(fmt, np.float32(x), random).astype(np.float64)
    values = numbers_of(fmt)[0]
    above = np.searchsorted(values, abs(x))
    neighbours = np.sort(np.copysign(values[[above - 1, above]], x))
    np.testing.assert_array_equal(np.unique(rounded), neighbours)
    assert rounded.mean() == x


@pytest.mark.parametrize("exponent", [-38, -39, -40, -44])
def test_far_below_the_smallest_number_every_random_bit_counts(exponent):
    # The number is ups * 2^-31 of 2^-13, so ups of 2^31 random numbers round up.
    fmt, ups = FloatFormat(4, 3, 4), int(1.5 * 2.0 ** (exponent + 13 + 31))
    turn = 2 * (2**31 - ups)
    words = np.array([0, turn - 1, min(turn, 2**32 - 1), 2**32 - 1], np.uint32)
    got = rounded_many_times(fmt, np.float32(1.5 * 2.0**exponent), words)
    np.testing.assert_array_equal(got, np.array([0, 0, ups > 0, ups > 0]) * 2.0**-13)


def test_stochastic_rounding_past_the_largest():
    random = np.uint32([0, 2**31 - 1, 2**31, 2**32 - 1])
    halfway = np.float32(31)  # 30 is the largest number, and 32 would be next
    saturated = rounded_many_times(FloatFormat(4, 3, 4), halfway, random)
    np.testing.assert_array_equal(saturated, [30, 30, 30, 30])
    fmt = FloatFormat(4, 3, 4, overflow="infinity")
    infinite = rounded_many_times(fmt, -halfway, random)
    np.testing.assert_array_equal(infinite, [-30, -30, -np.inf, -np.inf])


@each_narrow
def test_patterns_are_the_dtypes(name):
    fmt = NATIVE[name]
    patterns, values = all_numbers(name)
    encoded = np.array(jax.jit(fmt.encode)(values))
    assert encoded.dtype == patterns.dtype
    if fmt.specials != "none":  # ml_dtypes drops a NaN's payload
        nan = np.isnan(values)
        assert np.isnan(in_float32(encoded[nan].view(jnp.dtype(name)))).all()
        encoded[nan] = patterns[nan]
    if name.endswith("fnuz"):  # its NaN has the pattern of -0
        minus_zero = 2 ** (fmt.bits - 1)
        values[minus_zero] = -0.0
        encoded[minus_zero] = minus_zero
    np.testing.assert_array_equal(encoded, patterns)
    assert_same(jax.jit(fmt.decode)(patterns), values)


@each_format
def test_patterns_are_integers_in_the_order_of_the_numbers(fmt):
    values = numbers_of(dataclasses.replace(fmt, subnormals=True))[0][:-1]
    bits = max(8, int(2 ** np.ceil(np.log2(fmt.bits))))
    patterns = np.arange(values.size, dtype=f"uint{bits}")
    values = in_float32(values)
    sign = patterns.dtype.type(2 ** (fmt.bits - 1))
    for p, x in ((patterns, values), (patterns | sign, -values)):
        assert_same(jax.jit(fmt.decode)(p), x)
        encoded = jax.jit(fmt.encode)(x)
        assert encoded.dtype == p.dtype
        np.testing.assert_array_equal(encoded, p)


def test_no_nan_is_encoded_as_infinity():
    # These NaNs have a payload whose leading bits are zero.
    x = np.uint32([0x7F800001, 0xFF800001, 0x7F80FFFF]).view(np.float32)
    for fmt in (FloatFormat(8, 7), NATIVE["float16"], NATIVE["float8_e5m2"]):
        assert np.isnan(fmt.decode(fmt.encode(x))).all()


PAIRS = [*itertools.pairwise(FORMATS[:12] + FORMATS[-3:]), (FORMATS[0], FP32)]


def test_a_traced_flag_chooses_between_two_formats_in_one_program():
    traces = []

    @jax.jit
    def to_either(x, random, low, high, is_low):
        traces.append(None)
        grid = jax.tree.map(lambda a, b: jnp.where(is_low, a, b), low, high)
        return round_to_grid(x, grid), round_to_grid(x, grid, random)

    x = samples()
    random = np.random.default_rng(1).integers(0, 2**32, x.shape, np.uint32)

    @functools.cache
    def by_itself(fmt):
        alone = lambda x, random: (fmt.round(x), fmt.round(x, random), fmt.overflows(x))
        return jax.jit(alone)(x, random)

    for pair in PAIRS:
        grids = [grid_of(fmt) for fmt in pair]
        for fmt, is_low in zip(pair, (True, False), strict=True):
            nearest, drawn = to_either(x, random, *grids, is_low)
            to_nearest, at_random, overflows = by_itself(fmt)
            assert_same(nearest[0], to_nearest)
            assert_same(drawn[0], at_random)
            np.testing.assert_array_equal(nearest[1], overflows)
            np.testing.assert_array_equal(drawn[1], nearest[1])
    assert len(traces) == 1


@pytest.mark.parametrize("random", [None, jnp.zeros(8, jnp.uint32)], ids=str)
def test_rounding_contains_no_cast_that_xla_could_drop(random):
    for fmt in (FloatFormat(4, 3, 4), FloatFormat(8, 7), FloatFormat(6, 9)):
        rounded = lambda x, fmt=fmt: fmt.decode(fmt.encode(fmt.round(x, random)))
        assert float_casts(jax.make_jaxpr(rounded)(jnp.ones(8))) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3b11fnuz"])
def test_nearest_is_the_cast_to_the_dtype_on_every_float32(name):
    fmt = dataclasses.replace(NATIVE[name], overflow="infinity")

    @jax.jit
    def rounded(start):
        u = start + lax.iota(jnp.uint32, 2**24)
        return fmt.round(lax.bitcast_convert_type(u, jnp.float32))

    # The sign is only copied, so other tests cover the negative numbers.
    for start in range(0, 2**31, 2**24):
        x = np.arange(start, start + 2**24, dtype=np.uint32).view(np.float32)
        expected = in_float32(cast(x, jnp.dtype(name)))
        if fmt.specials != "ieee":
            expected = np.where(np.isnan(expected) & ~np.isnan(x), np.inf, expected)
        assert_same(rounded(jnp.uint32(start)), expected)
