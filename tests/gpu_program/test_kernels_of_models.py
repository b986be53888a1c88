"""Kernels of whole models' steps, compiled for one H200 and for eight."""

import collections
import functools

import optax
import pytest
from jax.sharding import PartitionSpec as P

import lowbit_optax
from tools.gpu_program.machine_code import instructions_per_parameter
from tools.gpu_program.steps import (
    bytes_of_accesses,
    gpt2,
    leaf,
    lower_lpmm_step,
    lower_step,
)
from tools.gpu_program.targets import gpu_mesh
from tools.gpu_program.unrolled import resnet18
from tools.hlo import collectives

pytestmark = pytest.mark.usefixtures("by_triton", "disassembler")

EXTRA_BITS_8 = lowbit_optax.extra_bits_adamw(1e-3, bits=8)
KAHAN = lowbit_optax.kahan_adamw(1e-3)
LOWBIT = lowbit_optax.lowbit_adamw(1e-3)
CLIPPED = lowbit_optax.lowbit(
    optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
)
SCALED = lowbit_optax.with_loss_scale(
    CLIPPED, lowbit_optax.loss_scaling.backoff_scale()
)

# A model, a transformation, and the maximum of launches and of moved bytes. In GPT-2,
# two matrices have a kernel each, and the other 48 matrices and the 98 vectors share
# kernels. ResNet-18 has 62 leaves. Gradients are read once for the update, once for the
# norm, and once for overflows.
MODELS = [
    ("gpt2", EXTRA_BITS_8, 26, 24.2),
    ("gpt2", KAHAN, 26, 18.2),
    ("resnet18", EXTRA_BITS_8, 16, 24.2),
    ("resnet18", KAHAN, 16, 18.2),
    ("gpt2", LOWBIT, 22, 12.28),
    ("gpt2", CLIPPED, 224, 14.28),
    ("gpt2", SCALED, 430, 16.3),
]


@pytest.mark.parametrize(("model", "tx", "launches", "moved"), MODELS)
def test_a_model_in_few_kernels_and_one_pass(model, tx, launches, moved):
    if model == "resnet18":
        pytest.importorskip("flax")
    step = lower_step(tx, gpt2() if model == "gpt2" else resnet18().params)
    assert len(step.launches) <= launches
    assert step.moved <= moved
    assert step.temporary < 0.002
    assert step.in_place


def test_the_kernel_of_gpt2s_matrices_leaves_room_for_16_warps():
    kernels = lower_step(LOWBIT, gpt2()).machine_code.values()
    shared = max(kernels, key=lambda kernel: len(kernel.launches))
    assert len(shared.launches) == 12
    assert shared.registers <= 128
    assert shared.spill_stores == shared.spill_loads == 0


def test_twelve_equal_leaves_run_the_instructions_of_one():
    alone = lower_step(LOWBIT, leaf(768, 2304))
    shared = lower_step(LOWBIT, [leaf(768, 2304)] * 12)
    (many,) = (k for n, k in shared.machine_code.items() if "many" in n)
    assert shared.fused_launches == len(many.launches) == 3
    assert many.registers <= 128
    assert many.spill_stores == many.spill_loads == many.stack == 0
    count = functools.partial(instructions_per_parameter, many, shared.parameters)
    # A thread executes one of four branches.
    common = count(conditional=False)
    executed = common + (count() - common) / 4
    one = instructions_per_parameter(alone.fused, alone.parameters)
    assert executed <= 1.05 * one
    accesses = collections.Counter(access.bits for access in many.accesses)
    assert set(accesses) <= {16, 32, 64, 128}
    # The other accesses are scales of 2 bytes each and the table of scalars.
    assert accesses[64] + accesses[128] >= 4 * 32


@pytest.mark.parametrize(("name", "kernels"), [("lpmm_adam", 2), ("lpmm_sgd", 1)])
def test_equal_quantised_leaves_share_kernels(name, kernels):
    # Adam's second moments have smaller blocks. A kernel with blocks of two sizes takes
    # long to compile, so it updates fewer leaves.
    options = {"momentum": 0.9} if name == "lpmm_sgd" else {}
    tx = getattr(lowbit_optax, name)(1e-3, **options)
    step = lower_lpmm_step(tx, [leaf(96, 256)] * 6)
    assert step.fused_launches == kernels
    assert step.in_place


def test_the_sums_of_equal_leaves_share_a_kernel():
    step = lower_step(lowbit_optax.factored_adamw(1e-3), [leaf(768, 2304)] * 12)
    kernels = step.machine_code
    (sums,) = (k for name, k in kernels.items() if name.startswith("axis_sums"))
    (updates,) = (k for name, k in kernels.items() if name.startswith("fused_update"))
    assert len(sums.launches) == 1
    assert sums.spill_stores == sums.spill_loads == 0
    assert step.fused_launches == 1 + len(updates.launches)
    assert len(step.launches) <= 34
    assert step.moved <= 11.35


def arguments_of(step):
    return step.compiled.memory_analysis().argument_size_in_bytes


def test_eight_h200s_each_update_their_eighth_of_gpt2():
    """Leaves are sharded by rows, but the vocabulary is sharded by columns.

    The number of its rows is not divisible by 8. Vectors, a thousandth of all
    parameters, are not sharded.
    """
    by_rows = lambda x: P(None, "d") if x.shape[0] > 4096 else P("d")
    alone, shared = (
        lower_step(EXTRA_BITS_8, gpt2(), mesh=gpu_mesh(devices), spec=by_rows)
        for devices in (1, 8)
    )
    assert not collectives(shared.compiled)
    assert shared.fused_launches == alone.fused_launches
    assert shared.moved == pytest.approx(alone.moved / 8, rel=0.01)
    assert arguments_of(shared) == pytest.approx(arguments_of(alone) / 8, rel=0.01)
    assert shared.temporary < 0.001


@pytest.mark.parametrize(
    ("shape", "devices", "spec"),
    [
        ((4096, 4096), 8, P("d")),
        ((4096, 4096), 8, P(None, "d")),
        ((50304, 768), 8, P("d")),
        ((151936, 896), 8, P("d")),
        ((4096, 4096), 256, P("d")),
        ((4096, 4096), 256, P(None, "d")),
        ((4096, 32, 128), 8, P(None, "d")),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("tx", "moved", "instructions"),
    [(EXTRA_BITS_8, 24, 36), (KAHAN, 18, 79.5), (LOWBIT, 12.25, 64.5)],
    ids=["extra bits", "kahan", "lowbit"],
)
def test_shards_of_whole_tiles_need_nothing_of_each_other(
    tx, moved, instructions, shape, devices, spec
):
    step = lower_step(tx, leaf(*shape), mesh=gpu_mesh(devices), spec=spec)
    assert not collectives(step.compiled)
    assert step.fused_launches == 1
    assert step.moved * devices <= moved + 0.1
    assert step.temporary * devices < 0.02
    own = step.parameters / devices
    assert arguments_of(step) <= 1.001 * (step.stored / devices + 2 * own)
    assert instructions_per_parameter(step.fused, own) <= instructions
    wide = sum(bytes_of_accesses(step.fused, bits) for bits in (64, 128))
    assert wide >= 0.97 * (moved - 0.25) * own
