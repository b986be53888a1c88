"""``convert`` moves a run to another format and loses no more than it must."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import (
    block_quantized,
    convert,
    extra_bits,
    kahan,
    lowbit,
    master_weights,
)
from lowbit_optax.lpmm import quantize_params
from tests.helpers.optimizers import (
    BFLOAT16_MOMENTS,
    adamw,
    assert_same_bits,
    gradient_series,
    initial,
    jitted,
    model_params,
    spec_of,
    train,
)
from tests.helpers.wrappers import WRAPPERS

pytestmark = pytest.mark.standard_promotion

RATE = 0.003


_adamw = functools.partial(adamw, RATE)
FLOAT32 = optax.adamw(RATE)
MASTER_MODEL = {"kernel": model_params(jnp.float32)["kernel"]}
CODES = jax.eval_shape(
    functools.partial(quantize_params, bits=12, block_size=32, min_size=0),
    MASTER_MODEL,
)

# Maps a name to a transformation, the dtypes of its parameters, and the errors of
# stored float32 masters and moments, relative to the value and to the largest value.
BF16, F16 = jnp.bfloat16, jnp.float16
FORMATS = {
    "float32": (FLOAT32, jnp.float32, (0, 0), (0, 0)),
    "bits_8": (
        _adamw(extra_bits(8), block_quantized(8)), BF16, (2**-16, 0), (0.07, 1e-4)
    ),
    "kahan": (_adamw(kahan(), BFLOAT16_MOMENTS), BF16, (2**-16, 0), (2**-8, 0)),
    "float16": (
        _adamw(extra_bits(), {"mu": block_quantized(8), "nu": block_quantized(4)}),
        F16, (2**-24, 2**-24), (0.3, 0.5)
    ),
    "lpmm": (
        lowbit_optax.lpmm_adam(RATE, weight_decay=1e-4, block_size=32, min_size=0),
        CODES, (0, 2**-11), (0.07, 0.1),
    ),
}  # fmt: skip


@functools.cache
def _float32_run(steps):
    """Returns parameters and state after some float32 steps."""
    params = MASTER_MODEL
    state = FLOAT32.init(params)
    for grads in gradient_series(params, steps):
        params, state = jitted(FLOAT32, lowbit_optax.step)(params, state, grads)
    return params, state


@functools.cache
def _converted():
    """Converts the float32 run after 5 steps to every format."""

    def to_all(params, state):
        return {
            name: convert(params, state, FLOAT32, tx, dtype=dtypes)
            for name, (tx, dtypes, *_) in FORMATS.items()
        }

    return jax.jit(to_all)(*_float32_run(5))


def _to_float32(runs):
    """Converts all runs to float32 in one program."""

    def to_float32(runs):
        return {
            key: convert(*run, FORMATS[key[-1]][0], FLOAT32)
            for key, run in runs.items()
        }

    return jax.jit(to_float32)(runs)


def _assert_near(got, want, bounds):
    """Checks |got - want| <= relative |want| + absolute max |want| for each leaf."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        most = bounds[0] * np.abs(b) + bounds[1] * np.abs(b).max()
        assert (np.abs(a - b) <= most).all(), np.max(np.abs(a - b) - most)


@pytest.mark.slow_to_compile
def test_every_pair_of_formats_loses_what_the_two_cannot_hold_and_no_more():
    def to_others(runs):
        return {
            (first, second): convert(
                *runs[first], FORMATS[first][0], FORMATS[second][0],
                dtype=FORMATS[second][1],
            )
            for first in FORMATS
            for second in FORMATS
        }  # fmt: skip

    want_params, want_state = _float32_run(5)
    pairs = jax.jit(to_others)(_converted())
    for (first, second), (params, state) in _to_float32(pairs).items():
        weights = np.add(FORMATS[first][2], FORMATS[second][2])
        _assert_near(params, want_params, weights)
        assert jax.tree.structure(state) == jax.tree.structure(want_state)
        moments = np.add(FORMATS[first][3], FORMATS[second][3])
        for field in ("mu", "nu"):
            got, want = getattr(state[0], field), getattr(want_state[0], field)
            _assert_near(got, want, moments)
        assert state[0].count == 5
    for first, second in pairs:
        assert_same_bits(pairs[second, second], _converted()[second])
        assert spec_of(pairs[first, second]) == spec_of(pairs[second, second])


