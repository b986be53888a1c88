"""A probe agrees with a float32 run that is fed the same gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats

import lowbit_optax
from lowbit_optax.loss_scaling import static_scale
from lowbit_optax.reports import probe
from tests.helpers.exact_steps import normal
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.stores import orbax
from tools.models.gpt import GPT

pytestmark = pytest.mark.standard_promotion

STEPS = 30


def _quadratic(params, key):
    noise = lambda i, x: jax.random.normal(jax.random.fold_in(key, i), x.shape)
    return sum(
        0.5 * jnp.sum((1 + i) * x**2) + jnp.sum(noise(i, x) * x)
        for i, x in enumerate(jax.tree.leaves(params))
    )


def _regression(params, key):
    x = jax.random.normal(key, (16, 64))
    y = x @ (normal((64, 96), seed=9) * 0.1)
    for name in ("a", "b"):
        x = jnp.tanh(x @ params[name] + params[f"of {name}"])
    return jnp.mean((x[:, :96] - y) ** 2)


MODEL = GPT(2, 64, 4, 16)


def _gpt(params, key):
    tokens = jax.random.randint(key, (4, 17), 0, 64)
    return MODEL.loss(params, tokens)


TASKS = {
    "quadratic": (
        lambda: {str(i): normal((96, 64 + 32 * i), seed=i) for i in range(5)},
        _quadratic,
    ),
    "regression": (
        lambda: {
            "a": normal((64, 256), seed=1) * 0.1,
            "b": normal((256, 128), seed=2) * 0.1,
            "of a": jnp.zeros(256),
            "of b": jnp.zeros(128),
        },
        _regression,
    ),
    "GPT": (lambda: MODEL.init(jax.random.key(0)), _gpt),
}


def run(tx, inner, task, share):
    """Returns the probe's report, and the true errors of each leaf."""
    init, loss_fn = TASKS[task]
    params, state = lowbit_optax.from_master(tx, init())
    start = lowbit_optax.master_weights(params, state)
    twin = start, inner.init(start)
    sample = probe(tx, params, state, share)

    @jax.jit
    def train(carry, key):
        params, state, sample, (wide, inner_state) = carry
        grads = jax.grad(loss_fn)(params, key)
        sample = sample.follow(tx, params, state, grads)
        params, state = lowbit_optax.step(tx, params, state, grads)
        grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        updates, inner_state = inner.update(grads, inner_state, wide)
        wide = optax.apply_updates(wide, updates)
        return (params, state, sample, (wide, inner_state)), None

    keys = jax.random.split(jax.random.key(5), STEPS)
    carry, _ = jax.lax.scan(train, (params, state, sample, twin), keys)
    params, state, sample, (wide, _) = carry
    report = jax.jit(type(sample).report)(sample, params, state)
    masters = lowbit_optax.master_weights(params, state)
    norm = lambda x, y: jnp.linalg.norm((x - y).ravel())
    true = jax.tree.map(
        lambda low, b, a: norm(low, b) / norm(b, a), masters, wide, start
    )
    paths = jax.tree_util.tree_leaves_with_path(true)
    return report, {jax.tree_util.keystr(path): float(x) for path, x in paths}


@pytest.mark.slow_to_compile
@pytest.mark.parametrize(
    "make", [lowbit_optax.sr_adamw, lowbit_optax.lowbit_adamw], ids=["sr", "lowbit"]
)
def test_the_probe_finds_the_error_of_a_whole_twin(make):
    inside, margins = [], []
    for task in TASKS:
        report, true = run(make(1e-3), optax.adamw(1e-3), task, share=0.3)
        assert set(report.leaves) == set(true)
        for name, leaf in report.leaves.items():
            if np.isfinite(float(leaf.margin)):
                off = abs(float(leaf.error) - true[name])
                inside.append(off <= float(leaf.margin) + 1e-6)
                margins.append(float(leaf.margin) / max(true[name], 1e-6))
    assert len(inside) >= 12
    # Wide intervals would contain every error.
    assert np.median(margins) < 0.2, margins
    assert np.mean(inside) >= 0.9


def test_a_sample_of_everything_is_the_whole_twin():
    report, true = run(
        lowbit_optax.sr_adamw(1e-3), optax.adamw(1e-3), "quadratic", share=1.0
    )
    for name, leaf in report.leaves.items():
        assert float(leaf.error) == pytest.approx(true[name], rel=1e-4)
        assert float(leaf.margin) == 0


