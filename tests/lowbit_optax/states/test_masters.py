"""Float32 masters are computed from a state, and a state from float32 masters."""

import functools
import re

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import lowbit_optax
from lowbit_optax import extra_bits, from_master, kahan, master_weights, training
from lowbit_optax._step.float32_params import is_bias_or_norm
from lowbit_optax._step.state import is_blank
from lowbit_optax.split_array import split_array
from tests.helpers.optimizers import (
    ALL_FORMATS,
    assert_same_bits,
    gradient_series,
    spec_of,
    train,
    weights_only,
)
from tests.helpers.wrappers import WRAPPERS

pytestmark = pytest.mark.standard_promotion


def _master(seed=0):
    random = np.random.default_rng(seed)
    draw = lambda *shape: jnp.asarray(random.standard_normal(shape), jnp.float32)
    return {"kernel": draw(64, 24), "bias": draw(40), "scale": draw()}


def _sgd(weights, rate=0.1):
    return weights_only(optax.sgd(rate), weights, min_size=0)


def _errors(tx, master, dtype=jnp.bfloat16):
    """Returns |joined - master| over the spacing of bfloat16 around each master."""
    params, state = from_master(tx, master, dtype, None)
    masters = master_weights(params, state)
    spacing = jax.tree.map(lambda x: 2.0 ** (np.floor(np.log2(np.abs(x))) - 7), master)
    return jax.tree.map(lambda a, b, s: np.abs(a - b) / s, masters, master, spacing)


EXACT = {
    "extra_bits_16": extra_bits(16),
    "extra_bits_16_toward_zero": extra_bits(16, rounding="toward_zero"),
    "extra_bits_16_stochastic": extra_bits(16, rounding="stochastic"),
    "master_copy": lowbit_optax.master_copy(),
}


# Bounds in spacings of the parameter: half of the last stored bit. Kahan's compensation
# has 8 significant bits and is at most half a spacing.
BOUNDS = {
    "extra_bits_8": 2.0**-9,
    "extra_bits_8_toward_zero": 2.0**-9,
    "extra_bits_7_stochastic": 2.0**-8,
    "kahan": 2.0**-10,
    "kahan_stochastic": 2.0**-10,
    "stochastic_rounding": 0.5,
    "nearest": 0.5,
}


@pytest.mark.parametrize("name", BOUNDS)
def test_round_trip_keeps_what_the_format_keeps(name):
    errors = _errors(_sgd(ALL_FORMATS[name]), _master())
    for leaf in (errors["kernel"], errors["bias"]):
        assert leaf.max() <= BOUNDS[name]
        assert leaf.max() > BOUNDS[name] / 8


@pytest.mark.parametrize("name", ALL_FORMATS)
def test_from_master_gives_a_state_like_inits(name):
    tx = _sgd(ALL_FORMATS[name])
    params, state = from_master(tx, _master(), jnp.bfloat16, None)
    assert spec_of(state) == spec_of(tx.init(params))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    kernel = params["kernel"].astype(jnp.float32)
    stored = master_weights(params, state)["kernel"]
    if "toward_zero" in name:
        assert (jnp.abs(kernel) <= jnp.abs(stored)).all()
    else:
        half = 2.0 ** (jnp.floor(jnp.log2(jnp.abs(stored))) - 8)
        assert (jnp.abs(kernel - stored) <= half).all()
    # The scalar has a float32 master, so it is rounded to nearest.
    assert_same_bits(params["scale"], _master()["scale"].astype(jnp.bfloat16))


@pytest.mark.parametrize("weights", EXACT.values(), ids=EXACT)
def test_formats_that_keep_every_bit_train_like_the_float32_master(weights):
    master = _master()
    inner = optax.adamw(0.01)
    tx = weights_only(inner, weights, min_size=0)
    params, state = from_master(tx, master, jnp.bfloat16, None)
    assert_same_bits(master_weights(params, state), master)
    series = gradient_series(params, 20)
    got, state = train(tx, params, state, series)
    want, _ = train(inner, master, inner.init(master), series)
    assert_same_bits(master_weights(got, state), want)


