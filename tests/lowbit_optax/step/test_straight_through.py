"""Steps on narrow leaves have the derivatives of optax in float32.

Rounding counts as the identity. The derivative for a narrow parameter is narrow as
well. It is exact here, because the coefficients of the losses are powers of two, and
weight decay multiplies them by 7/8.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import lowbit_optax
from tests.helpers.optimizers import ALL_FORMATS

pytestmark = pytest.mark.standard_promotion

FORMATS = {name: x for name, x in ALL_FORMATS.items() if name != "extra_bits_16"} | {
    "stochastic_sum": lowbit_optax.stochastic_rounding(sum_rounding="stochastic"),
    "error_into_mu": lowbit_optax.stochastic_rounding(error_feedback="mu"),
    "kahan_16_bit_unit": lowbit_optax.kahan(arithmetic="param"),
    "extra_bits_8_sum": lowbit_optax.extra_bits(8, sum_rounding="stochastic"),
    "extra_bits_most": lowbit_optax.extra_bits(),
}
DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
MIN_SIZE = 64  # the leaf "small" is below it
SHAPES = {"w": (8, 128), "small": (3,)}
RATE = 0.25

_rng = np.random.default_rng(0)
_draw = lambda shape: jnp.asarray(_rng.standard_normal(shape), jnp.float32)
MASTERS = {name: _draw(shape) for name, shape in SHAPES.items()}
GRADS = {name: _draw(shape) for name, shape in SHAPES.items()}
COEFFICIENTS = {
    name: jnp.asarray(2.0 ** _rng.integers(-2, 3, shape), jnp.float32)
    for name, shape in SHAPES.items()
}


def wide(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)


def weighted(tree, power=1):
    terms = jax.tree.map(lambda c, x: jnp.sum(c * x**power), COEFFICIENTS, wide(tree))
    return sum(jax.tree.leaves(terms))


def adamw(rate):
    return optax.adamw(rate, eps=0.1, weight_decay=0.5)


def by_update(apply_updates, around=lambda tx: tx):
    def run(tx, params, state, grads):
        updates, state = around(tx).update(grads, state, params)
        return apply_updates(params, updates), state

    return run


ROUTES = {
    "step": lowbit_optax.step,
    "update": by_update(optax.apply_updates),
    "apply_updates": by_update(lowbit_optax.apply_updates),
    "direct_updates": by_update(optax.apply_updates, lowbit_optax.direct_updates),
}
optax_step = ROUTES["update"]


def after_a_step(make, run, power=1):
    """Returns the loss after a step, given rate, parameters and gradients."""

    def loss(rate, params, grads):
        tx = make(adamw(rate))
        return weighted(run(tx, params, tx.init(params), grads)[0], power)

    return loss


def lowbit_of(name, **options):
    weights, fixed = FORMATS[name], {"min_size": MIN_SIZE, "moments": "float32"}
    options = fixed | options
    return lambda inner: lowbit_optax.lowbit(inner, weights=weights, **options)


def derivatives_of(loss, params):
    """Returns gradients for rate, parameters and gradients, and the rate's jvp."""
    first = jax.grad(loss, (0, 1, 2))(RATE, params, GRADS)
    by_rate = lambda rate: loss(rate, params, GRADS)
    forward = jax.jvp(by_rate, (RATE,), (1.0,))[1]
    return *first, forward


def derivatives(route, dtype, name, implementation="xla"):
    """Returns derivatives of a linear loss, and the second derivative of a square."""
    params = jax.tree.map(lambda x: x.astype(dtype), MASTERS)
    make = lowbit_of(name, implementation=implementation)
    linear, square = (after_a_step(make, ROUTES[route], power) for power in (1, 2))

    def compute(params):
        by_rate = jax.grad(lambda rate: square(rate, params, GRADS))
        second = jax.jvp(by_rate, (RATE,), (1.0,))[1]
        return *derivatives_of(linear, params), second

    # On a mesh of one CPU, the implementation None cuts leaves into blocks.
    with jax.set_mesh(jax.make_mesh((1,), ("x",), (AxisType.Auto,))):
        return jax.jit(compute)(params)


@functools.cache
def derivatives_by_optax(dtype):
    params = wide(jax.tree.map(lambda x: x.astype(dtype), MASTERS))
    linear, square = (
        after_a_step(lambda inner: inner, optax_step, power) for power in (1, 2)
    )
    second = jax.hessian(lambda rate: square(rate, params, GRADS))
    return *jax.jit(lambda p: derivatives_of(linear, p))(params), second(RATE)