# The means of 25 series of gradients are 0.040, 0.003, 0.061 and 0.242, and their
# standard deviations are 0.001, 0.0001, 0.002 and 0.006. With 12 bits, the step of
# these weights exceeds half the learning rate.
APART = {"bits_8": 0.05, "kahan": 0.005, "float16": 0.08, "lpmm": 0.3}


@pytest.mark.slow_to_compile
def test_a_converted_run_stays_near_the_float32_run():
    series = gradient_series(MASTER_MODEL, 10)[5:]
    series = jax.tree.map(lambda *x: jnp.stack(x), *series)

    def go_on(runs):
        ended = {}
        for name, run in runs.items():
            step = functools.partial(lowbit_optax.step, FORMATS[name][0])
            one = lambda run, grads, step=step: (step(*run, grads), None)
            ended[name,] = jax.lax.scan(one, run, series)[0]
        return ended

    runs = {name: run for name, run in _converted().items() if name != "float32"}
    want, start = _float32_run(10)[0]["kernel"], _float32_run(5)[0]["kernel"]
    for (name,), (params, _) in _to_float32(jax.jit(go_on)(runs)).items():
        apart = jnp.linalg.norm(params["kernel"] - want)
        assert apart < APART[name] * jnp.linalg.norm(want - start), name


def test_weights_come_back_from_float32_bit_for_bit():
    few_bits = [name for name in FORMATS if name != "float32"]

    def to_float32_and_back(runs):
        back, masters = {}, {}
        for name in few_bits:
            tx, dtypes = FORMATS[name][:2]
            wide = convert(*runs[name], tx, FLOAT32)
            back[name] = convert(*wide, FLOAT32, tx, dtype=dtypes)
            masters[name] = wide[0], convert(*back[name], tx, FLOAT32)[0]
        return back, masters

    back, masters = jax.jit(to_float32_and_back)(_converted())
    for name in few_bits:
        (params, state), (want_params, want_state) = back[name], _converted()[name]
        assert_same_bits(*masters[name])
        if name == "kahan":  # half a spacing is a tie between two parameters
            differ = params["kernel"] != want_params["kernel"]
            assert differ.sum() <= 2
            assert_same_bits(state.inner_state, want_state.inner_state)
        else:
            assert_same_bits(params, want_params)
            assert_same_bits(state.residual, want_state.residual)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _there_and_back(params, state, from_tx, to_tx):
    there = convert(params, state, from_tx, to_tx)
    return there, convert(*there, to_tx, from_tx)


def test_a_moment_keeps_its_codes_where_the_other_gets_fewer_bits():
    # Here, mu averages divided gradients, so it may have fewer bits than nu.
    inner = optax.chain(lowbit_optax.scale_by_factored_adam(), optax.scale(-RATE))
    mu = block_quantized(4)
    old, new = (
        lowbit(inner, moments={"mu": mu, "nu": block_quantized(bits)}, min_size=0)
        for bits in (8, 4)
    )
    params, state = lowbit_optax.from_master(old, MASTER_MODEL, BF16, None)
    params, state = train(old, params, state, gradient_series(params, 3))
    wide = convert(params, state, old, inner)
    _, got = convert(params, state, old, new)
    _, want = convert(*wide, inner, new, dtype=BF16)
    assert_same_bits(got.inner_state[0].mu, state.inner_state[0].mu)
    assert_same_bits(got.inner_state, want.inner_state)


def _plain_maker(learning_rate):
    return optax.sgd(learning_rate, 0.9)


