"""Steps compiled for an H200 and executed from their PTX match the reference's bits.

The tests run with every launcher that this version of JAX supports.

The whole compiled program is executed: the fused kernels, and XLA's kernels around
them. The numbers are chosen so that products, roots and quotients are exact. Kernels
then have nothing that they may round differently from the reference, and all bits of
all results must agree.
"""

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lowbit_optax
import pallas_kernels
from lowbit_optax import block_quantized, cast, extra_bits, lowbit, patches
from pallas_kernels import platforms
from pallas_kernels.fused_update.axis_sums import axis_sums
from tests.helpers.blocks import Maxima
from tests.helpers.exact_steps import MOMENTUM, dyadic_series, normal
from tests.helpers.gpu_steps import LAUNCHERS, update_layer
from tests.helpers.kernels import QUICK
from tests.helpers.optimizers import (
    assert_same_bits,
    gradient_series,
    random_grads,
    spec_of,
)
from tests.helpers.packing import pack, unpack
from tests.helpers.quantized_weights import quantised, shrinking
from tools.gpu_program.ptx.faults import Uninitialised
from tools.gpu_program.ptx.program import compile_program
from tools.gpu_program.steps import BF16, F32, leaf
from tools.gpu_program.targets import gpu_mesh, lower_for


@pytest.fixture(autouse=True, params=LAUNCHERS)
def launcher(request, monkeypatch):
    monkeypatch.setattr(platforms, "DEFAULT_LAUNCHER", request.param)
    return request.param


SHAPES = {"even": (128, 256), "ragged": (70, 261), "narrow": (80, 149)}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)

# The first step is exact for gradients that are powers of two.
ADAMW = optax.adamw(2.0**-9, b1=0.5, b2=0.75, eps=0.0, weight_decay=2.0**-7)

BFLOAT16 = cast(BF16)
FAMILIES = {
    "nearest": (lowbit_optax.nearest(), BFLOAT16),
    "stochastic_rounding": (lowbit_optax.stochastic_rounding(), BFLOAT16),
    "kahan": (lowbit_optax.kahan(), BFLOAT16),
    "extra_bits 5": (extra_bits(5), BFLOAT16),
    "extra_bits 8": (extra_bits(8), BFLOAT16),
    "extra_bits 12": (extra_bits(12), "float32"),
    "extra_bits 16": (extra_bits(16), "float32"),
    "extra_bits 8 stochastic": (extra_bits(8, rounding="stochastic"), BFLOAT16),
    "extra_bits 8, exact sums": (
        extra_bits(8, sum_rounding="stochastic"),
        block_quantized(8),
    ),
    "stochastic_rounding, exact sums": (
        lowbit_optax.stochastic_rounding(sum_rounding="stochastic"),
        BFLOAT16,
    ),
    "master_copy": (lowbit_optax.master_copy(), "float32"),
    "float8 moments": (extra_bits(8), cast("float8_e4m3fn")),
    "lowbit 8": (extra_bits(8), block_quantized(8)),
    "lowbit 4": (extra_bits(8), block_quantized(4)),
    "lowbit 4 in blocks of 64": (extra_bits(8), block_quantized(4, block_size=64)),
    "kahan and 8-bit moments": (lowbit_optax.kahan(), block_quantized(8)),
    "extra_bits 5 and 8-bit moments": (extra_bits(5), block_quantized(8)),
    "lowbit 8 in blocks of 256": (extra_bits(8), block_quantized(8, block_size=256)),
    "lowbit 4 in blocks of 2048": (extra_bits(8), block_quantized(4, block_size=2048)),
}
EIGHT = block_quantized(8)
OF_ADAM = FAMILIES | {
    "4-bit nu": (extra_bits(8), {"mu": EIGHT, "nu": block_quantized(4)}),
    "4-bit nu in blocks of 256": (
        extra_bits(8),
        {"mu": EIGHT, "nu": block_quantized(4, block_size=256)},
    ),
    "bfloat16 mu, 4-bit nu": (
        lowbit_optax.kahan(),
        {"mu": BFLOAT16, "nu": block_quantized(4)},
    ),
}
# Adam has no moments in float8, because small second moments would become 0.
WITH_ADAM = [name for name in OF_ADAM if name != "float8 moments"]


