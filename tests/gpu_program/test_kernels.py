"""The fused kernel of one leaf, compiled for an H200: bytes, memory, machine code."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from gpu_steps import WEIGHTS
from jax import lax

import lowbit_optax
import pallas_kernels
from pallas_kernels import Operand, Result
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
from tools.gpu_program.targets import compile_for, gpu_mesh, lower_for
from tools.hlo import copies, kernels, memory

pytestmark = pytest.mark.usefixtures("by_triton", "disassembler")

SIDE = 4096
PARAMETERS = SIDE * SIDE

OPTIMIZERS = {
    "extra_bits 8": lowbit_optax.extra_bits_adamw(1e-3, bits=8),
    "extra_bits 16": lowbit_optax.extra_bits_adamw(1e-3),
    "extra_bits 12": lowbit_optax.extra_bits_adamw(1e-3, bits=12),
    "extra_bits 5": lowbit_optax.extra_bits_adamw(1e-3, bits=5),
    "kahan": lowbit_optax.kahan_adamw(1e-3),
    "sr": lowbit_optax.sr_adamw(1e-3),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)

# Bytes a parameter, read and written: gradient (read), parameter, residual, mu and nu.
MOVED = {
    "extra_bits 8": 2 + 4 + 2 + 16,
    "extra_bits 16": 2 + 4 + 4 + 16,
    "extra_bits 12": 2 + 4 + 3 + 16,
    "extra_bits 5": 2 + 4 + 1.25 + 16,
    "kahan": 2 + 4 + 4 + 8,
    "sr": 2 + 4 + 0 + 8,
}

# What instructions ask for of that, in bfloat16 and in 32 bits. With 5 bits 8 rows ask
# for the two words that their fields may be in, and to write as many, if they are full.
ACCESSED = {
    "extra_bits 8": (6, 18),
    "extra_bits 16": (6, 20),
    "extra_bits 12": (6, 19),
    "extra_bits 5": (6, 16 + 2),
    "kahan": (18, 0),
    "sr": (14, 0),
}

MOST_REGISTERS = 80
"""A multiprocessor then holds 12 blocks of 64 threads."""

MOST_INSTRUCTIONS = {
    "extra_bits 8": 36.5,
    "extra_bits 16": 28,
    "extra_bits 12": 37.5,
    "extra_bits 5": 40,
    "kahan": 79,
    "sr": 56,
}
"""Per parameter, of AdamW.