def _lowbit_maker(learning_rate):
    return lowbit(_plain_maker(learning_rate), min_size=0)


def _kahan_maker(learning_rate):
    return lowbit(_plain_maker(learning_rate), weights=kahan(), moments="float32")


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_keep_their_state(wrap):
    from_tx, to_tx, plain = (
        wrap(make, make(0.01)) for make in (_lowbit_maker, _kahan_maker, _plain_maker)
    )
    params = model_params()

    @jax.jit
    def run(params):
        state = from_tx.init(params)
        params, state = lowbit_optax.step(
            from_tx, params, state, gradient_series(params, 1)[0]
        )
        there = convert(params, state, from_tx, to_tx)
        wide = convert(params, state, from_tx, plain)
        back = convert(*wide, plain, from_tx, dtype=params)
        ahead = lowbit_optax.step(to_tx, *there, gradient_series(params, 1)[0])
        return (params, state), there, wide, back, ahead

    (params, state), there, wide, back, ahead = run(params)
    like = jax.eval_shape(lambda x: (x, to_tx.init(x)), params)
    assert spec_of(there) == spec_of(ahead)
    assert spec_of(there)[0] == jax.tree.structure(like)
    assert wide[0]["kernel"].dtype == jnp.float32
    assert_same_bits(wide[0], master_weights(params, state))
    assert_same_bits(back[0], params)
    assert_same_bits(master_weights(*back), master_weights(params, state))
    # These are counts, rates and scales: not moments, weights or residuals.
    numbers = lambda tree: [
        x for x in jax.tree.leaves(tree) if not x.ndim and x.dtype != jnp.uint32
    ]
    assert_same_bits(numbers(there[1]), numbers(state))
    assert_same_bits(numbers(wide[1]), numbers(state))


SUMMING = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2),
    "MultiSteps that skips": lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "accumulate_gradients": lambda tx: lowbit_optax.accumulate_gradients(tx, 2),
    "conditionally_mask": lambda tx: optax.conditionally_mask(
        tx, lambda step: step < 3
    ),
}


@pytest.mark.parametrize("name", SUMMING)
def test_wrappers_that_sum_gradients_are_added_and_removed(name):
    wrap, tx = SUMMING[name], lowbit_optax.kahan_sgd(0.1, 0.9)
    params = {"w": jnp.linspace(-1, 1, 32, dtype=BF16).reshape(8, 4)}
    held = lowbit_optax.step(tx, params, tx.init(params), params)
    there = convert(*held, tx, wrap(tx))
    assert spec_of(there) == spec_of((params, wrap(tx).init(params)))
    assert_same_bits(convert(*there, wrap(tx), tx), held)
    other = SUMMING["MultiSteps"](optax.adamw(0.1))
    _, state = convert(params, FLOAT32.init(params), FLOAT32, other)
    again = SUMMING[name](optax.adamw(0.1))
    _, state = convert(*convert(params, state, other, again), again, other)
    assert spec_of(state) == spec_of(other.init(params))
    assert not state.acc_grads["w"].any()


def test_lowbit_may_move_to_another_place_in_the_chain():
    clip = optax.clip_by_global_norm(1.0)
    outer = optax.chain(clip, lowbit(optax.sgd(0.1, 0.9), min_size=0))
    inner = lowbit(optax.chain(clip, optax.sgd(0.1, 0.9)), min_size=0)
    params = model_params()
    held = params, initial(outer, params)
    held = train(outer, *held, gradient_series(params, 1), lowbit_optax.step)
    there, back = _there_and_back(*held, outer, inner)
    assert isinstance(there[1], lowbit_optax.LowbitState)
    assert_same_bits(back, held)