def transformation(inner, family, implementation=None):
    weights, moments = OF_ADAM[family]
    return lowbit(
        inner,
        weights=weights,
        moments=moments,
        min_size=0,
        implementation=implementation,
    )


def powers_of_two(params, seed=0):
    def draw(leaf):
        random = np.random.default_rng(seed)
        signs = random.choice([-1.0, 1.0], leaf.shape)
        return jnp.asarray(signs * 2.0 ** random.integers(-12, 3, leaf.shape), F32)

    return jax.tree.map(draw, params)


def compiled(tx, *arguments, advance=lowbit_optax.step):
    """A step as users run it on a GPU, with donated parameters and state."""
    step = functools.partial(advance, tx)
    program = compile_program(lower_for(gpu_mesh(), step, *arguments, donate=(0, 1)))
    # Only Mosaic's kernels are called with explicit arguments.
    assert bool(program.arguments) == (platforms.DEFAULT_LAUNCHER == "mosaic")
    return program


@functools.cache
def jitted(tx):
    return jax.jit(functools.partial(lowbit_optax.step, tx), compiler_options=QUICK)


def second_step(make, params, bits=16):
    """Arguments of a step whose state is no longer zero."""
    tx = make("xla")
    first, second = dyadic_series(params, 2, bits)
    return *jitted(tx)(params, tx.init(params), first), second


def both(make, *arguments):
    """Results of the compiled step and of the reference."""
    got = compiled(make(None), *arguments).run(*arguments)
    return got, jitted(make("xla"))(*arguments)


def assert_same_step(make, *arguments):
    got, want = both(make, *arguments)
    assert_same_bits(got, want)
    return got


def assert_few_roundings_differ(got, want):
    for own, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert np.mean(np.asarray(own) != np.asarray(other)) < 0.003


RANKED = ["kahan", "extra_bits 8", "lowbit 8"]
EQUAL = [*RANKED, "lowbit 4"]
DIFFERENT = ["kahan", "lowbit 8", "lowbit 4"]
SIZES = (1, 2, 40, 127, 512, 513, 1000)
# The families to test, and leaves that one step updates together.
LEAVES = {
    **{f"one {name}": (FAMILIES, [leaf(*shape)]) for name, shape in SHAPES.items()},
    # XLA would update packed leaves with fewer than 4096 elements.
    "four axes": (RANKED, [leaf(3, 3, 15, 40)]),
    "vector": (RANKED, [leaf(4103)]),
    "middle axis of 3": (RANKED, [leaf(40, 3, 40)]),
    "few rows": (RANKED, [leaf(33, 300)]),
    **{
        dtype: (["extra_bits 8"], [leaf(*SHAPES["ragged"], dtype=jnp.dtype(dtype))])
        for dtype in ("float16", "float8_e4m3fn", "float8_e5m2")
    },
    "small": (
        ["kahan", "stochastic_rounding", "master_copy"],
        [*map(leaf, SIZES), leaf(70, 65), leaf(40, dtype=F32), leaf()],
    ),
    **{f"equal {name}": (EQUAL, [leaf(*shape)] * 3) for name, shape in SHAPES.items()},
    "eight equal": (["lowbit 8"], [leaf(64, 72)] * 8),
    "different even": (
        DIFFERENT,
        [leaf(64, 72), leaf(16, 520), leaf(3, 3, 16, 64), leaf(8, 516), leaf(160, 40)],
    ),
    "different ragged": (DIFFERENT, [leaf(70, 72), leaf(20, 516), leaf(67, 64)]),
    "different odd": (DIFFERENT, [leaf(71, 65), leaf(133, 33), leaf(5, 41, 23)]),
    "different folded": (
        DIFFERENT,
        [leaf(4100), leaf(8196), leaf(3, 2000), leaf(2, 2000)],
    ),
}
OF_MOMENTUM = [(name, family) for name in LEAVES for family in LEAVES[name][0]]


