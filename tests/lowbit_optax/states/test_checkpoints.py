"""Resuming from a checkpoint is exact, and unsuitable checkpoints raise an error."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import block_quantized, extra_bits, kahan, lowbit
from lowbit_optax.states.checkpoints import check_storage_formats, storage_formats
from tests.helpers.optimizers import (
    ALIASES,
    BFLOAT16_MOMENTS,
    VARIANTS,
    adamw,
    assert_same_bits,
    each,
    gradient_series,
    model_params,
    random_grads,
    train,
)
from tests.helpers.stores import STORES, orbax

pytestmark = pytest.mark.standard_promotion


_adamw = functools.partial(adamw, 0.01)


def _resumes(folder, store, tx, params, series):
    """Compares ten steps with five steps, a checkpoint and five more steps."""
    want = train(tx, params, tx.init(params), series, lowbit_optax.step)
    halfway = train(tx, params, tx.init(params), series[:5], lowbit_optax.step)
    restored = store(folder, halfway, (params, tx.init(params)))
    assert_same_bits(restored, halfway)
    assert_same_bits(train(tx, *restored, series[5:], lowbit_optax.step), want)


@STORES
@each(ALIASES | VARIANTS)
def test_five_steps_a_checkpoint_and_five_more_are_ten_steps(
    tmp_path, store, optimizer
):
    params = model_params() | {"norm": jnp.ones(24), "unused": None}
    _resumes(tmp_path, store, optimizer(), params, gradient_series(params, 10))


SCALE = lowbit_optax.loss_scaling.backoff_scale(4.0, period=3, smallest=2.0)
# Maps a name to a transformation and to the function that prepares its parameters.
OTHERS = {
    "lpmm": (lowbit_optax.lpmm_adam(0.01), lowbit_optax.lpmm.quantize_params),
    "block-scaled": (
        lowbit(optax.sgd(0.1, 0.9)),
        lowbit_optax.block_scaling.block_scale,
    ),
    "loss scale": (
        lowbit_optax.with_loss_scale(lowbit_optax.kahan_sgd(0.5), SCALE),
        lambda params: params,
    ),
}


@STORES
@pytest.mark.parametrize("name", OTHERS)
def test_runs_of_other_weights_and_states_continue_too(tmp_path, store, name):
    tx, prepared = OTHERS[name]
    params = {"w": random_grads({"w": jnp.ones((64, 96))}, 0)["w"], "b": jnp.ones(8)}
    series = gradient_series(params, 10)
    series[2]["w"] = series[2]["w"].at[0].set(jnp.inf if name == "loss scale" else 0)
    _resumes(tmp_path, store, tx, prepared(params), series)


def _placed(tx, params, sharding):
    """Returns the shapes of parameters and state with their shardings."""
    shardings = lowbit_optax.state_shardings(tx, params, {"w": sharding})
    state = jax.eval_shape(tx.init, params)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    params = jax.tree.map(lambda x: place(x, sharding), params)
    return params, jax.tree.map(place, state, shardings)


MESHES = {
    "half of the devices": ((4,), ("data",), jax.P("data")),
    "other axes": ((2, 4), ("model", "data"), jax.P("data", "model")),
    "4 devices, 2 axes": ((2, 2), ("data", "model"), jax.P("model", "data")),
    "one device": ((1,), ("data",), jax.P()),
}


@pytest.mark.parametrize(("shape", "axes", "spec"), MESHES.values(), ids=MESHES)
def test_another_mesh_continues_with_the_same_bits(tmp_path, shape, axes, spec):
    """Saves on eight devices, resumes on a mesh, and compares with one device's run."""
    tx = lowbit_optax.lowbit_adamw(0.01, min_size=0)
    params = {"w": model_params()["kernel"]}
    series = gradient_series(params, 4)
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(auto,))
    devices = jax.devices()[: np.prod(shape)]
    other = jax.make_mesh(shape, axes, (auto,) * len(axes), devices=devices)
    rows, there = jax.NamedSharding(mesh, jax.P("data")), jax.NamedSharding(other, spec)
    halfway = train(tx, params, jax.jit(tx.init)(params), series[:2])
    want = train(tx, *halfway, series[2:])

    saved = jax.tree.map(
        lambda x, like: jax.device_put(x, like.sharding),
        halfway,
        _placed(tx, params, rows),
    )
    target = _placed(tx, params, there)
    restored = orbax(tmp_path, saved, target)
    placed = jax.tree.map(lambda x: x.sharding, restored)
    assert placed == jax.tree.map(lambda x: x.sharding, target)
    assert_same_bits(jax.device_get(restored), jax.device_get(halfway))
    assert_same_bits(jax.device_get(train(tx, *restored, series[2:])), want)


OTHER_WEIGHTS = {
    "fewer bits": (_adamw(extra_bits(16)), _adamw(extra_bits(8))),
    "stochastic for nearest": (
        _adamw(extra_bits(7, rounding="stochastic")),
        _adamw(extra_bits(8)),
    ),
    "kahan for extra bits": (_adamw(kahan()), _adamw(extra_bits(16))),
    "kahan for none": (_adamw(kahan()), _adamw(lowbit_optax.stochastic_rounding())),
    "none for kahan": (_adamw(lowbit_optax.nearest()), _adamw(kahan())),
    "packed or not": (_adamw(extra_bits(8)), _adamw(extra_bits(8), min_size=9999)),
}


