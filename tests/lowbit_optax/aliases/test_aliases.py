"""Aliases train like optax's float32 counterparts and accept the same arguments."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from tests.helpers.optimizers import (
    ALIASES,
    EVERY_ALIAS,
    OF_OPTAX,
    UNIT,
    VARIANTS,
    WRAPPED,
    Optimizer,
    assert_same_bits,
    each,
    gradient_series,
    model_params,
    train,
)

pytestmark = pytest.mark.standard_promotion

STEPS = 400

each_alias = pytest.mark.parametrize("alias", EVERY_ALIAS.values(), ids=EVERY_ALIAS)
BFLOAT16_SPACING = 2.0**-7  # for weights between 1 and 2, as in the parabola


def _parabola():
    """Returns the start and the minimum of ``sum((w - target)**2) / 2``."""
    target = 1.5 + 0.3 * jax.random.uniform(jax.random.key(1), (64, 8), minval=-1.0)
    return jnp.full((64, 8), 1.5), target


def _minimise(tx, params, target):
    def body(carry, _):
        params, state = carry
        grads = (params.astype(jnp.float32) - target).astype(params.dtype)
        return lowbit_optax.step(tx, params, state, grads), None

    @jax.jit
    def run(params):
        carry = params, tx.init(params)
        return jax.lax.scan(body, carry, None, length=STEPS)[0]

    return run(params)


def _rms(x):
    return float(jnp.sqrt(jnp.mean(jnp.square(x))))


def _decaying(peak):
    return optax.linear_schedule(peak, 0.0, STEPS)


@functools.cache
def _float32_error(reference, peak):
    start, target = _parabola()
    params, _ = _minimise(reference(_decaying(peak)), start, target)
    return _rms(params - target)


@each(ALIASES | VARIANTS | UNIT | WRAPPED)
def test_reaches_the_minimum_of_a_parabola_as_float32_training_does(optimizer):
    start, target = _parabola()
    tx = optimizer(_decaying(optimizer.peak))
    params, state = _minimise(tx, start.astype(jnp.bfloat16), target)
    assert params.dtype == jnp.bfloat16
    # The gradient is evaluated at the parameter, at most one spacing away from its
    # master. Without a residual, the parameter keeps jumping between neighbours.
    spacings = 1 if state.residual.by_name else 2
    reference = _float32_error(optimizer.reference, optimizer.peak)
    allowed = spacings * BFLOAT16_SPACING + reference
    assert _rms(lowbit_optax.master_weights(params, state) - target) < allowed


@pytest.mark.parametrize("name", OF_OPTAX)
def test_takes_optax_arguments_in_their_order_with_their_defaults(name):
    theirs = inspect.signature(OF_OPTAX[name]).parameters
    ours = inspect.signature(EVERY_ALIAS[name]).parameters
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    expected = [p for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == [p.name for p in expected]
    assert [p.default for p in positional] == [p.default for p in expected]
    keyword_only = {p for p in theirs.values() if p.kind is p.KEYWORD_ONLY}
    assert {p.name for p in keyword_only} <= set(ours)


def test_every_adamw_argument_reaches_optax():
    params = model_params()
    mask = {"kernel": True, "bias": False}
    arguments = (0.01, 0.8, 0.95, 1e-4, 1e-6, jnp.bfloat16, 0.1, mask)
    _assert_trains_as_float32(
        lowbit_optax.extra_bits_adamw(*arguments, nesterov=True, min_size=0),
        optax.adamw(*arguments, nesterov=True),
        params,
    )


def test_every_sgd_argument_reaches_optax():
    _assert_trains_as_float32(
        lowbit_optax.extra_bits_sgd(
            0.01, 0.8, True, jnp.bfloat16, weight_decay=0.1, min_size=0
        ),
        optax.chain(
            optax.add_decayed_weights(0.1), optax.sgd(0.01, 0.8, True, jnp.bfloat16)
        ),
        model_params(),
    )


def _assert_trains_as_float32(tx, reference, params):
    masters = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    series = gradient_series(params, 10)
    got, state = train(tx, params, tx.init(params), series)
    want, _ = train(reference, masters, reference.init(masters), series)
    assert_same_bits(lowbit_optax.master_weights(got, state), want)


@pytest.mark.parametrize(
    "alias",
    [lowbit_optax.kahan_sgd, lowbit_optax.sr_sgd, lowbit_optax.extra_bits_sgd],
)
def test_sgd_weight_decay_is_added_to_the_gradient(alias):
    params = jnp.full(64, 2.0, jnp.bfloat16)
    tx = alias(0.25, weight_decay=0.5)
    moved, _ = lowbit_optax.step(tx, params, tx.init(params), jnp.ones(64))
    np.testing.assert_array_equal(np.asarray(moved, np.float32), 2 - 0.25 * (1 + 1))


@pytest.mark.parametrize("moments", [{"nu": lowbit_optax.cast("bfloat16")}, {}])
def test_moments_without_a_format_are_float32(moments):
    tx = lowbit_optax.kahan_adamw(1e-3, moments=moments)
    adam = tx.init(jnp.ones(64, jnp.bfloat16)).inner_state[0]
    assert adam.mu.dtype == "float32"
    assert adam.nu.dtype == ("bfloat16" if moments else "float32")


@pytest.mark.parametrize("name", ["lowbit_sgd", "lowbit_adamw", "lowbit_lion"])
def test_a_preset_is_lowbit_around_optax_alias(name):
    params = {"kernel": jnp.ones((64, 64), jnp.bfloat16)}
    arguments = (0.01, 0.9) if name == "lowbit_sgd" else (0.01,)
    tx = EVERY_ALIAS[name](*arguments, implementation="xla")
    want = lowbit_optax.lowbit(OF_OPTAX[name](*arguments), implementation="xla")

    def program(tx):
        step = functools.partial(lowbit_optax.step, tx)
        return str(jax.make_jaxpr(step)(params, tx.init(params), params))

    assert_same_bits(tx.init(params), want.init(params))
    assert program(tx) == program(want)


NOT_A_RATE = [None, "0.1", [0.1], True, 1j, np.float16(0.1), np.uint8(1)]
NOT_FINITE = [float("nan"), float("inf"), -float("inf"), np.float32("nan")]


@each_alias
def test_an_invalid_learning_rate_raises_a_clear_error(alias):
    name = f"{alias.__name__}: learning_rate"
    for rate in NOT_A_RATE:
        with pytest.raises(TypeError, match=f"{name} .*number.*schedule"):
            alias(rate)
    for rate in NOT_FINITE:
        with pytest.raises(ValueError, match=f"{name} .*{rate}"):
            alias(rate)
    with pytest.raises(ValueError, match=rf"{name} .*\(3,\)"):
        alias(jnp.ones(3))
    for rate in (1, -0.5, 0, np.float32(0.1), jnp.float32(0.1), lambda count: 0.1):
        assert alias(rate)


def test_other_hyperparameters_that_are_not_numbers_are_refused():
    for alias, name, value in (
        (lowbit_optax.kahan_sgd, "momentum", "0.9"),
        (lowbit_optax.sr_sgd, "weight_decay", "0.1"),
        (lowbit_optax.lpmm_adam, "b1", None),
        (lowbit_optax.extra_bits_adamw, "b2", jnp.bfloat16(0.999)),
        (lowbit_optax.lowbit_adamw, "eps", jnp.float16(1e-4)),
        (lowbit_optax.lowbit_lion, "weight_decay", None),
    ):
        with pytest.raises(TypeError, match=f"{alias.__name__}: {name} .*number"):
            alias(0.1, **{name: value})
        with pytest.raises(ValueError, match=f"{name} .*nan"):
            alias(0.1, **{name: float("nan")})


@pytest.mark.parametrize(
    ("alias", "argument", "field", "stored"),
    [
        (lowbit_optax.kahan_adamw, "mu_dtype", "mu", "Cast"),
        (lowbit_optax.sr_adamw, "mu_dtype", "mu", "Cast"),
        (lowbit_optax.lowbit_adamw, "mu_dtype", "mu", "8-bit codes"),
        (lowbit_optax.lowbit_lion, "mu_dtype", "mu", "8-bit codes"),
        (lowbit_optax.kahan_sgd, "accumulator_dtype", "trace", "Cast"),
        (lowbit_optax.lowbit_sgd, "accumulator_dtype", "trace", "8-bit codes"),
    ],
)
def test_two_storages_of_one_moment_are_refused(alias, argument, field, stored):
    make = alias if field == "mu" else functools.partial(alias, momentum=0.9)
    message = f"{argument} is bfloat16.*{field}.*{stored}"
    with pytest.raises(ValueError, match=message):
        make(0.1, **{argument: jnp.bfloat16})
    with pytest.raises(ValueError, match=f"{argument} is float16.*{field}.*Cast"):
        make(
            0.1, **{argument: "float16"}, moments={field: lowbit_optax.cast("bfloat16")}
        )
    # An argument is fine as long as only one of the two options sets the dtype.
    for moments in ("float32", {}, {field: "float32"}):
        tx = make(0.1, **{argument: jnp.bfloat16}, moments=moments)
        state = tx.init(jnp.ones((64, 64), jnp.bfloat16)).inner_state[0]
        assert getattr(state, field).dtype == jnp.bfloat16
    assert make(0.1, **{argument: jnp.float32})


def test_optimizer_table_names_every_alias():
    tabled = {name.removesuffix("_8").removesuffix("_16") for name in ALIASES}
    assert tabled == set(OF_OPTAX)
    assert all(isinstance(value, Optimizer) for value in ALIASES.values())
