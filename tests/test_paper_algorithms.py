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

import lowbit_optax
from lowbit_optax._numerics.random_bits import leaf_number, random_bits

bf16 = ml_dtypes.bfloat16
SHAPES = {"b": (33,), "w": (64, 33)}
ONE = bf16(1)


def starting_weights():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=s).astype(bf16) for name, s in SHAPES.items()}


def gradients(steps):
    """Noise of several magnitudes around a fixed direction, bfloat16."""
    rng = np.random.default_rng(1)
    scale = {name: 10.0 ** rng.uniform(-3, 1, s) for name, s in SHAPES.items()}
    noise = {n: rng.normal(0.3, 1, (steps, *s)) for n, s in SHAPES.items()}
    return {name: (noise[name] * scale[name]).astype(bf16) for name in SHAPES}


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


def numpy_sgd(w, grads, eta, mu, d, *, kahan, name, seed=0):
    """Algorithms 2 (stochastic rounding) and 3 (Kahan); their line numbers."""
    mu, d = bf16(mu), bf16(d)
    m, c = np.zeros_like(w), np.zeros_like(w)  # Algorithm 3, line 2
    for t, gradient in enumerate(grads):
        eta_t = bf16(eta(t) if callable(eta) else eta)
        g = gradient + d * w  # 3 and 4
        m = mu * m + g  # 4 and 5
        if kahan:
            u = -(eta_t * m)  # 6
            y = u - c  # 7
            s = w + y  # 8
            c = (s - w) - y  # 9
            w = s  # 10
        else:
            w = stochastic_minus(w, eta_t * m, name, t, seed)  # 5
    return dict(w=w, c=c, m=m)


def numpy_adamw(w, grads, eta, b1, b2, eps, d, *, kahan, name, seed=0):
    """Algorithms 4 (stochastic rounding) and 5 (Kahan); their line numbers."""
    b1, b2, eps, d = bf16(b1), bf16(b2), bf16(eps), bf16(d)
    c1, c2 = ONE, ONE  # 2
    c, m, v = (np.zeros_like(w) for _ in range(3))  # Algorithm 5, line 3
    for t, g in enumerate(grads):  # 4 and 5
        eta_t = bf16(eta(t) if callable(eta) else eta)
        m = b1 * m + (ONE - b1) * g  # 5 and 6
        v = b2 * v + (ONE - b2) * (g * g)  # 6 and 7
        c1 = c1 * b1  # 7 and 8
        c2 = c2 * b2  # 8 and 9
        m_hat = m / (ONE - c1)  # 9 and 10
        v_hat = np.sqrt(v / (ONE - c2))  # 10 and 11
        step = eta_t * m_hat / (v_hat + eps) + eta_t * d * w  # 11 and 12
        if kahan:
            u = -step  # 12
            y = u - c  # 13
            s = w + y  # 14
            c = (s - w) - y  # 15
            w = s  # 16
        else:
            w = stochastic_minus(w, step, name, t, seed)  # 11
    return dict(w=w, c=c, m=m, v=v)


def run_library(tx, grads, *, jit):
    """Params and state after a step a gradient."""
    params = jax.tree.map(jnp.asarray, starting_weights())
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


def assert_same_bits(got, expected):
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


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


def sgd_reference(grads, eta, *, kahan, seed=0):
    start = starting_weights()
    run = functools.partial(numpy_sgd, eta=eta, mu=0.9, d=5e-4, kahan=kahan, seed=seed)
    return {n: run(start[n], grads[n], name=n) for n in SHAPES}


def adamw_reference(grads, eta, *, kahan, b1=0.9, b2=0.997, seed=0):
    start = starting_weights()
    run = functools.partial(
        numpy_adamw, eta=eta, b1=b1, b2=b2, eps=1e-8, d=0.01, kahan=kahan, seed=seed
    )
    return {n: run(start[n], grads[n], name=n) for n in SHAPES}


def moved(reference):
    """The weights went somewhere, so that equality says something."""
    start = starting_weights()
    return all(np.mean(reference[n]["w"] != start[n]) > 0.5 for n in SHAPES)


@modes
def test_kahan_sgd_is_algorithm_3_bit_for_bit(jit, steps):
    grads = gradients(steps)
    tx = lowbit_optax.kahan_sgd(0.01, **SGD, arithmetic="param")
    params, state = run_library(tx, grads, jit=jit)
    reference = sgd_reference(grads, 0.01, kahan=True)
    assert moved(reference)
    for name, expected in reference.items():
        assert_same_bits(params[name], expected["w"])
        assert_same_bits(state.residual.compensation[name], expected["c"])
        assert_same_bits(state.inner_state.trace[name], expected["m"])
        assert np.any(expected["c"].astype(np.float32) != 0)