def test_leaves_of_float8_that_share_a_kernel_have_the_same_bits():
    def make(implementation):
        weights, options = lowbit_optax.nearest(), {"min_size": 0, "warn": False}
        options |= {"moments": "float32", "implementation": implementation}
        return lowbit(MOMENTUM, weights=weights, **options)

    shapes = (96, 64), (128, 72), (64, 100), (200, 33)
    params = {str(shape): normal(shape, jnp.float8_e4m3fn) for shape in shapes}
    assert_same_step(make, *second_step(make, params))


@pytest.mark.parametrize(("name", "family"), OF_MOMENTUM)
def test_a_step_with_momentum_has_the_same_bits(name, family):
    _, leaves = LEAVES[name]
    make = functools.partial(transformation, MOMENTUM, family)
    params = {str(n): normal(x.shape, x.dtype, seed=n) for n, x in enumerate(leaves)}
    arguments = second_step(make, params)
    program = compiled(make(None), *arguments)
    assert_same_bits(program.run(*arguments), jitted(make("xla"))(*arguments))
    assert is_shared_by_leaves(program) == (len(leaves) > 1)
    if "equal" in name:  # XLA compiles it once, even if it is launched twice
        assert len(fused_kernels(program)) == 1


def fused_kernels(program):
    """Names of the kernels written in Pallas."""
    return [name for name in program.sources if name.startswith("fused_update")]


def is_shared_by_leaves(program):
    return any(name.startswith("fused_update_many") for name in fused_kernels(program))


@pytest.mark.parametrize("shape", [(70, 261), (76, 149)], ids=str)
@pytest.mark.parametrize("family", ["lowbit 8", "lowbit 4", "extra_bits 5"])
def test_words_and_scales_contain_nothing_from_missing_rows(family, shape):
    """The update is 1 for a gradient of 0, and smaller for the real gradients."""
    one_more = optax.stateless(lambda u, _: jax.tree.map(lambda x: x + F32(1), u))
    inner = optax.chain(one_more, MOMENTUM)
    make = functools.partial(transformation, inner, family)
    params = {"kernel": normal(shape)}
    (grads,) = dyadic_series(params, 1, bits=8)
    grads = jax.tree.map(lambda x: x * F32(2.0**-6) - F32(1), grads)
    assert_same_step(make, params, make("xla").init(params), grads)


@pytest.mark.parametrize("family", WITH_ADAM)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_first_step_of_adamw_has_the_same_bits(family, shape):
    make = functools.partial(transformation, ADAMW, family)
    params = {"kernel": normal(shape)}
    state = make("xla").init(params)
    assert_same_step(make, params, state, powers_of_two(params))


@pytest.mark.parametrize("family", ["lowbit 8", "4-bit nu"])
def test_gradients_that_are_not_finite_have_the_same_bits_and_harm_nothing_else(family):
    make = functools.partial(transformation, ADAMW, family)
    params = {"kernel": normal(SHAPES["ragged"])}
    grads = np.array(powers_of_two(params)["kernel"])
    places = np.random.default_rng(1).choice(grads.size, 60, replace=False)
    bad = np.float32([np.inf, -np.inf, np.nan, 2.0**100, -(2.0**63)])
    grads.flat[places] = np.resize(bad, places.shape)
    arguments = params, make("xla").init(params), {"kernel": jnp.asarray(grads)}
    got = assert_same_step(make, *arguments)
    new = np.asarray(got[0]["kernel"]).astype(np.float32)
    lost = np.setdiff1d(np.flatnonzero(~np.isfinite(new)), places)
    assert lost.size == 0


@each_shape
@pytest.mark.parametrize("family", ["kahan", "lowbit 8", "lowbit 4"])
def test_second_moments_have_the_same_bits(family, shape):
    # Squares of 8-bit numbers and their halves are exact, but roots are rounded.
    inner = optax.chain(optax.scale_by_rms(0.5, 2.0**-20), optax.scale(-(2.0**-6)))
    make = functools.partial(transformation, inner, family)
    arguments = second_step(make, {"kernel": normal(shape)}, bits=8)
    (_, got), (_, want) = both(make, *arguments)
    assert_same_bits(got.inner_state, want.inner_state)


