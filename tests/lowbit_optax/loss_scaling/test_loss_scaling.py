"""Loss scales follow plain models of their rules, and skipped steps change nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lowbit_optax
from lowbit_optax import scaled_value_and_grad, with_loss_scale
from lowbit_optax.loss_scaling import (
    backoff_scale,
    current_loss_scale,
    log_normal_scale,
    static_scale,
)
from tests.helpers.optimizers import apply, assert_same_bits, initial, jitted

pytestmark = pytest.mark.standard_promotion

SCALINGS = {
    "static": static_scale(2.0**10),
    "backoff": backoff_scale(2.0**10, period=3),
    "log_normal": log_normal_scale(2.0**10),
}
INNERS = {
    "adamw": lambda: optax.adamw(2.0**-7),
    "kahan_adamw": lambda: lowbit_optax.kahan_adamw(2.0**-7),
    "extra_bits_adamw": lambda: lowbit_optax.extra_bits_adamw(2.0**-7, bits=8),
    "lowbit_adamw": lambda: lowbit_optax.lowbit_adamw(2.0**-7),
}


def parameters(dtype=jnp.float16):
    x = np.random.default_rng(0).standard_normal((64, 80))
    return {"w": jnp.asarray(x, dtype), "b": jnp.asarray(np.full(5, -0.0), dtype)}


def gradients(step, scale=1.0, like=None):
    like = parameters() if like is None else like
    random = np.random.default_rng(step)
    return {
        name: jnp.asarray(scale * random.standard_normal(x.shape), x.dtype)
        for name, x in like.items()
    }


def spoilt(grads, value=np.inf):
    return grads | {"w": grads["w"].at[3, 4].set(value)}


@pytest.mark.parametrize("name", SCALINGS)
def test_no_dtype_is_promoted_by_accident(name):
    params = parameters()
    tx = with_loss_scale(lowbit_optax.kahan_sgd(0.5), SCALINGS[name])
    with jax.numpy_dtype_promotion("strict"):
        state = tx.init(params)
        step = functools.partial(lowbit_optax.step, tx)
        for advance in (step, lambda *args: tx.update(args[2], *args[1::-1])):
            new, new_state = jax.eval_shape(advance, params, state, params)
            assert new_state.scale.dtype == jnp.float32
        assert new["w"].dtype == jnp.float32


def test_backoff_follows_its_rule_step_by_step():
    scaling = backoff_scale(8.0, period=3, smallest=2.0, largest=16.0)
    overflows = np.array([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0], bool)
    want, expected, good = [], 8.0, 0
    for bad in overflows:
        good = 0 if bad else good + 1
        if bad:
            expected = max(expected / 2, 2.0)
        elif good == 3:
            expected, good = min(expected * 2, 16.0), 0
        want.append(expected)
    largest = np.where(overflows, np.inf, 1.0).astype(np.float32)
    assert run_of(scaling, largest, ~overflows).tolist() == want
    assert {2.0, 16.0} <= set(want)


def log_normal_model(sizes, finite, initial=2.0**15, decay=0.99, limit=65504.0):
    """Yields the scale after each max |g|, computed in float64.

    The inputs contain few overflows, so halving never makes gradients subnormal.
    """
    scale, mean, square, weight = initial, 0.0, 0.0, 0.0
    usual = initial
    for size, is_finite in zip(sizes, finite, strict=True):
        if not is_finite:
            scale = min(scale / 2, usual)
            yield scale
            continue
        x = np.log2(size)
        mean += (1 - decay) * (x - mean)
        square += (1 - decay) * (x * x - square)
        weight += (1 - decay) * (1 - weight)
        m = mean / weight
        deviation = np.sqrt(max(square / weight - m * m, 1.0))
        # 3.0902 is the 0.999 quantile of the normal distribution.
        exponent = np.floor(np.log2(limit) - m - 3.090232306 * deviation)
        usual = 2.0 ** np.clip(exponent, -24, 24)
        scale = min(usual, 2.0 ** np.floor(np.log2(limit) - x))
        yield scale


def run_of(scaling, largest, finite):
    """Returns the scale after each step."""

    def one(carry, step):
        carry = scaling.next(*carry, *step)
        return carry, carry[0]

    return np.asarray(
        jax.jit(lax.scan, static_argnums=0)(one, scaling.init(), (largest, finite))[1]
    )


@pytest.mark.parametrize("exponent", [-4, 12])
def test_the_first_gradients_of_log_normal_are_never_far_from_the_mean(exponent):
    """If they were outliers, an initial scale that is too large would be kept."""
    size = np.exp2(np.array([exponent], np.float32))
    scaling = log_normal_scale(2.0**24)
    got = run_of(scaling, size, np.array([True]))
    assert got.tolist() == list(log_normal_model(size, [True], 2.0**24))


def test_log_normal_follows_a_model_in_numpy():
    random = np.random.default_rng(0)
    sizes = 2.0 ** random.normal(-6, 1.7, 400)
    finite = random.random(400) > 0.02
    assert not finite.all()
    largest = np.where(finite, sizes, np.nan).astype(np.float32)
    got = run_of(log_normal_scale(), largest, finite)
    want = list(log_normal_model(sizes, finite))
    # The floor's argument may end up on the other side of a whole number.
    assert np.mean(got == want) > 0.99
    np.testing.assert_array_less(np.abs(np.log2(got) - np.log2(want)), 1.5)


@functools.cache
def in_float16(scaling):
    """Returns a function from max |g| to scales, overflows and zeros of each step."""

    def one(carry, size):
        scale, state = carry
        scaled = (size * scale).astype(jnp.float16)
        finite, largest = jnp.isfinite(scaled), scaled.astype(jnp.float32) / scale
        carry = scaling.next(scale, state, largest, finite)
        return carry, (scale, ~finite, scaled == 0)

    return jax.jit(jax.vmap(lambda x: lax.scan(one, scaling.init(), x)[1]))


def log_normal_run(sizes):
    """Returns the scales of one run, which steps overflow, and which are zero."""
    sizes = np.asarray([sizes], np.float32)
    return [np.asarray(x[0]) for x in in_float16(log_normal_scale())(sizes)]


@pytest.mark.parametrize("deviation", [0.5, 2.0, 4.0])
def test_log_normal_overflows_less_than_once_in_a_thousand_steps(deviation):
    noise = deviation * jax.random.normal(jax.random.key(1), (64, 10_000))
    _, overflows, _ = in_float16(log_normal_scale())(jnp.exp2(noise - 8))
    assert overflows[:, 1000:].mean() < 0.001


@pytest.mark.parametrize("name", ["backoff", "log_normal"])
def test_a_run_of_overflows_does_not_stall_training(name):
    sizes = np.array([np.inf] * 100 + [2.0**-9] * 600, np.float32)
    scales = run_of(SCALINGS[name], sizes, np.isfinite(sizes))
    assert scales[99] <= 1.0
    assert scales[-1] >= 2.0**10


def test_outside_of_jit_only_the_first_steps_compile(caplog):
    tx = with_loss_scale(optax.adam(0.1), log_normal_scale())
    params = {"w": jnp.ones(8, jnp.float16)}
    state, grads = tx.init(params), {"w": jnp.ones(8, jnp.float16)}
    for _ in range(2):
        params, state = lowbit_optax.step(tx, params, state, grads)
    with jax.log_compiles():
        lowbit_optax.step(tx, params, state, grads)
    assert not [x for x in caplog.messages if x.startswith("Compiling")]


@pytest.mark.parametrize("run", [20, 100, 500])
def test_overflows_do_not_hide_gradients_of_the_usual_size(run):
    sizes = [2.0**-9] * 50 + [np.nan] * run + [2.0**-9] * 3
    scales, overflows, zeros = log_normal_run(sizes)
    assert scales.min() * 2.0**-9 >= 2.0**-24
    assert not (overflows | zeros)[-3:].any()
    # One finite step is enough to compute the scale from the statistics again.
    assert (scales[-2:] == scales[49]).all()


@pytest.mark.parametrize("deviation", [0.0, 0.5, 2.0])
def test_gradients_of_another_size_are_followed(deviation):
    octaves = np.array([-40, -36, -30, -25, -20, -8, 8, 20, 30, 36, 40])
    first = np.where(octaves < 0, 14, -24)[:, None]
    noise = deviation * np.random.default_rng(0).standard_normal((len(octaves), 1000))
    changed = np.arange(1000) >= 200
    sizes = np.exp2(first + octaves[:, None] * changed + noise).astype(np.float32)
    _, overflows, zeros = in_float16(log_normal_scale())(sizes)
    assert not zeros[:, 500:].any()
    assert np.mean(overflows[:, 500:]) < 0.001


@pytest.mark.parametrize("size", [1e-3, 1e-9, 1e-12])
def test_zeros_at_a_low_scale_raise_it(size):
    sizes = np.full((1, 2000), size, np.float32)
    scaling = log_normal_scale(2.0**-24)
    scales, overflows, zeros = in_float16(scaling)(sizes)
    assert zeros[0, 0]
    assert not (overflows | zeros)[0, -1]
    assert scales.max() <= scaling.largest


def test_zeros_raise_the_scale_and_an_overflow_brings_back_the_usual_one():
    good = [2.0**-9] * 50
    scales, _, _ = log_normal_run([*good, *[np.nan] * 20, 0, 0])
    assert scales[-1] == scales[49] > scales[69]
    scales, _, _ = log_normal_run([*good, *[0] * 300, np.nan, good[0]])
    assert scales[-2] > 4 * scales[49]
    assert scales[-1] == scales[49]


def test_the_third_far_gradient_in_a_row_restarts_the_statistics():
    scales, _, _ = log_normal_run([2.0**-9] * 50 + [2.0**-20] * 4)
    assert scales[-2] < scales[-1] == log_normal_run([2.0**-20] * 2)[0][-1]


def test_a_gradient_of_the_usual_size_ends_a_row_of_zeros():
    row = [2.0**-9] * 50 + [0.0] * 150
    scales, _, _ = log_normal_run([*row, *row])
    np.testing.assert_array_equal(scales[100:200], scales[300:])


def test_a_gradient_far_below_the_mean_does_not_end_a_row_of_zeros():
    sizes = [2.0] * 50 + [0.0] * 100 + [2.0**-8] + [0.0] * 100
    scales, _, _ = log_normal_run(sizes)
    assert scales[-1] > 4 * scales[150]


@pytest.mark.parametrize("inner", INNERS)
def test_scaled_training_is_unscaled_training_bit_for_bit(inner):
    start = parameters(jnp.float32)
    step = jax.jit(lowbit_optax.step, static_argnums=0)
    plain = INNERS[inner]()
    want = start, plain.init(start)
    for i in range(6):
        want = step(plain, *want, gradients(i, like=start))
    for scaling in SCALINGS.values():
        tx = with_loss_scale(INNERS[inner](), scaling)
        got = start, tx.init(start)
        for i in range(6):
            scale = current_loss_scale(got[1])
            assert float(np.log2(scale)).is_integer()
            grads = jax.tree.map(lambda g, s=scale: g * s, gradients(i, like=start))
            got = step(tx, *got, grads)
        assert_same_bits((got[0], got[1].inner_state), want)


BY_KERNELS = [
    pytest.param(
        functools.partial(alias, 2.0**-7, implementation="pallas"),
        marks=pytest.mark.slow_to_compile,
        id=f"{alias.__name__}, kernels",
    )
    for alias in (lowbit_optax.kahan_adamw, lowbit_optax.lowbit_adamw)
]


@pytest.mark.parametrize("advance", [lowbit_optax.step, apply])
@pytest.mark.parametrize(
    "inner",
    [*(pytest.param(make, id=name) for name, make in INNERS.items()), *BY_KERNELS],
)
def test_an_overflow_changes_only_the_scale(inner, advance):
    tx = with_loss_scale(inner(), SCALINGS["backoff"])
    advance = jitted(tx, advance)
    params = parameters() | {"norm": jnp.ones(7)}
    state = initial(tx, params)
    for i in range(2):
        params, state = advance(params, state, gradients(i, 2.0**10, params))
    grads = gradients(2, 2.0**10, params)
    for bad in (np.inf, -np.inf, np.nan):
        after, new = advance(params, state, spoilt(grads, bad))
        assert_same_bits((after, new.inner_state), (params, state.inner_state))
        assert float(new.scale) == float(state.scale) / 2
        assert (int(state.skipped), int(new.skipped)) == (0, 1)
        assert int(new.scaling_state) == 0
    moved, _ = advance(params, state, grads)
    assert all((moved[name] != params[name]).any() for name in params)


def test_gradients_that_overflow_only_without_the_scale_are_skipped():
    tx = with_loss_scale(optax.sgd(1.0), static_scale(2.0**-24))
    params = {"w": jnp.ones(8)}
    grads = {"w": jnp.full(8, 2.0**120)}
    after, state = lowbit_optax.step(tx, params, tx.init(params), grads)
    assert_same_bits(after, params)
    assert int(state.skipped) == 1


AROUND = {
    "partition": lambda tx: optax.partition(
        {"scaled": tx, "frozen": optax.set_to_zero()}, {"w": "scaled", "b": "frozen"}
    ),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "chain": lambda tx: optax.chain(optax.identity(), tx),
}
INSIDE = {
    "lowbit": lambda rate: lowbit_optax.kahan_adamw(rate),
    "chain": lambda rate: optax.chain(optax.clip(1.0), optax.adamw(rate)),
    "injected": lambda rate: optax.inject_hyperparams(
        lowbit_optax.kahan_adamw, hyperparam_dtype=jnp.float32
    )(rate),
    "apply_if_finite": lambda rate: optax.apply_if_finite(optax.sgd(rate), 3),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("around", AROUND)
def test_an_overflow_is_skipped_in_any_composition(around, inside):
    tx = with_loss_scale(INSIDE[inside](2.0**-7), SCALINGS["backoff"])
    tx = AROUND[around](tx)
    params = {"w": parameters()["w"], "b": jnp.ones(5)}
    state = tx.init(params)
    step = jax.jit(lowbit_optax.step, static_argnums=0)
    grads = gradients(0, 2.0**10, params)
    moved, _ = step(tx, params, state, grads)
    assert (moved["w"] != params["w"]).any()
    after, new = step(tx, params, state, spoilt(grads))
    np.testing.assert_array_equal(after["w"], params["w"])
    assert float(current_loss_scale(new)) == 2.0**9
    is_scaled = lambda x: isinstance(x, lowbit_optax.loss_scaling.LossScaleState)
    old, new = (
        next(x for x in jax.tree.leaves(s, is_leaf=is_scaled) if is_scaled(x))
        for s in (state, new)
    )
    assert_same_bits(new.inner_state, old.inner_state)


def test_the_value_and_what_comes_with_it_are_not_scaled():
    tx = with_loss_scale(optax.sgd(0.5), static_scale(1024.0))
    loss_fn = lambda params, x: (jnp.sum(params * x, dtype=jnp.float32), {"x": x})
    params, x = jnp.ones(3, jnp.float16), jnp.full(3, 2.0, jnp.float16)
    state = tx.init(params)
    (value, aux), grads = scaled_value_and_grad(loss_fn, has_aux=True)(params, state, x)
    assert float(value) == 6.0
    np.testing.assert_array_equal(aux["x"], x)
    np.testing.assert_array_equal(grads, np.full(3, 2048.0))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("names", ["w", "wb"], ids=["sharded", "and replicated"])
def test_all_shards_of_a_shard_map_skip_together(names, check_vma):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = with_loss_scale(lowbit_optax.kahan_sgd(0.1), backoff_scale(2.0**10))
    params = {name: jnp.ones((64, 4), jnp.float16) for name in names}
    grads = params | {"w": params["w"].at[0, 0].set(jnp.nan)}
    specs = {"w": jax.P("x"), "b": jax.P()}
    specs = {name: specs[name] for name in names}

    def step(params, grads):
        params, state = lowbit_optax.step(tx, params, tx.init(params), grads)
        return params, state.scale[None]

    step = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, specs),
        out_specs=(specs, jax.P("x")),
        check_vma=check_vma,
    )
    new, scales = jax.jit(step)(params, grads)
    assert_same_bits(new, params)
    assert scales.tolist() == [2.0**9] * 4


def test_shards_with_scales_of_their_own_decide_alone():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = with_loss_scale(lowbit_optax.kahan_sgd(0.5), backoff_scale(2.0**10))
    params = jnp.ones((2, 4), jnp.float16)
    state = jax.vmap(tx.init)(params)
    grads = jnp.array([[jnp.nan] * 4, [2.0**10] * 4], jnp.float16)
    alone = lambda *args: jax.tree.map(lambda x: x[0], args)
    run = lambda *args: jax.tree.map(
        lambda x: x[None], lowbit_optax.step(tx, *alone(*args))
    )
    step = jax.shard_map(run, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    new, state = jax.jit(step)(params, state, grads)
    assert new[:, 0].tolist() == [1.0, 0.5]
    assert state.scale.tolist() == [2.0**9, 2.0**10]