Memory does not hide all of them: with 11 more, a step of ``lowbit_adamw`` took 11%
longer on an H200 (``docs/first_device.md``).
"""

MOST_OF_LOWBIT = 68.5
"""Of ``lowbit_adamw``."""

FORMATS = WEIGHTS | {f"extra_bits {k}": lowbit_optax.extra_bits(k) for k in (1, 8)}
MOMENTS = {
    "float32": None,
    "bfloat16": lowbit_optax.cast(BF16),
    "float8": lowbit_optax.cast("float8_e4m3fn"),
}


@functools.cache
def step_of(name, shape=(SIDE, SIDE), make_step=fast):
    return lower_step(OPTIMIZERS[name], leaf(*shape), make_step)


def assert_one_pass_in_place(step, moved):
    assert step.large == step.fused_launches == 1
    assert step.moved <= moved
    assert step.temporary < 0.01
    assert step.in_place


def assert_whole_accesses(step, name, conditional=0):
    narrow, wide = ACCESSED[name]
    assert bytes_of_accesses(step.fused, 64) == narrow * step.parameters
    assert bytes_of_accesses(step.fused, 128) == wide * step.parameters
    assert step.fused.masked_stores == conditional


def assert_short(step, instructions):
    """Few instructions per parameter, and no registers that spill."""
    kernel = step.fused
    assert instructions_per_parameter(kernel, step.parameters) <= instructions
    assert_nothing_spills(kernel)


def assert_nothing_spills(kernel):
    assert kernel.stack == kernel.spill_stores == kernel.spill_loads == 0


@each_optimizer
def test_a_step_is_one_short_pass_in_place(name):
    step = step_of(name)
    assert_one_pass_in_place(step, MOVED[name] + 0.01)
    assert_short(step, MOST_INSTRUCTIONS[name])


@each_optimizer
def test_update_and_apply_updates_write_and_read_one_bfloat16_more(name):
    # The update that lands exactly is the kernel's result less the parameter: it is
    # held for the addition, in two bytes, and that reads it and rewrites the parameter.
    step = step_of(name, make_step=applied)
    assert step.fused_launches == 1
    assert step.moved <= step_of(name).moved + 6.1
    assert step.temporary <= 2.01
    assert step.in_place


@each_optimizer
def test_registers_suffice_and_nothing_is_shared(name):
    kernel = step_of(name).fused
    assert kernel.registers <= MOST_REGISTERS
    assert kernel.static_shared == 0
    assert [launch.shared for launch in kernel.launches] == [0]


@each_optimizer
def test_a_thread_moves_four_elements_at_a_time_without_masks(name):
    conditional = 1 if name == "extra_bits 5" else 0  # a word, written when full
    assert_whole_accesses(step_of(name), name, conditional)


def test_lowbit_adamw_moves_twelve_bytes_in_place():
    # 2 of gradient, and 5.125 of parameter, extra bits, codes and scales, twice.
    tx = lowbit_optax.lowbit_adamw(1e-3)
    step, by_update = (
        lower_step(tx, leaf(SIDE, SIDE), make) for make in (fast, applied)
    )
    assert step.stored / PARAMETERS == pytest.approx(5.125, rel=1e-6)
    assert_one_pass_in_place(step, 12.3)
    assert by_update.moved <= 18.3
    assert by_update.temporary <= 2.01
    assert_short(step, MOST_OF_LOWBIT)
    assert step.fused.static_shared == 0
    assert step.fused.registers <= 128  # eight blocks of 64 threads in a multiprocessor


@pytest.mark.parametrize(
    ("shape", "instructions"),
    [((4000, 1001), 85), ((51200, 2561), 83), ((4001, 1001), 91.5)],
    ids=str,
)
def test_a_step_of_an_odd_width_is_one_short_pass(shape, instructions):
    step = lower_step(lowbit_optax.lowbit_adamw(1e-3), leaf(*shape))
    assert_one_pass_in_place(step, 12.3)
    assert_short(step, instructions)


@pytest.mark.parametrize("block_size", [32, 64, 128, 2048])
def test_blocks_of_any_size_are_read_once(block_size):
    inner = optax.adamw(1e-3)
    moments = lowbit_optax.block_quantized(block_size=block_size)
    tx = lowbit_optax.lowbit(inner, weights=lowbit_optax.extra_bits(8), moments=moments)
    step = lower_step(tx, leaf(SIDE, SIDE))
    # Gradient, parameter and words. Scales come on top. What a thread reads 32 bits of
    # is the table of scalars.
    read = sum(bytes_of_accesses(step.fused, bits, store=False) for bits in (64, 128))
    assert 4 + 3 <= read / PARAMETERS <= 4 + 3 + 0.5
    assert_short(step, MOST_OF_LOWBIT)


EIGHT = lowbit_optax.block_quantized(8)
# Formats of AdamW, bytes that a step moves, and instructions.
MORE = {
    "master copy": (lowbit_optax.master_copy(), "float32", 30.1, 24),
    "4-bit mu": (
        lowbit_optax.extra_bits(8),
        {"mu": lowbit_optax.block_quantized(4), "nu": EIGHT},
        11.3,
        78,
    ),
    "low moments": (lowbit_optax.extra_bits(8), "low", 10.8, 97),
    "errors into 8-bit mu": (
        lowbit_optax.stochastic_rounding(error_feedback="mu"),
        EIGHT,
        10.3,
        115.5,
    ),
    "sums of exact mean": (
        lowbit_optax.extra_bits(8, sum_rounding="stochastic"),
        EIGHT,
        12.3,
        84.5,
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_other_formats_are_one_short_pass_in_place_too(name):
    weights, moments, moved, instructions = MORE[name]
    tx = lowbit_optax.lowbit(optax.adamw(1e-3), weights=weights, moments=moments)
    step = lower_step(tx, leaf(SIDE, SIDE))
    assert_one_pass_in_place(step, moved)
    assert_short(step, instructions)


# Bits of the weights, bytes that a step moves, and instructions, per parameter.
LPMM = {
    "lpmm_adam": (lowbit_optax.lpmm_adam(1e-3), 12, 9.14, 127),
    "lpmm_adam, 8 bits": (lowbit_optax.lpmm_adam(1e-3), 8, 8.14, 127),
    "lpmm_sgd": (lowbit_optax.lpmm_sgd(1e-3, 0.9), 12, 7.01, 100.5),
}


@pytest.mark.parametrize("name", LPMM)
def test_a_step_on_quantised_weights_is_one_pass_in_place(name):
    tx, bits, moved, instructions = LPMM[name]
    step = lower_lpmm_step(tx, leaf(SIDE, SIDE), bits)
    assert_one_pass_in_place(step, moved)
    assert_short(step, instructions)
    wide = sum(bytes_of_accesses(step.fused, size) for size in (64, 128))
    assert wide / PARAMETERS > 0.97 * moved


@pytest.mark.parametrize("name", ["extra_bits 8", "kahan"])
@pytest.mark.parametrize("shape", [(4001, 1000), (1000, 4001), (1000003,)], ids=str)
def test_stores_of_a_ragged_shape_are_masked(name, shape):
    # BlockSpec's stores have no masks on this backend: they would write beyond it.
    step = step_of(name, shape)
    kernel = step.fused
    assert kernel.masked_stores == sum(kernel.global_stores.values()) > 0
    assert_nothing_spills(kernel)
    assert_one_pass_in_place(step, MOVED[name] + 0.1)


@pytest.mark.parametrize(
    "shape", [(3, 3, 512, 512), (4096, 32, 128), (50304, 768)], ids=str
)
@pytest.mark.parametrize("name", ["extra_bits 8", "kahan"])
def test_kernels_of_convolutions_heads_and_vocabularies_are_like_matrices(name, shape):
    step = step_of(name, shape)
    assert_whole_accesses(step, name)
    assert_one_pass_in_place(step, MOVED[name] + 0.1)


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


def test_another_order_of_arguments_is_copied():
    # XLA gives the memory of donated arguments to results of the same shape and dtype,
    # in order. The moments of kahan_adamw have the parameters' dtype, and so take their
    # place.
    tx, params = OPTIMIZERS["kahan"], leaf(SIDE, SIDE)

    def step(grads, state, params):
        return lowbit_optax.step(tx, params, state, grads)

    arguments = params, jax.eval_shape(tx.init, params), params
    compiled = compile_for(gpu_mesh(), step, *arguments, donate=(1, 2))
    assert sum(size for _, size in kernels(compiled)) > 40 * PARAMETERS
    assert memory(compiled).temp_size_in_bytes > PARAMETERS


@pytest.mark.parametrize("name", ["extra_bits 8", "kahan"])
def test_clipping_by_the_global_norm_reads_the_gradients_once_more(name):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    weights, moments = {
        "extra_bits 8": (lowbit_optax.extra_bits(8), "float32"),
        "kahan": (lowbit_optax.kahan(), lowbit_optax.cast(BF16)),
    }[name]
    tx = lowbit_optax.lowbit(inner, weights=weights, moments=moments)
    step = lower_step(tx, leaf(SIDE, SIDE))
    assert step.fused_launches == 1
    assert step.moved <= MOVED[name] + 2.1
    assert step.temporary < 0.01
    assert step.in_place


LAYERS, LAYER_SIDE = 12, 1024


def momentum_of_a_layer(values, scalars, index, multiply_add):
    grad, param, trace, low = values
    trace = multiply_add(jnp.full_like(trace, 0.9), trace, grad.astype(F32))
    return [(param.astype(F32) - trace).astype(BF16), trace, low ^ jnp.uint32(1)]


def layer_by_layer(params, traces, words, grads):
    """Update a stack in place, as a backward pass over the layers would."""

    def update(i, stacks):
        grad = lax.dynamic_index_in_dim(grads, i, 0, keepdims=False)
        given = [Operand(stack) for stack in stacks[:2]]
        return tuple(
            pallas_kernels.fused_update(
                momentum_of_a_layer,
                [Operand(grad), *given, Operand(stacks[2], 8)],
                [Result(BF16, None, 1), Result(F32, None, 2), Result("uint32", 8, 3)],
                shape=(LAYER_SIDE, LAYER_SIDE),
                layer=i,
            )
        )

    return lax.fori_loop(0, LAYERS, update, (params, traces, words))


def test_a_stack_is_updated_in_place_a_layer_at_a_time():
    shape = LAYER_SIDE, LAYER_SIDE
    words = pallas_kernels.packed_shape(shape, 8)
    stacks = (
        leaf(LAYERS, *shape),
        leaf(LAYERS, *shape, dtype=F32),
        leaf(LAYERS, *words, dtype=jnp.uint32),
    )
    arguments = *stacks, leaf(LAYERS, *shape)
    lowered = lower_for(gpu_mesh(), layer_by_layer, *arguments, donate=(0, 1, 2))
    compiled = lowered.compile()
    gradient = 2 * LAYER_SIDE**2
    assert compiled.as_text().count("__gpu$xla.gpu.triton") == 1
    assert memory(compiled).temp_size_in_bytes <= 1.01 * gradient
    assert memory(compiled).alias_size_in_bytes == bytes_of(stacks)
    assert max(copies(compiled), default=0) <= gradient


@pytest.mark.parametrize("bits", [1, 3, 8, 11, 16])
@pytest.mark.parametrize("direction", ["pack", "unpack"])
def test_packing_is_one_kernel(direction, bits):
    shape = SIDE, SIDE
    if direction == "pack":
        fn = functools.partial(pallas_kernels.pack, bits=bits)
        argument = leaf(*shape, dtype=jnp.uint32)
    else:
        fn = functools.partial(pallas_kernels.unpack, bits=bits, shape=shape)
        argument = leaf(*pallas_kernels.packed_shape(shape, bits), dtype=jnp.uint32)
    found = program(lower_for(gpu_mesh(), fn, argument))
    ((_, moved),) = kernels(found.compiled)
    (kernel,) = found.kernels.values()
    assert kernel.name == "fused_update"
    assert moved <= (4 + bits / 8) * PARAMETERS + 64
    assert {access.bits for access in kernel.accesses} == {128}
    assert found.compiled.memory_analysis().temp_size_in_bytes == 0
    assert_nothing_spills(kernel)
