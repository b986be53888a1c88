"""Released steps match ordinary steps for every optimizer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import emulation, release
from tests.helpers import released
from tests.helpers.optimizers import ALIASES, VARIANTS, assert_same_bits
from tests.helpers.released import (
    RATE,
    SGD,
    SIMPLE_IN_LOOP,
    normal,
    simple_loss,
    simple_params,
)

pytestmark = pytest.mark.standard_promotion

HALF = dict(b1=0.5, b2=0.5)
FOUR_BITS = lowbit_optax.block_quantized(4)
FLOAT16 = lowbit_optax.cast(jnp.float16)


def both(loss_fn, tx, params, batches, **options):
    """Returns the results of ordinary steps and of released steps."""
    steps = (
        released.ordinary(loss_fn, tx),
        release.value_and_update(loss_fn, tx, **options),
    )
    return [released.run(step, tx, params, batches) for step in steps]


def _lion(weights=None, moments="float32"):
    inner = optax.lion(RATE, **HALF, weight_decay=0.5)
    weights = weights or lowbit_optax.extra_bits(16)
    return lowbit_optax.lowbit(inner, weights=weights, moments=moments)


LOWBIT = {name: make(RATE) for name, make in (ALIASES | VARIANTS).items()} | {
    "sixteen_bit_sgd": emulation.sixteen_bit_sgd(RATE, 0.5),
    "extra_bits_7_stochastic_float16": _lion(
        lowbit_optax.extra_bits(7, rounding="stochastic"), FLOAT16
    ),
    "stochastic_rounding_4_bits": _lion(lowbit_optax.stochastic_rounding(), FOUR_BITS),
    "nearest_8_bits_stochastic": _lion(
        lowbit_optax.nearest(),
        lowbit_optax.block_quantized(8, rounding="stochastic"),
    ),
    "nearest_bfloat16": _lion(lowbit_optax.nearest(), lowbit_optax.cast(jnp.bfloat16)),
    "master_copy": _lion(lowbit_optax.master_copy()),
}
"""Every alias, weight format and moment format."""


@pytest.mark.parametrize("name", LOWBIT)
def test_twenty_released_steps_are_twenty_ordinary_ones(name):
    released.assert_equal_steps(
        simple_loss,
        LOWBIT[name],
        simple_params(dtype=jnp.bfloat16),
        released.batches(20),
        in_loop=SIMPLE_IN_LOOP,
    )


@pytest.mark.slow_to_compile
@pytest.mark.parametrize("name", ["kahan_sgd", "extra_bits_sgd_8"])
def test_bfloat16_float16_and_float32_leaves_are_updated_beside_each_other(name):
    released.assert_equal_steps(
        released.mixed_loss,
        LOWBIT[name],
        released.mixed_params(),
        released.batches(20),
        in_loop=released.MIXED_IN_LOOP,
    )


def _adam(rate=RATE, **options):
    return optax.adam(rate, **HALF, eps=2.0**-10, **options)


def _frozen(**labels):
    return optax.partition({"train": _adam(), "freeze": optax.set_to_zero()}, labels)


SCHEDULE = optax.piecewise_constant_schedule(RATE, {3: 0.5, 11: 0.25})

OPTAX = {
    "sgd": optax.sgd(RATE),
    "sgd_momentum": optax.sgd(RATE, momentum=0.5, nesterov=True),
    "adam_clipped": optax.chain(optax.clip(2.0**-6), _adam()),
    "adamw": optax.adamw(RATE, **HALF, weight_decay=0.5),
    "lion": optax.lion(RATE, **HALF, weight_decay=0.5),
    "rmsprop": optax.rmsprop(RATE, decay=0.5, eps=2.0**-10),
    "adagrad": optax.adagrad(RATE),
    "schedule": optax.sgd(SCHEDULE, momentum=0.5),
    "injected_adam": optax.inject_hyperparams(
        optax.adam, hyperparam_dtype=jnp.float32, static_args=("b1", "b2", "eps")
    )(SCHEDULE, **HALF, eps=2.0**-10),
    "adam_frozen_head": _frozen(layers="train", head="freeze"),
    "adam_frozen_layers": _frozen(layers="freeze", head="train"),
    "adam_masked": optax.masked(_adam(), {"layers": True, "head": False}),
    "multi_steps": optax.MultiSteps(optax.sgd(RATE, momentum=0.5), 4),
    "schedule_free": optax.contrib.schedule_free_sgd(RATE, b1=0.5),
}


@pytest.mark.parametrize("name", OPTAX)
def test_twenty_released_steps_with_optax_are_twenty_ordinary_ones(name):
    released.assert_equal_steps(
        simple_loss,
        OPTAX[name],
        simple_params(),
        released.batches(20),
        in_loop=SIMPLE_IN_LOOP,
    )


@pytest.mark.parametrize("every", [1, 3])
def test_accumulated_gradients_are_equal(every):
    released.assert_equal_steps(
        simple_loss,
        lowbit_optax.accumulate_gradients(lowbit_optax.kahan_sgd(RATE, 0.5), every),
        simple_params(dtype=jnp.bfloat16),
        released.batches(2 * every + 1),
        in_loop=SIMPLE_IN_LOOP,
    )


def _over_sums(sums):
    """Divides gradients by 1 plus the sums that a function returns for a leaf."""

    def divide(updates, params):
        del params
        return jax.tree.map(lambda g: g / (1 + sums(g * g)), updates)

    return optax.chain(optax.stateless(divide), optax.sgd(RATE))


# These functions compute other sums if a layer is the whole leaf.
SUMS = {
    "sums": lambda x: jnp.sum(x, tuple(range(1, x.ndim)), keepdims=True),
    "maxima": lambda x: jnp.max(x, tuple(range(1, x.ndim)), keepdims=True),
    "sums over axis 1": lambda x: jnp.sum(x, x.ndim > 1, keepdims=True),
    "repeated sums": lambda x: jnp.broadcast_to(
        jnp.sum(x, tuple(range(1, x.ndim))).reshape(-1, *[1] * (x.ndim - 1)), x.shape
    ),
    "sums after a reshape": lambda x: jnp.sum(x.reshape(len(x), -1, 1), 1).reshape(
        -1, *[1] * (x.ndim - 1)
    ),
}
WAITING = {
    "trust_ratio": (optax.lamb(RATE, **HALF), "of several layers"),
    "block_rms": (
        optax.chain(optax.clip_by_block_rms(2.0**-6), optax.sgd(RATE)),
        "of several layers",
    ),
    "factored": (optax.adafactor(RATE, min_dim_size_to_factor=8), "of several layers"),
    "matrices": (optax.contrib.muon(RATE), "different structure"),
    "centralized": (
        optax.chain(optax.centralize(), optax.sgd(RATE)),
        "updates a layer differently than the stack",
    ),
    **{
        name: (_over_sums(sums), "updates a layer differently than the stack")
        for name, sums in SUMS.items()
    },
}


@pytest.mark.parametrize("name", WAITING)
def test_updates_of_a_whole_leaf_wait_for_its_whole_gradient(name):
    (tx, reason), params, batches = WAITING[name], simple_params(), released.batches(3)
    report = released.explained(simple_loss, tx, params, *batches[0])["['layers']"]
    assert not report.startswith("in the loop")
    assert report.endswith(reason)
    # Fusion changes the order in which norms and products of matrices add up.
    want, got = both(simple_loss, tx, params, batches)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def _noise(make_noise):
    """Adds noise that depends only on the shape of each leaf."""

    def add(updates, params):
        del params
        return jax.tree.map(lambda x: x + make_noise(x), updates)

    return optax.chain(optax.stateless(add), optax.sgd(RATE))


OF_SHAPE = {
    "noise": optax.chain(optax.add_noise(0.5, 0.5, jax.random.key(0)), optax.sgd(RATE)),
    "a_ramp_over_layers": _noise(lambda x: jnp.ones_like(x).cumsum(0) if x.ndim else x),
    "a_constant_for_each_layer": _noise(
        lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
    ),
}


@pytest.mark.parametrize("name", OF_SHAPE)
def test_updates_that_depend_on_the_index_of_a_layer_are_equal(name):
    released.assert_equal_steps(
        simple_loss, OF_SHAPE[name], simple_params(), released.batches(2)
    )


def test_a_mask_by_rank_is_that_of_the_stack():
    params = {"layers": released.weights(3).reshape(3, -1), "head": normal(64)}

    def loss_fn(params, x):
        return simple_loss(params | {"layers": params["layers"].reshape(3, 64, 64)}, x)

    def scanned(params, x):
        body = lambda x, w: (released.dense(x, w.reshape(64, 64)), None)
        return simple_loss(params, x, body)

    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    tx = optax.adamw(RATE, **HALF, weight_decay=0.5, mask=matrices)
    for each in (loss_fn, scanned):
        released.assert_equal_steps(each, tx, params, released.batches(3))


def test_the_gradient_of_one_layer_may_be_nan():
    params = simple_params(dtype=jnp.bfloat16)

    def loss_fn(params, x):
        body = lambda x, w: (x, jnp.sum(jnp.sqrt(1 + w.astype(jnp.float32)) * x[0]))
        _, ys = jax.lax.scan(body, x, params["layers"])
        return jnp.sum(ys) + released.head_loss(params, x)

    params["layers"] = params["layers"].at[1, 5, 7].set(-2.0)
    want, got = both(loss_fn, LOWBIT["kahan_adamw"], params, released.batches(3))
    is_nan = np.isnan(np.asarray(got[1]["layers"], np.float32))
    assert is_nan[1, 5, 7]
    assert not is_nan[0].any()
    chex.assert_trees_all_equal(got, want)


def _words(dtype, patterns):
    """A transformation whose state consists of integer words that change in one bit."""

    def init(params):
        fill = lambda x: jnp.resize(jnp.asarray(patterns, dtype), x.shape)
        return jax.tree.map(fill, params)

    def update(updates, state, params=None):
        del params
        # The gradient flips the lowest bit of each word and keeps the other bits.
        flip = lambda word, x: word ^ (x > 0).astype(word.dtype)
        return updates, jax.tree.map(flip, state, updates)

    return optax.chain(
        optax.GradientTransformation(init, update), optax.sgd(RATE, momentum=0.5)
    )


SIGNALLING = [0x7FA00001, 0xFFA00000, 0x7F800001, 0xFFFFFFFF, 0x00000001, 0x80000000]
SIGNALLING_16 = [0x7F81, 0xFF81, 0x7FA0, 0xFFFF, 0x0001, 0x8000, 0x7C01, 0xFC01]

WORDS = {
    "uint32": (jnp.uint32, SIGNALLING),
    "uint16": (jnp.uint16, SIGNALLING_16),
    "int32": (jnp.int32, [x - 2**32 if x >= 2**31 else x for x in SIGNALLING]),
    "uint8": (jnp.uint8, [0, 255, 128]),
}


@pytest.mark.parametrize("name", WORDS)
def test_integer_state_keeps_every_bit_whatever_float_it_looks_like(name):
    dtype, patterns = WORDS[name]
    _, _, state = released.assert_equal_steps(
        simple_loss, _words(dtype, patterns), simple_params(), released.batches(4)
    )
    kept = np.asarray(state[0]["layers"]).reshape(-1)
    want = np.resize(np.asarray(patterns, dtype), kept.shape)
    one = np.asarray(1, dtype)
    np.testing.assert_array_equal(kept | one, want | one)


@pytest.mark.parametrize("max_norm", [2.0**-4, 2.0**20], ids=["clipped", "not_clipped"])
def test_two_passes_clip_as_clip_by_global_norm(max_norm):
    loss_fn, params = released.mixed_loss, released.mixed_params()
    batches = released.batches(3)
    build = lambda inner: lowbit_optax.lowbit(
        inner, weights=lowbit_optax.kahan(), moments="float32"
    )
    tx = build(SGD)
    clipped = build(optax.chain(optax.clip_by_global_norm(max_norm), SGD))
    free, (values, got, state) = both(
        loss_fn, tx, params, batches, max_grad_norm=max_norm
    )
    step = released.ordinary(loss_fn, clipped)
    want_values, want, want_state = released.run(step, clipped, params, batches)
    chex.assert_trees_all_close(values, want_values, rtol=1e-5)
    chex.assert_trees_all_close(
        lowbit_optax.master_weights(got, state),
        lowbit_optax.master_weights(want, want_state),
        rtol=1e-4,
        atol=1e-6,
    )
    if max_norm > 1:
        # Nothing is clipped. In the other case, the norm is at least 16 and is clipped.
        assert_same_bits((values, got, state), free)


def test_parameters_may_be_one_stack_without_a_name():
    def loss_fn(params, x):
        return simple_loss({"layers": params, "head": jnp.ones(64)}, x)

    released.assert_equal_steps(
        loss_fn, SGD, released.weights(3), released.batches(2), in_loop=[""]
    )


def test_effects_in_the_body_happen_once_a_layer():
    seen = []

    def loss_fn(params, x):
        def body(x, w):
            jax.debug.callback(lambda v: seen.append(float(v)), jnp.sum(w))
            return released.dense(x, w), None

        return simple_loss(params, x, body)

    params, (x,) = simple_params(), released.batches(1)[0]
    step = jax.jit(release.value_and_update(loss_fn, SGD))
    jax.block_until_ready(step(params, SGD.init(params), x))
    jax.effects_barrier()
    want = np.asarray(jnp.sum(params["layers"], axis=(1, 2)))
    np.testing.assert_allclose(sorted(seen), sorted(want), rtol=1e-4, atol=1e-4)


def _quantized_loss(params, x):
    @jax.checkpoint
    def body(x, w):
        return jnp.tanh(x @ lowbit_optax.lpmm.dequantize(w, jnp.float32)), None

    return simple_loss(params, x, body)


LPMM = {
    "sgd": lowbit_optax.lpmm_sgd(RATE, 0.5),
    "adam": lowbit_optax.lpmm_adam(RATE, b1=0.5, b2=0.5, eps=2.0**-10),
}


@pytest.mark.parametrize("name", LPMM)
def test_quantised_layers_are_stepped_as_by_lazy_gradients(name):
    tx = LPMM[name]
    layers = lowbit_optax.lpmm.quantize_params(
        released.weights(3), bits=12, block_size=64
    )
    params = {"layers": layers, "head": normal(64)}
    batches = released.batches(5)

    def step(params, state, x):
        differentiate = lowbit_optax.lpmm.value_and_grad(_quantized_loss, lazy=True)
        loss, grads = differentiate(params, x)
        return loss, *lowbit_optax.step(tx, params, state, grads)

    found = released.updated_in_loop(_quantized_loss, tx, params, *batches[0])
    assert found == released.SIMPLE_IN_LOOP
    want = released.run(step, tx, params, batches)
    step = release.value_and_update(_quantized_loss, tx)
    assert_same_bits(released.run(step, tx, params, batches), want)


def test_each_of_many_quantised_stacks_keeps_its_codes():
    """The paths of eleven stacks have another order as text than as numbers."""
    quantize = lowbit_optax.lpmm.quantize_params
    params = [quantize(released.weights(2, seed=n)) for n in range(11)]
    state, (x,) = LPMM["sgd"].init(params), released.batches(1)[0]

    def loss_fn(params, x):
        def body(x, layers):
            for w in layers:
                x = jnp.tanh(x @ lowbit_optax.lpmm.dequantize(w, jnp.float32))
            return x, None

        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    step = release.value_and_update(loss_fn, LPMM["sgd"])
    loss, new, _ = jax.jit(step)(params, state, x)
    want, grads = lowbit_optax.lpmm.value_and_grad(loss_fn)(params, x)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    updated, _ = lowbit_optax.step(LPMM["sgd"], params, state, grads)
    for pair in zip(new, updated, strict=True):
        got, want = (lowbit_optax.lpmm.dequantize(w, jnp.float32) for w in pair)
        np.testing.assert_allclose(got, want, atol=1e-6)