# Accumulation is left out, because it rounds sums of gradients.
EXACT_WRAPPERS = [name for name in WRAPPERS if name != "accumulation"]


@pytest.mark.parametrize("name", EXACT_WRAPPERS)
def test_masters_of_wrapped_states_start_whole_and_move_with_training(name):
    other = optax.set_to_zero() if name == "masked" else lowbit_optax.kahan_sgd(0.1)
    tx = WRAPPERS[name](
        lambda learning_rate: _sgd(extra_bits(16), learning_rate), other
    )
    master = _master()
    params, state = from_master(tx, master, jnp.bfloat16, None)
    assert spec_of(state) == spec_of(tx.init(params))
    masters = master_weights(params, state)
    rounded = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    assert_same_bits(masters["kernel"], master["kernel"])
    if name == "masked":  # the other leaves have no residual
        assert_same_bits(masters["bias"], rounded["bias"])
    elif name == "partition":  # Kahan summation
        np.testing.assert_allclose(masters["bias"], master["bias"], rtol=2.0**-17)
        assert not np.array_equal(masters["bias"], rounded["bias"])
    else:
        assert_same_bits(masters, master)

    grads = jax.tree.map(jnp.ones_like, master)
    params, state = train(tx, params, state, [grads, grads])
    want = master["kernel"] - jnp.float32(0.1)
    if name != "multi_steps":
        want -= jnp.float32(0.1)
    got = master_weights(params, state)["kernel"]
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_formats_without_residuals_start_where_a_wrapper_flattens_the_parameters():
    tx, master = optax.flatten(lowbit_optax.sr_sgd(0.1)), _master()
    params, state = from_master(tx, master, jnp.bfloat16, None)
    assert_same_bits(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), master))
    assert spec_of(state) == spec_of(tx.init(params))


def test_dtypes_may_be_a_prefix_of_the_tree():
    others = {"steps": jnp.arange(3), "flag": jnp.ones(2, bool)}  # keep their dtypes
    master = {"block": _master(), "norm": jnp.ones(8), "others": others}
    dtypes = {"block": jnp.bfloat16, "norm": "float32", "others": jnp.bfloat16}
    params, state = from_master(_sgd(kahan()), master, dtypes)
    assert params["block"]["kernel"].dtype == jnp.bfloat16
    assert params["norm"].dtype == jnp.float32
    assert_same_bits(params["others"], others)
    assert is_blank(state.residual.tree["norm"])


def test_vectors_and_scalars_stay_float32_by_default():
    master = _master() | {"steps": jnp.arange(6).reshape(2, 3), "none": None}
    params, state = from_master(_sgd(extra_bits(16)), master)
    assert jax.tree.map(lambda x: x.dtype.name, params) == {
        "kernel": "bfloat16",
        "bias": "float32",
        "scale": "float32",
        "steps": "int32",
        "none": None,
    }
    assert_same_bits(master_weights(params, state), master)


def _starts(tx, params):
    """Return ``{function: parameters}`` of the functions that start a run."""
    adamw, model = optax.adamw(0.1), nnx.Linear(64, 24, rngs=nnx.Rngs(0))
    model.kernel[...], model.bias[...] = params["kernel"], params["bias"]
    training.nnx_optimizer(model, tx)
    return {
        "from_master": from_master(tx, params)[0],
        "TrainState": training.TrainState.create(
            apply_fn=None, params=params, tx=tx
        ).params,
        "nnx_optimizer": {"kernel": model.kernel[...], "bias": model.bias[...]},
        "convert": lowbit_optax.convert(params, adamw.init(params), adamw, tx)[0],
    }


BY_RULE = {
    "a weight format": (lowbit_optax.kahan_adamw(0.1), "bfloat16"),
    "plain optax": (optax.adamw(0.1), "float32"),
    "plain optax for the matrix": (
        optax.partition(
            {1: lowbit_optax.kahan_adamw(0.1), 2: optax.adamw(0.1)},
            lambda params: jax.tree.map(lambda x: x.ndim, params),
        ),
        "float32",
    ),
}