@pytest.mark.parametrize("column", [0, 1, 32])
def test_every_column_is_counted_once(column):
    # The last of two blocks begins at column 1, and repeats columns of the first.
    tx = lowbit_optax.kahan_sgd(0.1)
    params = {"w": jnp.ones((64, 33), jnp.bfloat16)}
    state, grads = tx.init(params), {"w": jnp.zeros((64, 33)).at[:, column].set(1.0)}
    sample = probe(tx, params, state, 1.0).follow(tx, params, state, grads)
    leaf = sample.report(*lowbit_optax.step(tx, params, state, grads)).leaves["['w']"]
    assert float(leaf.moved) == pytest.approx(0.1 / np.sqrt(33), rel=1e-5)
    assert float(leaf.margin) == 0


def test_the_margin_of_few_blocks_is_infinite_or_zero():
    tx = lowbit_optax.kahan_sgd(0.1)
    shapes = {"one of many": (64, 64), "whole": (32,), "s": ()}
    params = {name: jnp.ones(x, jnp.bfloat16) for name, x in shapes.items()}
    state = tx.init(params)
    sample = probe(tx, params, state).follow(tx, params, state, params)
    after = sample.report(*lowbit_optax.step(tx, params, state, params)).leaves
    margins = {name: float(leaf.margin) for name, leaf in after.items()}
    assert margins == {"['one of many']": np.inf, "['whole']": 0, "['s']": 0}


def test_blocks_that_do_not_move_give_no_margin():
    tx = lowbit_optax.sr_adamw(1e-3, weight_decay=0.0)
    params = {"embedding": jnp.ones((256, 32), jnp.bfloat16)}
    state = tx.init(params)
    sample = probe(tx, params, state, 0.25)
    (rows,) = sample.twins[0].blocks
    for count, is_known in ((2, False), (3, True)):
        grads = {"embedding": jnp.zeros((256, 32)).at[rows[:count]].set(1.0)}
        followed = sample.follow(tx, params, state, grads)
        report = followed.report(*lowbit_optax.step(tx, params, state, grads))
        margin = float(report.leaves["['embedding']"].margin)
        assert np.isfinite(margin) == is_known
        assert margin > 0


@pytest.mark.parametrize("count", [3, 4, 12])
def test_margins_are_those_of_a_ratio_of_sums(count):
    tx = lowbit_optax.sr_adamw(1e-3)
    draw = np.random.default_rng(count).standard_normal((2, 256, 32))
    params = {"w": jnp.asarray(draw[0], jnp.bfloat16)}
    state, grads = tx.init(params), {"w": jnp.asarray(draw[1], jnp.float32)}
    sample = probe(tx, params, state, count / 256)
    start = np.asarray(sample.twins[0].start[0], np.float64)
    sample = sample.follow(tx, params, state, grads)
    wide = np.asarray(sample.twins[0].masters[0], np.float64)
    new, state = lowbit_optax.step(tx, params, state, grads)
    leaf = sample.report(new, state).leaves["['w']"]
    own = np.asarray(new["w"], np.float64)[np.asarray(sample.twins[0].blocks[0])]
    errors, squares = (((x - wide) ** 2).sum(1) for x in (own, start))
    ratio = errors.sum() / squares.sum()
    spread = ((errors - ratio * squares) ** 2).sum() * count / (count - 1)
    half = stats.t.ppf(0.975, count - 1) * np.sqrt(spread * (1 - count / 256))
    assert float(leaf.error) == pytest.approx(np.sqrt(ratio), rel=1e-3)
    want = half / squares.sum() / (2 * np.sqrt(ratio))
    assert float(leaf.margin) == pytest.approx(want, rel=0.01)


def test_small_movements_have_a_margin():
    tx = lowbit_optax.sr_adamw(1e-12)
    params = {"w": jnp.full((256, 32), 1e-9, jnp.bfloat16)}
    state, grads = tx.init(params), {"w": jnp.ones((256, 32))}
    sample = probe(tx, params, state, 0.1).follow(tx, params, state, grads)
    leaf = sample.report(*lowbit_optax.step(tx, params, state, grads)).leaves["['w']"]
    assert 0 < float(leaf.margin) < float(leaf.error)


def test_lost_updates_are_counted():
    # bfloat16 numbers near 1 are 2^-7 apart, so updates of 2^-12 are lost.
    params, state = {"w": jnp.ones((64, 64), jnp.bfloat16)}, None
    tx = lowbit_optax.lowbit(optax.sgd(1.0), weights=lowbit_optax.nearest())
    state = tx.init(params)
    sample = probe(tx, params, state)
    grads = jax.tree.map(lambda x: jnp.full_like(x, 2.0**-12), params)
    sample = sample.follow(tx, params, state, grads)
    after = sample.report(*lowbit_optax.step(tx, params, state, grads))
    assert float(after.leaves["['w']"].lost) == 1
    assert float(after.leaves["['w']"].error) == 1
    assert "['w']/lost" in after.scalars()


