"""TPU kernels, run with Pallas's model of a TPU, give the reference's numbers."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lowbit_optax import block_quantized, cast, extra_bits, kahan, stochastic_rounding
from pallas_kernels import Operand, Result, Scalars
from pallas_kernels.fused_update import Leaf
from pallas_kernels.fused_update.spec import KernelCall, Shard
from pallas_kernels.fused_update.tpu import kernel as tpu
from tests.helpers import tpu_refusals
from tests.helpers.blocks import Maxima
from tests.helpers.exact_steps import MOMENTUM, dyadic_series, normal, trained
from tests.helpers.kernels import (
    TABLE,
    Mixture,
    assert_equal,
    assert_layer_written,
    index_of,
    stacks_of,
)
from tests.helpers.optimizers import assert_same_bits

RAGGED = (133, 131)
SHAPES = {
    "even": (128, 256),
    "ragged": RAGGED,
    "long": (2200, 130),
    "stacked": (2, 72, 257),
}
TRANSPOSED = [(1024, 136), (1024, 16)]
# Rows come before heads or layers. Each head is a matrix, transposed or not; heads are
# side by side in registers; or arrays are copied.
BEFORE_HEADS = {
    "transposed": (72, 5, 64),
    "several axes transposed": (2, 256, 3, 32),
    "matrices": (136, 3, 128),
    "side by side": (72, 16, 256),
    "few side by side": (136, 8, 128),
    "some side by side": (2, 71, 3, 24, 128),
    "copied": (72, 4, 128),
}
# A vector with whole tiles, and one that XLA pads.
VECTORS = [(32768,), (20011,)]
LAYERED = {
    "plain": (2, 128, 129),
    "transposed": (1024, 40),
    "heads": BEFORE_HEADS["transposed"],
    "heads side by side": (64, 2, 16, 128),
}


@pytest.fixture(autouse=True)
def only_kernels(monkeypatch):
    """Fail if the reference would run instead of a kernel."""
    return tpu_refusals.noted(monkeypatch)


WIDTHS = [(8,), (4, 8), (12,), (16,)]
# Shapes, widths of their fields, and whether kernels update them.
LEAVES = [
    *(
        (x, widths, True)
        for x in SHAPES.values()
        for widths in [*WIDTHS, (5, 8), (10,)]
    ),
    *((x, (5, 8), True) for name, x in BEFORE_HEADS.items() if name != "copied"),
    *((x, widths, True) for x in VECTORS for widths in WIDTHS),
    (VECTORS[0], (5,), False),
    *((x, (8,), False) for x in [(12000,), (128, 64), (64, 4, 256)]),
]


@pytest.mark.parametrize(("shape", "widths", "has_kernel"), LEAVES)
def test_results_are_those_of_the_model(shape, widths, has_kernel, only_kernels):
    body = Mixture(widths)
    arrays, held = body.arrays(shape)
    got = body.update(arrays, shape, "tpu", scalars=Scalars(jnp.asarray(TABLE), 1))
    assert_equal(got, body.want(held, [3, 4], index_of(shape)))
    assert only_kernels == [has_kernel]


@pytest.mark.slow_to_compile
@pytest.mark.parametrize("shape", LAYERED.values(), ids=LAYERED)
def test_a_layer_of_a_stack_is_updated_in_its_place(shape, only_kernels):
    body = Mixture((8, 5))
    stacks, held = stacks_of(body, shape)
    options = {"scalars": jnp.asarray(TABLE[0]), "layer": jnp.int32(1)}
    got = body.update(stacks, shape, "tpu", **options)
    want = body.want(held[1], [1, 2], index_of(shape, math.prod(shape)))
    assert_layer_written(got, stacks, 1, want)
    assert only_kernels == [True]


@pytest.mark.parametrize("proceeds", [False, True])
@pytest.mark.parametrize("shape", [SHAPES["ragged"], (1024, 40)])
def test_a_step_that_is_skipped_keeps_what_it_overwrites(shape, proceeds):
    body = Mixture((8, 5))
    arrays, held = body.arrays(shape)
    scalars = [int(proceeds), 7]
    options = {"scalars": Scalars(jnp.asarray(scalars, jnp.uint32), when=0)}
    got = body.update(arrays, shape, "tpu", **options)
    want = body.want(held, scalars, index_of(shape)) if proceeds else arrays
    assert_equal(got[:3], want[:3])


# Heads that share blocks have kernels if each is a matrix.
OF_BLOCKS = [
    *itertools.product(
        [(128, 256), (141, 150), (2, 200, 640)],
        [(32,), (64, 32), (128,), (2048, 256)],
        [True],
    ),
    ((72, 5, 66), (32,), True),
    ((72, 4, 130), (32,), False),
]


@pytest.mark.slow_to_compile
@pytest.mark.parametrize(("shape", "sizes", "has_kernel"), OF_BLOCKS)
def test_maxima_are_those_of_blocks_of_each_size(
    shape, sizes, has_kernel, only_kernels
):
    body = Maxima(sizes)
    arrays = body.arrays(shape)
    assert_equal(body.update([*map(jnp.asarray, arrays)], "tpu"), body.want(arrays))
    assert only_kernels == [has_kernel]


# Plain leaves have kernels if their columns fill registers.
FULL = (133, 256)
E4M3FN, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
OTHER_SHAPES = [*TRANSPOSED, *BEFORE_HEADS.values()]
BFLOAT16 = {"moments": cast(jnp.bfloat16)}
EIGHT_BITS = {"moments": block_quantized(8)}
SIDE_BY_SIDE = BEFORE_HEADS["side by side"]


def of_bits(bits, **options):
    return {"weights": extra_bits(bits, **options)}


def blocks_of(size):
    return {"moments": block_quantized(8, block_size=size)}


# Shapes of kernels, options of the transformation, and dtypes.
FORMATS = {
    "toward zero": (RAGGED, of_bits(8, rounding="toward_zero")),
    "kahan": (FULL, {"weights": kahan()} | BFLOAT16),
    "kahan param": (FULL, {"weights": kahan(arithmetic="param")}),
    "sr": (FULL, {"weights": stochastic_rounding()} | BFLOAT16),
    "eight bits linear": (RAGGED, {"moments": block_quantized(8, code="linear")}),
    "four bits": (RAGGED, {"moments": block_quantized(4)}),
    "blocks of 128": (RAGGED, blocks_of(128)),
    "odd widths and high blocks": (RAGGED, of_bits(5) | blocks_of(2048)),
    "moments of e5m2": (FULL, {"moments": cast(E5M2)}),
    "moments of float16": (FULL, {"moments": cast(jnp.float16)}),
    **{f"{bits} bits": (RAGGED, of_bits(bits)) for bits in range(1, 17)},
    **{f"eight bits {x}": (x, EIGHT_BITS) for x in [RAGGED, *OTHER_SHAPES]},
    **{
        f"{bits} bits {x}": (x, of_bits(bits))
        for x in OTHER_SHAPES[:-1]
        for bits in (5, 8)
    },
    **{
        f"{bits} bits {x}": (x, of_bits(bits) | {"min_size": 0})
        for x in VECTORS
        for bits in (4, 8, 12, 16)
    },
    **{
        f"blocks of {size} {x}": (x, blocks_of(size) | {"min_size": 0})
        for x in VECTORS
        for size in (32, 64, 128)
    },
    "e4m3fn vector": (VECTORS[0], EIGHT_BITS, E4M3FN),
    "plain before heads": (BEFORE_HEADS["matrices"], {"weights": kahan()}),
    "blocks of 64 side by side": (SIDE_BY_SIDE, of_bits(12) | blocks_of(64)),
    "blocks of 256 side by side": (SIDE_BY_SIDE, blocks_of(256)),
    "e4m3fn side by side": (SIDE_BY_SIDE, EIGHT_BITS, E4M3FN),
    "float16 side by side": (SIDE_BY_SIDE, of_bits(8), jnp.float16),
    "e4m3fn": (FULL, of_bits(8), E4M3FN),
    "e5m2": (FULL, {"weights": stochastic_rounding()}, E5M2),
    "e5m2 kahan": (FULL, {"weights": kahan()}, E5M2),
    "e4m3fn eight bits": (FULL, EIGHT_BITS, E4M3FN),
    "float16": (FULL, of_bits(12), jnp.float16),
    "float16 odd": (FULL, of_bits(5, rounding="toward_zero"), jnp.float16),
}


def assert_bits_are_those_of_xla(shape, options, dtype=jnp.bfloat16):
    params = {"kernel": normal(shape, dtype), "bias": normal((40,), dtype)}
    series = dyadic_series(params, 2)
    run = functools.partial(trained, params=params, series=series, **options)
    assert_same_bits(run("tpu"), run("xla"))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_bits(name, only_kernels):
    assert_bits_are_those_of_xla(*FORMATS[name])
    assert True in only_kernels  # the bias has none, and may be traced already


@pytest.mark.parametrize("name", [f"eight bits {RAGGED}", "5 bits", "sr"])
def test_formats_have_the_same_bits_with_64_bit_types(name, only_kernels):
    with jax.enable_x64(True):
        assert_bits_are_those_of_xla(*FORMATS[name])
    assert True in only_kernels  # the bias has none, and may be traced already


def test_plain_float16_is_left_to_the_reference(only_kernels):
    assert_bits_are_those_of_xla(FULL, {"weights": kahan()}, jnp.float16)
    assert only_kernels
    assert not any(only_kernels)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_gradients_of_every_dtype_have_the_same_bits(dtype, only_kernels):
    params = {"kernel": normal(RAGGED)}
    # All patterns, including subnormals, infinities, and NaNs, whose bits may differ.
    width = 8 * jnp.dtype(dtype).itemsize
    bits = np.random.default_rng(0).integers(0, 2**width, RAGGED)
    every = jnp.asarray(bits.astype(f"uint{width}").view(dtype))
    run = functools.partial(trained, params=params, weights=extra_bits(8))
    grads = {"kernel": jnp.where(jnp.isnan(every), 0, every)}
    assert_same_bits(run("tpu", series=[grads]), run("xla", series=[grads]))
    new, _ = run("tpu", series=[{"kernel": every}])
    np.testing.assert_array_equal(jnp.isnan(new["kernel"]), jnp.isnan(every))
    assert all(only_kernels)


@pytest.mark.standard_promotion  # optax's
def test_numbers_past_the_limits_of_codes_have_the_bits_of_xla(only_kernels):
    gradients = np.random.default_rng(0).integers(-12, 3, RAGGED)
    gradients = np.float32(2.0) ** gradients
    places = (5, 6), (70, 130), (100, 3), (120, 50), (132, 129)
    numbers = np.nan, -np.inf, 2.0**51, 2.0**62, 2.0**127
    for place, number in zip(places, numbers, strict=True):
        gradients[place] = number
    kernel = normal(RAGGED).at[1, 2].set(jnp.inf).at[77, 100].set(jnp.nan)
    run = functools.partial(
        trained,
        params={"kernel": kernel},
        series=[{"kernel": jnp.asarray(gradients)}],
        inner=optax.adamw(2.0**-9, b1=0.5, b2=0.75, eps=2.0**-20, weight_decay=2.0**-7),
        weights=extra_bits(8),
        moments=block_quantized(8),
        min_size=0,
    )
    assert_same_bits(run("tpu"), run("xla"))
    assert only_kernels == [True]


def test_a_shard_of_few_columns_before_heads_has_the_bits_of_the_whole():
    body, shape = Maxima((32,)), (256, 8, 8)
    arrays = body.arrays(shape)
    x, numbers = body.want(arrays)
    operands = (Operand(arrays[0]), Operand(arrays[1], block_size=32))
    results = (
        Result("int32", overwrites=0),
        Result("int32", overwrites=1, block_size=32),
    )
    leaf = Leaf(operands, results, shape)
    table = jnp.zeros((1, 1), jnp.uint32)
    for heads in (slice(2, 3), slice(4, 8)):
        given = leaf.with_arrays([jnp.asarray(a[:, heads]) for a in arrays])
        local = 256, heads.stop - heads.start, 8
        shard = Shard(given, local, jnp.uint32(8 * heads.start))
        got = tpu.update(KernelCall(body, [shard], Scalars(table), interpret=True))
        assert_equal(got, [x[:, heads], numbers[:, heads]])


@pytest.mark.slow_to_compile
def test_a_layer_of_rows_before_heads_is_updated_in_its_place(only_kernels):
    body, shape = Maxima((32,)), (72, 5, 64)
    layers = [body.arrays(shape, seed) for seed in range(3)]
    stacks = [jnp.stack(x) for x in zip(*layers, strict=True)]
    got = body.update(stacks, "tpu", shape=shape, layer=jnp.int32(1))
    want = body.want(layers[1])
    pairs = zip(stacks, want, strict=True)
    assert_equal(got, [x.at[1].set(new) for x, new in pairs])
    assert only_kernels == [True]


def test_several_equal_leaves_have_their_own_random_bits(only_kernels):
    leaves = lambda: {name: normal((128, 128)) for name in "ab"}
    grads = [{name: jnp.full((128, 128), 1e-3) for name in "ab"}]
    options = {"weights": stochastic_rounding(), "inner": MOMENTUM}
    params, state = trained("tpu", leaves(), grads, **options)
    assert only_kernels == [True]  # traced once for both
    assert_same_bits((params, state), trained("xla", leaves(), grads, **options))
    assert not jnp.array_equal(params["a"], params["b"])


def test_a_body_with_other_operations_is_left_to_the_reference():
    def body(values, scalars, index):
        return [jnp.sin(values[0])]

    def refusal(body, dtype):
        operand = Operand(jnp.zeros((256, 256), dtype))
        leaf = Leaf((operand,), (Result(dtype, overwrites=0),), (256, 256))
        return tpu.refusal(body, leaf, 1)

    same = lambda values, *_: values
    assert "sin of float32" in refusal(body, jnp.float32)
    assert "float16" in refusal(same, jnp.float16)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn):
        assert refusal(same, dtype) is None


@pytest.mark.parametrize(
    ("axes", "dtype", "reason"),
    [
        ((0,), jnp.float32, None),
        ((1,), jnp.float32, None),
        ((0, 1), jnp.float32, "only along one of the last two axes"),
        ((1,), jnp.bfloat16, "repeated arrays of bfloat16"),
    ],
)
def test_repeated_arrays_have_one_32_bit_element_per_row_or_column(axes, dtype, reason):
    body = lambda values, *_: values[:1]
    shape = tuple(1 if axis in axes else 256 for axis in range(2))
    words = Operand(jnp.zeros((64, 256), jnp.uint32), 8)
    repeated = Operand(jnp.zeros(shape, dtype), repeated=axes)
    leaf = Leaf((words, repeated), (Result("uint32", 8, 0),), (256, 256))
    found = tpu.refusal(body, leaf, 1)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        *(((512, 512), parts) for parts in [(2, 1), (1, 2), (4, 2), (1, 8)]),
        ((128, 32, 256), (2, 2, 1)),
        ((128, 16, 256), (1, 1, 2)),
        ((256, 8, 64), (2, 2, 1)),
        ((256, 4, 64), (1, 1, 2)),
        ((136, 6, 128), (1, 2, 1)),
        ((65536,), (2,)),
    ],
)
def test_shards_have_the_bits_of_the_whole(shape, parts):
    body = Mixture((8,))
    arrays, held = body.arrays(shape)
    want = body.want(held, [3, 4], index_of(shape))
    leaf = Leaf(tuple(body.operands(arrays)), tuple(body.results), shape)
    local = tuple(n // count for n, count in zip(shape, parts, strict=True))

    def part(x, place):
        steps = [n // count for n, count in zip(x.shape, parts, strict=True)]
        starts = [a * n for a, n in zip(place, steps, strict=True)]
        return x[tuple(slice(a, a + n) for a, n in zip(starts, steps, strict=True))]

    for place in np.ndindex(parts):
        first = part(index_of(shape), place).flat[0]
        given = leaf.with_arrays([part(x, place) for x in arrays])
        shard = Shard(given, local, jnp.uint32(first))
        scalars = Scalars(jnp.asarray(TABLE), jnp.uint32([1]))
        got = tpu.update(KernelCall(body, [shard], scalars, interpret=True))
        assert_equal(got, [part(x, place) for x in want])
