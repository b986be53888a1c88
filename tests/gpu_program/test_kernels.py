"""The fused kernel of one leaf, compiled for an H200: bytes, memory, machine code."""

import functools
import typing

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import lowbit_optax
import pallas_kernels
from tests.helpers.gpu_steps import WEIGHTS, update_layer
from tests.helpers.packing import pack, unpack
from tools.gpu_program.machine_code import (
    instructions_per_parameter,
    program,
)
from tools.gpu_program.steps import (
    BF16,
    F32,
    applied,
    bytes_of,
    bytes_of_accesses,
    fast,
    leaf,
    lower_lpmm_step,
    lower_step,
)
from tools.gpu_program.targets import gpu_mesh, lower_for
from tools.hlo import copies, kernels, memory

pytestmark = pytest.mark.usefixtures("by_triton", "disassembler")

SIDE = 4096
PARAMETERS = SIDE * SIDE


class Bounds(typing.NamedTuple):
    """A step, and upper bounds for its kernel.

    Memory accesses do not hide all instructions: with 11 more, a step of
    ``lowbit_adamw`` took 11% longer on an H200 (``docs/hardware.md``). A multiprocessor
    has room for 12 blocks of 64 threads with 80 registers, and for 8 with 128
    registers.

    Args:
      tx: the transformation.
      moved: bytes per parameter, read and written. For AdamW, these are the gradient
        (only read), parameter, residual, mu and nu.
      instructions: instructions per parameter.
      accessed: bytes per parameter that instructions access 64 and 128 bits at a time;
        None if other widths occur.
      registers: registers per thread.
      lower: function that lowers the step.
    """

    tx: optax.GradientTransformation
    moved: float
    instructions: float
    accessed: tuple[float, float] | None = None
    registers: int = 255
    lower: typing.Callable = lower_step


def _adamw(weights, moments):
    return lowbit_optax.lowbit(optax.adamw(1e-3), weights=weights, moments=moments)


EXTRA_BITS = functools.partial(lowbit_optax.extra_bits_adamw, 1e-3)
EIGHT = lowbit_optax.block_quantized(8)
FOUR_AND_EIGHT = {"mu": lowbit_optax.block_quantized(4), "nu": EIGHT}
DIVIDED_FIRST = optax.chain(
    lowbit_optax.scale_by_factored_adam(min_dim_size_to_factor=2**20),
    optax.add_decayed_weights(1e-4),
    optax.scale(-1e-3),
)
ERRORS_INTO_MU = lowbit_optax.stochastic_rounding(error_feedback="mu")
EXACT_MEAN = lowbit_optax.extra_bits(8, sum_rounding="stochastic")
LPMM_ADAM = lowbit_optax.lpmm_adam(1e-3)
LPMM_SGD = lowbit_optax.lpmm_sgd(1e-3, 0.9)
lower_8_bits = functools.partial(lower_lpmm_step, bits=8)

KAHAN = Bounds(lowbit_optax.kahan_adamw(1e-3), 2 + 4 + 4 + 8, 79.5, (18, 0), 80)
EXTRA_8 = Bounds(EXTRA_BITS(bits=8), 2 + 4 + 2 + 16, 35.5, (6, 18), 80)
# 2 for the gradient; 5.125, read and written, for parameter, extra bits, codes, scales.
LOWBIT = Bounds(lowbit_optax.lowbit_adamw(1e-3), 12.25, 64, registers=128)
STEPS = {
    "extra_bits 8": EXTRA_8,
    "extra_bits 16": Bounds(EXTRA_BITS(), 2 + 4 + 4 + 16, 28, (6, 20), 80),
    "extra_bits 12": Bounds(EXTRA_BITS(bits=12), 2 + 4 + 3 + 16, 37.5, (6, 19), 80),
    # For 8 rows, the kernel reads the two words that may contain their fields, and
    # writes two words if they are full.
    "extra_bits 5": Bounds(EXTRA_BITS(bits=5), 2 + 4 + 1.25 + 16, 40, (6, 16 + 2), 80),
    "kahan": KAHAN,
    "sr": Bounds(lowbit_optax.sr_adamw(1e-3), 2 + 4 + 0 + 8, 56, (14, 0), 80),
    "lowbit": LOWBIT,
    "master copy": Bounds(_adamw(lowbit_optax.master_copy(), "float32"), 30, 24),
    "4-bit mu": Bounds(
        lowbit_optax.lowbit(DIVIDED_FIRST, moments=FOUR_AND_EIGHT), 11.25, 65.5
    ),
    "errors into 8-bit mu": Bounds(_adamw(ERRORS_INTO_MU, EIGHT), 10.25, 93),
    "sums of exact mean": Bounds(_adamw(EXACT_MEAN, EIGHT), 12.25, 81),
    "lpmm_adam": Bounds(LPMM_ADAM, 9.13, 127, lower=lower_lpmm_step),
    "lpmm_adam, 8 bits": Bounds(LPMM_ADAM, 8.13, 127, lower=lower_8_bits),
    "lpmm_sgd": Bounds(LPMM_SGD, 7.0, 100.5, lower=lower_lpmm_step),
}

