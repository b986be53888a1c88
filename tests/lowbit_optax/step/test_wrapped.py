"""``step`` works inside wrappers, which keep their numbers, state and skipped steps."""

import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import lowbit_optax
from tests.helpers.optimizers import (
    assert_same_bits,
    initial,
    jitted,
    normal,
    train,
    weights_only,
)

CLIP = optax.clip_by_global_norm(0.5)
pytestmark = pytest.mark.standard_promotion


def params_of():
    return {
        "w": normal(0, (96, 64), jnp.bfloat16),
        "b": normal(1, (64,), jnp.bfloat16),
    }


def grads_of(seed, scale=0.1):
    w = (scale * normal(seed, (96, 64))).astype(jnp.bfloat16)
    return {"w": w, "b": normal(seed + 1, (64,), jnp.bfloat16)}


def run(tx, grads):
    params = params_of()
    return train(tx, params, initial(tx, params), grads, lowbit_optax.step)


SERIES = [grads_of(2), grads_of(4, 1e-3), grads_of(6)]


@pytest.mark.parametrize(
    "implementation",
    ["xla", pytest.param("pallas", marks=pytest.mark.slow_to_compile)],
)
def test_clipping_before_lowbit_is_clipping_inside(implementation):
    options = {"implementation": implementation, "min_size": 0}
    inside = lowbit_optax.lowbit(optax.chain(CLIP, optax.sgd(0.5, 0.9)), **options)
    before = optax.chain(CLIP, lowbit_optax.lowbit(optax.sgd(0.5, 0.9), **options))
    params, state = run(inside, SERIES)
    other, (_, other_state) = run(before, SERIES)
    assert_same_bits(other, params)
    assert_same_bits(other_state.residual, state.residual)
    assert_same_bits(other_state.inner_state, state.inner_state[1])


def scheduled():
    return optax.scale_by_schedule(lambda count: 1.0 / (1.0 + count))


def test_the_states_of_wrappers_continue():
    tx = optax.chain(scheduled(), lowbit_optax.lowbit_sgd(0.5))
    inside = lowbit_optax.lowbit(
        optax.chain(scheduled(), optax.sgd(0.5)), moments="float32"
    )
    params, state = run(tx, SERIES)
    assert int(state[0].count) == 3
    assert_same_bits(params, run(inside, SERIES)[0])


