"""The interpreter of PTX, tested on kernels with known results."""

import fractions
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools.gpu_program.launch import Launch
from tools.gpu_program.ptx import floats, interpreter
from tools.gpu_program.ptx.faults import (
    Divergence,
    Endless,
    Misaligned,
    OutOfBounds,
    Race,
    Uninitialised,
    UnknownInstruction,
)
from tools.gpu_program.ptx.memory import Memory
from tools.gpu_program.ptx.parser import parse
from tools.gpu_program.ptx.program import Unsupported, compile_program
from tools.gpu_program.targets import gpu_mesh, lower_for

THREADS = 64


def kernel(body):
    """A kernel in which ``%d1`` points to the thread's word, whose value is ``%r1``."""
    return parse(f"""
        .extern .shared .align 16 .b8 scratch[];
        .visible .entry k(.param .u64 pointer) {{
            .reg .b32 %r<20>; .reg .b64 %d<20>; .reg .pred %p<9>; .reg .b16 %h<9>;
            ld.param.u64 %d0, [pointer];
            mov.u32 %r0, %tid.x;
            mov.u32 %r10, %ntid.x;
            mad.lo.s32 %r0, %ctaid.x, %r10, %r0;
            mul.wide.u32 %d2, %r0, 4;
            add.s64 %d1, %d0, %d2;
            ld.global.b32 %r1, [%d1];
            {body}
            ret;
        }}""")["k"]


