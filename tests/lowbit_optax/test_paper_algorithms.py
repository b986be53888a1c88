"""Algorithms 2 to 5 of Zamirai et al. 2020 against plain numpy, bit for bit.

The reference is the paper's pseudocode on ml_dtypes.bfloat16 arrays in numpy, where
every operation takes bfloat16 and rounds its result to nearest: the paper's 16-bit
unit. It shares with the library only the random words of the stochastic subtraction,
which it applies by itself.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax import lax
from optimizers import assert_same_bits

import lowbit_optax
from lowbit_optax._numerics.random_bits import leaf_number, random_bits
from lowbit_optax.emulation import sixteen_bit_adamw, sixteen_bit_sgd

bf16 = ml_dtypes.bfloat16
SHAPES = {"b": (33,), "w": (64, 33)}


def starting_weights(dtype=bf16):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=s).astype(dtype) for name, s in SHAPES.items()}


def gradients(steps, dtype=bf16):
    """Noise of several magnitudes around a fixed direction."""
    rng = np.random.default_rng(1)
    scale = {name: 10.0 ** rng.uniform(-3, 1, s) for name, s in SHAPES.items()}
    noise = {n: rng.normal(0.3, 1, (steps, *s)) for n, s in SHAPES.items()}
    return {name: (noise[name] * scale[name]).astype(dtype) for name in SHAPES}


@functools.partial(jax.jit, static_argnums=(2, 3))
def _words(seed, step, name, shape):
    return random_bits(seed, step, [leaf_number(f"['{name}']")])[0].words(shape)


def stochastic_minus(w, x, name, step, seed):
    """The paper's circled minus: bfloat16 in, the exact result rounded stochastically.

    The difference is formed in float32 (the unit's accumulator); its upper 16 bits are
    a bfloat16, and the lower 16 go up with their share of 2^16.
    """
    difference = w.astype(np.float32) - x.astype(np.float32)
    words = np.asarray(_words(jnp.uint32(seed), jnp.uint32(step), name, w.shape))
    bits = difference.view(np.uint32) + (words >> 16)
    return (bits >> 16).astype(np.uint16).view(bf16)


def kahan_add(w, c, u):
    """Algorithm 3, lines 7 to 10: the weight and its compensation."""
    y = u - c
    s = w + y
    return s, (s - w) - y


def numpy_sgd(w, grads, eta, mu, d, *, rounding, name, seed=0):
    """Algorithms 2 (stochastic rounding) and 3 (Kahan); their line numbers."""
    number = w.dtype.type
    mu, d = number(mu), number(d)
    m, c = np.zeros_like(w), np.zeros_like(w)  # Algorithm 3, line 2
    for t, gradient in enumerate(grads):
        eta_t = number(eta(t) if callable(eta) else eta)
        g = gradient + d * w  # 3 and 4
        m = mu * m + g  # 4 and 5
        if rounding == "kahan":
            w, c = kahan_add(w, c, -(eta_t * m))  # 6 to 10
        elif rounding == "stochastic":
            w = stochastic_minus(w, eta_t * m, name, t, seed)  # 5
        else:
            w = w - eta_t * m
    return dict(w=w, c=c, m=m)


def numpy_adamw(w, grads, eta, b1, b2, eps, d, *, rounding, name, seed=0):
    """Algorithms 4 (stochastic rounding) and 5 (Kahan); their line numbers."""
    number = w.dtype.type
    b1, b2, eps, d = number(b1), number(b2), number(eps), number(d)
    one = number(1)
    c1, c2 = one, one  # 2
    c, m, v = (np.zeros_like(w) for _ in range(3))  # Algorithm 5, line 3
    for t, g in enumerate(grads):  # 4 and 5
        eta_t = number(eta(t) if callable(eta) else eta)
        m = b1 * m + (one - b1) * g  # 5 and 6
        v = b2 * v + (one - b2) * (g * g)  # 6 and 7
        c1 = c1 * b1  # 7 and 8
        c2 = c2 * b2  # 8 and 9
        m_hat = m / (one - c1)  # 9 and 10
        v_hat = np.sqrt(v / (one - c2))  # 10 and 11
        step = eta_t * m_hat / (v_hat + eps) + eta_t * d * w  # 11 and 12
        if rounding == "kahan":
            w, c = kahan_add(w, c, -step)  # 12 to 16
        elif rounding == "stochastic":
            w = stochastic_minus(w, step, name, t, seed)  # 11
        else:
            w = w - step
    return dict(w=w, c=c, m=m, v=v)


def run_library(tx, grads, *, jit, start=None):
    """Params and state after one step per gradient."""
    start = starting_weights(grads["w"].dtype) if start is None else start
    params = jax.tree.map(jnp.asarray, start)
    grads = jax.tree.map(jnp.asarray, grads)
    state = tx.init(params)
    if not jit:
        for t in range(len(grads["w"])):
            now = jax.tree.map(lambda g, t=t: g[t], grads)
            updates, state = tx.update(now, state, params)
            with jax.numpy_dtype_promotion("standard"):
                params = optax.apply_updates(params, updates)
        return params, state

    def one(carry, now):
        params, state = carry
        return lowbit_optax.step(tx, params, state, now), None

    return jax.jit(lambda *start: lax.scan(one, start, grads)[0])(params, state)


def schedule(count):
    """A warm-up and decay, of exact float32 operations."""
    if isinstance(count, int):
        count = np.float32(count)
        return (np.float32(2) ** np.float32(-7)) * (np.minimum(count, 64) + 1) / 64
    count = count.astype(jnp.float32)
    return jnp.float32(2.0**-7) * (jnp.minimum(count, 64) + 1) / 64


# Without jit one step takes as long as a hundred with.
modes = pytest.mark.parametrize(
    ("jit", "steps"), [(True, 400), (False, 25)], ids=["jit", "eager"]
)
SGD = dict(momentum=0.9, weight_decay=5e-4)
ADAMW = dict(b1=0.9, b2=0.997, eps=1e-8, weight_decay=0.01)


def reference_of(run, grads, eta, rounding, **options):
    start = starting_weights(grads["w"].dtype)
    return {
        name: run(
            start[name], grads[name], eta, rounding=rounding, name=name, **options
        )
        for name in SHAPES
    }


sgd_reference = functools.partial(reference_of, numpy_sgd, mu=0.9, d=5e-4)
adamw_reference = functools.partial(
    reference_of, numpy_adamw, b1=0.9, b2=0.997, eps=1e-8, d=0.01
)


def assert_is(got, reference, *, moments, is_kahan):
    """Weights, compensations and moments have the reference's bits."""
    params, state = got
    for name, expected in reference.items():
        start = starting_weights(expected["w"].dtype)[name]
        # They went somewhere, so that equality says something.
        assert np.mean(expected["w"] != start) > 0.5
        assert_same_bits(params[name], expected["w"])
        for field, key in moments.items():
            stored = getattr(state.inner_state, field)[name]
            assert_same_bits(stored, expected[key])
        if is_kahan:
            assert_same_bits(state.residual.tree[name], expected["c"])
            assert np.any(expected["c"].astype(np.float32) != 0)


assert_is_sgd = functools.partial(assert_is, moments={"trace": "m"})
assert_is_adamw = functools.partial(assert_is, moments={"mu": "m", "nu": "v"})


UNITS = {
    "sgd": (sixteen_bit_sgd, SGD, sgd_reference, assert_is_sgd),
    "adamw": (sixteen_bit_adamw, ADAMW, adamw_reference, assert_is_adamw),
}


@modes
@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_is_the_papers_algorithm_bit_for_bit(unit, rounding, jit, steps):
    # Algorithms 2 (SGD) and 4 (AdamW) round stochastically; 3 and 5 are Kahan's.
    make, options, reference, assert_is_algorithm = UNITS[unit]
    grads = gradients(steps)
    tx = make(0.01, **options, rounding=rounding, seed=5)
    seed = int(tx.init(starting_weights()).seed)
    expected = reference(grads, 0.01, rounding, seed=seed)
    got = run_library(tx, grads, jit=jit)
    assert_is_algorithm(got, expected, is_kahan=rounding == "kahan")


def test_adamw_rounds_after_every_operation_with_betas_that_show_it():
    # 1 - 0.997 is a power of two in bfloat16 and 1 - 0.9 exact; these are not.
    grads = gradients(100)
    betas = dict(b1=0.1, b2=0.98)
    tx = sixteen_bit_adamw(0.01, **{**ADAMW, **betas})
    reference = adamw_reference(grads, 0.01, "kahan", **betas)
    assert_is_adamw(run_library(tx, grads, jit=True), reference, is_kahan=True)


def test_with_weights_rounded_to_nearest_it_is_the_same_up_to_the_last_line():
    grads = gradients(100)
    tx = sixteen_bit_sgd(0.01, **SGD, rounding="nearest")
    reference = sgd_reference(grads, 0.01, "nearest")
    assert_is_sgd(run_library(tx, grads, jit=True), reference, is_kahan=False)


@pytest.mark.slow_to_compile
def test_the_unit_may_be_a_float16_one():
    grads = gradients(100, np.float16)
    sgd = sixteen_bit_sgd(0.01, **SGD, dtype=jnp.float16)
    reference = sgd_reference(grads, 0.01, "kahan")
    assert_is_sgd(run_library(sgd, grads, jit=True), reference, is_kahan=True)
    arguments = {**ADAMW, "eps": 1e-4}
    adamw = sixteen_bit_adamw(0.01, **arguments, dtype=jnp.float16)
    reference = adamw_reference(grads, 0.01, "kahan", eps=1e-4)
    assert_is_adamw(run_library(adamw, grads, jit=True), reference, is_kahan=True)


def test_a_learning_rate_schedule_is_rounded_to_the_unit_at_each_step():
    grads = gradients(100)
    got = run_library(sixteen_bit_sgd(schedule, **SGD), grads, jit=True)
    assert_is_sgd(got, sgd_reference(grads, schedule, "kahan"), is_kahan=True)
    got = run_library(sixteen_bit_adamw(schedule, **ADAMW), grads, jit=True)
    assert_is_adamw(got, adamw_reference(grads, schedule, "kahan"), is_kahan=True)


def test_float32_gradients_are_rounded_to_the_unit_first():
    grads = gradients(20)
    rng = np.random.default_rng(3)
    # Off by less than half of bfloat16's last bit: they round to the same gradients.
    wide = {
        n: g.astype(np.float32) * (1 + rng.uniform(-1, 1, g.shape) * 2.0**-10)
        for n, g in grads.items()
    }
    wide = {n: g.astype(np.float32) for n, g in wide.items()}
    for n in SHAPES:
        assert_same_bits(wide[n].astype(bf16), grads[n])
    tx = sixteen_bit_sgd(0.01, **SGD)
    got = run_library(tx, wide, jit=True, start=starting_weights())
    assert_is_sgd(got, sgd_reference(grads, 0.01, "kahan"), is_kahan=True)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: sixteen_bit_adamw(1e-3, b2=0.999), r"b2 is 0\.999, which is 1 in bfl"),
        (lambda: sixteen_bit_adamw(1e-3, b1=0.999), r"b1 is 0\.999, which is 1 in bfl"),
        (
            lambda: sixteen_bit_adamw(1e-3, dtype=jnp.float16),
            r"eps is 1e-08, which is not above 0 in float16; take 6\.0e-08 or larger",
        ),
        (lambda: sixteen_bit_adamw(1e-3, eps=0.0), r"eps is 0\.0"),
        (lambda: sixteen_bit_sgd(1e-3, rounding="up"), "rounding is 'up', not 'kahan'"),
        (lambda: sixteen_bit_sgd(1e-3, dtype=jnp.float32), "dtype is float32, not bfl"),
        (
            lambda: sixteen_bit_sgd(float("nan")),
            "sixteen_bit_sgd: learning_rate is nan",
        ),
    ],
)
def test_the_unit_refuses_what_its_format_cannot_hold(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_the_unit_takes_a_weight_format():
    weights = starting_weights()
    tx = sixteen_bit_sgd(0.01, rounding=lowbit_optax.master_copy())
    state = tx.init(jax.tree.map(jnp.asarray, weights))
    np.testing.assert_array_equal(state.residual.tree["w"], weights["w"])


# The default, float32 arithmetic: a float32 run up to what storing rounds.

STEPS = 200


def float32_run(tx, grads):
    start = {
        n: jnp.asarray(w.astype(np.float32)) for n, w in starting_weights().items()
    }
    grads = {n: jnp.asarray(g.astype(np.float32)) for n, g in grads.items()}

    def one(carry, now):
        params, state = carry
        params, state = lowbit_optax.step(tx, params, state, now)
        return (params, state), params

    _, path = jax.jit(lambda p: lax.scan(one, (p, tx.init(p)), grads))(start)
    return {n: np.asarray(x).astype(np.float64) for n, x in path.items()}


def errors_of(tx, plain, grads):
    """Per leaf, the masters' errors and a float32 run's path, after these gradients."""
    with jax.numpy_dtype_promotion("standard"):  # for optax.adamw
        params, state = run_library(tx, grads, jit=True)
        path = float32_run(plain, grads)
    masters = lowbit_optax.master_weights(params, state)
    for name in SHAPES:
        yield np.asarray(masters[name]).astype(np.float64) - path[name][-1], path[name]


def largest_weight_and_step(path):
    steps = np.diff(path, axis=0, prepend=path[:1])
    return np.abs(path).max(axis=0), np.abs(steps).max(axis=0)


def assert_within(error, deviation, rounding):
    """Independent errors of these standard deviations, and float32's own roundings.

    By Azuma-Hoeffding none of 2,145 elements is past 7 deviations.
    """
    assert np.all(np.abs(error) <= 7 * deviation + rounding)
    assert abs(error.sum()) <= 5 * np.sqrt(np.sum(deviation**2)) + rounding.sum()


SGD_PLAIN = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(1e-3, 0.9))
ADAMW_PLAIN = optax.adamw(1e-3, **ADAMW)
# Kahan: the compensation is at most half a unit, 2^-8 |w|, and spaced 2^-7 of itself.
KAHAN_SPACING, PARAM_SPACING = 2.0**-15, 2.0**-7


