"""``lowbit`` of any transformation has the documented dtypes, tracing and numbers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from tests.helpers.optimizers import (
    ALIASES,
    ALL_FORMATS,
    OPTIMIZERS,
    VARIANTS,
    WRAPPED,
    apply,
    assert_same_bits,
    each,
    gradient_series,
    model_params,
    random_grads,
    relaxed,
    spec_of,
    train,
    weights_only,
)

pytestmark = pytest.mark.standard_promotion

EVERY = OPTIMIZERS | {
    name: tx for name, tx in WRAPPED.items() if name.endswith("_extra_bits_8")
}


def _skipping_scan(tx, params, stacked):
    """Scans over gradients, and skips the second one with cond."""

    def body(carry, grads):
        params, state = carry
        skipped = params, state._replace(count=state.count + jnp.uint32(1))
        step = lambda: apply(tx, params, state, grads)
        return jax.lax.cond(state.count != 1, step, lambda: skipped), None

    return jax.lax.scan(body, (params, tx.init(params)), stacked)[0]


@each(EVERY)
def test_the_state_keeps_its_kind_in_init_steps_conditionals_and_scans(optimizer):
    tx, params = optimizer(), model_params()
    state = tx.init(params)
    assert_same_bits(jax.jit(tx.init)(params), state)
    kind, series = spec_of((params, state)), gradient_series(params, 3, jnp.bfloat16)
    # Tracing fails unless the branches of cond agree in every shape and dtype.
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *series)
    scan = functools.partial(_skipping_scan, tx)
    assert spec_of(jax.eval_shape(scan, params, stacked)) == kind
    traces = []

    @jax.jit
    def advance(params, state, grads):
        traces.append(None)
        return apply(tx, params, state, grads)

    for grads in series:
        params, state = advance(params, state, grads)
    assert spec_of((params, state)) == kind
    assert (int(state.count), len(traces)) == (3, 1)


def test_init_under_jit_encodes_when_it_runs_and_not_when_it_compiles():
    # XLA would compute the codes of constant zeros while compiling, taking seconds.
    tx = lowbit_optax.lowbit_adamw(1e-3)
    params = {"w": jnp.zeros((64, 128), jnp.bfloat16)}
    program = jax.jit(tx.init).lower(params).compile().as_text()
    assert " reduce(" in program  # the largest values of blocks


@pytest.mark.parametrize("weights", ALL_FORMATS.values(), ids=ALL_FORMATS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_library_code_needs_no_dtype_promotion(weights, dtype):
    if weights == lowbit_optax.extra_bits(16) and dtype == jnp.float16:
        weights = lowbit_optax.extra_bits(13)
    tx = lowbit_optax.lowbit(
        relaxed(optax.adamw(0.01)),
        weights=weights,
        moments=lowbit_optax.cast(jnp.bfloat16),
        min_size=0,
    )

    def run(params):
        grads = jax.tree.map(jnp.ones_like, params)
        state = tx.init(params)
        moved, state = lowbit_optax.step(tx, params, state, grads)
        updates, state = tx.update(grads, state, params)
        moved = lowbit_optax.apply_updates(params, updates)
        shares = lowbit_optax.step_report(tx, moved, state, grads).lost
        return moved, lowbit_optax.master_weights(moved, state), shares

    params = jax.tree.map(lambda p: p.astype(dtype), model_params())
    with jax.numpy_dtype_promotion("strict"):
        moved, masters, _ = jax.eval_shape(run, params)
        lowbit_optax.memory_report(tx, params)
    assert spec_of(moved) == spec_of(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(masters)} == {jnp.dtype("float32")}


EXACT = {
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "sgd": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "schedule": optax.adamw(optax.cosine_decay_schedule(0.1, 60)),
    "lion": optax.lion(0.01),
    "rmsprop": optax.rmsprop(0.01),
}


# These sum over one leaf or over all leaves. XLA chooses the order of a sum separately
# for every program.
SUMMING = {
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01)),
    "lamb": optax.lamb(0.01),
    "adafactor": optax.adafactor(0.01, min_dim_size_to_factor=8),
    "muon": optax.contrib.muon(0.01),
}


@pytest.mark.parametrize("name", EXACT | SUMMING)
def test_masters_are_those_of_float32_training(name):
    inner = (EXACT | SUMMING)[name]
    tx = weights_only(inner, lowbit_optax.extra_bits(16), min_size=0)
    params = model_params()
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    series = gradient_series(params, 50)
    params, state = train(tx, params, tx.init(params), series)
    want, _ = train(inner, wide, inner.init(wide), series)
    masters = lowbit_optax.master_weights(params, state)
    if name in SUMMING:
        chex.assert_trees_all_close(masters, want, rtol=2e-6, atol=2e-6)
        return
    assert_same_bits(masters, want)
    # The parameter is its rounded master.
    assert_same_bits(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), want))


@each(ALIASES | VARIANTS)
def test_step_and_apply_updates_agree_in_every_bit(optimizer):
    tx = optimizer()
    params = {"kernel": model_params()["kernel"]}
    series = gradient_series(params, 5)
    stepped = train(tx, params, tx.init(params), series, lowbit_optax.step)
    applied = train(tx, params, tx.init(params), series)
    assert_same_bits(stepped, applied)


@pytest.mark.parametrize("weights", ALL_FORMATS.values(), ids=ALL_FORMATS)
def test_updates_are_float32_and_a_zero_gradient_moves_nothing(weights):
    params = model_params()["kernel"]
    tx = weights_only(optax.sgd(0.1), weights, min_size=0)
    updates, _ = jax.jit(tx.update)(jnp.zeros_like(params), tx.init(params), params)
    assert updates.dtype == jnp.float32
    assert not updates.any()


def test_a_leafs_random_numbers_do_not_depend_on_other_leaves():
    w = jnp.ones(512, jnp.bfloat16)
    grads = jnp.full(512, 1e-3)
    tx = lowbit_optax.sr_sgd(1.0)
    init = lambda params: tx.init(params)._replace(seed=jnp.uint32(5))
    alone, _ = lowbit_optax.step(tx, {"w": w}, init({"w": w}), {"w": grads})
    pair = {"a": w, "w": w}
    both, _ = lowbit_optax.step(tx, pair, init(pair), {"a": grads, "w": grads})
    assert_same_bits(both["w"], alone["w"])
    assert not np.array_equal(both["a"], both["w"])


def test_donated_buffers_are_all_reused():
    tx = lowbit_optax.extra_bits_adamw(0.01, bits=8, min_size=0)
    params = {"w": model_params()["kernel"] + 0}
    grads = random_grads(params, 0)
    advance = jax.jit(functools.partial(lowbit_optax.step, tx), donate_argnums=(0, 1))
    state = tx.init(params)
    given = jax.tree.leaves((state, params))
    advance(params, state, grads)  # unused donations warn, which raises an error
    assert all(leaf.is_deleted() for leaf in given)
