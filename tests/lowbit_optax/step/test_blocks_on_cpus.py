"""CPUs update leaves block by block, and join small leaves into one.

The results match updates of whole leaves. The programs may fuse different products with
sums, but hyperparameters are powers of two, so every bit can be compared.
"""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType

import lowbit_optax
from lowbit_optax import block_quantized, extra_bits, lowbit
from lowbit_optax.loss_scaling import static_scale
from pallas_kernels.fused_update import cpu
from tests.helpers.exact_steps import MOMENTUM, dyadic_series, normal, trained
from tests.helpers.kernels import QUICK
from tests.helpers.optimizers import (
    ALL_FORMATS,
    BFLOAT16_MOMENTS,
    apply,
    assert_same_bits,
)

pytestmark = pytest.mark.standard_promotion

ONE_DEVICE = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))


@pytest.fixture(autouse=True, params=["alone", "joined"])
def small_blocks(request, monkeypatch):
    """Makes blocks so short that small leaves have many, joined or not."""
    if "real_blocks" not in request.fixturenames:
        monkeypatch.setattr(cpu, "PART", 512)
        if request.param == "alone":
            monkeypatch.setattr(cpu, "MAX_ELEMENTS", 0)


@pytest.fixture
def real_blocks():
    """Keeps the real size of blocks."""


TWO = {"w": normal((131, 40)), "b": normal((9,), seed=1)}


def both(params, **options):
    """Returns the results of steps on one device, with blocks and whole leaves."""
    series = dyadic_series(params, 2, bits=8)
    with jax.set_mesh(ONE_DEVICE):
        return [
            trained(name, params, series, min_size=0, **options)
            for name in (None, "xla")
        ]


def program(tx, params):
    """Returns the StableHLO of a step, as CPUs run it on the current mesh."""
    state = jax.eval_shape(tx.init, params)
    return str(jax.jit(functools.partial(lowbit_optax.step, tx)).lower(
        params, state, params
    ).as_text())  # fmt: skip


@pytest.mark.parametrize("advance", [lowbit_optax.step, apply], ids=["step", "update"])
@pytest.mark.parametrize("moments", ["bfloat16", "quantized"])
@pytest.mark.parametrize("weights", ALL_FORMATS.values(), ids=ALL_FORMATS)
def test_leaves_of_many_shapes_have_the_bits_of_each_alone(weights, moments, advance):
    shapes = [(131, 40), (64, 96), (16, 8, 24), (300,), (64, 96), (333, 7), (3, 3000)]
    params = {str(i): normal(shape, seed=i) for i, shape in enumerate(shapes)}
    quantized = block_quantized(8 if advance is apply else 4)
    options = {"moments": BFLOAT16_MOMENTS if moments == "bfloat16" else quantized}
    assert_same_bits(*both(params, weights=weights, advance=advance, **options))


@pytest.mark.parametrize("advance", [lowbit_optax.step, apply], ids=["step", "update"])
@pytest.mark.parametrize(
    ("weights", "moments"),
    [(extra_bits(8), block_quantized(8)), (lowbit_optax.kahan(), BFLOAT16_MOMENTS)],
    ids=["words and blocks", "plain"],
)
def test_large_leaves_in_one_loop_have_the_bits_of_each_alone(
    weights, moments, advance, monkeypatch
):
    for name, value in {"MAX_ELEMENTS": 0, "SIDE": 64, "MIN_LARGE": 2}.items():
        monkeypatch.setattr(cpu, name, value)
    monkeypatch.setattr(cpu, "MAX_LARGE", 3)
    squares = [(128, 64), (64, 192), (2, 64, 64), (192, 128)]
    shapes = [*squares, (136, 64), (136, 64), (9, 64)]
    params = {str(i): normal(shape, seed=i) for i, shape in enumerate(shapes)}
    inner = optax.apply_if_finite(MOMENTUM, max_consecutive_errors=3)
    options = dict(weights=weights, moments=moments, advance=advance)
    assert_same_bits(*both(params, inner=inner, **options))


def test_many_large_leaves_share_a_loop_and_are_updated_in_place(real_blocks):
    tx = lowbit_optax.sr_adamw(0.1)
    shapes = [(1024, 512), (512, 1024), (768, 768)] * 4
    params = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    with jax.set_mesh(ONE_DEVICE):
        state = jax.eval_shape(tx.init, params)
        step = jax.jit(functools.partial(lowbit_optax.step, tx), donate_argnums=(0, 1))
        lowered = step.lower(params, state, params)
    assert lowered.as_text().count("stablehlo.while") == 1
    memory = lowered.compile(compiler_options=QUICK).memory_analysis()
    # JAX 0.10 copies some arrays as integers.
    allowed = 4 if cpu.DROPS_BARRIERS else 0.5
    assert memory.temp_size_in_bytes < allowed * sum(x.size for x in params)