SUMMED = [
    lowbit_optax.accumulate_gradients(optax.sgd(0.1), 2, min_size=size)
    for size in (0, 10**9)
]
MASK = {"kernel": True, "bias": False}
SCHEDULE = optax.linear_schedule(0.1, 0.0, 10)
CHANGES = {
    "a schedule": optax.adamw(SCHEDULE),
    "clipping": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "no weight decay": optax.adam(0.1),
    "a mask of weight decay": optax.adamw(0.1, mask=MASK),
    "injected hyperparameters": optax.inject_hyperparams(optax.adamw)(0.1),
    "skipped steps": optax.apply_if_finite(optax.adamw(0.1), 3),
    "non-negative weights": optax.chain(
        optax.adamw(0.1), optax.keep_params_nonnegative()
    ),
    "another epsilon": optax.adamw(0.1, eps=1e-6, nesterov=True),
}


@pytest.mark.parametrize("new", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("whole", [True, False], ids=["tree", "array"])
def test_a_change_of_the_optimizer_keeps_moments_and_residuals(new, whole):
    """A new count starts at the number of steps, like the count of Adam's state."""
    params = {name: model_params()[name] for name in MASK}
    params = params if whole else params["kernel"]
    if not whole and new is CHANGES["a mask of weight decay"]:
        pytest.skip("a mask needs a tree")
    from_tx, to_tx = (lowbit(tx, min_size=0) for tx in (optax.adamw(0.1), new))

    @jax.jit
    def run(params):
        state = initial(from_tx, params)
        held = lowbit_optax.step(from_tx, params, state, params)
        there = convert(*held, from_tx, to_tx)
        back = convert(*there, to_tx, from_tx)
        return held, there, back, lowbit_optax.step(to_tx, *there, params)

    held, there, back, ahead = run(params)
    assert_same_bits(back, held)
    assert_same_bits(there[0], held[0])
    assert_same_bits(there[1].residual, held[1].residual)
    assert spec_of(there) == spec_of(ahead)
    for path, leaf in jax.tree_util.tree_leaves_with_path(there[1].inner_state):
        if jax.tree_util.keystr(path).endswith(".count"):
            assert leaf == 1, path
    like = jax.eval_shape(to_tx.init, params)
    assert jax.tree.structure(there[1]) == jax.tree.structure(like)


def test_a_schedule_continues_where_the_inner_state_has_no_count():
    from_tx, to_tx = (_sgd(), lowbit(optax.sgd(SCHEDULE, 0.9), min_size=0))
    params = model_params()
    held = train(from_tx, params, initial(from_tx, params), gradient_series(params, 3))
    _, state = convert(*held, from_tx, to_tx)
    assert optax.tree.get(state.inner_state, "count") == 3
    # Each count must be a separate array, so that a step can donate all of them.
    adam, scheduled = (lowbit(optax.adamw(x), min_size=0) for x in (0.1, SCHEDULE))
    own = jax.tree.map(jnp.copy, params)
    held = convert(own, adam.init(own), adam, scheduled)
    step = functools.partial(lowbit_optax.step, scheduled)
    jax.jit(step, donate_argnums=(0, 1))(*held, gradient_series(params, 1)[0])


def test_a_schedule_continues_where_only_multi_steps_counts():
    plain, scheduled = (optax.MultiSteps(optax.sgd(x), 2) for x in (0.1, SCHEDULE))
    params = model_params()
    held = train(plain, params, plain.init(params), gradient_series(params, 6))
    _, state = convert(*held, plain, scheduled)
    assert state.gradient_step == 3
    assert optax.tree.get(state.inner_opt_state, "count") == 3


def test_a_mask_drops_the_moments_of_the_parameters_that_it_leaves_out():
    params = {name: model_params()[name] for name in MASK}
    masked = optax.masked(optax.adamw(0.1), MASK)
    from_tx, to_tx = (lowbit(tx, min_size=0) for tx in (optax.adamw(0.1), masked))
    held = train(from_tx, params, initial(from_tx, params), gradient_series(params, 2))
    new, state = convert(*held, from_tx, to_tx)
    assert_same_bits(new, held[0])
    codes = state.inner_state.inner_state[0].mu.codes_v2
    old_codes = held[1].inner_state[0].mu.codes_v2
    assert_same_bits(codes["kernel"], old_codes["kernel"])
    assert isinstance(codes["bias"], optax.MaskedNode)
    with pytest.raises(ValueError, match=r"mu\['bias'\], which from_tx does not"):
        convert(new, state, to_tx, from_tx)


def test_small_leaves_change_with_min_size_and_other_leaves_stay():
    params = model_params() | {"norm": jnp.ones(24), "steps": jnp.int32(3), "no": None}
    small = lowbit(optax.sgd(0.1, 0.9), min_size=0)
    large = lowbit(optax.sgd(0.1, 0.9), min_size=9999)
    state = initial(small, params)
    there, back = _there_and_back(params, state, small, large)
    assert there[1].residual.tree["kernel"].dtype == jnp.float32
    assert_same_bits(there[0], params)
    assert_same_bits(back, (params, state))


def _of_no_floats(run):
    """Returns the integer and boolean leaves of parameters and inner state."""
    of_formats = ("residual", "scales")
    return [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(run)
        if jax.tree_util.keystr(path[-1:]) in ("['n']", "['flag']")
        and not any(name in jax.tree_util.keystr(path) for name in of_formats)
    ]


@pytest.mark.parametrize(
    "optimizer",
    [optax.adamw, optax.lion, functools.partial(optax.sgd, momentum=0.9)],
    ids=["adamw", "lion", "sgd"],
)
def test_a_run_with_integers_and_booleans_continues_after_a_step(optimizer):
    # optax keeps zeros in the leaves' dtypes, and the first step turns most into
    # floats.
    plain, low = optimizer(0.1), lowbit(optimizer(0.1), min_size=0)
    kahans = lowbit(optimizer(0.1), weights=kahan(), moments=BFLOAT16_MOMENTS)
    w = jnp.full((64, 8), 0.5, BF16)
    params = {"w": w, "n": jnp.arange(3), "flag": jnp.ones(2, bool)}
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 0.25), params)

    @jax.jit
    def there_and_back(params):
        step = lambda run, tx: lowbit_optax.step(tx, *run, grads)
        runs = [step((params, low.init(params)), low)]
        for from_tx, to_tx in itertools.pairwise([low, kahans, plain, low]):
            run = convert(*runs[-1], from_tx, to_tx, dtype=BF16)
            step(run, to_tx)  # a step must accept this state
            runs.append(run)
        return runs

    first, *others = there_and_back(params)
    assert jax.tree.leaves(_of_no_floats(first))
    for run in others:
        assert_same_bits(_of_no_floats(run), _of_no_floats(first))