def _trace_a_step(tx, params, state):
    grads = gradient_series(params, 1)[0]
    jax.eval_shape(functools.partial(lowbit_optax.step, tx), params, state, grads)


@STORES
@pytest.mark.parametrize(
    ("saved", "resumed"), OTHER_WEIGHTS.values(), ids=OTHER_WEIGHTS
)
def test_a_checkpoint_of_other_weights_is_an_error_before_it_is_used(
    tmp_path, store, saved, resumed
):
    params = {"kernel": model_params()["kernel"], "norm": jnp.ones(24)}
    held = params, jax.jit(saved.init)(params)
    like = params, jax.jit(resumed.init)(params)
    with pytest.raises((ValueError, TypeError)):
        # If Orbax and flax raise no error, tracing the first step must raise one.
        _trace_a_step(resumed, *store(tmp_path, held, like))


EIGHT = block_quantized(8)
OTHER_MOMENTS = {
    "code": (EIGHT, {"mu": EIGHT, "nu": block_quantized(8, code="log")}),
    # In this shape, blocks of 32 and 64 values have equally many scales.
    "block size": (EIGHT, block_quantized(8, block_size=64)),
}


@STORES
@pytest.mark.parametrize("part", ["moments", "accumulators"])
@pytest.mark.parametrize(
    ("saved", "resumed"), OTHER_MOMENTS.values(), ids=OTHER_MOMENTS
)
def test_a_checkpoint_of_other_codes_is_an_error_before_it_is_used(
    tmp_path, store, part, saved, resumed
):
    params = {"kernel": jnp.ones((8, 4), jnp.bfloat16)}

    def transformation(moments):
        if part == "moments":
            return _adamw(extra_bits(8), moments)
        return lowbit_optax.accumulate_gradients(optax.sgd(0.1), 2, moments, min_size=0)

    if part == "accumulators" and not isinstance(resumed, type(EIGHT)):
        resumed = block_quantized(8, code="linear")
    saved, resumed = map(transformation, (saved, resumed))
    held, like = ((params, jax.jit(tx.init)(params)) for tx in (saved, resumed))
    same = lambda x: [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(x)]
    assert same(held) == same(like)
    with pytest.raises((ValueError, TypeError)):
        store(tmp_path, held, like)
    with pytest.raises(ValueError, match="codes_v2"):
        _trace_a_step(resumed, *held)


OTHER_FORMATS = {
    "codes": (
        _adamw(kahan(), block_quantized(8, code="linear")),
        _adamw(kahan(), block_quantized(8, code="dynamic")),
        r"state\.inner_state\[0\]\.mu\['kernel'\] is .*'linear'.* and .*'dynamic'",
    ),
    "float32 moments for bfloat16": (
        _adamw(kahan()),
        _adamw(kahan(), BFLOAT16_MOMENTS),
        r"\.mu\['kernel'\] is float32\[64, 24\] in the .* in bfloat16 in this run",
    ),
    "blocks": (
        _adamw(kahan(), {"nu": block_quantized(8)}),
        _adamw(kahan(), {"nu": block_quantized(8, block_size=64)}),
        "blocks of 32.* in the checkpoint and .*blocks of 64",
    ),
    "bits": (
        _adamw(extra_bits(8)),
        _adamw(extra_bits(16)),
        r"params\['kernel'\] is .*nearest_8_bits_v2 .* and .*nearest_16_bits_v2",
    ),
    "plain optax": (
        optax.adamw(0.01),
        _adamw(extra_bits(8)),
        r"params\['kernel'\] is bfloat16\[64, 24\] in the .*nearest_8_bits.* in this",
    ),
    "moments that the run does not have": (
        optax.adamw(0.01),
        optax.sgd(0.01),
        r"state\[0\]\.mu\['kernel'\] is bfloat16\[64, 24\] in the .* nothing in this",
    ),
}


@pytest.mark.parametrize(
    ("saved", "resumed", "message"), OTHER_FORMATS.values(), ids=OTHER_FORMATS
)
def test_the_formats_that_a_checkpoint_stores_are_checked_by_name(
    saved, resumed, message
):
    # Arrays do not show their code. Read with another code, they would be noise.
    params = {"kernel": model_params()["kernel"]}
    stored = json.loads(json.dumps(storage_formats(saved, params)))
    check_storage_formats(stored, saved, params)
    with pytest.raises(ValueError, match=message):
        check_storage_formats(stored, resumed, params)


def test_the_rounding_of_later_steps_does_not_change_the_format():
    params = {"kernel": model_params()["kernel"]}
    rounding = dict(residual_rounding="nearest", sum_rounding="stochastic")
    moments = block_quantized(8, rounding="nearest")
    stored = storage_formats(_adamw(extra_bits(8), block_quantized(8)), params)
    other = _adamw(extra_bits(8, **rounding), moments, seed=5)
    check_storage_formats(stored, other, params)
