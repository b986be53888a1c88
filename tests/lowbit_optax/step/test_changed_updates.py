"""Wrappers in optax around lowbit train as in float32, or ``step`` raises an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from optax import contrib

import lowbit_optax
from examples.lookahead import lookahead
from lowbit_optax import release
from tests.helpers.optimizers import jitted, matching_grad_dtype, normal, weights_only

pytestmark = pytest.mark.standard_promotion

TRAINED = {"w": True, "v": False}
FROZEN = {"w": False, "v": True}
RATE = 1e-2


PARAMS = {"w": normal(0, (16, 8), jnp.bfloat16), "v": normal(1, (8,), jnp.bfloat16)}
SERIES = [{"w": normal(i, (16, 8)), "v": normal(-i % 99, (8,))} for i in range(2, 7)]


def lowbit(inner):
    # 16 extra bits restore float32, so any difference from the control is a loss.
    return weights_only(inner, lowbit_optax.extra_bits(16), min_size=0)


def adamw():
    return optax.adamw(RATE)


def loss_fn(params, *_):
    return sum(jnp.sum(jnp.square(jnp.float32(x))) for x in jax.tree.leaves(params))


def every_other(step):
    return step % 2 == 0


def products(updates, params=None):
    del params
    return jax.tree.map(lambda x: x * jnp.sum(x @ x.T), updates)


def same(x):
    """Returns an array after operations that do not change it."""
    x = jax.device_put(jax.lax.stop_gradient(checkpoint_name(x, "x")))
    return jnp.stack([jax.lax.optimization_barrier(x)[::-1][::-1], x])[0]


def arguments(state, grads):
    """Returns the arguments that some transformations need in addition to gradients."""
    is_sam = lambda x: isinstance(x, contrib.SAMState)
    if any(map(is_sam, jax.tree.leaves(state, is_leaf=is_sam))):
        return {"grad_fn": jax.grad(loss_fn)}  # and no other argument
    return {"value": jnp.float32(1), "grad": grads, "value_fn": loss_fn}


def trained(tx, params, advance=lowbit_optax.step, series=SERIES):
    state = tx.init(params)

    @jax.jit
    def run(params, state, grads):
        extra = arguments(state, grads)
        return advance(tx, params, state, grads, **extra)

    for grads in series:
        params, state = run(params, state, grads)
    return params, state


def updated(tx, params, state, grads, **extra):
    tx = optax.with_extra_args_support(tx)
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def control(tx, params=PARAMS, series=SERIES):
    """Trains in float32 with optax alone."""
    return trained(tx, jax.tree.map(jnp.float32, params), updated, series)[0]


def assert_close(params, state, wanted, tolerance=1e-5):
    """Masters match float32's weights, up to a fraction of the weights' movement."""
    masters = lowbit_optax.master_weights(params, state)
    for name, start in PARAMS.items():
        moved = np.abs(np.float32(wanted[name]) - np.float32(start)).max()
        difference = np.abs(np.float32(masters[name]) - np.float32(wanted[name]))
        assert difference.max() <= tolerance * moved, name


def alternating(tx):
    """Clips the gradients in every other step, in a conditional with two updates."""

    def update(grads, state, params=None):
        count, inner = state
        clipped = lambda: tx.update(optax.tree.clip(grads, -0.5, 0.5), inner, params)
        plain = lambda: tx.update(grads, inner, params)
        updates, inner = jax.lax.cond(count % 2 == 0, clipped, plain)
        return updates, (count + 1, inner)

    init = lambda params: (jnp.int32(0), tx.init(params))
    return optax.GradientTransformation(init, update)


PASS_ON = {
    "a conditional between two updates": alternating,
    "chain, last": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "chain, before identity": lambda tx: optax.chain(tx, optax.identity()),
    "chain, before a product with 1": lambda tx: optax.chain(tx, optax.scale(1.0)),
    "chain, before a decay of 0": lambda tx: optax.chain(
        tx, optax.add_decayed_weights(0.0), optax.trace(0.0)
    ),
    "named_chain": lambda tx: optax.named_chain(("a", optax.clip(0.5)), ("b", tx)),
    "masked": lambda tx: optax.chain(
        optax.masked(tx, TRAINED), optax.masked(optax.set_to_zero(), FROZEN)
    ),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.set_to_zero()}, {"w": "a", "v": "b"}
    ),
    "selective_transform": lambda tx: optax.selective_transform(tx, freeze_mask=FROZEN),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda rate: tx)(1.0),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, every_other),
    "conditionally_mask around products": lambda tx: optax.conditionally_mask(
        optax.chain(optax.stateless(products), tx), every_other
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "MultiSteps that sums": lambda tx: optax.MultiSteps(
        tx, lambda step: 2 - step % 2, use_grad_mean=False
    ).gradient_transformation(),
    "MultiSteps that skips": lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "monitor after": lambda tx: optax.chain(
        tx, optax.monitor({"n": optax.measure_with_ema(optax.tree.norm, 0.9)})
    ),
    "snapshot after": lambda tx: optax.chain(tx, optax.snapshot("n", optax.tree.norm)),
    "operations that change no value": lambda tx: optax.chain(
        tx, optax.stateless_with_tree_map(lambda update, _: same(update))
    ),
    "split_real_and_imaginary": contrib.split_real_and_imaginary,
    "with_loss_scale": lambda tx: lowbit_optax.with_loss_scale(
        tx, lowbit_optax.loss_scaling.static_scale(1.0)
    ),
}


@pytest.mark.parametrize("name", PASS_ON)
def test_wrappers_that_pass_updates_on_train_as_in_float32(name):
    wrap = PASS_ON[name]
    tx, wanted = wrap(lowbit(adamw())), control(wrap(adamw()))
    for advance in (lowbit_optax.step, updated):
        assert_close(*trained(tx, PARAMS, advance), wanted)


def test_flattened_parameters_train_as_in_float32():
    params, _ = trained(optax.flatten(lowbit(adamw())), PARAMS)
    wanted = control(optax.flatten(adamw()))
    for name, param in params.items():
        assert param.dtype == jnp.bfloat16
        np.testing.assert_array_equal(param, wanted[name].astype(jnp.bfloat16))


AFTER = {
    "scale": lambda: optax.scale(0.5),
    "reduce_on_plateau": lambda: contrib.reduce_on_plateau(0.5, patience=1),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda n: 1 / (1 + n)),
    "add_decayed_weights": lambda: optax.add_decayed_weights(-0.01),
}
REFUSED_AFTER = AFTER | {
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(5e-3),
    "zero_nans": lambda: optax.zero_nans(),
    "set_to_zero": lambda: optax.masked(optax.set_to_zero(), FROZEN),
    "keep_params_nonnegative": lambda: optax.keep_params_nonnegative(),
    "trace": lambda: optax.trace(0.9),
    "apply_every": lambda: optax.apply_every(2),
    "add_noise": lambda: optax.add_noise(1e-2, 0.5, 0),
    "scale_by_sign": lambda: optax.scale_by_sign(),
    "zoom": lambda: optax.scale_by_zoom_linesearch(5),
    "another lowbit": lambda: lowbit(optax.sgd(-0.5)),
    "zeros for a while": lambda: optax.conditionally_transform(
        optax.set_to_zero(), lambda step: step < 3
    ),
    "a cast": lambda: optax.stateless_with_tree_map(
        lambda update, _: update.astype(jnp.float16)
    ),
}


def halved(tx):
    return optax.chain(tx, optax.scale(0.5))


def loss_scaled(tx):
    return lowbit_optax.with_loss_scale(
        tx, lowbit_optax.loss_scaling.backoff_scale(2.0**4)
    )


CHANGE = {
    f"{name} after": lambda tx, after=after: optax.chain(tx, after())
    for name, after in REFUSED_AFTER.items()
} | {
    "conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, every_other
    ),
    "schedule_free": lambda tx: contrib.schedule_free(tx, RATE),
    "mechanize": contrib.mechanize,
    "sam": lambda tx: contrib.sam(tx, optax.sgd(0.1)),
    "sam by another lowbit": lambda tx: contrib.sam(
        tx, lowbit(optax.sgd(0.1)), opaque_mode=True
    ),
    "conditionally_mask": lambda tx: optax.conditionally_mask(halved(tx), every_other),
    "conditionally_mask around products": lambda tx: optax.conditionally_mask(
        optax.chain(optax.stateless(products), halved(tx)), every_other
    ),
    "MultiSteps": lambda tx: optax.MultiSteps(halved(tx), 2),
    "with_loss_scale, then scale": lambda tx: halved(loss_scaled(tx)),
    "direct_updates, then scale": lambda tx: halved(lowbit_optax.direct_updates(tx)),
    "match_grad_dtype, then scale": lambda tx: halved(matching_grad_dtype(tx)),
    "direct_updates": lambda tx: lowbit_optax.direct_updates(halved(tx)),
    "with_loss_scale": lambda tx: loss_scaled(halved(tx)),
    "accumulate_gradients": lambda tx: lowbit_optax.accumulate_gradients(halved(tx), 2),
}
# These call the step of ``lowbit`` in ``update``, which then raises the error too.
WITHIN = ("with_loss_scale", "direct_updates", "accumulate_gradients")


@pytest.mark.parametrize("name", CHANGE)
def test_wrappers_that_change_updates_are_refused(name):
    tx = CHANGE[name](lowbit(adamw()))
    grads, state = jax.tree.map(jnp.bfloat16, SERIES[0]), tx.init(PARAMS)
    extra = arguments(state, grads)
    match = r"params\['[vw]'\], bfloat16.*inside"
    with pytest.raises(ValueError, match=match):
        lowbit_optax.step(tx, PARAMS, state, grads, **extra)
    if name in WITHIN:
        with pytest.raises(ValueError, match="inside"):
            tx.update(grads, state, PARAMS)
        train_step = release.value_and_update(loss_fn, tx)
        with pytest.raises(ValueError, match="inside"):
            train_step(PARAMS, tx.init(PARAMS))


def test_each_kind_of_change_is_refused_while_tracing():
    tx = lowbit(optax.sgd(RATE))
    changes = [
        optax.scale(0.5),
        optax.stateless_with_tree_map(lambda update, _: update + jnp.float32(1)),
        optax.add_decayed_weights(0.5),
        REFUSED_AFTER["a cast"](),
        optax.scale_by_sign(),
    ]
    for after in changes:
        changed = optax.chain(tx, after)
        step = functools.partial(lowbit_optax.step, changed)
        state = jax.eval_shape(changed.init, PARAMS)
        with pytest.raises(ValueError, match="inside"):
            jax.eval_shape(step, PARAMS, state, PARAMS)


REPORTED = [f"{name} after" for name in AFTER]
REPORTED += ["schedule_free", "mechanize", "with_loss_scale", "accumulate_gradients"]


@pytest.mark.parametrize("name", REPORTED)
def test_reports_say_that_changed_updates_are_wrong(name):
    tx = CHANGE[name](lowbit(adamw()))
    report = lowbit_optax.memory_report(tx, PARAMS)
    assert report.changed_updates == ("['v']", "['w']")
    assert "wrong: " in str(report)
    found = lowbit_optax.explain(tx, PARAMS)
    assert all(found[path].startswith("wrong: ") for path in report.changed_updates)
    right = lowbit_optax.memory_report(lowbit(adamw()), PARAMS)
    assert right.changed_updates == ()


@pytest.mark.parametrize("name", AFTER)
def test_inside_lowbit_they_train_as_in_float32(name):
    inner = optax.chain(adamw(), AFTER[name]())
    assert_close(*trained(lowbit(inner), PARAMS), control(inner))


def test_schedule_free_inside_lowbit_trains_as_in_float32():
    inner = contrib.schedule_free(optax.sgd(RATE), RATE)
    assert_close(*trained(lowbit(inner), PARAMS), control(inner), 1e-4)


def test_lookahead_with_slow_weights_in_the_state_is_optaxs():
    params, state = trained(lowbit(lookahead(adamw(), 2, 0.5)), PARAMS)
    wide = jax.tree.map(jnp.float32, PARAMS)
    pair, tx = optax.LookaheadParams.init_synced(wide), optax.lookahead(adamw(), 2, 0.5)
    optaxs = tx.init(pair)
    for grads in SERIES:
        updates, optaxs = tx.update(grads, optaxs, pair)
        pair = optax.apply_updates(pair, updates)
    assert_close(params, state, pair.fast, 1e-4)
    slow = state.inner_state[-1]
    assert all(np.allclose(slow[x], pair.slow[x], rtol=1e-6) for x in slow)


def test_lookahead_is_refused_on_either_side():
    pair = optax.LookaheadParams.init_synced(PARAMS)
    around = optax.lookahead(lowbit(adamw()), 2, 0.5)
    with pytest.raises(ValueError, match=r"params\.fast\['v'\].*inside"):
        lowbit_optax.step(around, pair, around.init(pair), SERIES[0])
    for params in (PARAMS, pair):
        with pytest.raises(ValueError, match="lookahead"):
            lowbit(optax.lookahead(adamw(), 2, 0.5)).init(params)


def test_updates_that_nothing_rounds_may_be_changed():
    wide = jax.tree.map(jnp.float32, PARAMS)
    params, state = trained(halved(lowbit(adamw())), wide)
    assert_close(params, state, control(halved(adamw())))
    assert not lowbit_optax.memory_report(halved(lowbit(adamw())), wide).changed_updates
    scaled = halved(loss_scaled(adamw()))
    lowbit_optax.step(scaled, PARAMS, scaled.init(PARAMS), SERIES[0])


OVERFLOW = 2  # the index of the microbatch that overflows


def if_finite(tx):
    return optax.apply_if_finite(tx, 5)


def multi_steps(tx, **options):
    return optax.MultiSteps(tx, 2, **options).gradient_transformation()


def accumulated(tx):
    return lowbit_optax.accumulate_gradients(tx, 2, min_size=2**30)


LOST_SKIPS = {
    "loss scale": lambda: multi_steps(loss_scaled(lowbit(adamw()))),
    "loss scale inside lowbit": lambda: multi_steps(lowbit(loss_scaled(adamw()))),
    "loss scale, all inside": lambda: lowbit(multi_steps(loss_scaled(adamw()))),
    "loss scale of optax": lambda: multi_steps(loss_scaled(adamw())),
    "apply_if_finite": lambda: multi_steps(if_finite(lowbit(adamw()))),
    "zero_nans": lambda: multi_steps(optax.chain(optax.zero_nans(), lowbit(adamw()))),
    "in a partition": lambda: optax.partition(
        {"a": multi_steps(if_finite(lowbit(adamw())))}, {"w": "a", "v": "a"}
    ),
}


@pytest.mark.parametrize("name", LOST_SKIPS)
def test_multi_steps_that_never_recovers_from_an_overflow_is_refused(name):
    tx = LOST_SKIPS[name]()
    for init in (tx.init, jax.jit(tx.init)):
        with pytest.raises(ValueError, match=r"MultiSteps.*accumulate_gradients"):
            init(PARAMS)


# The number of microbatches that are left out: the one that overflows, or its sum.
KEPT_SKIPS = {
    "loss scale around": (lambda: loss_scaled(multi_steps(lowbit(adamw()))), 1),
    "loss scale around lowbit": (lambda: loss_scaled(lowbit(multi_steps(adamw()))), 1),
    "apply_if_finite around": (lambda: if_finite(multi_steps(lowbit(adamw()))), 1),
    "apply_if_finite around, inside lowbit": (
        lambda: lowbit(if_finite(multi_steps(adamw()))), 1
    ),
    "MultiSteps that skips": (
        lambda: multi_steps(
            lowbit(adamw()), should_skip_update_fn=optax.skip_not_finite
        ),
        1,
    ),
    "loss scale in sums": (lambda: accumulated(loss_scaled(lowbit(adamw()))), 2),
    "loss scale inside, in sums": (
        lambda: accumulated(lowbit(loss_scaled(adamw()))), 2
    ),
    "apply_if_finite in sums": (lambda: accumulated(if_finite(lowbit(adamw()))), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT_SKIPS)
def test_orders_that_recover_from_an_overflow_train_as_in_float32(name):
    make, lost = KEPT_SKIPS[name]
    tx = make()
    params, state, step = PARAMS, tx.init(PARAMS), jitted(tx, lowbit_optax.step)
    for i, grads in enumerate(SERIES + SERIES[:1]):
        if "loss scale" in name:
            scale = lowbit_optax.loss_scaling.current_loss_scale(state)
            grads = jax.tree.map(lambda x, by=scale: x * by, grads)
        if i == OVERFLOW:
            grads = grads | {"w": grads["w"].at[1, 2].set(jnp.inf)}
        params, state = step(params, state, grads)
    good = SERIES[:OVERFLOW] + SERIES[OVERFLOW + lost :] + SERIES[:1]
    assert_close(params, state, control(multi_steps(adamw()), series=good))