def check(got, dtype):
    rate, params, grads, forward, second = got
    want = derivatives_by_optax(dtype)
    for a, b in zip(
        jax.tree.leaves(wide(params)), jax.tree.leaves(want[1]), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want[2]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(rate, want[0], rtol=1e-4)
    # Tangents of parameters, and their cotangents after a square, are rounded.
    eps = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(forward, want[3], rtol=eps)
    np.testing.assert_allclose(second, want[4], rtol=eps)


KERNELS = (
    "stochastic_rounding",
    "error_into_mu",
    "master_copy",
    "kahan",
    "extra_bits_8",
)
CASES = [("step", "bfloat16", name, "xla") for name in FORMATS]
CASES += [
    (route, dtype, name, "xla")
    for route in ROUTES
    for dtype in DTYPES
    for name in ("stochastic_sum", "kahan", "extra_bits_8_toward_zero")
    # optax cannot add float32 to float8.
    if not (route == "update" and "float8" in dtype)
]
CASES += [
    (route, "bfloat16", name, implementation)
    for implementation in (None, "pallas", "tpu")
    for route in ("step", "apply_updates")
    for name in KERNELS
]


@pytest.mark.parametrize(("route", "dtype", "name", "implementation"), CASES)
def test_a_step_has_the_derivatives_of_optax(route, dtype, name, implementation):
    check(derivatives(route, dtype, name, implementation), dtype)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_have_the_derivatives_of_parameters(dtype, name):
    tx = lowbit_of(name)(adamw(RATE))
    masters = lambda params, state: weighted(lowbit_optax.master_weights(params, state))
    start = lambda master: lowbit_optax.from_master(tx, master, dtype, None)

    @jax.jit
    def compute(params):
        state = tx.init(params)
        return [
            jax.grad(lambda params: masters(params, state))(params),
            jax.grad(lambda master: weighted(start(master)[0]))(MASTERS),
            jax.grad(lambda master: masters(*start(master)))(MASTERS),
        ]

    for got in compute(jax.tree.map(lambda x: x.astype(dtype), MASTERS)):
        jax.tree.map(np.testing.assert_array_equal, wide(got), COEFFICIENTS)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"error_into_mu"}))
def test_split_arrays_have_derivatives(name):
    def loss(x, y):
        split = lowbit_optax.split_array(x, jnp.bfloat16, FORMATS[name])
        return jnp.sum(lowbit_optax.join_array((split + y) * y))

    x, y = jnp.float32([1.0, 2.0, -4.0]), jnp.float32([0.5, 0.25, 2.0])
    by_x, by_y = jax.grad(loss, (0, 1))(x, y)
    np.testing.assert_allclose(by_x, y, rtol=2**-8)
    np.testing.assert_allclose(by_y, x + 2 * y, rtol=2**-8)


INPUTS = _draw((16, 8))
TARGETS = jnp.sin(3 * INPUTS @ _draw((8, 32)))
START = 0.3 * _draw((8, 32))
SGD = functools.partial(optax.sgd, momentum=0.9)


def inner_loss(params):
    return 100 * jnp.mean((jnp.tanh(INPUTS @ wide(params)) - TARGETS) ** 2)


inner_grads = jax.grad(inner_loss)


def adapted(make, run, steps, grads=inner_grads):
    """Returns the loss after some training, given rate and parameters."""

    def loss(rate, params):
        tx = make(rate)
        state = tx.init(params)
        for _ in range(steps):
            params, state = run(tx, params, state, grads(params))
        return inner_loss(params)

    return loss


BFLOAT16 = lowbit_optax.cast(jnp.bfloat16)
TRAINING = {
    "one step, quantised moments": (adamw, 0.05, 1, lowbit_optax.block_quantized()),
    "AdamW": (adamw, 0.05, 3, "float32"),
    "SGD, bfloat16 moments": (SGD, 0.02, 3, BFLOAT16),
}


@functools.cache
def by_optax(training, is_first_order):
    """Returns float32 gradients for rate and parameters, from training with optax.

    If ``is_first_order`` is True, second derivatives of the inner loss are omitted.
    """
    inner, rate, steps, _ = TRAINING[training]
    stopped = lambda params: jax.lax.stop_gradient(inner_grads(params))
    grads = stopped if is_first_order else inner_grads
    loss = adapted(inner, optax_step, steps, grads)
    return jax.jit(jax.grad(loss, (0, 1)))(rate, wide(START.astype(jnp.bfloat16)))


@pytest.mark.parametrize(
    ("training", "name"),
    [
        (x, name)
        for x, (inner, *_) in TRAINING.items()
        for name in FORMATS
        if inner is adamw or name != "error_into_mu"
    ],
)
def test_training_inside_a_loss_has_the_derivatives_of_optax(training, name):
    inner, rate, steps, moments = TRAINING[training]
    of = lowbit_of(name, moments=moments)
    loss = adapted(lambda rate: of(inner(rate)), lowbit_optax.step, steps)
    got = jax.jit(jax.grad(loss, (0, 1)))(rate, START.astype(jnp.bfloat16))
    (by_rate, by_params), norm = by_optax(training, False), jnp.linalg.norm
    error = norm(wide(got[1]) - by_params) / norm(by_params)
    of_first_order = norm(by_optax(training, True)[1] - by_params) / norm(by_params)
    np.testing.assert_allclose(got[0], by_rate, rtol=0.02)
    assert error < min(0.02, of_first_order / 3)
