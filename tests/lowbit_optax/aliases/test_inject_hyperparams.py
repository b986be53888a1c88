"""``optax.inject_hyperparams`` works around the aliases and inside ``lowbit``.

It turns every int or float argument, including defaults, into a traced array.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import emulation, lowbit
from tests.helpers.optimizers import (
    EVERY_ALIAS,
    assert_same_bits,
    gradient_series,
    spec_of,
    train,
)

pytestmark = pytest.mark.standard_promotion

ALIASES = {
    name: (alias, dict(momentum=0.9) if name.endswith("_sgd") else {})
    for name, alias in EVERY_ALIAS.items()
}
SGDS = [name for name in ALIASES if name.endswith("_sgd")]
each_alias = pytest.mark.parametrize("name", ALIASES)


def injected(alias, **options):
    return optax.inject_hyperparams(alias, hyperparam_dtype=jnp.float32, **options)


def params_for(name, size=64):
    """Returns a kernel; a residual of 64 elements is not packed, one of 4096 is."""
    weights = {"kernel": jnp.linspace(-1, 1, size).reshape(-1, 64)}
    if name.startswith("lpmm"):
        return lowbit_optax.lpmm.quantize_params(weights, bits=12, min_size=0)
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)


def grads_for(size=64):
    return {"kernel": jnp.linspace(-1, 1, size).reshape(-1, 64)}


def counted_step(tx):
    """Returns a jitted step, and a list that grows each time the step is traced."""
    traces = []

    @jax.jit
    def train_step(params, state, grads):
        traces.append(None)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return train_step, traces


@each_alias
def test_the_rate_of_a_running_state_changes_without_compiling_again(name):
    alias, arguments = ALIASES[name]
    size = 4096 if name == "lowbit_adamw" else 64
    # Pass only the learning rate, and the momentum for SGD.
    tx = injected(alias)(learning_rate=0.1, **arguments)
    params, grads = params_for(name, size), grads_for(size)
    train_step, traces = counted_step(tx)
    first, state = train_step(params, tx.init(params), grads)
    assert _differ(first, params)
    state.hyperparams["learning_rate"] = jnp.float32(0)
    second, end = train_step(first, state, grads)
    # A rate of 0 gives a zero update, so nothing is rounded.
    assert_same_bits(second, first)
    assert_same_bits(end.inner_state.residual, state.inner_state.residual)
    end.hyperparams["learning_rate"] = jnp.float32(0.1)
    third, _ = train_step(second, end, grads)
    assert _differ(third, second)
    assert len(traces) == 1


def _differ(got, old):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(old), strict=True)
    return any(np.any(new != old) for new, old in pairs)


@each_alias
def test_every_optional_keyword_is_none_by_default(name):
    alias, _ = ALIASES[name]
    for parameter in inspect.signature(alias).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            # optax does not treat Python booleans as hyperparameters.
            assert parameter.default in (None, False), parameter.name


@pytest.mark.parametrize("name", SGDS)
def test_the_state_of_sgd_does_not_depend_on_the_weight_decay(name):
    alias, arguments = ALIASES[name]
    params = params_for(name)
    without = spec_of(alias(0.1, **arguments).init(params))
    for weight_decay in (0, 0.0, 0.1, jnp.float32(0), jnp.float32(0.1)):
        tx = alias(0.1, **arguments, weight_decay=weight_decay)
        assert spec_of(tx.init(params)) == without


@pytest.mark.parametrize("name", ["kahan_sgd", "lpmm_sgd"])
def test_a_traced_weight_decay_of_zero_is_no_weight_decay(name):
    # Products of powers of two are exact, so fusing them with sums changes nothing.
    alias = functools.partial(ALIASES[name][0], 0.125, 0.5)
    params, grads = params_for(name), grads_for()
    if name == "kahan_sgd":
        # With a weight decay of zero, this would become 0 * inf = NaN.
        params["kernel"] = params["kernel"].at[0, 4].set(jnp.inf)
    state = alias().init(params)

    @jax.jit
    def step(state, weight_decay):
        return lowbit_optax.step(alias(weight_decay=weight_decay), params, state, grads)

    assert_same_bits(step(state, jnp.float32(0)), step(state, None))
    decayed = step(state, jnp.float32(0.5))
    static = jax.jit(functools.partial(lowbit_optax.step, alias(weight_decay=0.5)))
    assert_same_bits(decayed, static(params, state, grads))
    assert _differ(decayed, step(state, None))


def test_a_static_weight_decay_of_zero_costs_nothing():
    params = params_for("kahan_sgd")

    def program(**arguments):
        tx = lowbit_optax.kahan_sgd(0.1, 0.9, implementation="xla", **arguments)
        step = functools.partial(lowbit_optax.step, tx)
        return str(jax.make_jaxpr(step)(params, tx.init(params), params))

    assert program(weight_decay=0.0) == program()
    assert len(program(weight_decay=0.5)) > len(program())


@pytest.mark.parametrize("name", ["extra_bits_sgd", "kahan_adamw"])
def test_the_kernels_take_injected_hyperparameters(name):
    alias, arguments = ALIASES[name]
    params, grads = params_for(name, 4096), grads_for(4096)

    def trained(implementation):
        make = functools.partial(alias, implementation=implementation)
        tx = injected(make)(0.1, **arguments, weight_decay=0.5)
        return train(tx, params, tx.init(params), [grads] * 2)

    assert_same_bits(trained("pallas"), trained("xla"))


@each_alias
def test_in_the_parameters_dtype_it_is_refused_because_b2_would_be_1(name):
    alias, arguments = ALIASES[name]
    tx = optax.inject_hyperparams(alias)(0.1, **arguments)
    dtype = "uint32" if name.startswith("lpmm") else "bfloat16"
    match = rf"{name}: learning_rate .*{dtype}.*hyperparam_dtype=jnp\.float32"
    with pytest.raises(TypeError, match=match):
        tx.init(params_for(name))


def _adamw(b2):
    return lowbit(optax.adamw(0.01, b2=b2))


OF_ONE = lowbit_optax.loss_scaling.static_scale(1.0)
# Functions that return a transformation, for optax.inject_hyperparams.
MADE_INSIDE = {
    "lowbit": _adamw,
    "lowbit of a chain": lambda b2: lowbit(
        optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=b2))
    ),
    "lowbit of a partition": lambda b2: lowbit(
        optax.partition({"a": optax.adamw(0.01, b2=b2)}, {"kernel": "a"})
    ),
    "the momentum of sgd": lambda b2: lowbit(optax.sgd(0.01, momentum=b2)),
    "chain": lambda b2: optax.chain(optax.clip_by_global_norm(1.0), _adamw(b2)),
    "partition": lambda b2: optax.partition({"a": _adamw(b2)}, {"kernel": "a"}),
    "with_loss_scale": lambda b2: lowbit_optax.with_loss_scale(_adamw(b2), OF_ONE),
    "accumulate_gradients": lambda b2: lowbit_optax.accumulate_gradients(_adamw(b2), 2),
    "direct_updates": lambda b2: lowbit_optax.direct_updates(_adamw(b2)),
    "direct_updates of a chain": lambda b2: lowbit_optax.direct_updates(
        optax.chain(optax.clip_by_global_norm(1.0), _adamw(b2))
    ),
    "MultiSteps": lambda b2: optax.MultiSteps(_adamw(b2), 2).gradient_transformation(),
}
AROUND = {
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "with_loss_scale": lambda tx: lowbit_optax.with_loss_scale(tx, OF_ONE),
    "accumulate_gradients": lambda tx: lowbit_optax.accumulate_gradients(tx, 2),
    "direct_updates": lowbit_optax.direct_updates,
}
ROUTES = {
    "step": lowbit_optax.step,
    "update": lambda tx, params, state, grads: tx.update(grads, state, params),
}
CASES = {
    **{name: (make, lambda tx: tx) for name, make in MADE_INSIDE.items()},
    **{f"{name} around": (_adamw, around) for name, around in AROUND.items()},
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize(("make", "around"), CASES.values(), ids=CASES)
def test_lowbit_refuses_a_b2_that_is_1_in_the_parameters_dtype(make, around, route):
    """The error is raised only in the parameters' dtype."""
    params, grads = params_for("lowbit"), grads_for()
    narrow = around(optax.inject_hyperparams(make)(b2=0.999))
    state = narrow.init(params)
    for run in (route, jax.jit(route, static_argnums=0)):
        with pytest.raises(TypeError, match=r"bfloat16.*hyperparam_dtype=jnp\.float32"):
            run(narrow, params, state, grads)
    wide = around(injected(make)(b2=0.999))
    for leaf in jax.tree.leaves(route(wide, params, wide.init(params), grads)[0]):
        assert np.all(np.isfinite(leaf.astype(jnp.float32)))


