"""The residual matches the parameter that optax's addition gives.

optax computes ``(param + update).astype(param.dtype)``. The values here are chosen to
make this sum inexact: cancellation of more bits than float32 has, sign changes, zeros
of both signs, subnormals, the ends of the range, infinities and NaN.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax._numerics import rounding as splitting
from lowbit_optax._numerics.landing import ADD, apply_leaf
from lowbit_optax._numerics.random_bits import random_bits
from lowbit_optax.precision import FloatFormat
from tests.helpers.optimizers import ALL_FORMATS, weights_only
from tests.helpers.patterns import (
    FLOAT8,
    HALVES,
    assert_same,
    cast,
    each_of,
    every,
    is_nan,
    patterns_of,
)

TWELVE_BITS = FloatFormat(8, 3, overflow="infinity")
each_half = each_of(HALVES)
each_float8 = each_of(FLOAT8)
# XLA's CPU code flushes float32 subnormals in additions; some are bfloat16 numbers.
FLUSHED = float(np.finfo(np.float32).smallest_normal)


def optax_apply(params, updates):
    with jax.numpy_dtype_promotion("standard"):  # for bfloat16 plus float32
        return optax.apply_updates(params, updates)


def old_values(dtype):
    """Returns old values of all kinds."""
    info = ml_dtypes.finfo(dtype)
    tiny, smallest, most = info.smallest_subnormal, info.smallest_normal, info.max
    kinds = [0, tiny, 3 * tiny, smallest, 1, 1.5, 0.1, 3e-3, 300, most, np.inf]
    kinds = np.array([*map(float, kinds), *(-float(k) for k in kinds), np.nan])
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, every(dtype).size, 9)
    return np.concatenate([cast(kinds, dtype), every(dtype)[drawn]])


@functools.partial(jax.jit, static_argnums=2)
def land_and_apply(old, new, apply):
    landed, update = ADD.land(old, new)
    return landed, update, apply(old, update)


@each_half
def test_all_new_values_land_where_optax_puts_them(dtype):
    new = jnp.asarray(every(dtype))
    apply = jax.jit(optax_apply)
    for value in old_values(dtype):
        old = jnp.full(new.shape, value)
        landed, update, applied = land_and_apply(old, new, optax_apply)
        assert update.dtype == jnp.float32
        assert_same(applied, landed)
        # Also apply it outside of that jit, in another jit and one operation at a time.
        assert_same(apply(old, update), landed)
        assert_same(optax_apply(old, update), landed)


@each_float8
def test_all_pairs_of_float8_land_where_apply_updates_puts_them(dtype):
    old, new = np.meshgrid(every(dtype), every(dtype))
    old, new = jnp.asarray(old), jnp.asarray(new)
    landed, update, applied = land_and_apply(old, new, lowbit_optax.apply_updates)
    assert_same(applied, landed)
    assert_same(jax.jit(lowbit_optax.apply_updates)(old, update), landed)


# The formats. With 4096 elements, extra bits are packed at the default min_size.

SIZE = 4096
extra_bits = lowbit_optax.extra_bits
BOTH = ALL_FORMATS | {"kahan_16_bit_unit": lowbit_optax.kahan(arithmetic="param")}
FORMATS = {
    jnp.bfloat16: {
        **BOTH,
        "0 bits": extra_bits(0),
        "4 bits": extra_bits(4),
        "8 bits, residual to nearest": extra_bits(8, residual_rounding="nearest"),
        "16 bits, toward zero": extra_bits(16, rounding="toward_zero"),
        "15 bits, stochastic": extra_bits(15, rounding="stochastic"),
        "Kahan, weights of 12 bits": lowbit_optax.kahan(float_format=TWELVE_BITS),
    },
    jnp.float16: {
        **{name: x for name, x in BOTH.items() if name != "extra_bits_16"},
        "12 bits": extra_bits(12),
        "12 bits, toward zero": extra_bits(12, rounding="toward_zero"),
    },
}
CASES = [
    pytest.param(format_, dtype, id=f"{name}-{dtype.__name__}")
    for dtype, formats in FORMATS.items()
    for name, format_ in formats.items()
]


@functools.cache
def adversarial(dtype):
    """Returns float32 masters and the float32 targets of their updates."""
    rng = np.random.default_rng(2)
    info = ml_dtypes.finfo(dtype)
    most, smallest = float(info.max), float(info.smallest_normal)
    draw = lambda: rng.normal(size=SIZE // 8) * 10.0 ** rng.uniform(-3, 3, SIZE // 8)
    starts = [draw() for _ in range(8)]
    # Start just below a power of two, to which the parameter rounds. Float32 is finer
    # at the master than at the parameter, so a difference of parameters loses bits.
    starts[0] = 2.0 ** rng.integers(-3, 4, SIZE // 8) * (
        1 - float(info.eps) * rng.uniform(2.0**-16, 2.0**-3, SIZE // 8)
    )
    sign = rng.choice([-1.0, 1.0], SIZE // 8)
    targets = [
        starts[0] * 2.0 ** rng.uniform(-25, -12, SIZE // 8) * sign,  # cancellation
        -starts[1] * (1 + rng.normal(size=SIZE // 8) * 1e-3),  # change of sign
        np.where(sign > 0, 0.0, -0.0),  # to zero
        smallest * rng.normal(size=SIZE // 8),  # to subnormals
        most * sign * rng.uniform(0.99, 1, SIZE // 8),  # to the largest
        most * sign * rng.uniform(0.9999, 1.01, SIZE // 8),  # past the largest
        np.resize([np.inf, -np.inf, np.nan, np.inf], SIZE // 8),
        starts[7] + rng.normal(size=SIZE // 8) * 1e-3,  # ordinary
    ]
    starts[3][::3] = smallest * rng.normal(size=len(starts[3][::3]))  # from subnormals
    starts[4][::2] = most * sign[::2]  # from the largest
    return tuple(cast(np.concatenate(x), np.float32) for x in (starts, targets))


@functools.partial(jax.jit, static_argnums=(0, 1))
def advance_and_apply(format_, dtype, start, target, seed):
    draws = [random_bits(seed, step, [0])[0] for step in jnp.arange(2, dtype="uint32")]
    param, residual = format_.split(start, jnp.dtype(dtype), draws[0])
    master = format_.join(param, residual)
    update = target - master
    landed, kept, difference = format_.advance(param, residual, update, draws[1], ADD)
    intended, rest = format_.split(master + update, jnp.dtype(dtype), draws[1])
    apply = lowbit_optax.apply_updates if dtype in FLOAT8 else optax_apply
    return dict(
        old=param,
        residual=residual,
        master=master,
        update=update,
        landed=landed,
        kept=kept,
        difference=difference,
        applied=apply(param, difference),
        joined=format_.join(landed, kept),
        intended=intended,
        meant=format_.join(intended, rest),
    )


@functools.cache
def result(format_, dtype):
    start, target = adversarial(dtype)
    out = advance_and_apply(format_, dtype, start, target, jnp.uint32(0))
    return {name: None if x is None else np.asarray(x) for name, x in out.items()}


as_float64 = functools.partial(cast, dtype=np.float64)


@pytest.mark.parametrize(("format_", "dtype"), CASES)
def test_the_sum_of_optax_is_the_parameter_of_the_format(format_, dtype):
    out = result(format_, dtype)
    assert_same(out["applied"], out["landed"])
    outside = optax_apply(jnp.asarray(out["old"]), jnp.asarray(out["difference"]))
    assert_same(outside, out["landed"])
    _assert_arrived(out, format_, dtype)
    _assert_no_nan_is_added(out, format_)


def _assert_arrived(out, format_, dtype):
    """After landing, the master is the old master plus the update, rounded."""
    wide = {
        name: as_float64(out[name])
        for name in ("old", "update", "master", "joined", "landed")
    }
    with np.errstate(invalid="ignore", over="ignore"):
        true = wide["master"] + wide["update"]
        usual = np.isfinite(true) & np.isfinite(wide["landed"])
        error = np.abs(wide["joined"] - true)
    info = ml_dtypes.finfo(dtype)
    epsilon, tiny = float(info.eps), float(info.smallest_subnormal)
    fewer = getattr(format_, "significand", None)
    if fewer is not None:
        epsilon, tiny = 2.0**-fewer.bits, 2.0 ** (-126 - fewer.bits)
    from_, by, to = np.abs(wide["old"]), np.abs(wide["update"]), np.abs(true)
    # Float32 rounds the sum, the difference and its application, each by 2^-24 of its
    # largest part, and flushes bfloat16 subnormals.
    bound = 2.0**-22 * (from_ + by) + FLUSHED
    # The stored number rounds by a unit of the parameter (epsilon of it, or the spacing
    # of subnormals), divided by 2^k for k extra bits.
    unit = np.maximum(epsilon * to, tiny)
    match type(format_).__name__:
        case "MasterCopyFormat":
            pass
        case "ExtraBits":
            part = 0.5 if format_.residual_rounding == "nearest" else 1.0
            bound = bound + part * unit / 2**format_.bits
            if format_.rounding == "toward_zero":
                # From large numbers (in bfloat16, from all numbers), the sum is +0, and
                # no unsigned residual leads to a master below zero.
                is_large = (from_ > tiny * 2.0**21) | (dtype == jnp.bfloat16)
                lost = is_large & (true < 0) & (to < tiny)
                bound = bound + np.where(lost, tiny, 0.0)
        case "KahanFormat" if format_.arithmetic == "param":
            # u, y, s - w and c each round by their unit; |c| is at most a unit of w.
            bound = bound + 4 * epsilon * (by + epsilon * from_) + unit * epsilon + tiny
        case "KahanFormat":
            # The compensation is at most a unit, and is rounded as well.
            bound = bound + unit * (2.0**-7 if fewer is None else epsilon)
        case _:
            bound = bound + unit
    # With fewer bits, more numbers near bfloat16's largest overflow.
    assert np.mean(usual) > (0.7 if fewer is None else 0.6)
    assert np.all(error[usual] <= bound[usual])


WITH_BITS = [case for case in CASES if getattr(case.values[0], "bits", 0)]


@functools.partial(jax.jit, static_argnums=1)
def masters_with_any_bits(param, format_):
    """Joins every parameter with every residual and returns ``[code, element]``."""
    codes = jnp.arange(2**format_.width, dtype=jnp.uint32)[:, None]
    fields = jnp.broadcast_to(codes, (codes.size, param.size))
    param = jnp.broadcast_to(param, fields.shape)
    return splitting.join(param, fields, format_.bits, format_.rounding)


FEW_BITS = [case for case in WITH_BITS if case.values[0].width <= 12] + [
    pytest.param(
        *(extra_bits(8), jnp.float8_e4m3fn),
        id="8 bits-float8_e4m3fn",
        marks=pytest.mark.slow_to_compile,  # XLA contracts differently in the quick run
    ),
    pytest.param(extra_bits(8), jnp.float8_e5m2, id="8 bits-float8_e5m2"),
]


@pytest.mark.parametrize(("format_", "dtype"), FEW_BITS)
def test_no_other_residual_of_the_parameter_is_nearer_to_the_master(format_, dtype):
    out = result(format_, dtype)
    joined, meant = as_float64(out["joined"]), as_float64(out["meant"])
    numbers = np.isfinite(joined) & np.isfinite(meant)
    missed = patterns_of(out["landed"]) != patterns_of(out["intended"])
    np.testing.assert_array_equal(joined[numbers & ~missed], meant[numbers & ~missed])
    missed &= numbers
    assert missed.any()
    others = masters_with_any_bits(np.resize(out["landed"][missed], SIZE // 8), format_)
    others = as_float64(others)[:, : missed.sum()]
    nearest = np.nanmin(np.abs(others - meant[missed]), axis=0)
    np.testing.assert_array_equal(np.abs(joined[missed] - meant[missed]), nearest)


def _assert_no_nan_is_added(out, format_):
    """Infinite and NaN parameters leave no NaN in the residual of a finite number."""
    landed = as_float64(out["landed"])
    joined = as_float64(out["joined"])
    number = np.isfinite(landed)
    assert not np.any(np.isnan(joined[number]))
    assert np.all(is_nan(out["landed"]) <= np.isnan(joined))
    if isinstance(format_, type(lowbit_optax.kahan())):
        kept = as_float64(out["kept"])
        assert np.all(np.isfinite(kept))
        np.testing.assert_array_equal(kept[~number], 0)


# Whole steps.


@pytest.mark.parametrize(
    ("dtype", "bits", "rate"),
    [
        (jnp.bfloat16, 16, 1e-8),
        (jnp.float16, 12, 1e-8),
        (jnp.float8_e4m3fn, 16, 1e-4),
        (jnp.float8_e5m2, 16, 1e-6),
    ],
)
@pytest.mark.parametrize("direction", [1, -1])
def test_a_weight_at_zero_can_take_small_updates_of_either_sign(
    dtype, bits, rate, direction
):
    # Zero plus a negative number that rounds to -0 is +0. The residual must then lead
    # to a master below zero, or the weight would stay at zero.
    tx = weights_only(optax.sgd(rate), extra_bits(bits), min_size=0)
    grads = jnp.full((32,), -direction, jnp.float32)

    @jax.jit
    def one(params, state):
        updates, state = tx.update(grads, state, params)
        return lowbit_optax.apply_updates(params, updates), state

    params = jnp.zeros((32,), dtype)
    state = jax.jit(tx.init)(params)
    for _ in range(3):
        params, state = one(params, state)
    master = np.asarray(lowbit_optax.master_weights(params, state))
    # Each step rounds stochastically to the format's smallest number over 2^bits.
    spacing = float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2**bits
    np.testing.assert_allclose(
        master, direction * 3 * rate, rtol=2.0**-20, atol=3 * spacing
    )


@each_float8
def test_applying_to_float8_rounds_the_float32_sum_to_nearest(dtype):
    rng = np.random.default_rng(0)
    param = rng.normal(size=1000).astype(dtype)
    update = rng.normal(size=1000).astype(np.float32)
    expected = (param.astype(np.float32) + update).astype(dtype)
    apply = jax.jit(apply_leaf)
    assert_same(apply(jnp.asarray(param), jnp.asarray(update)), expected)
    narrow = update.astype(ml_dtypes.bfloat16)
    expected = (param.astype(np.float32) + narrow.astype(np.float32)).astype(dtype)
    assert_same(apply(jnp.asarray(param), jnp.asarray(narrow)), expected)