@modes
def test_sr_sgd_is_algorithm_2_bit_for_bit(jit, steps):
    grads = gradients(steps)
    tx = lowbit_optax.sr_sgd(0.01, **SGD, arithmetic="param", seed=5)
    params, state = run_library(tx, grads, jit=jit)
    reference = sgd_reference(grads, 0.01, kahan=False, seed=5)
    assert moved(reference)
    for name, expected in reference.items():
        assert_same_bits(params[name], expected["w"])
        assert_same_bits(state.inner_state.trace[name], expected["m"])


@modes
def test_kahan_adamw_is_algorithm_5_bit_for_bit(jit, steps):
    grads = gradients(steps)
    tx = lowbit_optax.kahan_adamw(0.01, **ADAMW, arithmetic="param")
    params, state = run_library(tx, grads, jit=jit)
    reference = adamw_reference(grads, 0.01, kahan=True)
    assert moved(reference)
    for name, expected in reference.items():
        assert_same_bits(params[name], expected["w"])
        assert_same_bits(state.residual.compensation[name], expected["c"])
        assert_same_bits(state.inner_state.mu[name], expected["m"])
        assert_same_bits(state.inner_state.nu[name], expected["v"])
        assert np.any(expected["c"].astype(np.float32) != 0)


def test_adamw_rounds_after_every_operation_with_betas_that_show_it():
    # 1 - 0.997 is a power of two in bfloat16 and 1 - 0.9 exact; these are not.
    grads = gradients(100)
    betas = dict(b1=0.1, b2=0.98)
    tx = lowbit_optax.kahan_adamw(0.01, **{**ADAMW, **betas}, arithmetic="param")
    params, state = run_library(tx, grads, jit=True)
    reference = adamw_reference(grads, 0.01, kahan=True, **betas)
    for name, expected in reference.items():
        assert_same_bits(params[name], expected["w"])
        assert_same_bits(state.inner_state.mu[name], expected["m"])
        assert_same_bits(state.inner_state.nu[name], expected["v"])


@modes
def test_sr_adamw_is_algorithm_4_bit_for_bit(jit, steps):
    grads = gradients(steps)
    tx = lowbit_optax.sr_adamw(0.01, **ADAMW, arithmetic="param", seed=5)
    params, state = run_library(tx, grads, jit=jit)
    reference = adamw_reference(grads, 0.01, kahan=False, seed=5)
    assert moved(reference)
    for name, expected in reference.items():
        assert_same_bits(params[name], expected["w"])
        assert_same_bits(state.inner_state.mu[name], expected["m"])
        assert_same_bits(state.inner_state.nu[name], expected["v"])


def test_a_learning_rate_schedule_is_rounded_to_the_unit_at_each_step():
    grads = gradients(100)
    tx = lowbit_optax.kahan_sgd(schedule, **SGD, arithmetic="param")
    params, _ = run_library(tx, grads, jit=True)
    for name, expected in sgd_reference(grads, schedule, kahan=True).items():
        assert_same_bits(params[name], expected["w"])
    tx = lowbit_optax.kahan_adamw(schedule, **ADAMW, arithmetic="param")
    params, _ = run_library(tx, grads, jit=True)
    for name, expected in adamw_reference(grads, schedule, kahan=True).items():
        assert_same_bits(params[name], expected["w"])


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
    tx = lowbit_optax.kahan_sgd(0.01, **SGD, arithmetic="param")
    params, _ = run_library(tx, wide, jit=True)
    for name, expected in sgd_reference(grads, 0.01, kahan=True).items():
        assert_same_bits(params[name], expected["w"])


def test_the_unit_refuses_a_beta_that_is_one_in_bfloat16():
    for alias in (lowbit_optax.kahan_adamw, lowbit_optax.sr_adamw):
        with pytest.raises(ValueError, match=r"b2 is 0\.999, which is 1 in bfloat16"):
            alias(1e-3, b2=0.999, arithmetic="param")
        with pytest.raises(ValueError, match=r"b1 is 0\.999"):
            alias(1e-3, b1=0.999, b2=0.997, arithmetic="param")


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