@pytest.mark.parametrize(
    ("alias", "options", "plain", "spacing"),
    [
        (lowbit_optax.kahan_sgd, SGD, SGD_PLAIN, KAHAN_SPACING),
        (lowbit_optax.sr_sgd, SGD, SGD_PLAIN, PARAM_SPACING),
        (lowbit_optax.kahan_adamw, ADAMW, ADAMW_PLAIN, KAHAN_SPACING),
        (lowbit_optax.sr_adamw, ADAMW, ADAMW_PLAIN, PARAM_SPACING),
    ],
    ids=["kahan_sgd", "sr_sgd", "kahan_adamw", "sr_adamw"],
)
def test_in_float32_arithmetic_masters_follow_the_float32_run(
    alias, options, plain, spacing
):
    # Storing a weight w rounds stochastically to a spacing of at most spacing * |w|:
    # over T steps a standard deviation of at most half of that times sqrt(T). float32
    # rounds in the two runs by 2^-22 |w| a step, or of the step itself.
    tx = alias(1e-3, **options, moments="float32", seed=1)
    for error, path in errors_of(tx, plain, gradients(STEPS)):
        largest, step = largest_weight_and_step(path)
        deviation = spacing / 2 * np.sqrt(STEPS) * largest
        assert_within(error, deviation, STEPS * 2.0**-22 * (largest + step))