def test_quantized_weights_do_not_round_the_rate_to_0():
    params, grads = params_for("lpmm", 4096), grads_for(4096)
    make = lambda learning_rate: lowbit(optax.sgd(learning_rate))
    narrow = optax.inject_hyperparams(make)(0.1)
    with pytest.raises(TypeError, match=r"uint32.*hyperparam_dtype=jnp\.float32"):
        lowbit_optax.step(narrow, params, narrow.init(params), grads)
    wide = injected(make)(0.1)
    moved, _ = lowbit_optax.step(wide, params, wide.init(params), grads)
    assert _differ(moved, params)


def test_clipping_outside_of_lowbit_may_be_narrow():
    make = lambda largest: optax.chain(
        optax.clip_by_global_norm(largest), lowbit(optax.adamw(0.01))
    )
    tx = optax.inject_hyperparams(make)(1.0)
    params = params_for("lowbit")
    moved, _ = lowbit_optax.step(tx, params, tx.init(params), grads_for())
    assert _differ(moved, params)
    assert lowbit_optax.memory_report(tx, params).steps_directly


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("extra_bits_adamw", {"bits": 8}),
        ("lowbit_adamw", {"bits": 8}),
        ("kahan_sgd", {"seed": 3}),
        ("sr_sgd", {"min_size": 0}),
    ],
)
def test_integers_must_be_static_and_the_error_says_so(name, argument):
    alias, _ = ALIASES[name]
    (keyword,) = argument
    params = params_for(name)
    with pytest.raises(TypeError, match=f"{keyword} .*static_args"):
        injected(alias)(0.01, **argument).init(params)
    state = injected(alias, static_args=keyword)(0.01, **argument).init(params)
    assert isinstance(state.inner_state, lowbit_optax.LowbitState)