def test_shards_stay_where_they_are_and_have_the_same_bits():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    params = {"w": jax.random.normal(jax.random.key(0), (256, 64))}
    from_tx = FLOAT32
    to_tx = _adamw(extra_bits(8), block_quantized(8))
    state = jax.jit(from_tx.init)(params)
    state = jax.tree.map(
        lambda x: x + jnp.asarray(0.5, x.dtype) if x.ndim else x, state
    )
    change = jax.jit(
        functools.partial(convert, from_tx=from_tx, to_tx=to_tx, dtype=BF16)
    )
    want = change(params, state)
    at = lambda x: jax.device_put(
        x, rows if x.ndim else jax.NamedSharding(mesh, jax.P())
    )
    got = change(jax.tree.map(at, params), jax.tree.map(at, state))
    assert_same_bits(jax.device_get(got), jax.device_get(want))
    for leaf in jax.tree.leaves(got):
        if leaf.ndim:
            assert leaf.sharding.is_equivalent_to(rows, leaf.ndim)


def _sgd(rate=0.1):
    return lowbit(optax.sgd(rate, 0.9), min_size=0)


_OTHER = {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(40)}


def test_biases_and_normalisations_stay_float32_as_with_from_master():
    master = {"kernel": jnp.ones((8, 4)), "norm": {"scale": jnp.ones((2, 4))}}
    run = master, optax.adamw(0.1).init(master)
    to_tx = lowbit_optax.kahan_adamw(0.1)
    params, state = convert(*run, optax.adamw(0.1), to_tx, dtype=BF16)
    want, want_state = lowbit_optax.from_master(to_tx, master)
    assert_same_bits(params, want)
    assert params["norm"]["scale"].dtype == jnp.float32
    assert_same_bits(state.residual, want_state.residual)
    everywhere = {"kernel": BF16, "norm": {"scale": BF16}}
    params, _ = convert(*run, optax.adamw(0.1), to_tx, dtype=everywhere)
    assert params["norm"]["scale"].dtype == BF16


