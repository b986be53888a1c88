"""``factored_adamw`` is AdamW with Adafactor's second moment."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import block_quantized, factored_adamw, scale_by_factored_adam
from tests.helpers.moment_updates import compared, updates
from tests.helpers.optimizers import (
    assert_same_bits,
    gradient_series,
    initial,
    normal,
    train,
)
from tests.helpers.released import assert_equal_steps
from tools.hlo import collectives

pytestmark = pytest.mark.standard_promotion

SMALL = functools.partial(scale_by_factored_adam, min_dim_size_to_factor=8)
SHAPES = {"matrix": (40, 24), "stack": (3, 16, 40), "flat": (40, 7), "bias": (24,)}
FACTORED = ("matrix", "stack")


def _weights(dtype=jnp.float32):
    random = np.random.default_rng(0)
    draw = lambda shape: jnp.asarray(random.normal(size=shape), dtype)
    return {name: draw(shape) for name, shape in SHAPES.items()}


def _formula(grads, b1=0.9, b2=0.99, eps=1e-8):
    """The last direction for a series of gradients of a matrix, in float64."""
    m, r, c = 0.0, 0.0, 0.0
    for t, g in enumerate(np.asarray(grads, np.float64), 1):
        r = b2 * r + (1 - b2) * (g**2).mean(1)
        c = b2 * c + (1 - b2) * (g**2).mean(0)
        v = np.outer(r, c) / r.mean() / (1 - b2**t)
        m = b1 * m + (1 - b1) * g / (np.sqrt(v) + eps)
    return m / (1 - b1**t)


def test_directions_are_those_of_the_formula():
    params = _weights()
    series = gradient_series(params, 5)
    tx = SMALL(b2=0.99)
    state = tx.init(params)
    for grads in series:
        found, state = tx.update(grads, state)
    matrices = {"matrix": [g["matrix"] for g in series]}
    matrices |= {f"stack {i}": [g["stack"][i] for g in series] for i in range(3)}
    for name, grads in matrices.items():
        kind, _, number = name.partition(" ")
        got = found[kind][int(number)] if number else found[kind]
        near = dict(rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got, _formula(grads), **near)


def _without_factors(b1):
    options = dict(eps=1e-6, eps_in_sqrt=False, bias_correction=True)
    rms = optax.scale_by_rms(0.99, **options)
    return optax.chain(rms, optax.ema(b1))


@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_other_leaves_average_the_gradients_divided_by_their_own_root(b1):
    params = {name: x for name, x in _weights().items() if name not in FACTORED}
    series = gradient_series(params, 5)
    ours, theirs = SMALL(b1, 0.99, 1e-6), _without_factors(b1)
    got, state = train(ours, params, ours.init(params), series)
    want, (rms, _) = train(theirs, params, theirs.init(params), series)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(near, (got, state.nu), (want, rms.nu))


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_momentum_other_leaves_are_updated_as_in_adamw(nesterov):
    params = {name: x for name, x in _weights().items() if name not in FACTORED}
    series = gradient_series(params, 5)
    options = dict(b1=0.0, b2=0.99, eps=1e-6, eps_root=1e-7, nesterov=nesterov)
    ours, theirs = SMALL(**options), optax.scale_by_adam(**options)
    got, _ = train(ours, params, ours.init(params), series)
    want, _ = train(theirs, params, theirs.init(params), series)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(near, got, want)


@pytest.mark.parametrize("nesterov", [False, True])
def test_with_gradients_of_rank_one_it_is_adam(nesterov):
    rows, columns = jnp.exp(normal(0, (40, 1))), jnp.exp(normal(1, (1, 24)))
    size = rows * columns
    series = [size * jnp.sign(normal(seed, (40, 24))) for seed in range(2, 7)]
    params = jnp.ones((40, 24))
    options = dict(b2=0.99, nesterov=nesterov)
    ours, theirs = SMALL(**options), optax.scale_by_adam(**options)
    got, _ = train(ours, params, ours.init(params), series)
    want, _ = train(theirs, params, theirs.init(params), series)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-15, 1e-9, 1.0, 1e9, 1e15])
def test_the_product_of_means_neither_underflows_nor_overflows(scale):
    grads = scale * normal(0, (40, 24))
    tx = SMALL(eps=0.0)
    found, _ = tx.update(grads, tx.init(grads))
    usual, _ = tx.update(normal(0, (40, 24)), tx.init(grads))
    np.testing.assert_allclose(found, usual, rtol=1e-4)


def test_rows_and_matrices_without_gradients_do_not_move():
    grads = normal(0, (40, 24)).at[7].set(0).at[:, 3].set(0)
    tx = SMALL()
    state = tx.init(grads)
    for g in (jnp.zeros_like(grads), grads, grads):
        found, state = tx.update(g, state)
        assert np.isfinite(found).all()
    assert not found[7].any()
    assert not found[:, 3].any()
    assert found[8, 4] != 0


def test_axes_of_the_least_length_are_factored():
    init = lambda shape: jax.eval_shape(SMALL().init, jnp.zeros(shape))
    size = lambda shape: sum(x.size for x in jax.tree.leaves(init(shape)))
    assert size((8, 40)) < 1.5 * 8 * 40
    assert size((7, 40)) >= 2 * 7 * 40


def test_an_optimizer_without_leaves_works():
    tx = SMALL()
    updates, _ = tx.update({}, tx.init({}))
    assert updates == {}


@pytest.mark.parametrize(("bits", "size"), [(8, 3.57), (0, 2.57)])
def test_the_bytes_are_those_of_the_docstring(bits, size):
    shape = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    report = lowbit_optax.memory_report(factored_adamw(1e-3, bits=bits), shape)
    assert round(report.bytes_per_param, 2) == size


# Without extra bits, the first steps are as large as the spacing of bfloat16.
@pytest.mark.parametrize(("bits", "most"), [(16, 0.05), (8, 0.05), (0, 0.25)])
def test_low_bits_train_like_float32(bits, most):
    x, target = normal(0, (256, 64)), normal(1, (256, 32)) @ normal(2, (32, 32))
    loss = lambda w: jnp.mean((x @ w.astype(jnp.float32) - target) ** 2)
    rate = optax.cosine_decay_schedule(0.05, 200)
    options = dict(min_dim_size_to_factor=8)
    ours = factored_adamw(rate, bits=bits, min_size=0, **options)
    theirs = optax.chain(
        scale_by_factored_adam(**options),
        optax.add_decayed_weights(1e-4),
        optax.scale_by_learning_rate(rate),
    )

    def trained(tx, params):
        def step(carry, _):
            params, state = carry
            grads = jax.grad(loss)(params)
            return lowbit_optax.step(tx, params, state, grads), None

        run = jax.jit(lambda c: jax.lax.scan(step, c, length=200)[0])
        return run((params, tx.init(params)))[0]

    start = 0.1 * normal(3, (64, 32))
    got = float(loss(trained(ours, start.astype(jnp.bfloat16))))
    want = float(loss(trained(theirs, start)))
    assert abs(got / want - 1) < most


# Neighbours share the scale of a block, and each has its own second moment.
@pytest.mark.parametrize("small", [1.0, 0.1, 0.001])
@pytest.mark.parametrize("least", [8, 128], ids=["factored", "not factored"])
@pytest.mark.parametrize("axis", [0, 1])
def test_four_bits_keep_the_length_of_updates_next_to_large_gradients(
    small, least, axis
):
    adam = scale_by_factored_adam(min_dim_size_to_factor=least)
    inner = optax.chain(adam, optax.scale(-1.0))
    sizes = np.where(np.arange(64) % 2, small, 1.0)
    draws = np.random.default_rng(0).standard_normal((400, 64, 64), np.float32)
    grads = jnp.asarray(draws * np.expand_dims(sizes, 1 - axis), jnp.float32)
    few_bits = (("mu", block_quantized(4)), ("nu", block_quantized(8)))
    got, want = (
        np.moveaxis(updates(x, grads, inner=inner)[300:], 1 + axis, 0)[1::2]
        for x in (few_bits, "float32")
    )
    assert 1.0 < compared(got, want)[1] < 1.07


@pytest.mark.parametrize("axis_type", list(jax.sharding.AxisType)[:2])
@pytest.mark.parametrize("spec", [jax.P("x"), jax.P(None, "x"), jax.P("x", "y")])
@pytest.mark.parametrize("bits", [8, 0])
def test_eight_devices_exchange_only_sums(bits, spec, axis_type):
    tx = factored_adamw(1e-2, bits=bits)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    params = normal(0, (512, 256), jnp.bfloat16)
    series = [0.1 * normal(seed, (512, 256), jnp.bfloat16) for seed in (1, 2, 3)]
    want, before = train(tx, params, initial(tx, params), series, lowbit_optax.step)
    sharding = jax.NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
        shardings = lowbit_optax.state_shardings(tx, params, sharding)
        state = jax.jit(tx.init, out_shardings=shardings)(params)
        params, *series = jax.device_put((params, *series), sharding)
        step = jax.jit(functools.partial(lowbit_optax.step, tx))
        compiled = step.lower(params, state, series[0]).compile()
        assert set(collectives(compiled)) == {"all-reduce"}
        for grads in series:
            params, state = step(params, state, grads)
    assert params.sharding.is_equivalent_to(sharding, 2)
    # The sums are added in another order, so a few weights are rounded differently, by
    # at most one unit of bfloat16.
    got, want = (np.asarray(x, np.float32) for x in (params, want))
    unit = 2.0**-7 * np.abs(want)
    assert np.all(np.abs(got - want) <= np.maximum(1e-2, unit))
    assert np.mean(got != want) < 0.01
    for got, want in zip(
        jax.tree.leaves((state.inner_state[0].nu_row, state.inner_state[0].nu_column)),
        jax.tree.leaves(
            (before.inner_state[0].nu_row, before.inner_state[0].nu_column)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_backward_loop_updates_each_matrix_of_a_stack():
    params = {
        "layers": 0.1 * normal(0, (3, 64, 64), jnp.bfloat16),
        "scale": jnp.ones((3, 64)),
    }

    def loss(params, x):
        def body(x, layer):
            w, scale = layer
            return jnp.tanh(x @ w.astype(jnp.float32)) * scale, None

        x, _ = jax.lax.scan(body, x, (params["layers"], params["scale"]))
        return jnp.mean(x**2)

    batches = [(normal(seed, (8, 64)),) for seed in range(3)]
    tx = factored_adamw(1e-2, min_dim_size_to_factor=16)
    assert_equal_steps(loss, tx, params, batches, in_loop={"['layers']"})


def test_numbers_of_bits_that_are_not_integers_are_refused():
    for bits in (False, 0.0):
        with pytest.raises(TypeError, match="bits must be a static int"):
            factored_adamw(1e-3, bits=bits)


def test_the_state_moves_to_float32_and_back():
    params = _weights(jnp.bfloat16)
    series = gradient_series(params, 3)
    options = dict(min_dim_size_to_factor=8, min_size=0)
    low, wide = factored_adamw(1e-2, **options), factored_adamw(1e-2, bits=0, **options)
    params, state = train(low, params, initial(low, params), series, lowbit_optax.step)
    moved, there = lowbit_optax.convert(params, state, low, wide)
    inner, other = state.inner_state[0], there.inner_state[0]
    assert_same_bits((other.nu_row, other.nu_column), (inner.nu_row, inner.nu_column))
    assert_same_bits(moved, params)
    train(wide, moved, there, series, lowbit_optax.step)


def test_a_skipped_step_changes_nothing():
    params = _weights(jnp.bfloat16)
    scaling = lowbit_optax.loss_scaling.backoff_scale(8.0)
    inner = factored_adamw(1e-2, min_dim_size_to_factor=8, min_size=0)
    tx = lowbit_optax.with_loss_scale(inner, scaling)
    state = initial(tx, params)
    bad = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), params)
    new, after = lowbit_optax.step(tx, params, state, bad)
    assert_same_bits((new, after.inner_state), (params, state.inner_state))


def test_kernels_sum_unscaled_gradients():
    params = {"w": normal(0, (64, 128), jnp.bfloat16)}
    grads = {"w": normal(1, (64, 128), jnp.bfloat16)}

    def means(implementation):
        inner = factored_adamw(
            1e-2, min_dim_size_to_factor=8, implementation=implementation
        )
        scaling = lowbit_optax.loss_scaling.backoff_scale(2.0**10)
        tx = lowbit_optax.with_loss_scale(inner, scaling)
        step = functools.partial(lowbit_optax.step, tx)
        _, state = jax.jit(step)(params, initial(tx, params), grads)
        factored = state.inner_state.inner_state[0]
        return factored.nu_row["w"], factored.nu_column["w"]

    for got, want in zip(means("pallas"), means("xla"), strict=True):
        assert 1e-12 < float(want.max()) < 1e-6
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_one_axis_cannot_be_factored():
    with pytest.raises(ValueError, match=r"min_dim_size_to_factor .* 2, got 1"):
        scale_by_factored_adam(min_dim_size_to_factor=1)


def test_the_defaults_are_those_of_optax():
    pairs = [
        (lowbit_optax.scale_by_factored_adam, optax.scale_by_adam),
        (lowbit_optax.factored_adamw, optax.adamw),
    ]
    for ours, optaxs in pairs:
        ours, optaxs = (inspect.signature(x).parameters for x in (ours, optaxs))
        for name in ours.keys() & optaxs.keys():
            assert ours[name].default == optaxs[name].default, name


def test_without_lowbit_the_state_keeps_its_dtypes():
    tx, params = scale_by_factored_adam(), {"w": jnp.ones((128, 128), jnp.bfloat16)}
    state = tx.init(params)
    shapes = jax.eval_shape(tx.update, params, state, params)
    assert shapes == jax.eval_shape(lambda: (params, state))


def test_leaves_of_equal_shapes_may_have_different_shardings():
    auto, shape = (jax.sharding.AxisType.Auto,) * 2, (128, 128)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=auto)
    specs = {"a": jax.P("x", "y"), "b": jax.P("y", "x")}
    params = {name: jnp.ones(shape, jnp.bfloat16) for name in specs}
    grads = {
        name: jax.random.normal(jax.random.key(i), shape)
        * jnp.arange(1.0, 129)[:, None]
        for i, name in enumerate(specs)
    }
    scaled = optax.scale_by_factored_rms(min_dim_size_to_factor=8)
    inner = optax.chain(scaled, optax.scale(-(2.0**-6)))
    tx = lowbit_optax.lowbit(inner, implementation="pallas")
    step = jax.jit(functools.partial(lowbit_optax.step, tx))
    want = step(params, tx.init(params), grads)
    put = lambda tree: {
        name: jax.device_put(x, jax.NamedSharding(mesh, specs[name]))
        for name, x in tree.items()
    }
    params, grads = put(params), put(grads)
    got = step(params, jax.jit(tx.init)(params), grads)
    masters = (
        lowbit_optax.master_weights(params, state) for params, state in (got, want)
    )
    for own, one in zip(*map(jax.tree.leaves, masters), strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5)
