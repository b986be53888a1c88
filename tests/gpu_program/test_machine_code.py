"""The reader of machine code, tested on kernels with known counts."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tools.gpu_program.launch import Launch
from tools.gpu_program.machine_code import (
    instructions_per_parameter,
    program,
)
from tools.gpu_program.machine_code.compilation import (
    kernels_of_ptx,
)
from tools.gpu_program.machine_code.kernel import UnknownTrips
from tools.gpu_program.targets import gpu_mesh, lower_for

pytestmark = pytest.mark.usefixtures("disassembler")

F32 = jnp.float32
SIDE = 1024


def pallas(kernel, n=SIDE * SIDE, block=512, warps=4, dtype=F32):
    """A function of one array that runs ``kernel`` on blocks of it."""
    spec = pl.BlockSpec((block,), lambda i: (i,))
    return pl.pallas_call(
        kernel,
        grid=(n // block,),
        in_specs=[spec],
        out_specs=spec,
        out_shape=jax.ShapeDtypeStruct((n,), dtype),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        name="small",
    )


def only_kernel(fn, *args):
    (kernel,) = program(lower_for(gpu_mesh(), fn, *args)).kernels.values()
    return kernel


def grids(kernel):
    return {launch.grid for launch in kernel.launches}


def loaded_bits(kernel):
    return [access.bits for access in kernel.accesses if not access.store]


def vector(n=SIDE * SIDE, dtype=F32):
    return jax.ShapeDtypeStruct((n,), dtype)


def ptx(body, registers=".reg .b32 %r<20>; .reg .b64 %d<20>; .reg .pred %p<9>;"):
    """A kernel ``k`` with a pointer argument in ``%d1`` and its thread in ``%r1``."""
    return f"""
        .version 8.0
        .target sm_90a
        .address_size 64
        .visible .entry k(.param .u64 pointer) {{
            {registers} .reg .f32 %f<9>;
            ld.param.u64 %d1, [pointer];
            mov.u32 %r1, %tid.x;
            mul.wide.u32 %d2, %r1, 4;
            add.s64 %d1, %d1, %d2;
            ld.global.f32 %f1, [%d1];
            {body}
            st.global.f32 [%d1], %f1;
            ret;
        }}"""


def code_of(body, **kwargs):
    return kernels_of_ptx(ptx(body), **kwargs)["k"]


def sines(kernel, **kwargs):
    """The number of sines in the loops of ``kernel`` that a thread executes."""
    return kernel.opcodes(**kwargs)["MUFU.SIN"]


SINE = "sin.approx.f32 %f1, %f1;"
NO_UNROLL = '.pragma "nounroll";'
LOOP = f"""
    mov.u32 %r2, {{start}};
    top: {NO_UNROLL}
    {SINE}
    add.s32 %r2, %r2, {{step}};
    setp.{{test}} %p1, %r2, {{stop}};
    @%p1 bra top;"""


def test_an_xla_fusion():
    kernel = only_kernel(
        lambda x: x * 2 + 1, jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
    )
    (launch,) = kernel.launches
    assert launch.block == (128, 1, 1)
    assert launch.shared == 0
    assert launch.threads * 4 == SIDE**2
    assert loaded_bits(kernel) == [128]
    assert kernel.global_stores == {128: 1}
    assert kernel.masked_stores == 0
    assert kernel.opcodes()["FADD"] == 8
    assert kernel.executed() == kernel.instructions
    assert 10 < kernel.executed() < 40
    assert instructions_per_parameter(kernel, SIDE**2) == kernel.executed() / 4
    assert 8 <= kernel.registers <= 32
    assert not kernel.lost_loops
    assert kernel.stack == kernel.spill_stores == kernel.spill_loads == 0
    assert kernel.static_shared == 0


def test_a_reduction_declares_shared_memory():
    kernels = program(lower_for(gpu_mesh(), jnp.sum, vector())).kernels
    assert any(k.static_shared for k in kernels.values())
    assert {len(k.launches) for k in kernels.values()} == {1}
    first, second = map(grids, kernels.values())
    assert first != second


@pytest.mark.parametrize("trips", [48, 96, 1000])
def test_a_pallas_loop(trips):
    def root(x, y):
        y[:] = lax.fori_loop(0, trips, lambda i, v: jnp.sqrt(v + 1.0), x[:])

    kernel = only_kernel(pallas(root), vector())
    assert kernel.name == "small"
    assert kernel.launches == (Launch((SIDE**2 // 512, 1, 1), (128, 1, 1), 0),)
    assert kernel.opcodes()["MUFU.RSQ"] + kernel.opcodes()["MUFU.SQRT"] == 4 * trips
    # Everything else in the loop is executed as often as the square roots.
    inside = sum(
        block.visits * len(block.opcodes)
        for block in kernel.blocks
        if any("MUFU" in opcode for opcode in block.opcodes)
    )
    assert inside > 0.9 * kernel.executed() - 60
    assert kernel.executed() < 60 + 4 * 20 * trips


def test_spills_and_registers():
    def kernel(x, y):
        v = x[:]
        y[:] = lax.fori_loop(0, 50, lambda i, w: w * w + v, v)

    lean = only_kernel(pallas(kernel), vector())
    assert lean.registers < 40
    assert lean.stack == lean.spill_stores == lean.spill_loads == 0
    fat = only_kernel(pallas(kernel, block=2**14, warps=1), vector())
    assert fat.spill_stores > 1000
    assert fat.spill_loads > 1000
    assert fat.stack > 1000


@pytest.mark.parametrize(
    ("dtype", "block", "bits"),
    [(F32, 512, 128), (jnp.bfloat16, 512, 64), (jnp.int8, 512, 32), (F32, 128, 32)],
)
def test_widths(dtype, block, bits):
    def kernel(x, y):
        y[:] = x[:] + x[:]

    found = only_kernel(pallas(kernel, block=block, dtype=dtype), vector(dtype=dtype))
    assert loaded_bits(found) == [bits]
    assert found.global_stores == {bits: 1}


def counted(start, step, test, stop):
    return LOOP.format(start=start, step=step, test=test, stop=stop)


def counted_in_64_bits(step, test, stop):
    return f"""
        mov.u64 %d3, 0;
        top: {NO_UNROLL}
        {SINE}
        add.s64 %d3, %d3, {step};
        setp.{test} %p1, %d3, {stop};
        @%p1 bra top;"""


TESTED_AT_ITS_TOP = f"""
    mov.u32 %r2, 0;
    top: {NO_UNROLL}
    setp.ge.s32 %p1, %r2, 33;
    @%p1 bra done;
    {SINE}
    add.s32 %r2, %r2, 1;
    bra top;
    done:"""
SHIFTED = f"""
    mov.u32 %r2, 1;
    top: {NO_UNROLL}
    {SINE}
    shl.b32 %r2, %r2, 1;
    setp.lt.u32 %p1, %r2, 1000;
    @%p1 bra top;"""

NESTED = f"""
    mov.u32 %r2, 0;
    outer: {NO_UNROLL}
    mov.u32 %r3, {{inner}};
    inner: {NO_UNROLL}
    {SINE}
    add.s32 %r3, %r3, 1;
    setp.lt.s32 %p1, %r3, 9;
    @%p1 bra inner;
    add.s32 %r2, %r2, 1;
    setp.lt.s32 %p2, %r2, 7;
    @%p2 bra outer;"""


@pytest.mark.parametrize(
    ("loop", "trips"),
    [
        (counted(0, 1, "lt.s32", 100), 100),
        (counted(0, 8, "lt.u32", 120), 15),
        (counted(0, 7, "lt.s32", 100), 15),
        (counted(100, -1, "ne.s32", 0), 100),
        (counted(-5, 1, "le.s32", 5), 11),
        (counted(0, 1, "lt.s32", 0), 1),
        (counted(0, 3, "eq.s32", 3), 2),
        (counted_in_64_bits(0x40000000, "ne.s64", 0x900000000), 36),
        (counted_in_64_bits(0x10, "ne.s64", 0x90), 9),
        (counted_in_64_bits(0x40000001, "ne.s64", 36 * 0x40000001), 36),
        (counted_in_64_bits(0x40000000, "lt.s64", 0x900000000), 36),
        (counted_in_64_bits(0x40000000, "lt.s64", 0x900000001), 37),
        (counted_in_64_bits(0x40000000, "le.u64", 0x900000000), 37),
        (TESTED_AT_ITS_TOP, 33),
        (SHIFTED, 10),
        (NESTED.format(inner=0), 63),
        # Another loop sets the number of trips.
        (NESTED.format(inner="%r2"), sum(9 - i for i in range(7))),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else "loop",
)
def test_trip_counts(loop, trips):
    assert sines(code_of(loop)) == trips


def test_a_loop_of_unknown_trips_in_a_loop():
    kernel = code_of(NESTED.format(inner="%r1"))
    (inner,) = kernel.lost_loops
    with pytest.raises(UnknownTrips, match=f"the loops at {inner:#x}$"):
        kernel.executed()


def test_a_loop_left_early_on_data_is_unknown():
    kernel = code_of(f"""
        mov.u32 %r2, 0;
        top: {NO_UNROLL}
        {SINE}
        setp.gt.f32 %p2, %f1, 0f3F000000;
        @%p2 bra done;
        add.s32 %r2, %r2, 1;
        setp.lt.s32 %p1, %r2, 9;
        @%p1 bra top;
        done:
        again: {NO_UNROLL}
        {SINE}
        add.s32 %r2, %r2, 1;
        setp.lt.s32 %p1, %r2, 20;
        @%p1 bra again;""")
    assert len(kernel.lost_loops) == 2


def test_a_branch_on_data_is_conditional():
    kernel = code_of(f"""
        setp.gt.f32 %p1, %f1, 0f3F000000;
        @%p1 bra done;
        {(SINE + "ex2.approx.f32 %f1, %f1;") * 30}
        done:""")
    assert sines(kernel) == 30
    assert sines(kernel, conditional=False) == 0
    assert kernel.masked_stores == 0


def test_a_call_is_counted_as_often_as_it_is_made():
    loop = counted(0, 1, "lt.s32", 50)
    kernel = code_of(loop.replace(SINE, "div.rn.f32 %f1, %f1, 0f40490FDB;"))
    rounds = kernel.opcodes()
    # The slow path, for numbers near the ends of the range, ends with a return.
    assert sum(n for opcode, n in rounds.items() if opcode.startswith("RET")) >= 50
    fast = kernel.executed(conditional=False)
    assert 50 * 5 < fast < 50 * 25
    assert kernel.executed() > 2 * fast


def test_a_thread_that_leaves_masks_later_stores():
    kernel = code_of("setp.gt.u32 %p1, %r1, 7; @%p1 exit;")
    assert kernel.masked_stores == 1
    assert kernel.executed() == kernel.executed(conditional=False)
    assert code_of("").masked_stores == 0


def test_launches_of_one_kernel_add_up():
    launches = [Launch((4, 2, 1), (64, 1, 1), 0), Launch((1, 1, 1), (32, 1, 1), 0)]
    kernel = code_of("", launches={"k": launches})
    threads = 4 * 2 * 64 + 32
    assert instructions_per_parameter(kernel, 7) == kernel.executed() * threads / 7
    with pytest.raises(ValueError, match="no launch"):
        instructions_per_parameter(code_of(""), 7)


def test_kernels_of_one_name():
    def double(x, y):
        y[:] = x[:] * 2

    def root(x, y):
        y[:] = jnp.sqrt(x[:])

    found = program(
        lower_for(gpu_mesh(), lambda x: pallas(root)(pallas(double)(x)), vector())
    ).kernels
    assert len(found) == 2
    for kernel in found.values():
        assert grids(kernel) == {(SIDE**2 // 512, 1, 1)}