# The state's transformation, from_tx, to_tx, other arguments, and the error.
REFUSED = {
    "another optimizer": (
        _sgd(), _sgd(), _adamw(kahan()), {},
        r"to_tx keeps state\[0\]\.mu\['bias'\], which from_tx does not.*from_master",
    ),
    "no momentum": (
        _sgd(), _sgd(), optax.sgd(0.1), {},
        r"from_tx keeps state.*\.trace\['bias'\], which to_tx does not.*from_master",
    ),
    "one average more": (
        _sgd(), _sgd(), optax.chain(optax.ema(0.9), _sgd()), {},
        r"to_tx keeps state.*ema\['bias'\], which from_tx does not",
    ),
    "sums in another format": (
        SUMMED[0], SUMMED[0], SUMMED[1], {}, r"accumulators.*\['bias'\]"
    ),
    "a state of another transformation": (
        FLOAT32, _adamw(kahan()), FLOAT32, {}, "state.* LowbitState.*from_tx"
    ),
    "a state of other weights": (
        _adamw(kahan()), _adamw(extra_bits(8)), FLOAT32, {},
        "residuals 'nearest_8_bits_v2'.*, got 'compensation'",
    ),
    "a state of other moments": (
        _adamw(kahan(), BFLOAT16_MOMENTS), _adamw(kahan()), FLOAT32, {},
        r"\['bias'\].* float32\[40\].*, got bfloat16\[40\]",
    ),
    "a state of other parameters": (
        FLOAT32, FLOAT32, FLOAT32, dict(params=_OTHER),
        r"state\[0\]\.mu\['kernel'\] must be bfloat16\[64, 24\].*got float32\[8, 8\]",
    ),
    "too many bits for the dtype": (
        _adamw(kahan()), _adamw(kahan()), _adamw(extra_bits(16)),
        dict(dtype={"kernel": F16, "bias": F16}),
        r"params\['bias'\]: .*13.*float16.*16",
    ),
    "an integer dtype": (
        FLOAT32, FLOAT32, FLOAT32, dict(dtype=jnp.int8),
        r"convert: dtype .*floating.*int8",
    ),
    "dtypes of other leaves": (
        FLOAT32, FLOAT32, FLOAT32, dict(dtype={"kernel": BF16}),
        "dtype must have the structure of params",
    ),
    "shapes of other parameters": (
        FLOAT32, FLOAT32, FLOAT32, dict(dtype=_OTHER),
        r"dtype for params\['kernel'\] .*\[64, 24\], got \[8, 8\]",
    ),
    "parameters that a wrapper makes": (
        optax.flatten(_adamw(kahan())), optax.flatten(_adamw(kahan())), FLOAT32, {},
        "wrappers in from_tx must keep the structure of params",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("made_by", "from_tx", "to_tx", "given", "message"), REFUSED.values(), ids=REFUSED
)
def test_mismatched_arguments_are_refused(made_by, from_tx, to_tx, given, message):
    params = model_params()
    state = initial(made_by, given.get("params", params))
    with pytest.raises((ValueError, TypeError), match=message):
        convert(params, state, from_tx, to_tx, dtype=given.get("dtype"))