@pytest.mark.parametrize(("tx", "dtype"), BY_RULE.values(), ids=BY_RULE)
def test_every_start_narrows_the_matrices_that_a_weight_format_stores(tx, dtype):
    params = {"kernel": _master()["kernel"], "bias": jnp.ones(24)}
    for name, found in _starts(tx, params).items():
        dtypes = jax.tree.map(lambda x: x.dtype.name, found)
        assert dtypes == {"kernel": dtype, "bias": "float32"}, name
    # Parameters that are narrow already keep their dtype, and their state is init's.
    half = {**params, "kernel": params["kernel"].astype(jnp.float16)}
    kept, state = from_master(tx, half)
    assert_same_bits((kept, state), (half, tx.init(half)))


def test_a_float32_baseline_needs_no_other_functions():
    adamw, master = optax.adamw(0.1), _master()
    params, state = from_master(adamw, master)
    assert_same_bits((params, state), (master, adamw.init(master)))
    assert_same_bits(master_weights(params, state), master)


@pytest.mark.parametrize(
    ("path", "is_kept"),
    [
        ("['layers']['LayerNorm_0']['scale']", True),
        ("['layers']['ln_1']['weight']", True),
        ("['ln_f']", True),
        (".layers[0].norm1.weight", True),
        ("['query']['bias'].value", True),
        ("['query_bias']", True),
        ("['layers']['mlp']['kernel'].value", False),
        ("['normal_net']['kernel']", False),
        ("['embedding']", False),
        ("", False),
    ],
)
def test_stacked_normalisations_and_biases_stay_float32(path, is_kept):
    assert is_bias_or_norm(path, jnp.ones((12, 64))) == is_kept
    assert is_bias_or_norm(path, jnp.ones(64))


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("['norm1']['linear']['kernel']", (3072, 18432)),
        (".blocks[0].norm1.linear.weight", (18432, 3072)),
        ("['AdaLayerNorm_0']['kernel']", (64, 384)),
        ("['RMSNorm_0']['Dense_0']['kernel']", (64, 64)),
        ("['relative_position_bias']", (16, 2048, 2048)),
        ("['norm']['weight']", (2048, 2048)),
    ],
)
def test_matrices_of_normalisations_and_large_biases_are_narrowed(path, shape):
    assert not is_bias_or_norm(path, jax.ShapeDtypeStruct(shape, jnp.float32))


def _linen_attention():
    layer = linen.MultiHeadDotProductAttention(num_heads=2, normalize_qk=True)
    x = jnp.ones((1, 4, 16))
    return layer.init(jax.random.key(0), x, x)["params"]


def _nnx_attention():
    options = dict(num_heads=2, in_features=16, decode=False)
    return nnx.MultiHeadAttention(**options, rngs=nnx.Rngs(0))


def _equinox_layers():
    key, options = jax.random.key(0), dict(use_query_bias=True, use_output_bias=True)
    attention = equinox.nn.MultiheadAttention(2, 16, **options, key=key)
    layers = attention, equinox.nn.Conv2d(3, 4, 3, key=key)
    return equinox.filter(layers, equinox.is_array)


def _by_train_state(tx):
    create = functools.partial(training.TrainState.create, param_dtype=jnp.bfloat16)
    return create(apply_fn=None, tx=tx, params=_linen_attention()).params


def _by_nnx_optimizer(tx):
    model = _nnx_attention()
    training.nnx_optimizer(model, tx)
    return nnx.state(model, nnx.Param)


