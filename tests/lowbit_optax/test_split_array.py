"""Operators on split numbers run in float32 on the masters and round once."""

import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowbit_optax
from lowbit_optax import SplitArray, join_array, split_array

SIXTEEN = lowbit_optax.extra_bits(16, residual_rounding="nearest")  # rounds nothing
EIGHT = lowbit_optax.extra_bits(8, residual_rounding="nearest")
SIZE = 64


def numbers(seed, shape=(SIZE,), *, positive=False):
    """Returns nonzero float32 numbers of several magnitudes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 3, shape)
    return (np.abs(x) if positive else x).astype(np.float32)


def split16(x):
    """Splits without loss, so that results can be compared in all their bits."""
    return split_array(x, jnp.bfloat16, SIXTEEN)


join = jax.jit(join_array)
X, Y, Z = numbers(0), numbers(1), numbers(2)

OPERATORS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
}
each_operator = pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS)

OPERANDS = {
    "split": split16,
    "float32 array": jnp.asarray,
    "numpy array": np.asarray,
}


def on_either_side(x, y):
    """Returns ``{operator: (x op y, y op x)}``."""
    return {name: (op(x, y), op(y, x)) for name, op in OPERATORS.items()}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", OPERANDS)
def test_an_operator_is_float32s_with_the_other_operand_on_either_side(kind, jit):
    run = jax.jit(on_either_side) if jit else on_either_side
    results = run(split16(X), OPERANDS[kind](Y))
    expected = on_either_side(X, Y)
    for name in OPERATORS:
        for got, wanted in zip(results[name], expected[name], strict=True):
            assert isinstance(got, SplitArray)
            np.testing.assert_array_equal(join(got), wanted)


@each_operator
def test_a_number_is_an_operand_on_either_side(op):
    for number in (3, 0.1, -2.5):
        # Compute in jax.numpy, because XLA divides by a scalar with its reciprocal.
        wide, x = jnp.float32(number), jnp.asarray(X)
        np.testing.assert_array_equal(join_array(op(split16(X), number)), op(x, wide))
        np.testing.assert_array_equal(join_array(op(number, split16(X))), op(wide, x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_])
def test_operands_of_other_dtypes_are_widened_first(dtype):
    other = jnp.arange(1, SIZE + 1).astype(dtype)
    wide = np.asarray(other.astype(jnp.float32))
    np.testing.assert_array_equal(join_array(split16(X) * other), X * wide)
    np.testing.assert_array_equal(join_array(split16(X) + other), X + wide)


METHODS = {
    "addcmul": (lambda x, y, z: x.addcmul(y, z), X + Y * Z),
    "addcmul with a factor": (
        lambda x, y, z: x.addcmul(split16(y), z, value=-0.5),
        X + (np.float32(-0.5) * Y) * Z,
    ),
    "addcdiv": (lambda x, y, z: x.addcdiv(y, z), X + Y / Z),
    "addcdiv with a factor": (
        lambda x, y, z: x.addcdiv(y, split16(z), value=3.0),
        X + (np.float32(3) * Y) / Z,
    ),
    "lerp": (lambda x, y, z: x.lerp(y, 0.25), X + np.float32(0.25) * (Y - X)),
    "lerp by nothing": (lambda x, y, z: x.lerp(y, 0.0), X),
    "lerp by arrays": (lambda x, y, z: x.lerp(split16(y), split16(z)), X + Z * (Y - X)),
}


def test_a_method_is_float32s_arithmetic():
    for name, (method, expected) in METHODS.items():
        got = join_array(method(split16(X), Y, Z))
        np.testing.assert_array_equal(got, expected, err_msg=name)


# Results are rounded once, to the bits that the format keeps.


@each_operator
def test_a_result_is_the_float32_result_rounded_once_to_the_bits_kept(op):
    x, y = (split_array(a, jnp.bfloat16, EIGHT) for a in (X, Y))
    exact = op(np.asarray(join_array(x)), np.asarray(join_array(y)))
    bits = exact.view(np.uint32).astype(np.uint64)
    # 16 + 8 of 32 bits, rounded to nearest even.
    rounded = ((bits + 0x7F + ((bits >> 8) & 1)) >> 8) << 8
    expected = rounded.astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(join_array(op(x, y)), expected)


@pytest.mark.parametrize(
    "format_",
    [
        lowbit_optax.nearest(),
        lowbit_optax.stochastic_rounding(),
        lowbit_optax.master_copy(),
        lowbit_optax.kahan(),
        lowbit_optax.extra_bits(0),
        lowbit_optax.extra_bits(4, rounding="toward_zero"),
    ],
    ids=repr,
)
def test_every_format_computes_and_keeps_its_kind(format_):

    @jax.jit
    def compute(x):
        split = split_array(x, jnp.bfloat16, format_)
        result = (split * 2 - 1).sqrt()
        return split, result, join_array(result)

    split, result, joined = compute(jnp.full((40, 3), 1.5))
    assert result.weight_format == format_
    chex.assert_trees_all_equal_shapes_and_dtypes(result, split)
    # sqrt(2) is accurate to a unit of bfloat16 or better.
    np.testing.assert_allclose(joined, np.sqrt(2), atol=2.0**-7)


def test_every_operation_draws_its_own_stochastic_results():
    format_ = lowbit_optax.stochastic_rounding()
    # A quarter of the spacing above 1 rounds up independently in each draw.
    one = split_array(jnp.ones(4096), jnp.bfloat16, format_)
    quarter = np.float32(2.0**-9)
    first = one + quarter
    again = one + quarter
    chex.assert_trees_all_equal(first, again)  # the state was the same
    later = one * 1
    second = later + quarter
    up, other = np.asarray(first.param) > 1, np.asarray(second.param) > 1
    differing = np.mean(up != other)
    assert abs(differing - 0.375) <= 5 * np.sqrt(0.375 * 0.625 / 4096)
    seeded = split_array(jnp.ones(4096), jnp.bfloat16, format_, seed=1) + quarter
    assert np.any(np.asarray(seeded.param) != np.asarray(first.param))


# Shapes.


@each_operator
def test_shapes_broadcast_as_arrays_do(op):
    x, row = numbers(4, (5, 33)), numbers(5, (33,))
    column, one, layers = numbers(6, (5, 1)), numbers(7, (1,)), numbers(8, (4, 1, 33))
    pairs = [(x, row), (x, column), (x, one), (x, layers), (row, x), (column, row)]

    @jax.jit
    def results(pairs):
        return [join_array(op(split16(a), b)) for a, b in pairs]

    for (a, b), result in zip(pairs, results(pairs), strict=True):
        # Compute in jax.numpy, because XLA divides by a broadcast array as by a scalar.
        expected = op(jnp.asarray(a), jnp.asarray(b))
        assert result.shape == expected.shape
        np.testing.assert_array_equal(result, expected)


def test_a_scalar_keeps_its_whole_master_and_packs_when_it_grows():
    scalar = split_array(0.1, jnp.bfloat16, SIXTEEN)
    assert scalar.shape == ()
    assert scalar.residual.dtype == jnp.float32
    np.testing.assert_array_equal(join_array(scalar + 0.2), np.float32(0.1) + 0.2)
    grown = scalar * X
    np.testing.assert_array_equal(join_array(grown), np.float32(0.1) * X)
    back = split16(X[:1]) + scalar
    np.testing.assert_array_equal(join_array(back), X[:1] + np.float32(0.1))


# Transformations.


def test_vmap_over_a_stack_of_split_arrays_made_by_vmap():
    rows = numbers(9, (3, SIZE))
    stack = jax.jit(jax.vmap(split16))(jnp.asarray(rows))
    assert stack.param.shape == (3, SIZE)
    assert stack.random_state.shape == (3, 2)
    doubled = jax.jit(jax.vmap(lambda x: join_array(x + x)))(stack)
    np.testing.assert_array_equal(doubled, rows + rows)