def test_groups_without_leaves_are_followed():
    groups = {name: lowbit_optax.kahan_sgd(0.1) for name in "abc"}
    tx = optax.partition(groups, {"w": "b"})
    params = {"w": jnp.ones(64, jnp.bfloat16)}
    state = tx.init(params)
    sample = probe(tx, params, state).follow(tx, params, state, params)
    report = sample.report(*lowbit_optax.step(tx, params, state, params))
    assert float(report.leaves["['w']"].moved) == pytest.approx(0.1)
    other = {"v": params["w"]}
    with pytest.raises(ValueError, match=r"in probe, \['w'\], got \['v'\]"):
        sample.follow(groups["a"], other, groups["a"].init(other), other)


def test_complex_and_empty_leaves_are_reported():
    tx = lowbit_optax.lowbit(optax.sgd(0.1))
    params = {"w": jnp.ones(64, jnp.complex64), "empty": jnp.ones(0, jnp.bfloat16)}
    state = tx.init(params)
    sample = probe(tx, params, state).follow(tx, params, state, params)
    report = sample.report(*lowbit_optax.step(tx, params, state, params))
    assert list(report.leaves) == ["['w']"]
    assert float(report.leaves["['w']"].moved) == pytest.approx(0.1)
    assert "['w']" in str(report)


def test_quantized_weights_have_a_sample():
    tx = lowbit_optax.lpmm_adam(1e-3)
    params = lowbit_optax.lpmm.quantize_params({"w": normal((64, 64))}, bits=8)
    state, grads = tx.init(params), {"w": normal((64, 64), seed=1)}
    sample = probe(tx, params, state, share=0.5).follow(tx, params, state, grads)
    report = sample.report(*lowbit_optax.step(tx, params, state, grads))
    # The first update of Adam is the learning rate.
    assert float(report.leaves["['w']"].moved) == pytest.approx(1e-3, rel=1e-2)