FORMATS = WEIGHTS | {f"extra_bits {k}": lowbit_optax.extra_bits(k) for k in (1, 8)}
MOMENTS = {
    "float32": None,
    "bfloat16": lowbit_optax.cast(BF16),
    "float8": lowbit_optax.cast("float8_e4m3fn"),
}


@functools.cache
def step_of(name, shape=(SIDE, SIDE), make_step=fast):
    bounds = STEPS[name]
    return bounds.lower(bounds.tx, leaf(*shape), make_step=make_step)


def assert_one_pass_in_place(step, moved, beyond=0.1):
    assert step.large == step.fused_launches == 1
    assert step.moved <= moved + beyond
    assert step.temporary < 0.01
    assert step.in_place


def assert_whole_accesses(step, accessed, conditional=0):
    """Assert that a thread moves four elements at a time, without masks."""
    for bits, most in zip((64, 128), accessed, strict=True):
        assert bytes_of_accesses(step.fused, bits) == most * step.parameters
    assert step.fused.masked_stores == conditional


def assert_short(step, instructions):
    """Assert that there are few instructions per parameter, and no spills."""
    kernel = step.fused
    assert instructions_per_parameter(kernel, step.parameters) <= instructions
    assert_nothing_spills(kernel)


def assert_nothing_spills(kernel):
    assert kernel.stack == kernel.spill_stores == kernel.spill_loads == 0


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_one_short_pass_in_place(name):
    step, bounds = step_of(name), STEPS[name]
    assert_one_pass_in_place(step, bounds.moved, beyond=0.01)
    assert_short(step, bounds.instructions)
    assert step.fused.registers <= bounds.registers
    assert step.fused.static_shared == 0
    if bounds.accessed:
        assert [launch.shared for launch in step.fused.launches] == [0]
        conditional = 1 if name == "extra_bits 5" else 0  # a word, written when full
        assert_whole_accesses(step, bounds.accessed, conditional)
    if name.startswith("lpmm"):
        wide = sum(bytes_of_accesses(step.fused, size) for size in (64, 128))
        assert wide / PARAMETERS > 0.97 * bounds.moved


@pytest.mark.parametrize(("bits", "block_size"), [(8, 2048), (8, 64), (6, 64), (4, 64)])
def test_errors_of_codes_enter_a_moment_of_4_bits_in_one_kernel(bits, block_size):
    """Another kernel reads the gradient before, for its sums over rows and columns."""
    tx = lowbit_optax.factored_adamw(1e-3, bits=0)
    step = lower_lpmm_step(tx, leaf(SIDE, SIDE), bits=bits, block_size=block_size)
    assert step.fused_launches == 2
    scales = 2 * 4 / block_size
    assert step.moved <= 2 * 2 + 2 * bits / 8 + 2 * 4 / 8 + 2 * 2 / 32 + scales + 0.16
    assert step.temporary < 0.08  # the partial sums
    assert step.in_place
    assert_short(step, 94)


@pytest.mark.parametrize("name", [*STEPS][:7])  # the aliases
def test_update_and_apply_updates_write_and_read_one_bfloat16_more(name):
    # The update is the difference between the kernel's result and the parameter. It is
    # stored in two bytes, and the addition reads it and writes the parameter.
    step = step_of(name, make_step=applied)
    assert step.fused_launches == 1
    assert step.moved <= step_of(name).moved + 6.1
    assert step.temporary <= 2.01
    assert step.in_place


@pytest.mark.parametrize(
    ("shape", "instructions"),
    [((4000, 1001), 81.5), ((51200, 2561), 79.5), ((4001, 1001), 88)],
    ids=str,
)
def test_a_step_of_an_odd_width_is_one_short_pass(shape, instructions):
    step = step_of("lowbit", shape)
    assert_one_pass_in_place(step, LOWBIT.moved)
    assert_short(step, instructions)


@pytest.mark.parametrize("block_size", [32, 64, 128, 2048])
def test_blocks_of_any_size_are_read_once(block_size):
    moments = lowbit_optax.block_quantized(block_size=block_size)
    step = lower_step(_adamw(lowbit_optax.extra_bits(8), moments), leaf(SIDE, SIDE))
    # The gradient, the parameter and words, without the scales. Accesses of 32 bits
    # read the table of scalars.
    read = sum(bytes_of_accesses(step.fused, bits, store=False) for bits in (64, 128))
    assert 4 + 3 <= read / PARAMETERS <= 4 + 3 + 0.5
    assert_short(step, 65.5)