# Kernels cannot compute these gradients, or wrappers keep them in their own dtypes.
OUTSIDE = {
    "their own momentum": lambda: optax.trace(0.5),
    "decay of the parameters": lambda: optax.add_decayed_weights(0.1),
    "norms of rows": lambda: optax.adaptive_grad_clip(0.01),
    "noise": lambda: optax.add_noise(0.1, 0.5, 7),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_other_gradients_are_made_outside_in_their_dtype(name):
    before, tx = OUTSIDE[name](), lowbit_optax.lowbit_sgd(0.5)
    got, (_, state) = run(optax.chain(before, tx), SERIES[:2])

    @jax.jit
    def by_hand(params, first, second, grads):
        grads, first = before.update(grads, first, params)
        return *lowbit_optax.step(tx, params, second, grads), first

    params = params_of()
    first, second = before.init(params), initial(tx, params)
    for grads in SERIES[:2]:
        params, second, first = by_hand(params, first, second, grads)
    assert_same_bits((got, state), (params, second))


@pytest.mark.parametrize("clip", [False, True])
def test_apply_if_finite_around_skips_without_a_change(clip):
    alone = lowbit_optax.lowbit_adamw(1e-2)
    tx = optax.apply_if_finite(optax.chain(CLIP, alone) if clip else alone, 2)
    spoilt = SERIES[1] | {"b": SERIES[1]["b"].at[3].set(jnp.inf)}
    params, state = run(tx, SERIES[:1])
    step = jitted(tx, lowbit_optax.step)
    still, skipped = step(params, state, spoilt)
    assert_same_bits(still, params)
    assert_same_bits(skipped.inner_state, state.inner_state)
    assert (int(skipped.notfinite_count), int(skipped.total_notfinite)) == (1, 1)
    for _ in range(3):
        still, skipped = step(still, skipped, spoilt)
    assert not bool(jnp.isfinite(jnp.float32(still["b"])).all())


def skipped_where(is_bad, inner):
    """A user-defined wrapper that skips a step when the gradients are bad."""

    def update(grads, state, params=None):
        bad = is_bad(grads)
        updates, new_state = inner.update(grads, state, params)
        updates = jax.tree.map(lambda x: jnp.where(bad, jnp.zeros_like(x), x), updates)
        kept = jax.tree.map(lambda new, old: jnp.where(bad, old, new), new_state, state)
        return updates, kept

    return optax.GradientTransformation(inner.init, update)


def test_a_step_happens_where_no_wrapper_skips_it():
    alone = lowbit_optax.lowbit_sgd(0.5, 0.9)
    within = skipped_where(lambda grads: grads["b"][0] > 0, alone)
    tx = skipped_where(lambda grads: grads["b"][1] > 0, within)
    grads = SERIES[1] | {"b": SERIES[1]["b"].at[:2].set(-1)}
    params, state = run(tx, [grads])
    assert lowbit_optax.memory_report(tx, params).steps_directly
    step = jitted(tx, lowbit_optax.step)
    for skips in itertools.product([False, True], repeat=2):
        signs = jnp.asarray(skips) * 2.0 - 1
        grads["b"] = grads["b"].at[:2].set(signs.astype(jnp.bfloat16))
        got, new_state = step(params, state, grads)
        if any(skips):
            assert_same_bits((got, new_state), (params, state))
        else:
            assert int(new_state.count) == 2
            assert all((got[name] != params[name]).any() for name in params)


AROUND = {
    "chain": lambda tx: optax.chain(CLIP, tx),
    "masked": lambda tx: optax.masked(tx, {"b": True}),
    "partition": lambda tx: optax.partition({"a": tx}, {"b": "a"}),
    "inject": lambda tx: optax.inject_hyperparams(lambda rate: tx)(1.0),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "finite": lambda tx: optax.apply_if_finite(tx, 3),
    "mask": lambda tx: optax.conditionally_mask(tx, lambda count: count % 2 == 0),
    "scale": lambda tx: lowbit_optax.with_loss_scale(
        tx, lowbit_optax.loss_scaling.static_scale(1.0)
    ),
    "sum": lambda tx: lowbit_optax.accumulate_gradients(tx, 2),
    "direct": lowbit_optax.direct_updates,
}


@pytest.mark.parametrize("outer", ["MultiSteps", "finite", "mask", "sum", "scale"])
def test_wrappers_work_in_each_order_or_say_which_one_to_use(outer):
    params, refused = {"b": jnp.ones(8, jnp.bfloat16)}, {}
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    for inner in AROUND:
        try:
            tx = AROUND[outer](AROUND[inner](lowbit_optax.kahan_sgd(0.5)))
            state = tx.init(params)
            step = lambda *args, tx=tx: lowbit_optax.step(tx, *args)
            results = jax.eval_shape(step, params, state, params)
            assert shapes(results) == shapes((params, state))
            jax.eval_shape(tx.update, params, state, params)
        except (TypeError, ValueError) as error:
            refused[inner] = str(error)
    advice = "Use lowbit", "Use the other", "Use only one"
    assert all(any(x in message for x in advice) for message in refused.values())
    within = {
        "MultiSteps": {"finite", "scale"},
        "finite": {"direct"},
        "mask": {"direct"},
        "scale": {"scale"},
    }
    refused.pop("sum", None)  # whose updates are float32 if the sums are
    assert set(refused) == within.get(outer, set())


def test_every_wrapper_passes_extra_arguments_on():
    def update(updates, state, params=None, *, times, sign="+", **_):
        times = {"+": times, "-": -times}[sign]
        return jax.tree.map(lambda grad: -times * grad, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    alone = weights_only(inner, lowbit_optax.kahan())
    multi_steps = optax.MultiSteps(alone, 1)
    params, grads = jnp.ones(4, jnp.bfloat16), jnp.full(4, 0.125, jnp.bfloat16)
    for tx in (
        optax.apply_if_finite(alone, 2),
        multi_steps.gradient_transformation(),
        weights_only(optax.MultiSteps(inner, 1), lowbit_optax.kahan()),
        lowbit_optax.accumulate_gradients(multi_steps, 1),
        lowbit_optax.direct_updates(multi_steps),
    ):
        state = tx.init(params)
        extra = {"times": jnp.float32(3), "sign": "-", "other": None}
        new, _ = lowbit_optax.step(tx, params, state, grads, **extra)
        assert new.tolist() == [1.375] * 4


def test_a_compiled_update_that_a_wrapper_has_traced_still_runs():
    inner = lowbit_optax.kahan_sgd(0.5)
    update = jax.jit(inner.update)
    tx = optax.chain(CLIP, optax.GradientTransformation(inner.init, update))
    params, grads = {"b": jnp.ones(8, jnp.bfloat16)}, {"b": jnp.ones(8)}
    lowbit_optax.step(tx, params, tx.init(params), grads)
    arguments = grads, inner.init(params), params
    assert_same_bits(update(*arguments), inner.update(*arguments))


def loss_scaled(learning_rate):
    tx = lowbit_optax.kahan_sgd(learning_rate)
    return lowbit_optax.with_loss_scale(tx, lowbit_optax.loss_scaling.static_scale(1.0))


@pytest.mark.parametrize("make", [lowbit_optax.kahan_sgd, loss_scaled])
def test_rates_are_injected_into_a_transformation_that_is_made_at_each_step(make):
    injected = optax.inject_hyperparams(make, hyperparam_dtype=jnp.float32)
    params, state = run(injected(learning_rate=0.5), SERIES)
    assert_same_bits(params, run(make(0.5), SERIES)[0])
    assert float(state.hyperparams["learning_rate"]) == 0.5


@pytest.mark.parametrize("error", [TypeError, ValueError, AttributeError])
def test_an_error_of_a_wrapper_is_raised_once(error):
    calls = []

    def update(updates, state, params=None):
        calls.append(error)
        raise error("of the wrapper")

    broken = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    tx = optax.chain(broken, lowbit_optax.kahan_sgd(0.5))
    with pytest.raises(error, match="of the wrapper"):
        run(tx, SERIES[:1])
    assert len(calls) == 1