def run(body, words, blocks=1, writable=True):
    """The words after a kernel ran with one thread per word.

    The 64 bytes behind the words can be written but not read.
    """
    words = np.asarray(words, np.uint32)
    memory = Memory(words.nbytes + 64)
    memory.fill(0, words)
    memory.begin([(0, words.nbytes)], [(0, words.nbytes + 64)] if writable else [])
    launch = Launch((blocks, 1, 1), (words.size // blocks, 1, 1), 4 * THREADS)
    interpreter.execute(kernel(body), launch, memory, [0])
    return memory.array(0, words.shape, np.uint32)


STORE = "st.global.b32 [%d1], %r2;"
WORDS = np.random.default_rng(0).integers(0, 2**32, THREADS, np.uint64)
WORDS[:6] = 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 0x00FF8001


def signed(x, bits=32):
    return x - (x >> bits - 1 << bits)


ON_INTEGERS = {
    "add.s32 %r2, %r1, -3;": lambda x: x - 3,
    "mul.lo.s32 %r2, %r1, 12345;": lambda x: x * 12345,
    "mul.hi.u32 %r2, %r1, -7;": lambda x: x * (2**32 - 7) >> 32,
    "mul.hi.s32 %r2, %r1, -7;": lambda x: signed(x) * -7 >> 32,
    "mad.lo.s32 %r2, %r1, %r1, %r1;": lambda x: x * x + x,
    "neg.s32 %r2, %r1;": lambda x: -x,
    "abs.s32 %r2, %r1;": lambda x: abs(signed(x)),
    "min.s32 %r2, %r1, 5;": lambda x: min(signed(x), 5),
    "max.u32 %r2, %r1, 5;": lambda x: max(x, 5),
    "max.relu.s32 %r2, %r1, -5;": lambda x: max(signed(x), 0),
    "shl.b32 %r2, %r1, 40;": lambda x: 0,
    "shl.b32 %r2, %r1, 7;": lambda x: x << 7,
    "shr.u32 %r2, %r1, 7;": lambda x: x >> 7,
    "shr.s32 %r2, %r1, 7;": lambda x: signed(x) >> 7,
    "shr.s32 %r2, %r1, 99;": lambda x: signed(x) >> 31,
    "not.b32 %r2, %r1;": lambda x: ~x,
    "bfe.u32 %r2, %r1, 5, 11;": lambda x: x >> 5 & 2047,
    "bfe.s32 %r2, %r1, 5, 11;": lambda x: signed(x >> 5 & 2047, 11),
    "bfe.u32 %r2, %r1, 0, 32;": lambda x: x,
    "bfe.s32 %r2, %r1, 28, 9;": lambda x: signed(x >> 28, 4),
    "prmt.b32 %r2, %r1, 0x44332211, 0x7410;": lambda x: (
        0x44110000 | x & 255 | (x >> 8 & 255) << 8
    ),
    "prmt.b32 %r2, %r1, 0, 0x4b49;": lambda x: (
        255 * (x >> 15 & 1) | 65536 * 255 * (x >> 31)
    ),
    "lop3.b32 %r2, %r1, 0xff00ff00, 0xf0f0f0f0, 0xca;": lambda x: (
        x & 0xFF00FF00 | ~x & 0xF0F0F0F0
    ),
    "shf.l.wrap.b32 %r2, %r1, 0x12345678, 36;": lambda x: 0x12345678 << 4 | x >> 28,
    "shf.r.wrap.b32 %r2, %r1, 5, 36;": lambda x: x >> 4 | 5 << 28,
    "clz.b32 %r2, %r1;": lambda x: 32 - x.bit_length(),
    "cvt.u16.u32 %h1, %r1; cvt.s32.s16 %r2, %h1;": lambda x: signed(x & 65535, 16),
    "mov.b32 {%h1, %h2}, %r1; mov.b32 %r2, {%h2, %h1};": lambda x: x >> 16 | x << 16,
    "setp.lt.s32 %p1, %r1, 9; selp.b32 %r2, 1, 2, %p1;": lambda x: 2 - (signed(x) < 9),
    "mul.wide.s32 %d3, %r1, -9; shr.u64 %d3, %d3, 32; cvt.u32.u64 %r2, %d3;": (
        lambda x: signed(x) * -9 >> 32
    ),
}


@pytest.mark.parametrize("code", ON_INTEGERS)
def test_integers(code):
    want = [ON_INTEGERS[code](int(x)) % 2**32 for x in WORDS]
    assert run(code + STORE, WORDS).tolist() == want


def patterns(*numbers):
    return np.resize(np.float32(numbers), THREADS).view(np.uint32)


ON_FLOATS = {
    "add.rn.f32 %r2, %r1, 0f3F800000;": (3e-8, 1.0),
    "mul.rn.ftz.f32 %r2, %r1, 0f3F000000;": (2.0**-126, 0.0),
    "mul.rn.f32 %r2, %r1, 0f3F000000;": (2.0**-126, 2.0**-127),
    "max.f32 %r2, %r1, 0f80000000;": (math.nan, -0.0),
    "min.f32 %r2, %r1, 0f80000000;": (0.0, -0.0),
    "max.NaN.f32 %r2, %r1, 0f00000000;": (math.nan, math.nan),
    "sqrt.approx.ftz.f32 %r2, %r1;": (6.25, 2.5),
    "rcp.approx.ftz.f32 %r2, %r1;": (-0.0, -math.inf),
    "cvt.rni.f32.f32 %r2, %r1;": (2.5, 2.0),
    "cvt.rzi.s32.f32 %r2, %r1; cvt.rn.f32.s32 %r2, %r2;": (3e9, 2.0**31),
    "cvt.rn.bf16x2.f32 %r2, %r1, %r1; and.b32 %r2, %r2, 0xffff0000;": (
        1 + 2.0**-8,
        1.0,
    ),
    "cvt.rn.bf16.f32 %h1, %r1; cvt.f32.bf16 %r2, %h1;": (1 + 3 * 2.0**-8, 1 + 2.0**-6),
    "cvt.sat.f32.f32 %r2, %r1;": (1.5, 1.0),
    "setp.ltu.f32 %p1, %r1, 0f00000000; selp.f32 %r2, %r1, 0f00000000, %p1;": (
        math.nan,
        math.nan,
    ),
}


@pytest.mark.parametrize("code", ON_FLOATS)
def test_floats(code):
    given, want = ON_FLOATS[code]
    got = run(code + STORE, patterns(given)).view(np.float32)
    np.testing.assert_array_equal(got, np.float32(want))
    np.testing.assert_array_equal(np.signbit(got), np.signbit(np.float32(want)))


def products_and_addends():
    random = np.random.default_rng(0)
    mantissas = random.integers(2**23, 2**24, (3, 4000)).astype(np.float64)
    a, b = (mantissas[:2] * 2.0 ** random.integers(-60, -10, (2, 4000))).astype("f4")
    near = np.float64(a) * b * 2.0 ** random.integers(-30, 30, 4000)
    c = np.float32(near * random.choice([-1, -0.5, 1, 2], 4000))
    c[:500] = -np.float32(np.float64(a[:500]) * b[:500])
    exact = [
        fractions.Fraction(float(x) * float(y)) + fractions.Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    return a, b, c, exact


@pytest.mark.parametrize("direction", ["rz", "rm"])
def test_fma_is_rounded_in_a_direction(direction):
    *given, numbers = products_and_addends()
    for exact, result in zip(numbers, floats.fma(*given, direction), strict=True):
        up = direction == "rz" and exact < 0
        sign = -1 if up else 1
        next_ = np.nextafter(result, np.float32(sign * np.inf))
        held, beyond = (fractions.Fraction(float(x)) for x in (result, next_))
        assert sign * held <= sign * exact < sign * beyond


def test_fma_is_rounded_once():
    a, b, c, numbers = products_and_addends()
    for exact, result in zip(numbers, floats.fma(a, b, c), strict=True):
        distance = abs(fractions.Fraction(float(result)) - exact)
        for toward in (-np.inf, np.inf):
            other = np.nextafter(result, np.float32(toward))
            gap = abs(fractions.Fraction(float(other)) - exact)
            even = result.view(np.uint32) % 2 == 0
            assert distance < gap or (distance == gap and even)


def test_threads_part_and_meet_again():
    got = run(
        """
        mov.u32 %r2, 0;
        top:
        setp.ge.u32 %p1, %r2, %r1;
        @%p1 bra done;
        add.s32 %r2, %r2, 2;
        bra top;
        done:
        bar.sync 0;
        """
        + STORE,
        np.arange(THREADS),
    )
    assert got.tolist() == [x + x % 2 for x in range(THREADS)]


def test_a_guard_leaves_other_threads_alone():
    got = run(f"setp.eq.b32 %p1, %r1, 3; mov.b32 %r2, 9; @!%p1 {STORE}", [0, 3, 5, 7])
    assert got.tolist() == [9, 3, 9, 9]


SHARED = """
    mov.b64 %d3, scratch;
    mul.wide.u32 %d4, %r0, 4;
    add.s64 %d5, %d3, %d4;
    st.shared.b32 [%d5], %r1;
    {}
    xor.b64 %d5, %d5, 128;
    ld.shared.b32 %r2, [%d5];
    """


def test_shared_memory_after_a_barrier():
    got = run(SHARED.format("bar.sync 0;") + STORE, np.arange(THREADS))
    assert got.tolist() == [x ^ 32 for x in range(THREADS)]
    with pytest.raises(Race, match=r"ld\.shared\.b32"):
        run(SHARED.format("") + STORE, np.arange(THREADS))


@pytest.mark.parametrize(
    ("mode", "lane", "want"),
    [
        ("bfly", "5, 31", lambda x: x ^ 5),
        ("down", "3, 31", lambda x: x + 3 if x % 32 < 29 else x),
        ("idx", "7, 31", lambda x: x // 32 * 32 + 7),
    ],
)
def test_exchanges_in_a_warp(mode, lane, want):
    code = f"shfl.sync.{mode}.b32 %r2, %r1, {lane}, -1;"
    got = run(code + STORE, np.arange(THREADS))
    assert got.tolist() == [want(x) for x in range(THREADS)]


def test_exchanges_in_a_block_smaller_than_a_warp():
    code = "shfl.sync.down.b32 %r2, %r1, 2, 31, -1;"
    got = run(code + STORE, np.arange(8), blocks=2)
    assert got[[0, 1, 4, 5]].tolist() == [2, 3, 6, 7]
    assert not set(got[[2, 3, 6, 7]].tolist()) & set(range(8))  # not from any thread


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("redux.sync.max.s32 %r2, %r1, -1;", lambda x: 25 if x < 32 else 57),
        ("redux.sync.max.u32 %r2, %r1, -1;", lambda x: 2**32 - 1 if x < 32 else 57),
        ("mov.b32 %r3, -1; redux.sync.max.s32 %r2, %r0, %r3;", lambda x: x | 31),
    ],
)
def test_reductions_over_a_warp(code, want):
    words = (np.arange(THREADS) - 6).astype(np.uint32)
    assert run(code + STORE, words).tolist() == [want(x) for x in range(THREADS)]


FIRST = "setp.eq.b32 %p1, %r0, 0; mov.b32 %r2, %r1;"
FAULTS = {
    "ld.global.b32 %r2, [%d1+4];": (OutOfBounds, "thread 63 of block 0"),
    "ld.global.b32 %r2, [%d1+-4];": (OutOfBounds, "thread 0 of block 0"),
    "ld.global.b32 %r2, [%d1+2];": (Misaligned, "4 does not divide"),
    "ld.global.v2.b32 {%r2, %r3}, [%d1];": (Misaligned, "8 does not divide"),
    "mov.b64 %d3, scratch; st.shared.b32 [%d3], %r0;": (Race, "thread 0 .* at once"),
    "ld.global.b32 %r2, [%d0]; st.global.b32 [%d1], %r0;": (Race, "another .* reads"),
    "st.global.b32 [%d1], %r9;": (Uninitialised, "%r9 is read before"),
    f"{FIRST} @%p1 mov.b32 %r9, 1; st.global.b32 [%d1], %r9;": (
        Uninitialised,
        "%r9 is read where",
    ),
    "mov.b64 %d3, scratch; ld.shared.b32 %r2, [%d3];": (
        Uninitialised,
        "nothing has written",
    ),
    "mov.b64 %d3, scratch; ld.shared.b32 %r2, [%d3+256];": (OutOfBounds, "not given"),
    "st.global.b32 [%d1+68], %r0;": (OutOfBounds, "thread 63 of block 0"),
    f"{FIRST} @%p1 bra done; bar.sync 0; done:": (Divergence, "elsewhere"),
    f"{FIRST} @%p1 bra done; shfl.sync.bfly.b32 %r3, %r1, 1, 31, -1; done:": (
        Divergence,
        "a thread of the warp",
    ),
    f"{FIRST} @%p1 bra done; redux.sync.max.s32 %r3, %r1, -1; done:": (
        Divergence,
        "a thread of the warp",
    ),
    "redux.sync.max.s32 %r2, %r1, 255;": (UnknownInstruction, "whole warps"),
    "redux.sync.add.s32 %r2, %r1, -1;": (UnknownInstruction, "does not support"),
    "shfl.sync.up.b32 %r2, %r1, 3, 31, -1;": (UnknownInstruction, "does not support"),
    "shfl.sync.bfly.b32 %r2, %r1, 1, 0x1c1f, -1;": (UnknownInstruction, "whole warps"),
    "ld.global.L1::evict_first.b32 %r2, [%d1];": (
        UnknownInstruction,
        "does not support",
    ),
    "fence.proxy.async;": (UnknownInstruction, "does not support"),
    "cvta.to.shared.u64 %d3, %d1;": (UnknownInstruction, "does not support"),
    "sin.approx.f32 %r2, %r1;": (UnknownInstruction, "does not support"),
    "add.sat.s32 %r2, %r1, %r1;": (UnknownInstruction, "does not support"),
    "cvt.rn.f16.f32 %h1, %r1;": (UnknownInstruction, "does not support"),
    "cvt.rzi.s64.f32 %d3, %r1;": (UnknownInstruction, "does not support"),
    "mul.wide.u64 %d3, %d1, %d1;": (UnknownInstruction, "does not support"),
    "add.rn.bf16x2 %r2, %r1, %r1;": (UnknownInstruction, "does not support"),
    "ld.b32 %r2, [%d1];": (UnknownInstruction, "does not support"),
    "mov.u32 %r2, %clock;": (UnknownInstruction, "%clock"),
}


@pytest.mark.parametrize("code", FAULTS)
def test_faults_raise_errors_that_name_the_instruction(code):
    fault, message = FAULTS[code]
    with pytest.raises(fault, match=message) as error:
        run(code, np.arange(THREADS))
    named = str(error.value).split("`")[1]
    assert named in code
    assert named.split()[0] not in ("mov.b64", "setp.eq.b32")


def test_a_loop_without_an_end_is_an_error(monkeypatch):
    monkeypatch.setattr(interpreter, "_MOST_STEPS", 1000)
    with pytest.raises(Endless, match="1000 steps"):
        run("top: bra top;", np.arange(THREADS))


def test_an_array_that_is_only_read_is_not_written():
    with pytest.raises(OutOfBounds, match=r"st\.global"):
        run("mov.b32 %r2, 0;" + STORE, np.arange(THREADS), writable=False)


@pytest.mark.parametrize(
    "code",
    [
        "bar.sync 0; st.global.b32 [%d0], 5;",
        f"bar.sync 0; st.global.b32 [%d0+{8 * THREADS}], 5;",
        f"ld.global.b32 %r3, [%d0]; bar.sync 0; {FIRST} @%p1 st.global.b32 [%d0], 5;",
    ],
    ids=["what another reads", "at once", "what both read"],
)
def test_blocks_race_even_with_barriers_and_equal_values(code):
    with pytest.raises(Race):
        run(code, np.arange(2 * THREADS), blocks=2)
    alone = code.replace(f"+{8 * THREADS}", "")
    assert run(alone, np.arange(THREADS))[0] == 5


def test_two_writes_race_without_a_barrier_between():
    code = """
        mov.b64 %d3, scratch;
        add.s64 %d4, %d3, %d2;
        st.shared.b32 [%d4], %r0;
        BARRIER
        xor.b64 %d4, %d4, 4;
        st.shared.b32 [%d4], %r0;
        """
    run(code.replace("BARRIER", "bar.sync 0;"), np.arange(THREADS))
    with pytest.raises(Race, match="thread 0 of block 0"):
        run(code.replace("BARRIER", ""), np.arange(THREADS))


def test_the_shared_memory_of_another_block_is_out_of_bounds():
    code = "mov.b64 %d3, scratch; add.s64 %d3, %d3, %d2; st.shared.b32 [%d3+{}], %r0;"
    run(code.format(0), np.arange(THREADS))
    with pytest.raises(OutOfBounds, match="block 0"):
        run(code.format(4 * THREADS), np.arange(2 * THREADS), blocks=2)


def test_parameters_are_read_as_newer_ptx_spells_it():
    code = "ld.param::entry.u64 %d3, [pointer]; cvt.u32.u64 %r2, %d3;"
    assert not run(code + STORE, WORDS).any()


def test_xla_kernels_run():
    def fn(x, y):
        return jnp.cumsum(x[::-1]) * 2, jnp.sum(y, axis=1), x.astype(jnp.float32) / 3

    x = jnp.arange(37, dtype=jnp.int32)
    y = jnp.arange(700, dtype=jnp.float32).reshape(7, 100)
    got = compile_program(lower_for(gpu_mesh(), fn, x, y)).run(x, y)
    for own, want in zip(got, fn(x, y), strict=True):
        np.testing.assert_allclose(own, want, rtol=1e-6)


def test_programs_with_loops_are_refused():
    fn = lambda x: jax.lax.fori_loop(0, 100, lambda i, v: jnp.sqrt(v[::-1]), x)
    program = compile_program(lower_for(gpu_mesh(), fn, jnp.ones(8)))
    with pytest.raises(Unsupported, match="while"):
        program.run(jnp.ones(8))