@pytest.fixture
def few_programs_are_many(monkeypatch):
    """Use the blocks of threads of large leaves, which take too long to execute."""
    mosaic = importlib.import_module("pallas_kernels.fused_update.gpu.mosaic")
    monkeypatch.setattr(mosaic, "_FEW_PROGRAMS", 0)
    # Otherwise, JAX would reuse kernels of the same leaves from other tests.
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize("launcher", LAUNCHERS[1:], indirect=True)
@each_shape
@pytest.mark.parametrize(
    "family",
    [
        "kahan",
        "extra_bits 8",
        "lowbit 8",
        "lowbit 4 in blocks of 64",
        "lowbit 4 in blocks of 2048",
    ],
)
def test_several_programs_in_a_block_of_threads_have_the_same_bits(
    family, shape, few_programs_are_many
):
    make = functools.partial(transformation, MOMENTUM, family)
    arguments = second_step(make, {"kernel": normal(shape)})
    program = compiled(make(None), *arguments)
    (launch,) = (program.launches[node][1] for node in program.arguments)
    assert launch.block[0] in (256, 512)
    assert_same_bits(program.run(*arguments), jitted(make("xla"))(*arguments))


def with_scale(family, implementation):
    inner = transformation(MOMENTUM, family, implementation)
    scaling = lowbit_optax.loss_scaling.backoff_scale(2.0**4)
    return lowbit_optax.with_loss_scale(inner, scaling)


@pytest.mark.parametrize("overflow", [False, True], ids=["taken", "skipped"])
@pytest.mark.parametrize("family", ["kahan", "extra_bits 8", "lowbit 8"])
def test_guarded_steps_have_the_same_bits(family, overflow):
    make = functools.partial(with_scale, family)
    params = {"kernel": normal(SHAPES["ragged"]), "bias": normal((40,))}
    params, state, grads = second_step(make, params)
    if overflow:
        grads["bias"] = grads["bias"].at[3].set(jnp.inf)
    assert_same_step(make, params, state, grads)


@each_shape
@pytest.mark.parametrize("family", ["kahan", "lowbit 8"])
def test_bitmaps_mark_the_weights_that_change(family, shape):
    # Many updates are too small to change a weight.
    make = functools.partial(transformation, optax.sgd(2.0**-9, momentum=0.5), family)
    params = {name: normal(shape, seed=n) for n, name in enumerate("abc")}
    arguments = second_step(make, params)
    program = compiled(make(None), *arguments, advance=patches.step)
    new, _, changed = program.run(*arguments)
    assert_same_bits(changed, patches.diff(arguments[0], new))
    marked = np.bitwise_count(np.asarray(changed["a"])).sum()
    assert 0 < marked < 0.5 * params["a"].size


@pytest.mark.parametrize("family", ["kahan", "lowbit 8"])
def test_a_skipped_step_marks_no_weights(family):
    make = functools.partial(with_scale, family)
    params, state, grads = second_step(make, {"kernel": normal(SHAPES["ragged"])})
    grads["kernel"] = grads["kernel"].at[3].set(jnp.inf)
    arguments = params, state, grads
    program = compiled(make(None), *arguments, advance=patches.step)
    new, _, changed = program.run(*arguments)
    assert_same_bits(new, params)
    assert not np.asarray(changed["kernel"]).any()


# If roots and quotients round, kernels may round them differently. Masters then differ
# by a few units of the larger of master and update.


def test_masters_after_adamw_are_close():
    params = {"kernel": normal(SHAPES["ragged"])}
    inner = optax.adamw(0.01, weight_decay=0.1)
    make = functools.partial(transformation, inner, "extra_bits 16")
    arguments = second_step(make, params)
    got, want = both(make, *arguments)
    assert spec_of(jax.tree.map(jnp.asarray, got)) == spec_of(want)
    own, others = (lowbit_optax.master_weights(*each)["kernel"] for each in (got, want))
    np.testing.assert_allclose(own, others, rtol=2.0**-22, atol=2.0**-24)