RAGGED = [(4001, 1000), (1000, 4001), (1000003,)]
# Convolutions, heads and vocabularies, which kernels update like matrices.
WHOLE = [(3, 3, 512, 512), (4096, 32, 128), (50304, 768)]


@pytest.mark.parametrize("name", ["extra_bits 8", "kahan"])
@pytest.mark.parametrize("shape", [*RAGGED, *WHOLE], ids=str)
def test_only_stores_of_a_ragged_shape_are_masked(name, shape):
    # On this backend, a BlockSpec has no masks, and stores would go beyond the array.
    step = step_of(name, shape)
    assert_one_pass_in_place(step, STEPS[name].moved)
    if shape in WHOLE:
        assert_whole_accesses(step, STEPS[name].accessed)
    else:
        kernel = step.fused
        assert kernel.masked_stores == sum(kernel.global_stores.values()) > 0
        assert_nothing_spills(kernel)


@pytest.mark.parametrize("name", ["kahan", "extra_bits 16", "lowbit"])
def test_kernels_are_the_same_with_64_bit_types(name):
    params = [leaf(512, 512), leaf(512), leaf(256), leaf(768, dtype=F32)]

    def facts():
        step = lower_step(STEPS[name].tx, params)
        assert step.in_place
        return {
            name: (k.registers, k.spill_stores, k.opcodes())
            for name, k in step.machine_code.items()
            if name.startswith("fused_update")
        }

    narrow = facts()
    with jax.enable_x64(True):
        wide = facts()
    # XLA appends numbers to equal names, in different ways.
    kinds = {kernel.rstrip("_$0123456789") for kernel in narrow}
    assert kinds == {"fused_update", "fused_update_many"}
    assert wide == narrow


NARROW = ("float16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize(
    ("weights", "moments", "dtype"),
    [
        *((name, "bfloat16", "bfloat16") for name in FORMATS),
        *(("extra_bits 16", moments, "bfloat16") for moments in MOMENTS),
        *(("extra_bits 8", "float32", dtype) for dtype in NARROW),
    ],
)
def test_every_format_takes_the_kernel(weights, moments, dtype):
    inner = optax.sgd(1e-3, momentum=0.9)
    tx = lowbit_optax.lowbit(inner, weights=FORMATS[weights], moments=MOMENTS[moments])
    step = lower_step(tx, leaf(512, 384, dtype=jnp.dtype(dtype)))
    assert step.fused_launches == step.large == 1
    assert step.in_place


def test_a_stack_is_updated_in_place_a_layer_at_a_time():
    """The loop is like a backward pass over the layers."""
    layers, shape = 12, (1024, 1024)
    words = pallas_kernels.packed_shape(shape, 8)
    stacks = (
        leaf(layers, *shape),
        leaf(layers, *shape, dtype=F32),
        leaf(layers, *words, dtype=jnp.uint32),
    )

    def layer_by_layer(stacks, grads, scalars):
        def update(i, stacks):
            grad = lax.dynamic_index_in_dim(grads, i, 0, keepdims=False)
            return tuple(update_layer(stacks, grad, i, scalars))

        return lax.fori_loop(0, layers, update, stacks)

    arguments = stacks, leaf(layers, *shape), leaf(2, dtype=jnp.uint32)
    lowered = lower_for(gpu_mesh(), layer_by_layer, *arguments, donate=(0,))
    compiled, gradient = lowered.compile(), 2 * 1024**2
    assert compiled.as_text().count("__gpu$xla.gpu.triton") == 1
    assert memory(compiled).temp_size_in_bytes <= 1.01 * gradient
    assert memory(compiled).alias_size_in_bytes == bytes_of(stacks)
    assert max(copies(compiled), default=0) <= gradient


@pytest.mark.parametrize("bits", [1, 3, 8, 11, 16])
@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_packing_is_one_kernel(direction, bits):
    shape = SIDE, SIDE
    if direction == "pack":
        fn = functools.partial(pack, bits=bits)
        argument = leaf(*shape, dtype=jnp.uint32)
    else:
        fn = functools.partial(unpack, bits=bits, shape=shape)
        argument = leaf(*pallas_kernels.packed_shape(shape, bits), dtype=jnp.uint32)
    found = program(lower_for(gpu_mesh(), fn, argument))
    ((_, moved),) = kernels(found.compiled)
    (kernel,) = found.kernels.values()
    assert kernel.name == "fused_update"
    assert moved <= (4 + bits / 8) * PARAMETERS + 64
    assert {access.bits for access in kernel.accesses} == {128}
    assert found.compiled.memory_analysis().temp_size_in_bytes == 0
    assert_nothing_spills(kernel)