STARTS = {
    "linen": lambda tx: from_master(tx, _linen_attention())[0],
    "nnx": lambda tx: from_master(tx, nnx.state(_nnx_attention(), nnx.Param))[0],
    "equinox": lambda tx: from_master(tx, _equinox_layers())[0],
    "TrainState": _by_train_state,
    "nnx_optimizer": _by_nnx_optimizer,
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_biases_of_several_axes_stay_float32(start):
    """Biases and vectors of each layer are float32, and kernels are narrow."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        start(lowbit_optax.kahan_adamw(0.1))
    ):
        names = jax.tree_util.keystr(path).removesuffix(".value").strip("']")
        is_matrix = re.split(r"\W+", names)[-1] in ("kernel", "weight")
        found.setdefault(is_matrix, set()).add(leaf.dtype.name)
    assert found == {True: {"bfloat16"}, False: {"float32"}}


def test_the_rule_receives_paths_and_leaves_or_only_shapes():
    shapes = jax.eval_shape(
        lambda: {"block": {"norm": jnp.ones((3, 8))}, "w": _master()}
    )
    seen = {}

    def keep(path, leaf):
        seen[path] = leaf.shape
        return "norm" in path

    start = lambda params: from_master(_sgd(kahan()), params, "bfloat16", keep)
    params, _ = jax.eval_shape(start, shapes)
    assert params["block"]["norm"].dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(params["w"])} == {jnp.dtype("bfloat16")}
    assert seen["['block']['norm']"] == (3, 8)
    assert seen["['w']['kernel']"] == (64, 24)


OPTIMIZERS = {
    "kahan": lowbit_optax.kahan_sgd(0.5),
    "no residuals": lowbit_optax.sr_sgd(0.5),
    "below min_size": lowbit_optax.extra_bits_sgd(0.5, bits=8),
}
BOTH = {
    "the average last": lambda state, ema: (state, ema),
    "the average first": lambda state, ema: (ema, state),
    "a dict": lambda state, ema: {"optimizer": (state,), "average": ema},
}


@pytest.mark.parametrize("both", BOTH.values(), ids=BOTH)
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_two_states_of_one_parameter_raise_an_error_that_names_both(tx, both):
    params = {"w": jnp.ones((8, 8), jnp.bfloat16), "b": jnp.ones(8)}
    ema = lowbit_optax.ema_of_params(0.9)
    given = both(optax.chain(optax.identity(), tx).init(params), ema.init(params))
    with pytest.raises(
        ValueError, match=r"params\['b'\].* state\S+ and state\S+ .*alone"
    ):
        master_weights(params, given)
    with pytest.raises(ValueError, match="state"):
        lowbit_optax.convert(params, given, tx, tx)
    # Each state has its masters, and so do two states of different parameters.
    for part in given.values() if isinstance(given, dict) else given:
        assert master_weights(params, part)["w"].dtype == jnp.float32
    halves = {"w": tx, "b": lowbit_optax.kahan_sgd(0.5)}
    halves = optax.MultiSteps(optax.partition(halves, {"w": "w", "b": "b"}), 2)
    assert master_weights(params, halves.init(params))["w"].dtype == jnp.float32


NARROW_RANGES = {jnp.float16: 1e6, jnp.float8_e4m3fn: 1e3, jnp.float8_e5m2: 1e6}


@pytest.mark.parametrize("dtype", NARROW_RANGES, ids=lambda x: x.__name__)
def test_weights_that_would_become_infinite_raise_an_error_with_their_name(dtype):
    large = NARROW_RANGES[dtype]
    params = {"fine": jnp.ones((4, 4)), "large": jnp.full((4, 4), large)}
    tx = lowbit_optax.lowbit(optax.sgd(0.1))
    message = rf"params\['large'\].*{np.dtype(dtype)}, got {re.escape(f'{large:.6g}')}"
    with pytest.raises(ValueError, match=message):
        from_master(tx, params, dtype)
    plain = optax.sgd(0.1)
    with pytest.raises(ValueError, match=f"convert: {message}"):
        lowbit_optax.convert(params, plain.init(params), plain, tx, dtype=dtype)
    with pytest.raises(ValueError, match="split_array: x must have"):
        split_array(params["large"], dtype, lowbit_optax.nearest())
    # Infinities of the user stay, and bfloat16 has the range of float32.
    from_master(tx, {"given": params["fine"].at[0, 0].set(jnp.inf)}, jnp.float16)
    from_master(tx, params, jnp.bfloat16)
