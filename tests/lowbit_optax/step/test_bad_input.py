"""Errors name the leaf, what was given and what is accepted."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import (
    apply,
)

import lowbit_optax
from lowbit_optax import cast, extra_bits, kahan, lowbit

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
        (jnp.ones(8, jnp.int32), "int32.*floating"),
        (jnp.ones(8, bool), "bool.*floating"),
        (jnp.ones(8, jnp.complex64), "complex64.*floating"),
        (np.zeros(8, jax.dtypes.float0), "float0.*floating"),
        (jnp.ones(7), r"\(7,\).*\(8,\)"),
        (jnp.ones((8, 1)), r"\(8, 1\).*\(8,\)"),
        (jnp.ones(()), r"\(\).*\(8,\)"),
    ],
    ids=lambda x: str(getattr(x, "dtype", x)) + str(getattr(x, "shape", "")),
)
def test_a_bad_gradient_of_one_leaf(bad, match, advance):
    tx = lowbit_optax.kahan_adamw(0.1)
    with pytest.raises(
        (ValueError, TypeError), match=f"gradient of params{BIAS}.*{match}"
    ):
        _fail(tx, advance, _grads(bias=bad))


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
    with pytest.raises(
        ValueError, match=f"{BIAS}.*{name} takes 0 to {most}.*not {bits}"
    ):
        tx.init(params)
    held = lowbit(optax.sgd(0.1), weights=extra_bits(most), moments="float32")
    assert held.init(params)


sgd = functools.partial(lowbit, optax.sgd(0.1))
split = functools.partial(lowbit_optax.split_array, jnp.ones(4))
# What the error says of each value, what takes the value, and the values.
REFUSED = {
    ValueError: [
        ("bits is {}; bfloat16 takes 0 to 16", extra_bits, [-1, 22, 32]),
        ("{}.*nearest.*toward_zero", lambda x: extra_bits(8, rounding=x), ["up"]),
        (
            "residual_rounding is {}.*'nearest', 'stochastic', 'toward_zero'",
            lambda x: extra_bits(8, residual_rounding=x),
            ["up", None, 0],
        ),
        ("rounding is {}.*'nearest'", lambda x: kahan(rounding=x), ["toward_zero"]),
        ("l_rounding is {}.*'near", lambda x: kahan(residual_rounding=x), ["up"]),
        ("arithmetic is {}.*'param'", lambda x: kahan(arithmetic=x), ["bfloat16"]),
        ("dtype is float32, not one of bfloat16.*leave", cast, [jnp.float32]),
        ("dtype is int8, not one of bfloat16", cast, [jnp.int8]),
        (
            "rounding is {}, not 'nearest'",
            lambda x: cast("float16", rounding=x),
            ["up"],
        ),
        ("dtype is float32", lambda x: split(x, kahan()), [jnp.float32]),
        ("takes 0 to 13 .*not 16", lambda x: split(x, extra_bits(16)), ["float16"]),
        (
            "{}, not None, 'xla', 'pallas', 'triton', 'mosaic' or 'tpu'",
            lambda x: sgd(implementation=x),
            ["gpu", "cuda", 1],
        ),
        ("seed is {}", lambda x: sgd(seed=x), [-1, -4096, 2**32, 2**40]),
        ("min_size is {}", lambda x: sgd(min_size=x), [-1, -4096]),
    ],
    TypeError: [
        ("bits is .*static int", extra_bits, [8.0, "8", jnp.int32(8), True]),
        ("seed is .*static int", lambda x: sgd(seed=x), [1.5, "1", jnp.int32(1)]),
        ("min_size is .*static", lambda x: sgd(min_size=x), [1.5, "1", jnp.int32(1)]),
        (
            "weights is .*not a weight format",
            lambda x: sgd(weights=x),
            ["kahan", 8, kahan, cast(jnp.bfloat16)],
        ),
        (
            "moments has .*not a moment format",
            lambda x: sgd(moments=x),
            ["bfloat16", 8, kahan(), {"mu": "bfloat16"}],
        ),
        ("dtype is .*accepted are fl", cast, [None, "bfloat17", jnp.zeros_like]),
        ("dtype is .*accepted are fl", lambda x: split(x, kahan()), [None, "int7"]),
        (
            r"complex64\[3\]; accepted are real",
            lambda x: lowbit_optax.split_array(x, jnp.bfloat16, kahan()),
            [jnp.ones(3, jnp.complex64)],
        ),
        ("complex64", lambda x: split("bfloat16", kahan()) + x, [jnp.complex64(1j)]),
    ],
}


@pytest.mark.parametrize(
    ("error", "message", "function", "value"),
    [
        (error, message, function, value)
        for error, cases in REFUSED.items()
        for message, function, values in cases
        for value in values
    ],
)
def test_arguments_that_are_refused(error, message, function, value):
    with pytest.raises(error, match=message.format(repr(value))):
        function(value)


def test_moments_that_name_a_field_which_does_not_exist():
    for format_ in (cast("float16"), "float32"):
        moments = {"nu": cast("bfloat16"), "trace": format_}
        tx = lowbit(optax.adamw(0.1), moments=moments, weights=extra_bits(16))
        with pytest.raises(ValueError, match=r"'trace'.*\['mu', 'nu'\]"):
            tx.init(_params())
    with pytest.raises(ValueError, match=r"'mu'.*\[\]"):
        lowbit_optax.kahan_sgd(0.1, moments={"mu": cast("bfloat16")}).init(_params())


# States that were made by something else.


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
    (WIDE["dense"], rf"{BIAS} is bfloat16.*cast after tx\.init.*from_master\(tx, "),
]
KAHAN, BITS, STOCHASTIC = map(
    _with, (kahan(), extra_bits(8), lowbit_optax.stochastic_rounding())
)
BFLOAT16 = cast("bfloat16")
MOMENT = rf"moment .*{BIAS} is .*\[8\]"
# The state, what steps with it, and the error.
OTHERS = [
    (tx.init(_params()), other, match)
    for tx, other, match in [
        (BITS, _with(extra_bits(16)), "nearest_8_bits.*nearest_16_bits"),
        (BITS, _with(extra_bits(8, rounding="toward_zero")), "nearest_8_.*toward_zero"),
        (KAHAN, BITS, "compensation.*nearest_8_bits"),
        (STOCHASTIC, _with(lowbit_optax.master_copy()), "None.*master"),
        (_adamw(BFLOAT16), _adamw(cast("float16")), MOMENT),
        (_adamw("float32"), _adamw(BFLOAT16), MOMENT),
        (_adamw({"nu": BFLOAT16}), _adamw(BFLOAT16), MOMENT),
        (_adamw(BFLOAT16), _adamw({"nu": BFLOAT16}), MOMENT),
        (KAHAN, _adamw("float32"), "but .* returns .ScaleByAdamState"),
        (optax.adamw(0.1), KAHAN, "tuple, not a LowbitState"),
        (optax.chain(KAHAN), KAHAN, "tuple, not a LowbitState"),
    ]
]
OTHERS += [(state, KAHAN, "not a LowbitState") for state in (None, ())]
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


@ADVANCES
def test_parameters_that_became_float32(advance):
    with pytest.raises(ValueError, match=r"\['bias'\] is float32.* was it cast"):
        _fail(KAHAN, advance, _grads(), WIDE)


@pytest.mark.parametrize("bad", ["text", object(), 1.0], ids=["str", "object", "float"])
def test_leaves_that_are_no_arrays(bad):
    with pytest.raises((TypeError, ValueError), match=r"params\['w'\]"):
        lowbit_optax.kahan_sgd(0.1).init({"w": bad})


def test_errors_leave_arguments_alone():
    tx = lowbit_optax.kahan_adamw(0.1)
    params, grads = _params(), _grads(bias=jnp.ones(7))
    state = tx.init(params)
    donating = jax.jit(functools.partial(apply, tx), donate_argnums=(0, 1))
    with pytest.raises(ValueError, match=BIAS):
        donating(params, state, grads)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, state)))


def _takes_a_dtype():
    """Functions of a dtype, each on the smallest arguments that it takes."""
    weights = {"w": jnp.ones((64, 64))}
    quantized = lowbit_optax.quantize_params(weights, bits=8)
    tx = lowbit_optax.lpmm_sgd(0.1)
    loss_fn = lambda params: jnp.sum(lowbit_optax.dequantize(params["w"]))
    return {
        "param_dtypes": lambda dtype: lowbit_optax.param_dtypes(weights, dtype),
        "plan": lambda dtype: lowbit_optax.plan(weights, 1e9, dtype=dtype),
        "memory_report": lambda dtype: lowbit_optax.memory_report(
            tx, quantized, dtype=dtype
        ),
        "step_memory": lambda dtype: lowbit_optax.step_memory(
            tx, quantized, loss_fn, dtype=dtype
        ),
        "dequantize": lambda dtype: lowbit_optax.dequantize(quantized, dtype),
        "one weight's dequantize": lambda dtype: quantized["w"].dequantize(dtype),
        "value_and_grad": lambda dtype: lowbit_optax.lpmm.value_and_grad(
            loss_fn, dtype
        ),
        "release": lambda dtype: lowbit_optax.release.value_and_update(
            loss_fn, tx, dtype=dtype
        ),
    }


@pytest.mark.parametrize("function", _takes_a_dtype())
@pytest.mark.parametrize(
    ("bad", "given"),
    [
        (jnp.int8, "int8"),
        (bool, "bool"),
        (jnp.complex64, "complex64"),
        (None, "None"),
        ("bfloat17", "'bfloat17'"),
        (jnp.zeros_like, "<function"),
        ({"w": jnp.bfloat16}, r"\{'w'"),
    ],
    ids=["int8", "bool", "complex64", "None", "a name", "a function", "a tree"],
)
def test_dtypes_that_are_no_floats(function, bad, given):
    with pytest.raises(TypeError, match=f"dtype is {given}.*; accepted are floating"):
        _takes_a_dtype()[function](bad)


def test_floats_that_no_format_holds():
    params = {"w": jnp.ones((8, 8), jnp.float8_e4m3b11fnuz)}
    with pytest.raises(ValueError, match=r"\['w'\] is float8_e4m3b11fnuz.*accepted"):
        lowbit_optax.kahan_sgd(0.1).init(params)
