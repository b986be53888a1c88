"""Products in the formats' own dtypes match the emulated products."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

from lowbit_optax import precision
from lowbit_optax.precision import FLOAT8, FP32, HFP8, FloatFormat, Formats
from lowbit_optax.precision.products import product_dtypes
from tests.helpers.optimizers import assert_same_bits
from tests.helpers.rounded_losses import equations, gradient, mlp, uniform

E4M3, E5M2, BFLOAT16 = "float8_e4m3fn", "float8_e5m2", "bfloat16"
SIXTEEN_BITS, WIDE = (BFLOAT16, BFLOAT16), ("float32", "float32")
SHIFTED = Formats(
    low=FloatFormat(4, 3, 5, specials="nan"),
    low_backward=FloatFormat(5, 2, -7, specials="ieee"),
    high=FP32,
)


def dyadic(seed, *shape):
    """Returns multiples of 1/4 up to 1, whose products add up exactly."""
    return jnp.asarray(
        np.random.default_rng(seed).integers(-4, 5, shape) / 4, "float32"
    )


def scanned(w, x):
    def cell(h, layer):
        return jax.nn.relu(h @ layer) / 4, h @ layer

    h, ys = lax.scan(cell, x @ w["in"], jnp.stack([w["mid"], w["mid"].T]))
    return jnp.sum(jnp.square(h @ w["out"])) + jnp.sum(ys)


def branching(w, x):
    h = jax.checkpoint(lambda h: jax.nn.relu(h @ w["in"]))(x)
    deep = lambda h: jax.nn.relu(h @ w["mid"])
    h = lax.cond(x[0, 0] > 2, lambda h: h / 2, deep, h)
    return jnp.sum(jnp.square(h @ w["out"]))


def attention(w, x):
    """Uses products over several axes, in every order, with sums and batches."""
    q = jnp.einsum("td,dhe->hte", x, w["in"].reshape(8, 2, 4))
    k = jnp.einsum("td,hed->teh", x, w["mid"].reshape(2, 4, 8))
    scores = jax.nn.relu(jnp.einsum("hte,seh->ths", q, k)) / 16
    return jnp.sum(jnp.square(jnp.einsum("ths,hsd->dt", scores, w["out"])))


WEIGHTS = {"in": dyadic(0, 8, 8), "mid": dyadic(1, 8, 8), "out": dyadic(2, 8, 4)}
X = dyadic(3, 6, 8)
CASES = {
    "mlp": (mlp, WEIGHTS),
    "scanned": (scanned, WEIGHTS),
    "branching": (branching, WEIGHTS),
    "attention": (attention, WEIGHTS | {"out": dyadic(4, 2, 6, 3)}),
}


def multiplied(fn, *args):
    """Counts products by their operands' dtypes and FLOP.

    Every iteration of a scan and every branch of a conditional count.
    """
    found = collections.Counter()
    for eqn, runs in equations(jax.make_jaxpr(fn)(*args).jaxpr):
        if eqn.primitive is primitives.dot_general_p:
            (summed, _), _ = eqn.params["dimension_numbers"]
            terms = np.prod([eqn.invars[0].aval.shape[axis] for axis in summed])
            dtypes = tuple(var.aval.dtype.name for var in eqn.invars)
            flop = 2 * int(terms) * eqn.outvars[0].aval.size
            found[(dtypes, flop)] += runs
    return found


@pytest.mark.parametrize(
    ("case", "formats"),
    [
        ("mlp", HFP8),
        # XLA:CPU compiles float8 slowly.
        pytest.param("mlp", SHIFTED, marks=pytest.mark.slow_to_compile),
        pytest.param("attention", FLOAT8, marks=pytest.mark.slow_to_compile),
        pytest.param("scanned", FLOAT8, marks=pytest.mark.slow_to_compile),
        pytest.param("branching", SHIFTED, marks=pytest.mark.slow_to_compile),
    ],
    ids=str,
)
def test_products_whose_sums_are_exact_equal_the_emulated_ones(case, formats):
    loss_fn, w = CASES[case]
    assignment = uniform(loss_fn, w, X, formats=formats)
    want = jax.jit(gradient(loss_fn, assignment))(w, X)
    got = jax.jit(gradient(loss_fn, assignment, products="native"))(w, X)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(want[1]))
    assert_same_bits(got, want)


@pytest.mark.parametrize("bias", [63, -63, 64, -64])
def test_products_are_in_float8_up_to_a_bias_of_63(bias):
    fmt = FloatFormat(4, 3, bias, specials="nan")
    is_float8 = abs(bias) <= 63
    wanted = (E4M3, E4M3) if is_float8 else (BFLOAT16, BFLOAT16)
    assert product_dtypes(fmt, fmt) == wanted


@pytest.mark.parametrize("options", [{"stored": True}, {"seed": 7}], ids=str)
def test_native_products_work_with_the_other_options(options):
    assignment = uniform(mlp, WEIGHTS, X, formats=FLOAT8)
    want = jax.jit(gradient(mlp, assignment, **options))(WEIGHTS, X)
    native = gradient(mlp, assignment, products="native", **options)
    assert_same_bits(jax.jit(native)(WEIGHTS, X), want)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "choose",
    [
        precision.uniform,
        functools.partial(precision.demote, ratio=0.5),
        precision.operator_based,
    ],
    ids=["uniform", "demote", "operator_based"],
)
def test_products_lists_the_operands_and_the_native_products(case, choose):
    loss_fn, w = CASES[case]
    plan = precision.trace(loss_fn, w, X)
    for formats in (FLOAT8, dataclasses.replace(FLOAT8, high=FP32, high_backward=FP32)):
        assignment = choose(plan, formats=formats)
        listed = precision.products(loss_fn, assignment, w, X)
        claimed = {(tuple(p.dtypes), p.is_native) for p in listed}
        assert all(is_native == ("float32" not in d) for d, is_native in claimed)
        native = gradient(loss_fn, assignment, products="native")
        program = multiplied(lambda w, x, native=native: native(w, x)[1], w, X)
        # Jaxprs also contain recomputations, and cotangents of inputs that XLA removes.
        assert claimed
        assert {d for d, _ in claimed} <= {d for d, _ in program}
        assert sum(p.flop for p in listed) <= sum(
            f * n for (_, f), n in program.items()
        )


@pytest.mark.parametrize(
    ("formats", "forward", "backward"),
    [
        (FLOAT8, (E4M3, E4M3), (E5M2, E4M3)),
        (SHIFTED, (E4M3, E4M3), (E5M2, E4M3)),
        (HFP8, SIXTEEN_BITS, SIXTEEN_BITS),
        # GPUs have no product of two float8_e5m2 operands.
        (Formats(FloatFormat.of(E5M2), FP32), SIXTEEN_BITS, SIXTEEN_BITS),
        (Formats(FloatFormat.of(BFLOAT16), FP32), SIXTEEN_BITS, SIXTEEN_BITS),
        (dataclasses.replace(FLOAT8, low_backward=FP32), (E4M3, E4M3), WIDE),
        (dataclasses.replace(FLOAT8, low=FloatFormat(6, 9)), WIDE, WIDE),
    ],
    ids=str,
)
def test_products_use_the_dtypes_of_both_formats(formats, forward, backward):
    assignment = uniform(mlp, WEIGHTS, X, formats=formats)
    native = gradient(mlp, assignment, products="native")
    program = multiplied(native, WEIGHTS, X)
    assert {dtypes for dtypes, _ in program} == {forward, backward}
    listed = precision.products(mlp, assignment, WEIGHTS, X)
    assert {(p.dtypes, p.is_native) for p in listed} == {
        (dtypes, dtypes != WIDE) for dtypes, _ in program
    }


def test_the_backward_pass_keeps_operands_in_8_bits():
    loss_fn = lambda w, x: jnp.sum(x @ w["in"])
    assignment = uniform(loss_fn, WEIGHTS, X, formats=FLOAT8)

    def kept(products):
        rounded = precision.apply(loss_fn, assignment, products=products)
        _, pull, _ = jax.vjp(rounded, WEIGHTS, X, has_aux=True)
        return {x.dtype.name for x in jax.tree.leaves(pull) if jnp.ndim(x) == 2}

    assert kept("emulated") == {"float32"}
    assert kept("native") == {E4M3}


@pytest.mark.slow_to_compile
def test_values_that_overflow_to_infinity_stay_infinite():
    for low in (
        FloatFormat(4, 3, specials="nan", overflow="infinity"),
        FloatFormat(4, 3, 3, specials="nan", overflow="infinity"),
    ):
        formats = dataclasses.replace(FLOAT8, low=low)
        assignment = uniform(mlp, WEIGHTS, X, formats=formats)
        native = gradient(mlp, assignment, products="native")
        (loss, overflow), _ = native(WEIGHTS, X.at[0, 0].set(1e4))
        assert overflow[[t.kind for t in assignment.plan.tensors].index("input")] > 0
        assert not np.isfinite(loss)
    # A large loss scale produces a cotangent past float8_e5m2's largest number.
    assignment = uniform(mlp, WEIGHTS, X, formats=FLOAT8)
    scaled = lambda w, x: mlp(w, x) * 2.0**20
    native = gradient(scaled, assignment, products="native")
    _, grads = native(WEIGHTS, X)
    assert not any(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


def test_operands_that_are_float8_already_are_multiplied_by_the_bias_too():
    def loss_fn(w, x):
        wide = {"preferred_element_type": jnp.float32}
        return jnp.sum(jnp.dot(x.astype(E4M3), w.astype(E4M3), **wide))

    w, x, fmt = jnp.ones((8, 4)), jnp.ones((2, 8)), FloatFormat(4, 3, 2, specials="nan")
    assignment = uniform(loss_fn, w, x, formats=Formats(low=fmt, high=FP32))
    for products in ("emulated", "native"):
        got = precision.apply(loss_fn, assignment, products=products)(w, x)
        assert got[0] == 64, products
