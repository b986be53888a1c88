"""Both implementations of ``fused_update`` equal its numpy model, bit for bit."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import (
    Leaf,
    Operand,
    Result,
    Scalars,
    fused_update,
    fused_update_many,
    packed_shape,
)
from pallas_kernels.operations import multiply_add
from tests.helpers.kernels import (
    EACH,
    QUICK,
    SHAPES,
    TABLE,
    Mixture,
    assert_equal,
    assert_layer_written,
    fields_of,
    index_of,
    stacks_of,
    words_of,
)
from tests.helpers.packing import pack, unpack

U32 = jnp.uint32
LAST = [int(x) for x in TABLE[2]]

CASES = [(shape, (bits,)) for shape in SHAPES for bits in (8, 32)]
CASES += [(shape, ()) for shape in SHAPES]
CASES += [
    ((70, 33), (5,)),
    ((3, 3, 3, 64), (12, 4)),
    ((1000,), (17,)),
    ((5, 40, 24), (1, 8)),
    ((1, 1), (3,)),
    ((33,), (12, 16)),
]


@EACH
@pytest.mark.parametrize(("shape", "widths"), CASES)
def test_results_are_those_of_the_model(shape, widths, implementation):
    mixture = Mixture(widths)
    arrays, held = mixture.arrays(shape)
    update = mixture.jitted(shape, implementation)
    got = update(arrays, dict(scalars=Scalars(jnp.asarray(TABLE), jnp.array([2], U32))))
    assert_equal(got, mixture.want(held, LAST, index_of(shape)))


@EACH
@pytest.mark.parametrize("widths", [(), (8,)])
def test_scalars_may_be_one_row_or_a_table(widths, implementation):
    mixture = Mixture(widths)
    arrays, held = mixture.arrays((40, 3))
    want = mixture.want(held, LAST, index_of((40, 3)))
    update = functools.partial(mixture.update, arrays, (40, 3), implementation)
    assert_equal(update(scalars=jnp.asarray(TABLE[2])), want)
    assert_equal(update(scalars=Scalars(jnp.asarray(TABLE), 2)), want)


STACKS = [((3, 40, 3), (8,)), ((4, 64, 2), (12,)), ((2, 5, 40, 24), ()), ((3, 7), ())]


@EACH
@pytest.mark.parametrize(("stack", "widths"), STACKS)
def test_a_layer_of_a_stack_is_updated_in_its_place(stack, widths, implementation):
    layers, *shape = stack
    mixture, shape = Mixture(widths), tuple(shape)
    stacks, held = stacks_of(mixture, shape, layers)
    update = mixture.jitted(shape, implementation)
    for layer in (0, layers - 1):
        got = update(
            stacks, dict(scalars=jnp.asarray(TABLE[2]), layer=jnp.int32(layer))
        )
        # The index counts elements of the whole stack.
        want = mixture.want(held[layer], LAST, index_of(stack)[layer])
        assert_layer_written(got, stacks, layer, want)


@EACH
def test_operands_that_stay_have_one_layer_where_others_are_stacks(implementation):
    def add(values, scalars, index):
        return [values[0] + values[1]]

    stack, grad = jnp.zeros((3, 5, 7)), jnp.ones((5, 7))
    (new,) = fused_update(
        add,
        [Operand(stack), Operand(grad)],
        [Result("float32", overwrites=0)],
        shape=(5, 7),
        layer=jnp.int32(1),
        implementation=implementation,
    )
    np.testing.assert_array_equal(new, stack.at[1].set(1.0))


DTYPES = [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float16, jnp.bfloat16, jnp.float32]


@EACH
@pytest.mark.parametrize("shape", [(70, 33), (33,)])
def test_arrays_have_any_dtypes_together(shape, implementation):
    def double(values, scalars, index):
        *floats, words = values
        doubled = [(x.astype(jnp.float32) * 2).astype(x.dtype) for x in floats]
        return [*doubled, words + jnp.uint32(1)]

    numbers = np.random.default_rng(0).integers(-7, 8, (len(DTYPES), *shape))
    floats = [jnp.asarray(x, d) for x, d in zip(numbers, DTYPES, strict=True)]
    arrays = [*floats, jnp.asarray(index_of(shape))]
    got = fused_update(
        double,
        [Operand(x) for x in arrays],
        [Result(x.dtype, overwrites=i) for i, x in enumerate(arrays)],
        implementation=implementation,
    )
    chex.assert_trees_all_equal_shapes_and_dtypes(got, arrays)
    for new, number in zip(got, numbers, strict=False):
        np.testing.assert_array_equal(new.astype(jnp.float32), 2 * number)
    np.testing.assert_array_equal(got[-1], index_of(shape) + 1)


@EACH
def test_a_sum_of_a_product_is_as_given(implementation):
    def lerp(values, scalars, index):
        return [multiply_add(jnp.full_like(values[0], 0.25), *values)]

    a, b = jnp.arange(33.0), 7 - jnp.arange(33.0)
    (got,) = fused_update(
        lerp,
        [Operand(a), Operand(b)],
        [Result("float32")],
        implementation=implementation,
    )
    np.testing.assert_array_equal(got, 0.25 * a + b)


# Many leaves.

SIZES = [(1,), (5000,), (3, 7), (1024,), (1025,), (70, 33), (), (2, 1, 5), (4096,)]


MANY = [((SIZES * 7)[:count], ()) for count in (1, len(SIZES), 60)]
# One kernel cannot update 9 leaves, so 5 of them share a kernel, and so do the other 4.
MANY += [
    pytest.param([shape] * count, widths, marks=pytest.mark.slow_to_compile)
    for shape, widths in [
        ((70, 33), (8,)),
        ((64, 16), (12, 4)),
        ((24, 3, 8), (16,)),
        ((33, 5), (5,)),
    ]
    for count in (2, 5, 9)
]
# Matrices and stacks of even, ragged and odd rows and columns, and folded axes.
DIFFERENT = [(64, 16), (70, 33), (3, 16, 24), (8, 260), (3, 3, 40, 12), (2, 70, 64)]
DIFFERENT += [(5, 40, 24), (24, 3, 8), (1000,), (2, 2048), (71, 33), (129, 8), (4, 320)]
MANY += [
    pytest.param(DIFFERENT, widths, marks=pytest.mark.slow_to_compile)
    for widths in [(8,), (12, 4), (5,)]
]


@EACH
@pytest.mark.parametrize(("shapes", "widths"), MANY)
def test_many_leaves_are_each_leaf_alone(shapes, widths, implementation):
    mixture, count = Mixture(widths), len(shapes)
    arrays, held = zip(
        *(mixture.arrays(shape, seed) for seed, shape in enumerate(shapes)), strict=True
    )
    table = np.random.default_rng(0).integers(0, 2**32, (count + 3, 2), np.uint64)
    rows = np.arange(count)[::-1] + 3
    update = mixture.jitted_many(shapes, implementation)
    got = update(arrays, jnp.asarray(table, U32), jnp.asarray(rows, U32))
    assert len(got) == count
    for own, each, shape, row in zip(got, held, shapes, rows, strict=True):
        scalars = [int(x) for x in table[row]]
        assert_equal(own, mixture.want(each, scalars, index_of(shape)))


def test_leaves_of_several_kinds_are_refused_together():
    mixture = Mixture(())
    (leaf,) = mixture.leaves([mixture.arrays((3,))[0]], [(3,)])
    narrow = leaf.with_arrays([x.astype(jnp.int32) for x in leaf.arrays])
    stack = Leaf(leaf.operands, leaf.results, (), stacked=True)
    for leaves in ([leaf, narrow], [stack, stack]):
        with pytest.raises(ValueError, match="same kinds of operands"):
            fused_update_many(
                mixture, leaves, scalars=Scalars(jnp.asarray(TABLE), jnp.zeros(2, U32))
            )


# Packing.

PACKED = [(shape, bits) for shape in SHAPES for bits in (5, 12)]
PACKED += [(SHAPES[(3 * bits + i) % 7], bits) for bits in range(1, 17) for i in (0, 1)]
PACKED += [(SHAPES[3 * bits % 7], bits) for bits in range(17, 33)]


@EACH
@pytest.mark.parametrize(("shape", "bits"), PACKED)
def test_packed_fields_are_one_long_number_and_come_back(shape, bits, implementation):
    fields = fields_of(shape, bits)
    options = dict(implementation=implementation)
    there = lambda fields: pack(fields, bits, **options)
    back = lambda words: unpack(words, bits, shape, **options)
    both = jax.jit(lambda x, w: (there(x), back(w)), compiler_options=QUICK)
    want = words_of(fields, bits)
    assert want.shape == packed_shape(shape, bits)
    assert_equal(both(fields, want), [want, fields])


def test_packing_refuses_wrong_fields_and_words():
    there = pallas_kernels.pack
    back = functools.partial(pallas_kernels.unpack, layout=(32,))
    for way in (there, back):
        for bits in (-1, 0, 33):
            with pytest.raises(ValueError, match=f"bits .*, got {bits}"):
                way(jnp.zeros(32, U32), bits)
        for other in ("int32", "uint8", "float32"):
            with pytest.raises(ValueError, match=f"uint32, got {other}"):
                way(jnp.zeros(32, other), 8)
    with pytest.raises(ValueError, match="scalar"):
        there(jnp.uint32(3), 8)
    with pytest.raises(ValueError, match=r"words .* \(32,\).*8-bit.*, got .*\(9,\)"):
        back(jnp.zeros(9, U32), 8)


# Transformations.


def smooth(values, scalars, index):
    a, b = values
    return [jnp.sin(a) * b, multiply_add(a, b, a)]


def smooth_update(a, b, implementation):
    return fused_update(
        smooth,
        [Operand(a), Operand(b)],
        [Result("float32", overwrites=0), Result("float32")],
        implementation=implementation,
    )


def pair(*shape):
    random = np.random.default_rng(0)
    return [jnp.asarray(x, jnp.float32) for x in random.standard_normal((2, *shape))]


@EACH
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 1)])
def test_batches_are_each_element_alone(in_axes, implementation):
    a, b = (
        x[0] if axis is None else x for x, axis in zip(pair(4, 4), in_axes, strict=True)
    )
    run = functools.partial(smooth_update, implementation=implementation)
    take = lambda x, axis, i: x if axis is None else jnp.take(x, i, axis=axis)
    alone = [
        smooth_update(take(a, in_axes[0], i), take(b, in_axes[1], i), "xla")
        for i in range(4)
    ]
    want = [jnp.stack(x) for x in zip(*alone, strict=True)]
    got = jax.vmap(run, in_axes=in_axes)(a, b)
    chex.assert_trees_all_close(got, want, rtol=1e-6)


def test_derivatives_are_the_references():
    (a, b), tangents = pair(33), pair(33)[::-1]
    of = lambda implementation: jax.jvp(
        functools.partial(smooth_update, implementation=implementation),
        (a, b),
        tuple(tangents),
    )
    chex.assert_trees_all_close(of("pallas"), of("xla"), rtol=1e-6)
    loss = lambda a, implementation: sum(
        map(jnp.sum, smooth_update(a, b, implementation))
    )
    chex.assert_trees_all_close(
        jax.grad(loss)(a, "pallas"), b * jnp.cos(a) + b + 1, rtol=1e-5
    )


@EACH
def test_donated_arrays_are_overwritten(implementation):
    mixture = Mixture((8,))
    arrays, held = mixture.arrays((64, 8))
    update = mixture.jitted((64, 8), implementation, donate_argnums=0)
    places = [x.unsafe_buffer_pointer() for x in arrays]
    got = update(arrays, dict(scalars=jnp.asarray(TABLE[2])))
    assert all(x.is_deleted() for x in arrays)
    assert [x.unsafe_buffer_pointer() for x in got[:2]] == places
    assert_equal(got, mixture.want(held, LAST, index_of((64, 8))))


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0)])
def test_leaves_without_elements_are_left_to_the_reference(shape):
    (got,) = fused_update(
        lambda values, *_: values, [Operand(jnp.zeros(shape))], [Result("float32")]
    )
    assert got.shape == shape
    with pytest.raises(ValueError, match=r"1 to \d+ elements, got 0"):
        pack(jnp.zeros(shape, U32), 8, implementation="pallas")


# Bad input.

X, WORDS = jnp.zeros((64, 8)), jnp.zeros((16, 8), U32)

# Arguments, and a pattern that matches their error message.
REFUSED = [
    (dict(operands=[Operand(WORDS, 8)]), "shape must be given"),
    (dict(operands=[Operand(X)], layer=jnp.int32(0)), "shape must be given"),
    (
        dict(operands=[Operand(X), Operand(X.T)]),
        r"operand 1 has shape \[8, 64\].* leaf of shape \[64, 8\] needs \[64, 8\]",
    ),
    (
        dict(operands=[Operand(X), Operand(WORDS, 4)]),
        r"operand 1 has shape \[16, 8\].*needs \[8, 8\]",
    ),
    (
        dict(operands=[Operand(X), Operand(WORDS.astype(jnp.int32), 8)]),
        "operand 1 is packed.* uint32, got int32",
    ),
    (
        dict(operands=[Operand(X)], results=[Result("bfloat16", overwrites=0)]),
        r"result 0 \(bfloat16, bits None\) cannot overwrite operand 0 \(float32",
    ),
    (
        dict(operands=[Operand(X), Operand(WORDS, 8)], results=[Result(U32, 4, 1)]),
        r"bits 4\) cannot overwrite operand 1 \(uint32, bits 8\)",
    ),
    (
        dict(
            operands=[Operand(X)],
            results=[Result("float32", overwrites=0)],
            shape=(64, 8),
            layer=jnp.int32(0),
        ),
        "for each layer",
    ),
    (
        dict(
            operands=[Operand(jnp.zeros((32, 8), U32), 8)],
            results=[Result(U32, 8, overwrites=0)],
            shape=(32,),
            layer=jnp.int32(0),
        ),
        r"words and blocks .* stack of shape \[32, 32\]",
    ),
    (dict(operands=[Operand(jnp.uint32(0), 8)], shape=()), r"rank 1 .* got \(\)"),
    (
        dict(operands=[Operand(X)], implementation="cuda"),
        "None, 'xla', 'pallas', 'triton', 'mosaic' or 'tpu', got 'cuda'",
    ),
]


@pytest.mark.parametrize(("given", "match"), REFUSED)
def test_arrays_that_do_not_fit_are_refused(given, match):
    given = {"results": [Result("float32")], **given}
    error = TypeError if "got int32" in match else ValueError
    with pytest.raises(error, match=match):
        fused_update(lambda values, *_: values[:1], **given)


@EACH
def test_leaves_of_different_shapes_repeat_rows_by_their_own_shapes(implementation):
    def leaf(rows, columns):
        row = jnp.arange(rows, dtype=jnp.float32)[:, None]
        words = pack(jnp.zeros((rows, columns), U32), 8)
        operands = Operand(words, 8), Operand(row, repeated=(1,))
        return Leaf(operands, (Result("float32"),), (rows, columns))

    found = fused_update_many(
        lambda values, scalars, index: [values[0].astype(jnp.float32) + values[1]],
        [leaf(64, 64), leaf(128, 64)],
        scalars=Scalars(jnp.asarray(TABLE), jnp.zeros(2, U32)),
        implementation=implementation,
    )
    for (own,), rows in zip(found, (64, 128), strict=True):
        want = np.broadcast_to(np.arange(rows)[:, None], (rows, 64))
        np.testing.assert_array_equal(own, want)