WRAPPERS = {
    "clipped": lambda tx: optax.chain(optax.clip_by_global_norm(0.1), tx),
    "scaled": lambda tx: lowbit_optax.with_loss_scale(tx, static_scale(8.0)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_act_on_the_sample(wrap):
    weights = lowbit_optax.master_copy()
    inner = optax.adamw(1e-2, weight_decay=5.0)  # so that the weights matter
    tx = wrap(lowbit_optax.lowbit(inner, weights=weights, moments={}))
    params, state = lowbit_optax.from_master(tx, {"w": normal((128, 64))})
    sample = probe(tx, params, state, share=0.5)
    for seed, bad in enumerate([0.0, jnp.inf, 0.0]):
        if bad and wrap is WRAPPERS["clipped"]:
            continue
        grads = {"w": normal((128, 64), seed=seed).at[0, 0].add(bad)}
        sample = sample.follow(tx, params, state, grads)
        params, state = lowbit_optax.step(tx, params, state, grads)
    # A run in float32 goes where its sample goes.
    leaf = sample.report(params, state).leaves["['w']"]
    assert float(leaf.error) < 1e-5
    assert float(leaf.moved) > 0.01


def test_a_probe_can_be_donated_with_the_run():
    tx, params = lowbit_optax.lowbit_adamw(1e-3), {"w": normal((64, 64)), "s": 0.5}
    params, state = lowbit_optax.from_master(tx, jax.tree.map(jnp.float32, params))

    def train(params, state, sample, grads):
        sample = sample.follow(tx, params, state, grads)
        return *lowbit_optax.step(tx, params, state, grads), sample

    grads = jax.tree.map(jnp.ones_like, params)
    donated = jax.jit(train, donate_argnums=(0, 1, 2))
    *run, sample = donated(params, state, probe(tx, params, state), grads)
    assert float(sample.report(*run).leaves["['s']"].moved) > 0


def test_a_probe_survives_a_checkpoint(tmp_path):
    tx, params = lowbit_optax.lowbit_adamw(1e-3), {"w": normal((64, 64))}
    params, state = lowbit_optax.from_master(tx, params)
    sample = probe(tx, params, state, share=0.2)
    again = orbax(tmp_path, sample, jax.eval_shape(lambda: sample))
    assert jax.tree.structure(again) == jax.tree.structure(sample)
    assert_same_bits(again, sample)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_the_report_is_the_same(kind):
    tx = lowbit_optax.lowbit_adamw(1e-3)
    reports = []
    for devices in (1, 8):
        mesh = jax.make_mesh((devices,), ("x",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            place = NamedSharding(mesh, P("x", None))
            master = jax.device_put({"w": normal((512, 64))}, place)
            params, state = lowbit_optax.from_master(tx, master)
            sample = probe(tx, params, state, share=0.1)
            grads = jax.device_put({"w": normal((512, 64), seed=1)}, place)
            step = jax.jit(functools.partial(lowbit_optax.step, tx))
            follow = jax.jit(lambda sample, *args: sample.follow(tx, *args))
            sample = follow(sample, params, state, grads)
            params, state = step(params, state, grads)
            reports.append(sample.report(params, state).leaves["['w']"])
    np.testing.assert_allclose(*map(np.asarray, reports), rtol=1e-4, atol=1e-6)


WARMUP = optax.linear_schedule(0.0, 1e-3, 1000)
NORM = optax.clip_by_global_norm(1.0)


def of_each(function):
    """An inner transformation that applies a function to each leaf's gradient."""
    return optax.stateless(lambda grads, _: jax.tree.map(function, grads))


def of_columns(grads, table, params=None):
    del params
    return jax.tree.map(lambda x: x * table if x.ndim > 1 else x, grads), table


def swapped(grads, _):
    return {"w": grads["v"], "v": grads["w"], "b": grads["b"]}


DEPENDS = {
    "clip": optax.chain(NORM, optax.adamw(1e-3)),
    "clip at rate 0": optax.chain(NORM, optax.sgd(WARMUP)),
    "clip after Adam": optax.chain(optax.scale_by_adam(), NORM),
    "rare clip": optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(1e-3)),
    "scale of weights": optax.chain(optax.sgd(1e-3), optax.scale_by_param_block_rms()),
    "norms of columns": of_each(
        lambda x: x / jnp.linalg.norm(x, axis=0) if x.ndim > 1 else x
    ),
    "sums of rows": of_each(lambda x: jnp.cumsum(x, axis=-1)),
    "places": of_each(lambda x: x * jnp.arange(x.size).reshape(x.shape)),
    "table in the state": optax.GradientTransformation(
        lambda params: jnp.arange(32), of_columns
    ),
    "other leaf": optax.stateless(swapped),
    "distance of all weights": optax.contrib.dadapt_adamw(),
    "random numbers": optax.noisy_sgd(1e-3, key=0),
}
ELEMENTWISE = {
    "AdamW": optax.adamw(WARMUP, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
    "clip of elements": optax.chain(optax.clip(0.1), optax.lion(1e-3)),
    "accumulation": optax.MultiSteps(optax.adam(1e-3), 3).gradient_transformation(),
    "schedule-free": optax.contrib.schedule_free_adamw(1e-3),
    "hyperparameters": optax.inject_hyperparams(optax.nadam)(WARMUP),
    "count of NaN": optax.chain(optax.zero_nans(), optax.rprop(1e-3)),
    "table": optax.sgd(optax.piecewise_interpolate_schedule("cosine", 0.1, {5: 0.2})),
    "other functions": of_each(lambda x: jnp.round(jax.lax.erf(x)) + jnp.sinh(x) % 3),
}


def probed(tx):
    shapes = {"w": (64, 32), "v": (64, 32), "b": (64,)}
    params = {name: jnp.ones(x, jnp.bfloat16) for name, x in shapes.items()}
    return probe(tx, params, tx.init(params))


@pytest.mark.parametrize("inner", DEPENDS.values(), ids=DEPENDS)
def test_updates_that_depend_on_other_elements_are_refused(inner):
    with pytest.raises(ValueError, match="depends on other gradients or weights"):
        probed(lowbit_optax.lowbit(inner, min_size=0))


@pytest.mark.parametrize("inner", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_elementwise_updates_are_accepted(inner):
    probed(lowbit_optax.lowbit(inner, min_size=0))


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (lowbit_optax.lowbit_muon(1e-3), "must be elementwise"),
        (
            lowbit_optax.factored_adamw(1e-3, min_dim_size_to_factor=16),
            "must be elementwise",
        ),
        (lowbit_optax.lowbit(optax.sm3(0.1)), "must be elementwise"),
        (optax.adamw(1e-3), "must contain a lowbit"),
    ],
    ids=["muon", "factored", "rows and columns", "no lowbit"],
)
def test_other_transformations_are_refused(tx, message):
    with pytest.raises(ValueError, match=message):
        probed(tx)


def test_bad_arguments_are_refused():
    tx, params = lowbit_optax.kahan_adamw(1e-3), {"w": jnp.ones((64, 64), jnp.bfloat16)}
    state = tx.init(params)
    with pytest.raises(ValueError, match="share must be"):
        probe(tx, params, state, share=0)
    with pytest.raises(ValueError, match="seed must be"):
        probe(tx, params, state, seed=-1)
    with pytest.raises(ValueError, match=r"outside of jax\.jit"):
        jax.jit(lambda p, s: probe(tx, p, s))(params, state)