STATIC = {
    "mask": lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    "nesterov": lambda count: count > 0,
    "mu_dtype": jnp.bfloat16,
    "accumulator_dtype": jnp.bfloat16,
    "warn": 1,
}


@each_alias
def test_masks_flags_and_dtypes_must_be_static_and_the_error_says_so(name):
    alias, arguments = ALIASES[name]
    for argument in STATIC.keys() & inspect.signature(alias).parameters:
        tx = injected(alias)(0.01, **arguments, **{argument: STATIC[argument]})
        with pytest.raises(TypeError, match=f"{name}: {argument} .*static_args"):
            tx.init(params_for(name))
    if "mask" in inspect.signature(alias).parameters:
        with pytest.raises(TypeError, match="static_args"):
            alias(0.01, mask=False)
        injected(alias, static_args="mask")(0.01, mask=STATIC["mask"])


@pytest.mark.parametrize(
    ("make", "arguments"),
    [(emulation.sixteen_bit_sgd, {"momentum": 0.9}), (emulation.sixteen_bit_adamw, {})],
)
def test_only_the_rate_of_the_16_bit_unit_may_be_injected(make, arguments):
    make = functools.partial(make, **arguments)
    params = params_for("lowbit")
    match = r"float32 array.*learning_rate.*static_args"
    with pytest.raises(TypeError, match=match):
        injected(make)(0.0078125).init(params)
    static = set(inspect.signature(make).parameters) - {"learning_rate"}
    tx = injected(make, static_args=static)(0.0078125)
    series = gradient_series(params, 2)
    got, _ = train(tx, params, tx.init(params), series)
    plain = make(0.0078125)
    want, _ = train(plain, params, plain.init(params), series)
    assert_same_bits(got, want)


def test_inside_it_keeps_hyperparameters_in_float32():
    tx = lowbit(optax.inject_hyperparams(optax.adamw)(0.01, b2=0.999))
    params = params_for("lowbit")
    state = tx.init(params)
    hyperparams = state.inner_state.hyperparams
    np.testing.assert_array_equal(hyperparams["b2"], np.float32(0.999))
    series = gradient_series(params, 1)
    moved, state = train(tx, params, state, series)
    state.inner_state.hyperparams["learning_rate"] = jnp.float32(0)
    still, _ = train(tx, moved, state, series)
    assert not np.array_equal(moved["kernel"], params["kernel"])
    assert_same_bits(still, moved)
