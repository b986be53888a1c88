"""A parameter that the user overwrites keeps its new value in every weight format.

Pruning, projections, swapped-in averages and re-initialisation write to ``params`` and
leave the optimizer's state unchanged. The state of such a parameter belongs to the old
value, which must not come back.
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
from lowbit_optax._numerics.random_bits import random_bits
from lowbit_optax.formats.extra_bits import ExtraBits
from lowbit_optax.formats.plain import MasterCopyFormat
from tests.helpers.optimizers import ALL_FORMATS, apply
from tests.helpers.patterns import each_dtype, every

pytestmark = pytest.mark.standard_promotion

FLUSHED = float(np.finfo(np.float32).smallest_normal)
FORMATS = ALL_FORMATS | {
    "kahan_16_bit_unit": lowbit_optax.kahan(arithmetic="param"),
    "extra_bits_1": lowbit_optax.extra_bits(1),
    "extra_bits_8_stochastic": lowbit_optax.extra_bits(8, rounding="stochastic"),
}
each_format = pytest.mark.parametrize("name", FORMATS)


def same_numbers(a, b):
    """Returns where two arrays have equal numbers or are both NaN."""
    return (a == b) | (np.isnan(a) & np.isnan(b))


# Joining: a residual of another parameter does not move the master away.


def spacings_away(master, param):
    """Measures distances of masters from finite parameters in parameter spacings.

    At a power of two, the spacing is the larger one, above the number.
    """
    info = ml_dtypes.finfo(param.dtype)
    param, master = param.astype(np.float64), master.astype(np.float64)
    exponent = np.floor(np.log2(np.maximum(np.abs(param), float(info.tiny))))
    return np.abs(master - param) / 2.0 ** (exponent - info.nmant)


def check_joined(bits, rounding, residuals):
    """Joins every bfloat16 parameter with each of these residuals."""
    param = every(jnp.bfloat16)
    wide = param.astype(np.float32)
    format_ = ExtraBits(bits, rounding, packed=False)
    join = jax.jit(jax.vmap(format_.join, (None, 0)))
    allowed = 0.5 if rounding == "nearest" else 1.0
    for part in np.array_split(residuals, max(1, len(residuals) // 64)):
        masters = np.asarray(join(jnp.asarray(param), jnp.asarray(part)))
        finite = np.isfinite(wide)
        assert np.all(spacings_away(masters[:, finite], param[finite]) <= allowed)
        np.testing.assert_array_equal(
            np.signbit(masters[:, finite]),
            np.broadcast_to(np.signbit(wide[finite]), masters[:, finite].shape),
        )
        np.testing.assert_array_equal(
            np.isnan(masters), np.broadcast_to(np.isnan(wide), masters.shape)
        )


each_rounding = pytest.mark.parametrize(
    "rounding", ["nearest", "toward_zero", "stochastic"]
)


@each_rounding
@pytest.mark.parametrize(
    "bits", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.exhaustive)]
)
def test_no_residual_moves_a_bfloat16_parameter(bits, rounding):
    width = splitting.stored_bits(bits, rounding)
    check_joined(bits, rounding, np.arange(2**width, dtype=np.uint32))


@each_dtype
def test_a_stored_master_stays_only_if_it_rounds_to_the_parameter(dtype):
    param = every(dtype)
    rng = np.random.default_rng(1)
    # For each parameter, try its own value, values around it, ties, and other values.
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        wide = param.astype(np.float64)
        unit = np.maximum(np.abs(wide), float(info.tiny)) * 2.0**-info.nmant
        near = [wide + f * unit for f in (0, 0.25, 0.5, -0.5, 0.75, -1, 2)]
        masters = [*near, rng.permutation(wide), np.full_like(wide, np.nan)]
        masters = np.stack(masters).astype(np.float32)
        rounded = masters.astype(param.dtype)
        # This is NVIDIA's NaN, which careless rounding turns into zero.
        masters[-1].view(np.uint32)[:] = 0x7FFFFFFF
    join = jax.jit(jax.vmap(MasterCopyFormat().join, (None, 0)))
    found = np.asarray(join(jnp.asarray(param), jnp.asarray(masters)))
    stays = same_numbers(rounded.astype(np.float32), param.astype(np.float32))
    if dtype == jnp.bfloat16:  # +0 and -0 have separate masters
        stays &= np.isnan(masters) | (np.signbit(rounded) == np.signbit(param))
    want = np.where(stays, masters, param.astype(np.float32))
    np.testing.assert_array_equal(found, want)
    assert stays.any()
    assert not stays.all()


@each_dtype
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_compensations_of_other_parameters_are_dropped(dtype, rounding):
    format_ = lowbit_optax.kahan(rounding=rounding)
    param = every(dtype)
    size = np.abs(param.astype(np.float32))
    # On some processors, XLA's CPU code treats float32 subnormals as zero.
    param = param[np.isfinite(size) & ((size == 0) | (size >= FLUSHED))]
    sizes = 2.0 ** np.arange(-40, 8)
    residual = np.concatenate([sizes, -sizes, 1.9 * sizes]).astype(ml_dtypes.bfloat16)
    join = jax.jit(jax.vmap(format_.join, (None, 0)))
    found = np.asarray(
        join(
            jnp.asarray(param),
            jnp.asarray(np.repeat(residual[:, None], param.size, 1)),
        )
    )
    # Just below a power of two, |w| 2^-m is up to two spacings.
    most = 1.02 if rounding == "nearest" else 2
    assert np.all(spacings_away(found, param) <= most)
    assert np.any(found != param.astype(np.float32))


@each_dtype
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_rounding_errors_of_the_parameter_are_kept(dtype, rounding):
    format_ = lowbit_optax.kahan(rounding=rounding)
    info = ml_dtypes.finfo(dtype)
    rng = np.random.default_rng(2)
    n = 2**14
    low = max(float(info.smallest_subnormal), 2.0**-100)
    masters = rng.normal(size=n) * np.exp(
        rng.uniform(np.log(low), np.log(float(info.max) / 8), n)
    )
    # Add numbers around powers of two, where the spacing changes, and ties.
    powers = 2.0 ** np.arange(np.log2(max(float(info.tiny), low)), np.log2(info.max))
    ulp = 2.0**-info.nmant
    edges = [powers * (1 + f * ulp) for f in (-0.5, -0.25, -0.125, 0.25, 0.5, 1.5)]
    masters = np.concatenate([masters, *edges]).astype(np.float32)
    (random,) = random_bits(jnp.uint32(0), jnp.uint32(0), [0])

    @jax.jit
    def there_and_back(master):
        param, residual = format_.split(master, jnp.dtype(dtype), random)
        return param, residual, format_.join(param, residual)

    param, residual, joined = map(np.asarray, there_and_back(jnp.asarray(masters)))
    finite = np.isfinite(param.astype(np.float32))
    want = param.astype(np.float32) - residual.astype(np.float32)
    np.testing.assert_array_equal(joined[finite], want[finite])
    assert np.any(residual.astype(np.float32) != 0)


# Whole steps with step and update, for large and small leaves.

SHAPES = {"large": (64, 96), "small": (12, 5)}


each_way = pytest.mark.parametrize("advance", [lowbit_optax.step, apply])


def start(seed=3):
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
        for name, shape in SHAPES.items()
    }


def gradients(steps):
    rng = np.random.default_rng(4)
    return {
        name: jnp.asarray(rng.normal(size=(steps, *shape)), jnp.float32)
        for name, shape in SHAPES.items()
    }


@functools.partial(jax.jit, static_argnums=(0, 1))
def train(tx, advance, params, state):
    one = lambda carry, grads: (advance(tx, *carry, grads), None)
    return jax.lax.scan(one, (params, state), gradients(10))[0]


def sgd(weights):
    return lowbit_optax.lowbit(
        optax.sgd(2.0**-7), weights=weights, moments=None, min_size=4096
    )


def pruned(params):
    """Sets every third weight to 0 and every sixth to -0."""

    def prune(w):
        index = jnp.arange(w.size).reshape(w.shape)
        zero = jnp.where(index % 2 == 0, jnp.zeros_like(w), -jnp.zeros_like(w))
        return jnp.where(index % 3 == 0, zero, w)

    return jax.tree.map(prune, params)


@each_way
@each_format
def test_a_pruned_weight_starts_from_zero(name, advance):
    tx = sgd(FORMATS[name])
    params, state = train(tx, advance, start(), tx.init(start()))
    params = pruned(params)
    ones = jax.tree.map(lambda w: jnp.ones(w.shape, jnp.float32), params)
    after, state = jax.jit(advance, static_argnums=0)(tx, params, state, ones)
    for w in after.values():
        is_pruned = np.arange(w.size).reshape(w.shape) % 3 == 0
        np.testing.assert_array_equal(np.asarray(w)[is_pruned], -(2.0**-7))


@each_format
def test_weights_that_became_nan_can_be_replaced(name):
    tx = sgd(FORMATS[name])
    params = start()
    state = tx.init(params)
    nan = jax.tree.map(lambda w: jnp.full(w.shape, jnp.nan, jnp.float32), params)
    step = jax.jit(lowbit_optax.step, static_argnums=0)
    params, state = step(tx, params, state, nan)
    assert all(np.isnan(np.asarray(w, np.float32)).all() for w in params.values())
    zeros = jax.tree.map(jnp.zeros_like, params)
    ones = jax.tree.map(lambda w: jnp.ones(w.shape, jnp.float32), params)
    after, _ = step(tx, zeros, state, ones)
    for w in after.values():
        np.testing.assert_array_equal(np.asarray(w, np.float32), -(2.0**-7))