@pytest.mark.parametrize(
    "family",
    [
        "stochastic_rounding",
        "kahan",
        "extra_bits 8",
        "lowbit 8",
        "lowbit 4",
        "4-bit nu",
    ],
)
def test_a_step_of_adamw_differs_in_few_roundings(family):
    params = {"kernel": normal(SHAPES["ragged"])}
    make = functools.partial(transformation, optax.adamw(0.01), family)
    params, state, _ = second_step(make, params)
    arguments = params, state, random_grads(params, 1)
    assert_few_roundings_differ(*both(make, *arguments))


# Quantised weights.

LPMM = {
    "12 bits": (12, 2048, 2048),
    "12 bits, moments in tiles": (12, 2048, 32),
    "8 bits in tiles": (8, 32, 256),
    "16 bits": (16, 128, 128),
    "5 bits": (5, 64, 32),
}


def lpmm(block_size, implementation):
    return lowbit(
        MOMENTUM,
        weights=lowbit_optax.formats.quantized_weights(),
        moments=block_quantized(8, block_size=block_size),
        min_size=0,
        implementation=implementation,
    )


@pytest.mark.parametrize(
    "shape", [(128, 256), (70, 261), (3, 40, 72), (4500,)], ids=str
)
@pytest.mark.parametrize("family", LPMM)
def test_quantised_weights_have_the_same_bits(family, shape):
    bits, block_size, of_moments = LPMM[family]
    params = quantised(shape, bits, block_size)
    assert_same_quantised_step(of_moments, params)


@each_shape
@pytest.mark.parametrize("others", ["equal", "different"])
@pytest.mark.parametrize("block_size", [32, 128], ids=["two sizes", "one size"])
def test_several_quantised_leaves_have_the_same_bits(block_size, others, shape):
    shapes = [shape] * 3
    if others == "different":
        shapes[1:] = (2, *shape), (*shape[:-1], shape[-1] + 32)
    params = {str(n): normal(each, seed=n) for n, each in enumerate(shapes)}
    params = lowbit_optax.lpmm.quantize_params(
        params, bits=12, block_size=128, min_size=0
    )
    assert_same_quantised_step(block_size, params, equal=others == "equal")


def assert_same_quantised_step(block_size, params, equal=True):
    make = functools.partial(lpmm, block_size)
    tx = make("xla")
    params, state = jitted(tx)(params, tx.init(params), shrinking(params, 0))
    arguments = params, state, shrinking(params, 1)
    program = compiled(make(None), *arguments)
    if equal:
        assert len(fused_kernels(program)) == 1
        assert is_shared_by_leaves(program) == (len(params) > 1)
    assert_same_bits(program.run(*arguments), jitted(tx)(*arguments))


@pytest.mark.parametrize("name", ["lpmm_sgd", "lpmm_adam"])
def test_a_step_of_lpmm_differs_in_few_roundings(name):
    values = {"kernel": normal(SHAPES["ragged"], F32)}
    params = lowbit_optax.lpmm.quantize_params(values)
    options = {"momentum": 0.9} if name == "lpmm_sgd" else {}
    tx = getattr(lowbit_optax, name)(0.01, **options)
    first, second = gradient_series(values, 2)
    arguments = *jitted(tx)(params, tx.init(params), first), second
    assert_few_roundings_differ(*both(lambda _: tx, *arguments))


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((128, 256), (32, 2048)), ((70, 261), (64, 256, 2048)), ((3000,), (32, 256))],
    ids=str,
)
def test_maxima_over_blocks_of_several_sizes_are_the_same(shape, sizes):
    body = Maxima(sizes)
    arrays = list(map(jnp.asarray, body.arrays(shape)))
    program = compile_program(lower_for(gpu_mesh(), body.update, arrays, donate=(0,)))
    assert_same_bits(program.run(arrays), list(map(jnp.asarray, body.want(arrays))))


# The kernels without an optimizer.