def assert_follows(tx, plain, relative_spacing):
    """Masters follow a float32 run of the same gradients.

    Storing a weight w rounds stochastically to a spacing of at most
    ``relative_spacing * |w|``: over T steps a standard deviation of at most half of
    that times sqrt(T), and by Azuma-Hoeffding none of 2,145 elements is past 7 of them.
    float32's own roundings in the two runs: 2^-22 |w| a step, or of the step itself.
    """
    grads = gradients(STEPS)
    with jax.numpy_dtype_promotion("standard"):  # for optax.adamw
        params, state = run_library(tx, grads, jit=True)
        path = float32_run(plain, grads)
    masters = lowbit_optax.master_weights(params, state)
    for name in SHAPES:
        steps = np.diff(path[name], axis=0, prepend=path[name][:1])
        largest = np.abs(path[name]).max(axis=0)
        travelled = np.abs(steps).max(axis=0)
        error = np.asarray(masters[name]).astype(np.float64) - path[name][-1]
        deviation = relative_spacing / 2 * np.sqrt(STEPS) * largest
        rounding = STEPS * 2.0**-22 * (largest + travelled)
        assert np.all(np.abs(error) <= 7 * deviation + rounding)
        # The mean of independent errors.
        together = np.sqrt(np.sum(deviation**2))
        assert abs(error.sum()) <= 5 * together + rounding.sum()


SGD_PLAIN = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(1e-3, 0.9))
ADAMW_PLAIN = optax.adamw(1e-3, **ADAMW)
# Kahan: the compensation is at most half a unit, 2^-8 |w|, and spaced 2^-7 of itself.
KAHAN_SPACING, PARAM_SPACING = 2.0**-15, 2.0**-7


@pytest.mark.parametrize(
    ("alias", "spacing"),
    [(lowbit_optax.kahan_sgd, KAHAN_SPACING), (lowbit_optax.sr_sgd, PARAM_SPACING)],
    ids=["kahan", "sr"],
)
def test_sgd_in_float32_arithmetic_follows_the_float32_run(alias, spacing):
    tx = alias(1e-3, **SGD, moments="float32", seed=1)
    assert_follows(tx, SGD_PLAIN, spacing)


@pytest.mark.parametrize(
    ("alias", "spacing"),
    [(lowbit_optax.kahan_adamw, KAHAN_SPACING), (lowbit_optax.sr_adamw, PARAM_SPACING)],
    ids=["kahan", "sr"],
)
def test_adamw_in_float32_arithmetic_follows_the_float32_run(alias, spacing):
    tx = alias(1e-3, **ADAMW, moments="float32", seed=1)
    assert_follows(tx, ADAMW_PLAIN, spacing)


def test_bfloat16_moments_leave_the_sgd_run_unbiased():
    # Momentum rounded stochastically: d(m) of at most 2^-8 |m| in standard deviation,
    # and a d(m) moves the weight by eta / (1 - mu) d(m) in all.
    grads = gradients(STEPS)
    tx = lowbit_optax.kahan_sgd(1e-3, **SGD, seed=2)
    params, state = run_library(tx, grads, jit=True)
    masters = lowbit_optax.master_weights(params, state)
    path = float32_run(SGD_PLAIN, grads)
    for name in SHAPES:
        error = np.asarray(masters[name]).astype(np.float64) - path[name][-1]
        steps = np.diff(path[name], axis=0, prepend=path[name][:1])
        momentum = np.abs(steps).max(axis=0) / 1e-3
        largest = np.abs(path[name]).max(axis=0)
        deviation = np.sqrt(STEPS) * np.hypot(
            1e-3 / (1 - 0.9) * 2.0**-8 * momentum, KAHAN_SPACING / 2 * largest
        )
        rounding = STEPS * 2.0**-22 * largest
        assert np.all(np.abs(error) <= 7 * deviation + rounding)
        together = np.sqrt(np.sum(deviation**2))
        assert abs(error.sum()) <= 5 * together + rounding.sum()


def test_bfloat16_moments_keep_adamw_within_five_percent_of_its_travel():
    # nu is rounded by 2^-8 of itself (standard deviation, at most) and forgets that by
    # b2: together 2^-8 / sqrt(1 - b2^2) = 5.1% of nu, half of that of the step. mu:
    # 2^-8 / sqrt(1 - b1^2) = 0.9% of its largest value.
    grads = {n: np.abs(g) for n, g in gradients(STEPS).items()}  # travel one way
    tx = lowbit_optax.kahan_adamw(1e-3, **ADAMW, seed=2)
    with jax.numpy_dtype_promotion("standard"):  # for optax.adamw
        params, state = run_library(tx, grads, jit=True)
        path = float32_run(ADAMW_PLAIN, grads)
    masters = lowbit_optax.master_weights(params, state)
    for name in SHAPES:
        error = np.asarray(masters[name]).astype(np.float64) - path[name][-1]
        travel = path[name][-1] - path[name][0]
        size = lambda x: np.sqrt(np.mean(x**2))
        assert size(travel) > 0.1
        assert size(error) <= 0.05 * size(travel)
