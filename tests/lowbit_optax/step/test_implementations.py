"""Kernels and XLA produce the same numbers in ``lowbit``.

On a CPU, ``"pallas"`` interprets the kernels' operations. Divisions by a scalar and
sums with a product may then round differently. With powers of two as hyperparameters,
these are exact, so every bit of the formats can be compared.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

import lowbit_optax
from lowbit_optax import (
    block_quantized,
    cast,
    extra_bits,
    kahan,
    lowbit,
    nearest,
    stochastic_rounding,
)
from lowbit_optax.formats.block_quantized import QuantizedMoment
from lowbit_optax.precision import FloatFormat
from lowbit_optax.transformations import regularize
from pallas_kernels.platforms import has_mosaic
from tests.helpers.exact_steps import (
    MOMENTUM,
    apply_any,
    both,
    dyadic_series,
    normal,
    trained,
)
from tests.helpers.optimizers import (
    ALL_FORMATS,
    BFLOAT16_MOMENTS,
    apply,
    assert_same_bits,
    weights_only,
)

pytestmark = pytest.mark.standard_promotion

MUON = optax.contrib.muon(0.01)
ADVANCES = {"step": lowbit_optax.step, "update": apply}


def penalty(params):
    """Penalizes weights with weight decay and a pull to zero."""
    leaves = [jnp.sum(2.0**-13 * x * x + 2.0**-12 * abs(x)) for x in params.values()]
    return sum(leaves)


def model(dtype=jnp.bfloat16):
    """Returns a leaf that is packed with padding, and one too small to be packed."""
    return {"kernel": normal((70, 65), dtype), "bias": normal((40,), dtype)}


@pytest.mark.parametrize("advance", ADVANCES.values(), ids=ADVANCES)
@pytest.mark.parametrize("weights", ALL_FORMATS.values(), ids=ALL_FORMATS)
def test_every_weight_format_has_the_same_bits(weights, advance):
    params = model()
    series = dyadic_series(params, 2)
    assert_same_bits(*both(params, series, weights=weights, advance=advance))


TWELVE_BITS = FloatFormat(8, 3)
FEWER_BITS = {
    "nearest": nearest(float_format=TWELVE_BITS),
    "stochastic": stochastic_rounding(float_format=TWELVE_BITS),
    "kahan": kahan(float_format=TWELVE_BITS),
    "kahan_stochastic": kahan(rounding="stochastic", float_format=TWELVE_BITS),
    "kahan_param": kahan(arithmetic="param", float_format=TWELVE_BITS),
}
# The rates are so low that float32 sums round, and so high that weights move.
SUMS = {
    "4_bits": (extra_bits(4, sum_rounding="stochastic"), 2.0**-20),
    "12_bits": (extra_bits(12, sum_rounding="stochastic"), 2.0**-26),
    "all_bits": (extra_bits(sum_rounding="stochastic"), 2.0**-26),
    "stochastic": (stochastic_rounding(sum_rounding="stochastic"), 2.0**-12),
}
INTO_TRACE = {"weights": stochastic_rounding(error_feedback="trace")}
# Maps a case to the dtype of the parameters, the options and the implementation.
OTHERS = {
    # Odd widths take longer to compile, because their period is 32 rows.
    **{f"{n}_bits": ("bfloat16", {"weights": extra_bits(n)}) for n in (5, 12)},
    "float16_bits": ("float16", {"weights": extra_bits(12)}),
    "float16_kahan": ("float16", {"weights": kahan()}),
    "e4m3fn_bits": ("float8_e4m3fn", {"weights": extra_bits(8)}),
    "e5m2_bits": (
        "float8_e5m2", {"weights": extra_bits(16, rounding="toward_zero")}
    ),
    "e5m2_stochastic": ("float8_e5m2", {"weights": stochastic_rounding()}),
    **{
        f"{name}_moments": ("bfloat16", {"weights": kahan(), "moments": moments})
        for name, moments in {
            "bfloat16": BFLOAT16_MOMENTS,
            "bfloat16_nearest": cast(jnp.bfloat16, rounding="nearest"),
            "float16": cast(jnp.float16),
            "float8": cast(jnp.float8_e5m2),
            "by_field": {"trace": BFLOAT16_MOMENTS},
        }.items()
    },
    **{f"12_bit_{k}": ("bfloat16", {"weights": x}) for k, x in FEWER_BITS.items()},
    **{
        f"sums_{name}": (
            "bfloat16", {"weights": x, "inner": optax.sgd(rate, momentum=0.5)}
        )
        for name, (x, rate) in SUMS.items()
    },
    "error_into_8_bits": ("bfloat16", INTO_TRACE | {"moments": block_quantized(8)}),
    "error_into_8_bits_tpu": (
        "float8_e4m3fn", INTO_TRACE | {"moments": block_quantized(8)}, "tpu"
    ),
    "error_into_bfloat16": (
        "float8_e4m3fn", INTO_TRACE | {"moments": BFLOAT16_MOMENTS}
    ),
    "error_into_bfloat16_tpu": (
        "bfloat16", INTO_TRACE | {"moments": BFLOAT16_MOMENTS}, "tpu"
    ),
    "a_penalty": (
        "bfloat16", {"inner": optax.chain(regularize(penalty), MOMENTUM)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_and_dtypes_have_the_same_bits(name):
    dtype, options, *by = OTHERS[name]
    params = model(dtype)
    if by:  # only larger leaves have this kernel
        params = {"kernel": normal((64, 256), dtype)}
    series = dyadic_series(params, 2, bits=11)
    assert_same_bits(*both(params, series, *by, **options))


QUANTIZED = {
    "eight_bits": block_quantized(8),
    "eight_bits_linear": block_quantized(8, code="linear"),
    "eight_bits_nearest": block_quantized(8, rounding="nearest"),
    "four_bits": block_quantized(4),
    "four_bits_in_blocks_of_64": block_quantized(4, block_size=64),
}


# Squares of 8-bit gradients are exact, and so are products with powers of two.
SQUARES = optax.chain(
    optax.scale_by_rms(decay=0.5, eps=2.0**-20), optax.scale(-(2.0**-6))
)


# With 8 extra bits, but not with Kahan, moments share the weight's random words.
@pytest.mark.parametrize("weights", [extra_bits(8), kahan()], ids=["bits", "kahan"])
@pytest.mark.parametrize("inner", [MOMENTUM, SQUARES], ids=["first", "second"])
@pytest.mark.parametrize("moments", QUANTIZED.values(), ids=QUANTIZED)
def test_quantized_moments_have_the_same_bits(moments, inner, weights):
    params = {"kernel": model()["kernel"]}
    series = dyadic_series(params, 2, bits=8)
    options = dict(inner=inner, weights=weights, moments=moments)
    by_kernels, by_xla = both(params, series, **options)
    assert_same_bits(by_kernels, by_xla)
    is_stored = lambda x: isinstance(x, QuantizedMoment)
    parts = jax.tree.leaves(by_kernels[1].inner_state, is_leaf=is_stored)
    (moments,) = filter(is_stored, parts)
    assert moments.codes["kernel"].dtype == jnp.uint32


@pytest.mark.slow_to_compile
@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_blocks_without_a_finite_value_have_the_same_bits(value):
    params = {"kernel": normal((64, 72))}
    (grads,) = dyadic_series(params, 1, bits=8)
    grads["kernel"] = grads["kernel"].at[8:16, 4:8].set(value)
    options = dict(weights=kahan(), moments=block_quantized(8))
    by_kernels, by_xla = both(params, [grads], **options)
    assert_same_bits(by_kernels, by_xla)
    scales = by_xla[1].inner_state[0].trace.scales["kernel"]
    assert [(int(i), int(j)) for i, j in np.argwhere(scales == 0)] == [(1, 1)]


MIXED = {
    "kernel": normal((64, 72)),
    "small": normal((3, 5)),
    "wide": normal((130, 130)),
    "half": normal((70, 65), jnp.float16),
    "norm": normal((40,), jnp.float32),
    "table": normal((130, 128), jnp.float32),
    "eighth": normal((64, 64), jnp.float8_e4m3fn),
    "scale": jnp.bfloat16(1.5),
    "shift": jnp.float32(0.5),
    "none": None,
    "empty": jnp.zeros((0, 4), jnp.bfloat16),
}


@pytest.mark.slow_to_compile
@pytest.mark.parametrize(
    ("weights", "moments", "advance"),
    [
        (extra_bits(8), BFLOAT16_MOMENTS, lowbit_optax.step),
        (kahan(), block_quantized(8), apply_any),
    ],
    ids=["bits_step", "kahan_update"],
)
def test_trees_of_many_kinds_of_leaves_have_the_same_bits(weights, moments, advance):
    options = dict(weights=weights, moments=moments, min_size=64)
    series = dyadic_series(MIXED, 3, bits=8)
    assert_same_bits(*both(MIXED, series, advance=advance, **options))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e5m2])
def test_gradients_of_any_float_dtype_have_the_same_bits(dtype):
    params = model() | {"norm": normal((40,), jnp.float32)}
    series = [jax.tree.map(lambda p: jnp.full(p.shape, 0.125, dtype), params)]
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), series)
    for got in both(params, series, weights=kahan()):
        assert_same_bits(got, trained("xla", params, wide, weights=kahan()))


def test_without_a_kernel_the_error_names_the_leaf_and_the_reason():
    params = {"kernel": model()["kernel"]}
    series = dyadic_series(params, 1)
    for inner in (MUON, optax.adafactor(0.01, min_dim_size_to_factor=8)):
        with pytest.raises(
            ValueError,
            match=r"no kernel can update params\['kernel'\]: .* is not among",
        ) as error:
            trained("pallas", params, series, inner=inner, weights=kahan())
        assert "implementation=None uses XLA for such leaves" in str(error.value)


def sharing_its_scales():
    """A transformation that multiplies the gradients of two leaves by one array."""

    def update(updates, scales, params=None):
        return jax.tree.map(lambda x: x * scales, updates), 0.5 * scales

    init = lambda params: jnp.ones_like(params["kernel"])
    return optax.GradientTransformation(init, update)


def test_leaves_that_share_a_moment_are_left_to_xla():
    kernel = model()["kernel"]
    params = {"kernel": kernel, "other": kernel}
    series = dyadic_series(params, 2)
    options = {"inner": sharing_its_scales(), "weights": kahan()}
    with pytest.raises(
        ValueError, match=r"'kernel'\]: it shares a moment with another"
    ):
        trained("pallas", params, series, **options)
    got, want = (trained(name, params, series, **options) for name in (None, "xla"))
    assert_same_bits(got, want)


@pytest.mark.parametrize(
    ("moments", "reason"),
    [
        (
            block_quantized(8, block_size=128),
            r"fields of \[5, 8\] bits and blocks of \[128\] do not fit together",
        ),
        (
            {"mu": block_quantized(8), "nu": block_quantized(8, block_size=128)},
            r"fields of \[5, 8\] bits and blocks of \[32, 128\] do not fit",
        ),
    ],
    ids=["high blocks beside an odd width", "two sizes"],
)
def test_blocks_that_no_kernel_can_walk_over_are_refused_or_left_to_xla(
    moments, reason
):
    params = {"kernel": model()["kernel"]}
    (grads,) = dyadic_series(params, 1)
    tx = functools.partial(
        lowbit, optax.adamw(0.01), weights=extra_bits(5), moments=moments
    )
    with pytest.raises(ValueError, match=rf"update params\['kernel'\]: its .*{reason}"):
        step_program(tx(implementation="pallas"), params, grads)
    assert "pallas_call" not in step_program(tx(), params, grads)


# The platform chooses.


def step_program(tx, params, grads):
    run = functools.partial(lowbit_optax.step, tx)
    return str(jax.make_jaxpr(run)(params, tx.init(params), grads))


@pytest.mark.slow_to_compile
def test_blocks_of_two_sizes_share_a_kernel():
    shape = (120, 68)  # the last tile of a row has one small block, not two
    params = {"kernel": normal(shape)}
    moments = {"mu": block_quantized(8), "nu": block_quantized(8, block_size=128)}
    inner = optax.adamw(0.01, b1=0.5, b2=0.75, eps=0.0)
    # With a power of two per tile, each block's scale differs from its neighbours.
    row, column = np.indices(shape)
    powers = 2.0 ** ((5 * (row // 8) + column // 4) % 13 - 10)
    (grads,) = dyadic_series(params, 1)
    grads = {"kernel": jnp.sign(grads["kernel"]) * jnp.float32(powers)}
    options = dict(inner=inner, weights=extra_bits(8), moments=moments)
    assert_same_bits(*both(params, [grads], **options))
    # Printing the step works too, because its operations have all their parameters.
    tx = lowbit(implementation="pallas", **options)
    assert "pallas_call" in step_program(tx, params, grads)


def test_a_traced_step_leaves_the_choice_to_the_platform():
    params = model()
    (grads,) = dyadic_series(params, 1)
    programs = {
        name: step_program(
            weights_only(MOMENTUM, extra_bits(16), implementation=name),
            params,
            grads,
        )
        for name in ("xla", "pallas", None)
    }
    assert "pallas_call" not in programs["xla"]
    assert "platform_index" in programs[None]
    assert "pallas_call" in programs["pallas"]
    # Kernels for a platform that JAX does not expect are traced during lowering.
    assert "pallas_call" not in programs[None] or jax.default_backend() != "cpu"
    tx = weights_only(MOMENTUM, extra_bits(16))
    gpu = AbstractDevice("NVIDIA H200", 132, platform="gpu")
    mesh = AbstractMesh((1,), ("a",), (AxisType.Auto,), abstract_device=gpu)
    with jax.sharding.use_abstract_mesh(mesh):
        assert "name=fused_update" in step_program(tx, params, grads)
    if not has_mosaic():  # newer versions cannot lower GPU kernels without a GPU
        step = jax.jit(functools.partial(lowbit_optax.step, tx))
        step = step.trace(params, tx.init(params), grads)
        text = step.lower(lowering_platforms=("cuda",)).as_text()
        assert "fused_update" in text
        assert "triton" in text
    alone = {"kernel": params["kernel"]}, {"kernel": grads["kernel"]}
    assert "pallas_call" not in step_program(
        lowbit(MUON, weights=kahan(), moments="float32"), *alone
    )


# Steps inside other transformations.


def test_members_of_an_ensemble_are_each_alone():
    params = {"kernel": model()["kernel"]}
    (grads,) = dyadic_series(params, 1)
    tx = weights_only(MOMENTUM, extra_bits(8), implementation="pallas")
    pair = jax.tree.map(lambda p: jnp.stack([p, -2 * p]), params)
    step = functools.partial(lowbit_optax.step, tx)
    states = jax.vmap(tx.init)(pair)
    got = jax.jit(jax.vmap(step, in_axes=(0, 0, None)))(pair, states, grads)
    for i in range(2):
        own = jax.tree.map(lambda p, i=i: p[i], pair)
        want = trained("xla", own, [grads], weights=extra_bits(8))
        assert_same_bits(jax.tree.map(lambda x, i=i: x[i], got), want)