@each_shape
@pytest.mark.parametrize("layer", [0, 2])
def test_one_layer_of_a_stack_is_updated_and_no_other(shape, layer):
    fields = np.random.default_rng(0).integers(0, 256, (3, *shape), np.uint32)
    stacks = (
        normal((3, *shape)),
        normal((3, *shape), F32, seed=1),
        jnp.stack([pallas_kernels.pack(jnp.asarray(x), 8) for x in fields]),
    )
    arguments = stacks, normal(shape, seed=2), jnp.int32(layer), jnp.uint32([7, 9])
    lowered = lower_for(gpu_mesh(), update_layer, *arguments, donate=(0,))
    reference = functools.partial(update_layer, implementation="xla")
    got = compile_program(lowered).run(*arguments)
    assert_same_bits(got, jax.jit(reference)(*arguments))


@pytest.mark.parametrize("shape", [*SHAPES.values(), (5, 40, 24), (1000,)], ids=str)
@pytest.mark.parametrize("bits", [1, 3, 5, 8, 11, 16, 32])
def test_packing_has_the_same_bits(bits, shape):
    drawn = np.random.default_rng(0).integers(0, 2**bits, shape, np.uint64)
    fields = jnp.asarray(drawn.astype(np.uint32))
    words = pallas_kernels.pack(fields, bits)
    there = functools.partial(pack, bits=bits)
    back = functools.partial(unpack, bits=bits, shape=shape)
    for function, given, want in ((there, fields, words), (back, words, fields)):
        program = compile_program(lower_for(gpu_mesh(), function, given))
        assert_same_bits(program.run(given), want)


@pytest.mark.parametrize("launcher", ["triton"], indirect=True)
def test_a_result_that_is_not_written_is_noticed():
    fields = jnp.zeros(SHAPES["ragged"], jnp.uint32)
    packed = functools.partial(pack, bits=8)
    program = compile_program(lower_for(gpu_mesh(), packed, fields))
    ((name, source),) = program.sources.items()
    mutated = re.sub(r"(@!?%\w+\s+)?st\.global[^;]*;", "", source, count=1)
    with pytest.raises(Uninitialised, match=r"result 0: .* not written"):
        program.with_source(name, mutated).run(fields)


# For several arrays of other shapes, XLA copies sums in a way that is not emulated.
@pytest.mark.parametrize(
    ("shape", "count"),
    [((128, 1024), 1), ((70, 1100), 1), ((70, 1100), 3), ((3, 65, 700), 1)],
)
def test_sums_of_rows_and_columns_are_those_of_numpy(shape, count, launcher):
    if launcher == "mosaic":
        pytest.skip("XLA computes the sums beside Mosaic's kernels")

    def squares(x, scalars):
        del scalars
        return x.astype(F32) ** 2

    arrays = [normal(shape, BF16, seed) for seed in range(count)]
    table = jnp.zeros(1, jnp.uint32)
    run = lambda arrays: axis_sums(squares, arrays, table)
    got = compile_program(lower_for(gpu_mesh(), run, arrays)).run(arrays)
    for x, sums in zip(arrays, got, strict=True):
        exact = np.asarray(x, np.float64) ** 2
        for found, axis in zip(sums, (-1, -2), strict=True):
            want = exact.sum(axis, keepdims=True)
            np.testing.assert_allclose(found, want, rtol=1e-5)


@pytest.mark.parametrize("bits", [8, 0])
def test_factored_adamw_is_near_the_reference(bits):
    make = functools.partial(
        lowbit_optax.factored_adamw, 2.0**-6, eps=0.0, bits=bits, warn=False
    )
    params = {"w": normal((256, 1024), BF16)}
    tx = make(implementation="xla")
    first, second = gradient_series(params, 2, BF16)
    arguments = *jitted(tx)(params, tx.init(params), first), second
    got, want = both(lambda name: make(implementation=name), *arguments)
    # Kernels add the squares in another order, and divide with one more rounding.
    for found, expected in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        found, expected = np.asarray(found), np.asarray(expected)
        if found.dtype == np.float32:
            np.testing.assert_allclose(found, expected, rtol=1e-5)
        else:
            assert np.mean(found != expected) < 0.02
