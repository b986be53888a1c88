"""Errors name the leaf, its value and the values that are allowed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
from lowbit_optax import block_quantized, cast, extra_bits, kahan, lowbit, master_copy
from lowbit_optax.precision import FloatFormat
from tests.helpers.optimizers import apply

pytestmark = pytest.mark.standard_promotion

ADVANCES = pytest.mark.parametrize(
    "advance", [apply, lowbit_optax.step], ids=["update", "step"]
)


UNSET = object()


def _params():
    return {
        "dense": {
            "kernel": jnp.ones((64, 8), jnp.bfloat16),
            "bias": jnp.ones(8, jnp.bfloat16),
        }
    }


def _grads(**dense):
    return {"dense": {"kernel": jnp.ones((64, 8)), "bias": jnp.ones(8)} | dense}


def _fail(tx, advance, grads, params=None, state=UNSET):
    params = _params() if params is None else params
    state = tx.init(_params()) if state is UNSET else state
    advance(tx, params, state, grads)


KERNEL = r"\['dense'\]\['kernel'\]"
BIAS = r"\['dense'\]\['bias'\]"


@ADVANCES
def test_missing_params(advance):
    tx = lowbit_optax.kahan_adamw(0.1)
    with pytest.raises(ValueError, match="init needs params"):
        tx.init(None)
    with pytest.raises(ValueError, match="needs params"):
        advance(tx, None, tx.init(_params()), _grads())


WITHOUT_BIAS = {"dense": {"kernel": jnp.ones((64, 8))}}
OTHER_STRUCTURES = {
    "fewer": (WITHOUT_BIAS, f"missing at {BIAS}"),
    "more": (_grads(extra=jnp.ones(3)), r"\['dense'\]\['extra'\]"),
    "a list": (list(jax.tree.leaves(_grads())), ""),
    "empty": ({}, ""),
}


@ADVANCES
@pytest.mark.parametrize(
    ("grads", "where"), OTHER_STRUCTURES.values(), ids=OTHER_STRUCTURES
)
def test_gradients_of_another_structure(grads, where, advance):
    given = re.escape(str(jax.tree.structure(grads)))
    accepted = re.escape(str(jax.tree.structure(_params())))
    message = f"grads.*structure of params.*{where}.*{given}.*{accepted}"
    with pytest.raises(ValueError, match=message):
        _fail(lowbit_optax.sr_sgd(0.1), advance, grads)


@ADVANCES
@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (None, "None"),
        (1.0, r"1\.0"),
        ({"a": jnp.ones(8)}, "Array"),
        (jnp.ones(8, jnp.int32), "floating.*int32"),
        (jnp.ones(8, bool), "floating.*bool"),
        (jnp.ones(8, jnp.complex64), "floating.*complex64"),
        (np.zeros(8, jax.dtypes.float0), "floating.*float0"),
        (jnp.ones(7), r"\(8,\).*\(7,\)"),
        (jnp.ones((8, 1)), r"\(8,\).*\(8, 1\)"),
        (jnp.ones(()), r"\(8,\).*\(\)"),
    ],
    ids=lambda x: str(getattr(x, "dtype", x)) + str(getattr(x, "shape", "")),
)
def test_a_bad_gradient_of_one_leaf(bad, match, advance):
    tx = lowbit_optax.kahan_adamw(0.1)
    with pytest.raises(
        (ValueError, TypeError), match=f"gradient of params{BIAS}.*{match}"
    ):
        _fail(tx, advance, _grads(bias=bad))


@ADVANCES
@pytest.mark.parametrize("bad", [None, jnp.ones(8, jnp.int32), jnp.ones(7)], ids=str)
def test_a_bad_gradient_behind_a_wrapper(bad, advance):
    tx = optax.chain(optax.identity(), lowbit_optax.kahan_adamw(0.1))
    with pytest.raises((ValueError, TypeError), match=f"gradient of params{BIAS}"):
        _fail(tx, advance, _grads(bias=bad))


def test_a_missing_gradient_behind_a_wrapper_that_reads_it():
    tx = optax.MultiSteps(lowbit_optax.kahan_adamw(0.1), 2)
    with pytest.raises(TypeError, match=f"gradient of params{BIAS}.*None"):
        lowbit_optax.step(tx, _params(), tx.init(_params()), _grads(bias=None))


@ADVANCES
@pytest.mark.parametrize("field", ["count", "seed"])
@pytest.mark.parametrize(
    "bad", [jnp.zeros(2, jnp.uint32), 1.5, jax.random.key(0)], ids=str
)
def test_a_count_or_seed_that_is_no_integer(field, bad, advance):
    tx = lowbit_optax.kahan_adamw(0.1)
    state = tx.init(_params())._replace(**{field: bad})
    with pytest.raises(TypeError, match=f"state.{field} must be an integer"):
        _fail(tx, advance, _grads(), state=state)


@pytest.mark.parametrize(
    ("dtype", "bits", "most"),
    [
        (jnp.float16, 16, 13),
        (jnp.float16, 14, 13),
        (jnp.bfloat16, 17, 16),
        (jnp.float8_e4m3fn, 21, 20),
    ],
)
def test_a_leaf_that_the_format_cannot_hold(dtype, bits, most):
    params = _params()
    params["dense"]["bias"] = jnp.ones(8, dtype)
    params["dense"]["kernel"] = jnp.ones((8, 8), jnp.float32)
    tx = lowbit(optax.sgd(0.1), weights=extra_bits(bits), moments="float32")
    name = jnp.dtype(dtype).name
    with pytest.raises(ValueError, match=f"{BIAS}.*{most}.*{name}.*{bits}"):
        tx.init(params)
    held = lowbit(optax.sgd(0.1), weights=extra_bits(most), moments="float32")
    assert held.init(params)


# States from another transformation.


def _with(weights, moments="float32", inner=None):
    return lowbit(inner or optax.sgd(0.1), weights=weights, min_size=0, moments=moments)


def _adamw(moments):
    return _with(kahan(), moments, optax.adamw(0.1))


DENSE = _params()["dense"]
WIDE = {"dense": jax.tree.map(lambda x: x.astype(jnp.float32), DENSE)}
OTHER_PARAMS = [
    (DENSE | {"kernel": DENSE["kernel"][:32]}, f"residual of params{KERNEL}"),
    ({"kernel": DENSE["kernel"]}, f"residuals.*missing at {BIAS}"),
    (DENSE | {"kernel": DENSE}, KERNEL),
    (WIDE["dense"], rf"{BIAS}.*float32.*bfloat16.*from_master\(tx, "),
]
KAHAN, BITS, STOCHASTIC = map(
    _with, (kahan(), extra_bits(8), lowbit_optax.stochastic_rounding())
)
BFLOAT16 = cast("bfloat16")
EIGHT, FOUR = block_quantized(8), block_quantized(4)
FEWER_BITS = [kahan(float_format=FloatFormat(8, bits)) for bits in (3, 5)]
MOMENT = rf"moment .*{BIAS}.*\[8\].*\[8\]"
# Each case has a state, the transformation that uses it, and the error's pattern.
OTHERS = [
    (tx.init(_params()), other, match)
    for tx, other, match in [
        (BITS, _with(extra_bits(16)), "nearest_16_bits.*nearest_8_bits"),
        (BITS, _with(extra_bits(8, rounding="toward_zero")), "toward_zero.*nearest_8_"),
        (KAHAN, BITS, "nearest_8_bits.*compensation"),
        (STOCHASTIC, _with(master_copy()), "master.*None"),
        (_adamw({"mu": BFLOAT16}), _adamw({"mu": cast("float16")}), MOMENT),
        (_adamw("float32"), _adamw(BFLOAT16), MOMENT),
        (_adamw({"nu": BFLOAT16}), _adamw(BFLOAT16), MOMENT),
        (_adamw(BFLOAT16), _adamw({"nu": BFLOAT16}), MOMENT),
        (_adamw(EIGHT), _adamw(FOUR), rf"{KERNEL}.*uint32.*"),
        (_adamw(EIGHT), _adamw("float32"), "QuantizedMoment"),
        (_adamw(EIGHT), _adamw(BFLOAT16), "Cast.*, got QuantizedMoment"),
        (_adamw("float32"), _adamw(EIGHT), rf"{BIAS}.*QuantizedMoment"),
        (*map(_with, FEWER_BITS), "residual"),
        (KAHAN, _adamw("float32"), "must be .ScaleByAdamState"),
        (optax.adamw(0.1), KAHAN, "LowbitState, got a tuple"),
        (optax.chain(KAHAN), KAHAN, "LowbitState, got a tuple"),
    ]
]
OTHERS += [(state, KAHAN, "LowbitState") for state in (None, ())]
OTHERS += [
    (tx.init({"dense": dense}), tx, match)
    for tx in (KAHAN, BITS, optax.chain(BITS))
    for dense, match in OTHER_PARAMS
]


@ADVANCES
@pytest.mark.parametrize(("state", "tx", "match"), OTHERS)
def test_states_that_were_made_by_something_else(state, tx, match, advance):
    with pytest.raises((ValueError, TypeError), match=match):
        _fail(tx, advance, _grads(), state=state)


SCALED = lowbit_optax.with_loss_scale(KAHAN, lowbit_optax.loss_scaling.static_scale(8))
WITH_RESIDUALS = [KAHAN, BITS, _with(master_copy()), SCALED, optax.chain(KAHAN)]


@ADVANCES
@pytest.mark.parametrize("tx", WITH_RESIDUALS)
def test_parameters_that_became_float32_raise_an_error_with_a_remedy(tx, advance):
    """``equinox.apply_updates`` returns such parameters."""
    message = rf"params{BIAS}.*float32.*lowbit_optax\.apply_updates"
    with pytest.raises((ValueError, TypeError), match=message):
        _fail(tx, advance, _grads(), params=WIDE)


@pytest.mark.parametrize("tx", WITH_RESIDUALS)
def test_parameters_cannot_change_between_dtypes_of_16_bits(tx):
    cast_to = lambda dtype: jax.tree.map(lambda x: x.astype(dtype), _params())
    for before, after in ((jnp.bfloat16, jnp.float16), (jnp.float16, jnp.bfloat16)):
        state, wrong = tx.init(cast_to(before)), cast_to(after)
        names = rf"{before.dtype}.*got {after.dtype}.*convert"
        with pytest.raises(TypeError, match=rf"params{KERNEL}.*{names}"):
            lowbit_optax.step(tx, wrong, state, _grads())


def test_errors_leave_arguments_alone():
    tx = lowbit_optax.kahan_adamw(0.1)
    params, grads = _params(), _grads(bias=jnp.ones(7))
    state = tx.init(params)
    donating = jax.jit(functools.partial(apply, tx), donate_argnums=(0, 1))
    with pytest.raises(ValueError, match=BIAS):
        donating(params, state, grads)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))