def test_a_step_that_is_skipped_inside_is_the_same():
    inner = optax.apply_if_finite(MOMENTUM, max_consecutive_errors=3)

    def advance(tx, params, state, grads):
        bad = jax.tree.map(lambda x: x.at[0].set(jnp.nan), grads)
        after = lowbit_optax.step(tx, params, state, bad)
        return lowbit_optax.step(tx, *after, grads)

    (params, state), want = both(TWO, advance=advance, inner=inner)
    assert_same_bits((params, state), want)
    assert bool(jnp.isfinite(params["w"]).all())


WRAPPERS = {
    "finite": lambda tx: optax.apply_if_finite(tx, 3),
    "scaled": lambda tx: lowbit_optax.with_loss_scale(tx, static_scale(0.5)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("advance", [lowbit_optax.step, apply], ids=["step", "update"])
def test_guarded_steps_are_the_same_and_skip(wrap, advance):
    options = dict(weights=extra_bits(8), moments=block_quantized(8))

    def make(**places):
        return wrap(lowbit(MOMENTUM, **options, **places, min_size=0))

    def skipping(tx, params, state, grads):
        bad = grads | {"b": grads["b"].at[0].set(jnp.nan)}
        skipped, state = advance(tx, params, state, bad)
        return (*advance(tx, skipped, state, grads), skipped)

    series = dyadic_series(TWO, 1, bits=8)
    with jax.set_mesh(ONE_DEVICE):
        results = []
        for implementation in (None, "xla"):
            tx = make(implementation=implementation)
            run = jax.jit(functools.partial(skipping, tx), compiler_options=QUICK)
            results.append(run(TWO, tx.init(TWO), series[0]))
    assert_same_bits(*results)
    new, _, skipped = results[0]
    assert_same_bits(skipped, TWO)
    assert not jnp.array_equal(new["w"], TWO["w"])


def test_batches_of_steps_are_the_same():
    def advance(tx, params, state, grads):
        stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x, x]), tree)
        step = functools.partial(lowbit_optax.step, tx)
        new = jax.vmap(step)(stack(params), stack(state), stack(grads))
        return jax.tree.map(lambda x: x[1], new)

    assert_same_bits(*both(TWO, advance=advance))


def test_where_there_are_several_devices_nothing_is_cut_into_blocks():
    # XLA may have to partition such a program.
    tx = lowbit_optax.sr_adamw(0.1)
    params = {"w": jax.ShapeDtypeStruct((131, 40), jnp.bfloat16)}
    with jax.set_mesh(ONE_DEVICE):
        assert "stablehlo.while" in program(tx, params)
    assert "stablehlo.while" not in program(tx, params)
    with jax.set_mesh(jax.make_mesh((8,), ("x",))):
        assert "stablehlo.while" not in program(tx, params)


def test_small_leaves_are_not_cut_into_blocks(real_blocks):
    # No other test traces this shape with small blocks.
    params = {"w": jax.ShapeDtypeStruct((130, 40), jnp.bfloat16)}
    with jax.set_mesh(ONE_DEVICE):
        assert "stablehlo.while" not in program(lowbit_optax.sr_adamw(0.1), params)


@pytest.mark.parametrize("rows", [4096, 4099])
@pytest.mark.parametrize(
    ("make", "bytes_per_parameter", "copied"),
    [
        (lowbit_optax.sr_adamw, 0.5, 4),
        (functools.partial(lowbit_optax.extra_bits_adamw, bits=8), 0.75, 2),
    ],
    ids=["sr", "extra_bits"],
)
def test_a_compiled_step_takes_little_memory(
    real_blocks, make, bytes_per_parameter, copied, rows
):
    tx = make(0.1)
    params = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
    with jax.set_mesh(ONE_DEVICE):
        state = jax.eval_shape(tx.init, params)
        step = jax.jit(functools.partial(lowbit_optax.step, tx), donate_argnums=(0, 1))
        memory = step.lower(params, state, params).compile().memory_analysis()
    # A whole bfloat16 array would need 2 bytes per parameter. JAX 0.10 converts arrays
    # in order to slice them, and copies some as integers.
    if cpu.DROPS_BARRIERS:
        bytes_per_parameter += copied
    assert memory.temp_size_in_bytes < bytes_per_parameter * rows * 1024


def test_vectors_of_thousands_of_elements_have_the_bits_of_each_alone(real_blocks):
    lengths = (4090, 8192, 12_290, 16_380)
    params = {str(n): normal((n,), seed=n) for n in lengths}
    options = dict(weights=lowbit_optax.kahan(), moments=BFLOAT16_MOMENTS)
    assert_same_bits(*both(params, **options))
