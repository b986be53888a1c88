"""Algorithms 2 to 5 of Zamirai et al. (2020) match plain numpy bit for bit.

The reference runs the paper's pseudocode on ml_dtypes.bfloat16 arrays in numpy. Like
the paper's 16-bit unit, every operation has bfloat16 operands and rounds its result to
nearest. Only the random words of the stochastic subtraction come from the library.
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
from lowbit_optax.emulation import sixteen_bit_adamw, sixteen_bit_sgd
from tests.helpers.optimizers import assert_same_bits

bf16 = ml_dtypes.bfloat16
SHAPES = {"b": (33,), "w": (64, 33)}


def starting_weights(dtype=bf16):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=s).astype(dtype) for name, s in SHAPES.items()}


def gradients(steps, dtype=bf16):
    """Returns noise of several magnitudes around a fixed direction."""
    rng = np.random.default_rng(1)
    scale = {name: 10.0 ** rng.uniform(-3, 1, s) for name, s in SHAPES.items()}
    noise = {n: rng.normal(0.3, 1, (steps, *s)) for n, s in SHAPES.items()}
    return {name: (noise[name] * scale[name]).astype(dtype) for name in SHAPES}


@functools.partial(jax.jit, static_argnums=(2, 3))
def _words(seed, step, name, shape):
    return random_bits(seed, step, [leaf_number(f"['{name}']")])[0].words(shape)


def stochastic_minus(w, x, name, step, seed):
    """Subtracts and rounds stochastically (the paper's circled minus).

    The difference is computed in float32, the unit's accumulator. Its upper 16 bits are
    a bfloat16, which rounds up with a probability of the lower 16 bits over 2^16.
    """
    difference = w.astype(np.float32) - x.astype(np.float32)
    words = np.asarray(_words(jnp.uint32(seed), jnp.uint32(step), name, w.shape))
    bits = difference.view(np.uint32) + (words >> 16)
    return (bits >> 16).astype(np.uint16).view(bf16)


def kahan_add(w, c, u):
    """Returns the weight and its compensation (algorithm 3, lines 7 to 10)."""
    y = u - c
    s = w + y
    return s, (s - w) - y


def numpy_sgd(w, grads, eta, mu, d, *, rounding, name, seed=0):
    """Runs algorithms 2 (stochastic rounding) and 3 (Kahan); comments number lines."""
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
    """Runs algorithms 4 (stochastic rounding) and 5 (Kahan); comments number lines."""
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
    """Returns the parameters and the state after one step per gradient."""
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
    """Returns a warm-up and decay of exact float32 operations."""
    if isinstance(count, int):
        count = np.float32(count)
        return (np.float32(2) ** np.float32(-7)) * (np.minimum(count, 64) + 1) / 64
    count = count.astype(jnp.float32)
    return jnp.float32(2.0**-7) * (jnp.minimum(count, 64) + 1) / 64


# Without jit, one step takes as long as a hundred steps with jit.
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
        # The weights must move; otherwise, equality would prove little.
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


def test_adamw_in_float16_is_the_papers_algorithm_bit_for_bit():
    grads, options = gradients(100, np.float16), {**ADAMW, "eps": 1e-4}
    expected = adamw_reference(grads, 0.01, "kahan", eps=1e-4)
    tx = sixteen_bit_adamw(0.01, **options, dtype="float16")
    assert_is_adamw(run_library(tx, grads, jit=True), expected, is_kahan=True)


def test_adamw_rounds_after_every_operation_with_betas_that_show_it():
    # 1 - 0.997 is a power of two in bfloat16, and 1 - 0.9 is exact. Use other betas.
    grads = gradients(100)
    betas = dict(b1=0.1, b2=0.98)
    tx = sixteen_bit_adamw(0.01, **{**ADAMW, **betas})
    reference = adamw_reference(grads, 0.01, "kahan", **betas)
    assert_is_adamw(run_library(tx, grads, jit=True), reference, is_kahan=True)


def test_a_learning_rate_schedule_is_rounded_to_the_unit_at_each_step():
    grads = gradients(100)
    got = run_library(sixteen_bit_sgd(schedule, **SGD), grads, jit=True)
    assert_is_sgd(got, sgd_reference(grads, schedule, "kahan"), is_kahan=True)
    got = run_library(sixteen_bit_adamw(schedule, **ADAMW), grads, jit=True)
    assert_is_adamw(got, adamw_reference(grads, schedule, "kahan"), is_kahan=True)
