"""Errors name the leaf, what was given and what is accepted."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optimizers import (
    ALIASES,
    ALL_FORMATS,
    apply,
    each,
    jitted,
)

import lowbit_optax
from lowbit_optax import cast, extra_bits, kahan, lowbit

pytestmark = pytest.mark.standard_promotion

ADVANCES = pytest.mark.parametrize(
    "advance", [apply, lowbit_optax.step], ids=["update", "step"]
)


def _params():
    return {
        "dense": {
            "kernel": jnp.ones((64, 8), jnp.bfloat16),
            "bias": jnp.ones(8, jnp.bfloat16),
        }
    }


def _grads(**dense):
    return {"dense": {"kernel": jnp.ones((64, 8)), "bias": jnp.ones(8)} | dense}


def _fail(tx, advance, grads, params=None, state=None):
    params = _params() if params is None else params
    state = tx.init(_params()) if state is None else state
    advance(tx, params, state, grads)


def _split_ones(dtype):
    return lowbit_optax.split_array(jnp.ones(3), dtype, kahan())


KERNEL = r"\['dense'\]\['kernel'\]"
BIAS = r"\['dense'\]\['bias'\]"


@ADVANCES
@each(ALIASES)
def test_missing_params(optimizer, advance):
    tx = optimizer()
    state = tx.init(_params())
    with pytest.raises(ValueError, match="needs params"):
        advance(tx, None, state, _grads())
    with pytest.raises(ValueError, match="needs params"):
        tx.update(_grads(), state)


def test_init_without_params():
    with pytest.raises(ValueError, match="init needs params"):
        lowbit_optax.kahan_sgd(0.1).init(None)


@ADVANCES
@each({name: ALIASES[name] for name in ("kahan_adamw", "sr_sgd", "extra_bits_sgd_8")})
def test_gradients_of_another_structure(optimizer, advance):
    tx = optimizer()
    without = _grads()
    del without["dense"]["bias"]
    with pytest.raises(ValueError, match=f"grads.*missing at {BIAS}"):
        _fail(tx, advance, without)
    with pytest.raises(ValueError, match=r"grads.*\['dense'\]\['extra'\]"):
        _fail(tx, advance, _grads(extra=jnp.ones(3)))
    with pytest.raises(ValueError, match="structure of params"):
        _fail(tx, advance, list(jax.tree.leaves(_grads())))
    with pytest.raises(ValueError, match="structure of params"):
        _fail(tx, advance, {})


@ADVANCES
@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (None, "None"),
        (1.0, r"1\.0"),
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


def test_a_gradient_tree_where_a_leaf_should_be():
    tx = lowbit_optax.kahan_adamw(0.1)
    with pytest.raises((ValueError, TypeError), match=BIAS):
        _fail(tx, apply, _grads(bias={"a": jnp.ones(8)}))


def test_a_wrong_gradient_is_found_while_tracing():
    tx = lowbit_optax.kahan_adamw(0.1)
    state = tx.init(_params())
    with pytest.raises(ValueError, match=BIAS):
        jitted(tx, apply)(_grads(bias=jnp.ones(7)), state, _params())


@ADVANCES
def test_a_wrong_gradient_shape_of_a_float32_leaf(advance):
    tx = lowbit_optax.kahan_adamw(0.1)
    params = {"norm": jnp.ones(8)}
    with pytest.raises(ValueError, match=r"\['norm'\].*\(4,\).*\(8,\)"):
        _fail(tx, advance, {"norm": jnp.ones(4)}, params, tx.init(params))


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


@pytest.mark.parametrize("bits", [-1, 22, 32])
def test_bits_out_of_range(bits):
    with pytest.raises(ValueError, match=f"bits is {bits}; bfloat16 takes 0 to 16"):
        extra_bits(bits)
    with pytest.raises(ValueError, match=f"bits is {bits}"):
        lowbit_optax.extra_bits_adamw(1e-3, bits=bits)


@pytest.mark.parametrize("bits", [8.0, "8", jnp.int32(8), True])
def test_bits_that_are_no_integer(bits):
    with pytest.raises(TypeError, match=r"bits is .*static int"):
        extra_bits(bits)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: extra_bits(8, rounding="up"),
            "rounding is 'up'.*nearest.*toward_zero",
        ),
        (
            lambda: extra_bits(8, residual_rounding="toward_zero"),
            "residual_rounding is 'toward_zero', not 'nearest' or 'stochastic'",
        ),
        (lambda: kahan(rounding="toward_zero"), "rounding is 'toward_zero'.*'nearest'"),
        (lambda: kahan(residual_rounding="up"), "residual_rounding is 'up'.*'nearest'"),
        (lambda: kahan(arithmetic="bfloat16"), "arithmetic is 'bfloat16'.*'param'"),
        (lambda: cast(jnp.float32), "dtype is float32, not one of bfloat16.*leave"),
        (lambda: cast(jnp.int8), "dtype is int8, not one of bfloat16"),
        (lambda: cast(jnp.bfloat16, rounding="up"), "rounding is 'up', not 'nearest'"),
    ],
)
def test_unknown_options(make, match):
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("implementation", ["gpu", "cuda", 1])
def test_unknown_implementation(implementation):
    accepted = "not None, 'xla', 'pallas', 'triton', 'mosaic' or 'tpu'"
    with pytest.raises(ValueError, match=f"{implementation!r}, {accepted}"):
        lowbit(
            optax.sgd(0.1),
            implementation=implementation,
            weights=extra_bits(16),
            moments="float32",
        )
    with pytest.raises(ValueError, match=f"{implementation!r}"):
        lowbit_optax.kahan_sgd(0.1, implementation=implementation)


@pytest.mark.parametrize("weights", ["kahan", 8, kahan, cast(jnp.bfloat16)])
def test_weights_that_are_no_weight_format(weights):
    with pytest.raises(TypeError, match=r"weights is .*not a weight format"):
        lowbit(optax.sgd(0.1), weights=weights, moments="float32")


@pytest.mark.parametrize("moments", ["bfloat16", 8, kahan(), {"mu": "bfloat16"}])
def test_moments_that_are_no_moment_format(moments):
    with pytest.raises((TypeError, ValueError), match="moment"):
        lowbit(optax.adamw(0.1), moments=moments, weights=extra_bits(16)).init(
            _params()
        )


def test_moments_that_name_a_field_which_does_not_exist():
    for format_ in (cast("float16"), "float32"):
        moments = {"nu": cast("bfloat16"), "trace": format_}
        tx = lowbit(optax.adamw(0.1), moments=moments, weights=extra_bits(16))
        with pytest.raises(ValueError, match=r"'trace'.*\['mu', 'nu'\]"):
            tx.init(_params())
    with pytest.raises(ValueError, match=r"'mu'.*\[\]"):
        lowbit_optax.kahan_sgd(0.1, moments={"mu": cast("bfloat16")}).init(_params())


@pytest.mark.parametrize("name", ["seed", "min_size"])
def test_seed_and_min_size_are_static_and_not_negative(name):
    for bad in (-1, -4096):
        with pytest.raises(ValueError, match=f"{name} is {bad}"):
            lowbit(optax.sgd(0.1), **{name: bad})
    for bad in (1.5, "1", jnp.int32(1)):
        with pytest.raises(TypeError, match=f"{name} is .*static int"):
            lowbit(optax.sgd(0.1), **{name: bad})


@pytest.mark.parametrize("seed", [2**32, 2**40])
def test_a_seed_past_32_bits_is_refused(seed):
    with pytest.raises((ValueError, OverflowError), match="seed"):
        lowbit(
            optax.sgd(0.1), seed=seed, weights=extra_bits(16), moments="float32"
        ).init(_params())


def test_the_largest_seed_is_taken():
    state = lowbit(
        optax.sgd(0.1), seed=2**32 - 1, weights=extra_bits(16), moments="float32"
    ).init(_params())
    assert int(state.seed) == 2**32 - 1


@ADVANCES
@pytest.mark.parametrize(
    ("made_by", "used_by", "match"),
    [
        ("extra_bits_8", "extra_bits_16", "NearestBits8.*NearestBits16"),
        ("extra_bits_8", "extra_bits_8_toward_zero", "NearestBits.*TowardZeroBits"),
        ("kahan", "extra_bits_8", "Kahan.*NearestBits"),
        ("kahan", "stochastic_rounding", "Kahan.*NoResidual"),
        ("stochastic_rounding", "master_copy", "NoResidual.*MasterCopy"),
    ],
)
def test_state_made_by_other_weights(made_by, used_by, match, advance):
    make = lambda name: lowbit(
        optax.sgd(0.1), weights=ALL_FORMATS[name], min_size=0, moments="float32"
    )
    state = make(made_by).init(_params())
    with pytest.raises(ValueError, match=match):
        _fail(make(used_by), advance, _grads(), state=state)


@ADVANCES
@pytest.mark.parametrize(
    ("made_by", "used_by"),
    [
        (cast("bfloat16"), cast("float16")),
        (None, cast("bfloat16")),
        ({"nu": cast("bfloat16")}, cast("bfloat16")),
        (cast("bfloat16"), None),
        (cast("bfloat16"), {"nu": cast("bfloat16")}),
    ],
)
def test_state_made_by_other_moments(made_by, used_by, advance):
    make = lambda moments: lowbit(optax.adamw(0.1), weights=kahan(), moments=moments)
    state = make(made_by).init(_params())
    with pytest.raises(ValueError, match=rf"moment .*{BIAS} is .*\[8\]"):
        _fail(make(used_by), advance, _grads(), state=state)


def _state_of(tx):
    return tx.init(_params())


@ADVANCES
@pytest.mark.parametrize(
    "wrong",
    [
        lambda: _state_of(optax.adamw(0.1)),
        lambda: _state_of(optax.chain(lowbit_optax.kahan_adamw(0.1))),
        lambda: None,
        lambda: (),
    ],
    ids=["optax's", "a chain's", "None", "empty"],
)
def test_state_that_is_no_lowbit_state(wrong, advance):
    state = wrong()
    with pytest.raises(TypeError, match=f"{type(state).__name__}, not a LowbitState"):
        _fail(
            lowbit_optax.kahan_adamw(0.1),
            lambda tx, params, _, grads: advance(tx, params, state, grads),
            _grads(),
        )


@ADVANCES
@pytest.mark.parametrize(
    "weights", [kahan(), extra_bits(8), lowbit_optax.master_copy()]
)
def test_state_of_other_parameters(weights, advance):
    tx = lowbit(optax.sgd(0.1), weights=weights, min_size=0, moments="float32")
    shorter = _params()
    shorter["dense"]["kernel"] = jnp.ones((32, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"residual of params{KERNEL}"):
        _fail(tx, advance, _grads(), state=tx.init(shorter))
    fewer = _params()
    del fewer["dense"]["bias"]
    with pytest.raises(ValueError, match=f"residuals.*missing at {BIAS}"):
        _fail(tx, advance, _grads(), state=tx.init(fewer))


@ADVANCES
@pytest.mark.parametrize(
    "weights", [kahan(), extra_bits(8), lowbit_optax.master_copy()]
)
def test_state_of_deeper_parameters(weights, advance):
    tx = lowbit(optax.sgd(0.1), weights=weights, min_size=0, moments="float32")
    deeper = _params()
    deeper["dense"]["kernel"] = dict(deeper["dense"])
    with pytest.raises((ValueError, TypeError), match=KERNEL):
        _fail(tx, advance, _grads(), state=tx.init(deeper))


@ADVANCES
def test_state_of_another_inner_transformation(advance):
    state = lowbit_optax.kahan_sgd(0.1, 0.9).init(_params())
    with pytest.raises((ValueError, TypeError)):
        _fail(lowbit_optax.kahan_adamw(0.1), advance, _grads(), state=state)
    with pytest.raises((ValueError, TypeError)):
        _fail(
            lowbit_optax.extra_bits_adamw(0.1),
            advance,
            _grads(),
            state=lowbit_optax.extra_bits_sgd(0.1, 0.9).init(_params()),
        )


@ADVANCES
@pytest.mark.parametrize(
    "weights",
    [kahan(), extra_bits(8), extra_bits(), lowbit_optax.master_copy()],
    ids=["kahan", "8 bits", "all bits", "master_copy"],
)
@pytest.mark.parametrize("around", [lambda tx: tx, optax.chain], ids=["alone", "chain"])
def test_parameters_that_were_cast_after_init(around, weights, advance):
    tx = around(lowbit(optax.sgd(0.1), weights=weights, min_size=0))
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), _params())
    with pytest.raises(
        ValueError, match=rf"{BIAS} is bfloat16.*cast after tx\.init.*from_master\(tx, "
    ):  # fmt: skip
        _fail(tx, advance, _grads(), state=tx.init(wide))


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


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: lowbit_optax.split_array(jnp.ones(4), jnp.float32, kahan()),
            "dtype is float32",
        ),
        (
            lambda: lowbit_optax.split_array(jnp.ones(4), jnp.float16, extra_bits(16)),
            "float16 takes 0 to 13 extra bits, not 16",
        ),
        (
            lambda: lowbit_optax.split_array(jnp.ones(4), jnp.int8, kahan()),
            "dtype is int8",
        ),
    ],
)
def test_split_arrays_of_wrong_dtypes(make, match):
    with pytest.raises(ValueError, match=match):
        make()


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


@pytest.mark.parametrize("make", [cast, _split_ones])
def test_dtypes_that_are_none(make):
    for bad in (None, "bfloat17", jnp.zeros_like):
        with pytest.raises(TypeError, match=r"dtype is .*accepted are floating"):
            make(bad)


def test_split_arrays_of_complex_numbers():
    with pytest.raises(TypeError, match=r"complex64\[3\]; accepted are real"):
        lowbit_optax.split_array(jnp.ones(3, jnp.complex64), jnp.bfloat16, kahan())
    split = _split_ones(jnp.bfloat16)
    with pytest.raises(TypeError, match="complex64"):
        split + jnp.complex64(1j)


def test_floats_that_no_format_holds():
    params = {"w": jnp.ones((8, 8), jnp.float8_e4m3b11fnuz)}
    with pytest.raises(ValueError, match=r"\['w'\] is float8_e4m3b11fnuz.*accepted"):
        lowbit_optax.kahan_sgd(0.1).init(params)


def test_messages_say_what_is_accepted():
    tx = lowbit_optax.kahan_adamw(0.1)
    without = _grads()
    del without["dense"]["bias"]
    with pytest.raises(ValueError, match="grads") as caught:
        _fail(tx, apply, without)
    message = str(caught.value)
    accepted = str(jax.tree.structure(_params()))
    given = str(jax.tree.structure(without))
    assert re.search(re.escape(given), message)
    assert re.search(re.escape(accepted), message)