def test_bfloat16_moments_leave_the_sgd_run_unbiased():
    # Momentum rounded stochastically: d(m) of at most 2^-8 |m| in standard deviation,
    # and a d(m) moves the weight by eta / (1 - mu) d(m) in all.
    tx = lowbit_optax.kahan_sgd(1e-3, **SGD, seed=2)
    for error, path in errors_of(tx, SGD_PLAIN, gradients(STEPS)):
        largest, step = largest_weight_and_step(path)
        deviation = np.sqrt(STEPS) * np.hypot(
            step / (1 - 0.9) * 2.0**-8, KAHAN_SPACING / 2 * largest
        )
        assert_within(error, deviation, STEPS * 2.0**-22 * largest)


def test_bfloat16_moments_keep_adamw_within_five_percent_of_its_travel():
    # nu is rounded by 2^-8 of itself (standard deviation, at most) and forgets that by
    # b2: together 2^-8 / sqrt(1 - b2^2) = 5.1% of nu, half of that of the step. mu:
    # 2^-8 / sqrt(1 - b1^2) = 0.9% of its largest value.
    grads = {n: np.abs(g) for n, g in gradients(STEPS).items()}  # travel one way
    tx = lowbit_optax.kahan_adamw(1e-3, **ADAMW, seed=2)
    size = lambda x: np.sqrt(np.mean(x**2))
    for error, path in errors_of(tx, ADAMW_PLAIN, grads):
        travel = size(path[-1] - path[0])
        assert travel > 0.1
        assert size(error) <= 0.05 * travel
