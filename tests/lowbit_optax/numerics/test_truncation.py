"""Masters of k extra bits are rounded, or cut off as in the paper's base scheme.

The expected numbers are computed in numpy's float64 with divisions by powers of two,
independently of the bit patterns that the package uses.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax

import lowbit_optax
from lowbit_optax._numerics import float_layouts
from lowbit_optax._numerics.random_bits import PARAM_STREAM, random_bits
from tests.helpers.optimizers import apply, weights_only
from tests.helpers.patterns import (
    HALVES,
    assert_same,
    cast,
    each_dtype,
    each_of,
    every,
    is_nan,
)

ROUNDINGS = ("nearest", "toward_zero", "stochastic")
each_rounding = pytest.mark.parametrize("rounding", ROUNDINGS)
truncated = functools.partial(
    lowbit_optax.extra_bits, residual_rounding="toward_zero", sum_rounding="nearest"
)


@functools.cache
def masters(dtype):
    """Returns 2^17 float32 numbers and NaNs.

    One half has each pattern of the leading 16 bits once, and random bits below. The
    other half consists of values of the dtype and numbers between two neighbours.
    """
    rng = np.random.default_rng(0)
    low = rng.integers(0, 2**16, 2**16).astype(np.uint32)
    leading = (np.arange(2**16, dtype=np.uint32) << 16 | low).view(np.float32)
    with np.errstate(all="ignore"):
        values = np.resize(every(dtype), 2**16).astype(np.float32)
        share = rng.choice([0, 2.0**-24, 0.3, 0.5, 0.9], 2**16)
        between = values + share * float(ml_dtypes.finfo(dtype).eps) * np.abs(values)
        return np.concatenate([leading, between.astype(np.float32)])


def expected(x, dtype, extra, rounding, words, cut=np.floor):
    """Returns ``(param, master)`` in float64, with magnitudes cut off at k extra bits.

    ``cut`` rounds a magnitude to an integer, in units of the last extra bit.
    """
    info = ml_dtypes.finfo(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs make numpy warn
        size = np.abs(x.astype(np.float64))
    exponent = np.frexp(np.where(np.isfinite(size), size, 1.0))[1] - 1
    exponent = np.maximum(exponent, int(np.log2(float(info.smallest_normal))))
    spacing = 2.0 ** (exponent - info.nmant)  # the dtype's spacing
    unit = spacing / 2**extra
    past = 2.0 ** (np.floor(np.log2(float(info.max))) + 1)
    beyond = np.inf
    if dtype == jnp.float8_e4m3fn:
        past, beyond = 480.0, np.nan
    with np.errstate(invalid="ignore"):
        kept = cut(size / unit) * unit
        down = np.floor(kept / spacing) * spacing
        rest = (kept - down) / unit  # an integer in [0, 2^k)
    half = 2.0 ** (extra - 1)
    if not extra or rounding == "toward_zero":
        up = np.zeros(size.shape, bool)
    elif rounding == "nearest":
        up = rest >= half
    else:
        drawn = (words >> np.uint32(32 - extra)).astype(np.float64)
        inside = kept <= float(info.max)
        up = np.where(inside, rest + drawn >= 2**extra, rest >= half)
    if dtype == jnp.float8_e4m3fn:
        # A tie between the largest number and NaN goes down. With "nearest", the
        # residual then stops one unit below the tie.
        tie = (kept == 464.0) & bool(extra) & (rounding != "toward_zero")
        up &= ~tie | (rounding == "stochastic") & (kept <= float(info.max))
        if rounding == "nearest":
            kept = np.where(tie, kept - unit, kept)
    param = down + up * spacing
    param = np.where(param >= past, beyond, param)
    is_past = (kept >= past) | np.isnan(size)
    param = np.where(is_past, np.where(np.isnan(size), np.nan, beyond), param)
    kept = np.where(is_past, np.where(np.isnan(size), np.nan, beyond), kept)
    sign = np.where(np.signbit(x), -1.0, 1.0)
    return sign * param, sign * kept


@each_dtype
@each_rounding
@pytest.mark.parametrize("residual", ["toward_zero", "nearest", "stochastic"])
def test_every_number_of_bits_rounds_the_master_once(dtype, rounding, residual):
    x = masters(dtype)
    (random,) = random_bits(jnp.uint32(3), jnp.uint32(5), [0])
    words = np.asarray(random.words(x.shape, PARAM_STREAM))
    cut = np.rint if residual == "nearest" else np.floor
    most = float_layouts.layout_of(dtype).max_extra_bits
    for extra in range(most + 1):
        format_ = lowbit_optax.extra_bits(
            extra, rounding=rounding, residual_rounding=residual
        ).on_fields()
        param, fields = format_.split(jnp.asarray(x), jnp.dtype(dtype), random)
        joined = format_.join(param, fields)
        want, kept = expected(x, dtype, extra, rounding, words, cut)
        # No draw turns a number within the range of the dtype into an infinity.
        is_held = np.isfinite(cast(cast(x, dtype), np.float32))
        assert np.isfinite(np.asarray(joined)[is_held]).all()
        if residual == "stochastic":
            # It rounds down or up, unless the parameter rounds past the largest value.
            _, up = expected(x, dtype, extra, rounding, words, np.ceil)
            ends = np.sort(np.stack([kept, up]).astype(np.float32), axis=0)
            number = np.isfinite(ends).all(0)
            got = np.asarray(joined)[number]
            assert np.all((got == ends[0, number]) | (got == ends[1, number]))
            continue
        with np.errstate(all="ignore"):
            assert_same(param, want.astype(dtype))
        # All NaNs compare equal, because some have no pair with 16 bits.
        assert_same(joined, kept.astype(np.float32))
        if fields is None:
            continue
        assert fields.max() < 2**format_.width
        # A residual for a given parameter has the same fields.
        again = format_.residual(jnp.asarray(x), param, random)
        number = ~is_nan(x)
        np.testing.assert_array_equal(
            np.asarray(again)[number], np.asarray(fields)[number]
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize("extra", [0, 8])
def test_the_base_scheme_stores_the_leading_bits_of_every_float32(extra):
    """Parameter and residual are exactly the first 16 + k bits (section 3.1)."""
    starts, chunk = np.arange(2**8, dtype=np.uint32) << 24, 2**24
    format_ = truncated(extra, rounding="toward_zero").on_fields()
    (random,) = random_bits(jnp.uint32(0), jnp.uint32(0), [0])

    def wrong(start):
        bits = start + lax.iota(jnp.uint32, chunk)
        x = lax.bitcast_convert_type(bits, jnp.float32)
        param, fields = format_.split(x, jnp.dtype(jnp.bfloat16), random)
        param = lax.bitcast_convert_type(param, jnp.uint16).astype(jnp.uint32)
        same = param == bits >> 16
        if extra:
            same &= fields == (bits & 0xFFFF) >> (16 - extra)
        is_number = (bits & 0x7FFFFFFF) <= 0x7F800000
        return jnp.sum(~same & is_number), jnp.sum(is_number)

    counts = jax.jit(lambda starts: lax.map(wrong, starts))(jnp.asarray(starts))
    count, numbers = (int(np.sum(np.asarray(x, np.int64))) for x in counts)
    assert numbers > 0.9 * len(starts) * chunk
    assert count == 0


def cut_off(x, dtype, extra):
    return expected(x, dtype, extra, "toward_zero", None)[1].astype(np.float32)


ROUTES = {
    "step": (lowbit_optax.step, None),
    "update": (apply, None),
    "step in kernels": (lowbit_optax.step, "pallas"),
    "update in kernels": (apply, "pallas"),
}


@pytest.mark.standard_promotion
@each_of(HALVES)
@each_rounding
@pytest.mark.parametrize(
    ("advance", "implementation"), ROUTES.values(), ids=ROUTES.keys()
)
def test_every_step_cuts_the_float32_sum_off(dtype, rounding, advance, implementation):
    rng = np.random.default_rng(1)
    master = rng.normal(size=(64, 32)).astype(np.float32) * np.float32(0.02)
    tx = weights_only(
        optax.sgd(2.0**-10),
        truncated(6, rounding=rounding),
        min_size=0,
        implementation=implementation,
    )
    params, state = lowbit_optax.from_master(tx, jnp.asarray(master), dtype, None)
    master = cut_off(master, dtype, 6)
    advance = jax.jit(functools.partial(advance, tx))
    for _ in range(4):
        grads = rng.normal(size=master.shape).astype(np.float32)
        params, state = advance(params, state, jnp.asarray(grads))
        master = cut_off(master - np.float32(2.0**-10) * grads, dtype, 6)
        assert_same(lowbit_optax.master_weights(params, state), master)


@pytest.mark.parametrize("alias", ["extra_bits_sgd", "extra_bits_adamw"])
def test_aliases_and_split_arrays_cut_masters_off(alias):
    x = np.random.default_rng(2).normal(size=(64, 64)).astype(np.float32)
    options = dict(rounding="toward_zero", residual_rounding="toward_zero")
    tx = getattr(lowbit_optax, alias)(0.0, bits=5, min_size=0, **options)
    params, state = lowbit_optax.from_master(tx, jnp.asarray(x), jnp.bfloat16, None)
    want = cut_off(x, jnp.bfloat16, 5)
    assert_same(lowbit_optax.master_weights(params, state), want)
    split = lowbit_optax.split_array(x, jnp.bfloat16, truncated(5))
    assert_same(lowbit_optax.join_array(split), want)
    doubled = lowbit_optax.join_array(split * 3.0)
    assert_same(doubled, cut_off(want * np.float32(3), jnp.bfloat16, 5))
