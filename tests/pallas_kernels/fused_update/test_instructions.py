"""The PTX instructions of kernels give the numbers of the operations they replace.

No GPU runs them here. A few lines of numpy emulate them as NVIDIA's PTX manual
describes them.
"""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend import core

from pallas_kernels import operations
from pallas_kernels.bitfields import put_fields
from pallas_kernels.fused_update.gpu.instructions import Byte, Difference
from pallas_kernels.fused_update.gpu.peephole import (
    with_peephole_rules as by_instructions,
)
from pallas_kernels.fused_update.gpu.triton_arrays import INSTRUCTIONS as instructions

U32 = np.uint32


def with_peephole_rules(function):
    return by_instructions(function, instructions)


def convert_pair(high, low):
    """``cvt.rn.bf16x2.f32``, whose NaN is 0x7FFF."""

    def one(x):
        x = x.view(np.float32)
        with np.errstate(invalid="ignore"):
            bits = x.astype(ml_dtypes.bfloat16).view(np.uint16)
        return np.where(np.isnan(x), 0x7FFF, bits).astype(U32)

    return one(high) << U32(16) | one(low)


def permute(a, b, selector):
    """prmt.b32."""
    result = U32(0)
    for i in range(4):
        choice = selector >> U32(4 * i) & U32(15)
        byte = np.where(choice & 4, b, a) >> U32(8) * (choice & U32(3)) & U32(255)
        sign = np.where(byte & 128, U32(255), U32(0))
        result = result | np.where(choice & 8, sign, byte) << U32(8 * i)
    return result


def look_up(a, b, c, table):
    """lop3.b32."""
    result = np.zeros_like(a)
    for i in range(8):
        if int(table) >> i & 1:
            chosen = [x if i & m else ~x for x, m in ((a, 4), (b, 2), (c, 1))]
            result |= chosen[0] & chosen[1] & chosen[2]
    return result


def multiply_add(a, b, c):
    """fma.rn.f32, exact here if the float64 sum is."""
    return (np.float64(a) * np.float64(b) + np.float64(c)).astype(np.float32)


MEANINGS = {
    "fma.rn.f32": multiply_add,
    "cvt.rn.bf16x2.f32": convert_pair,
    "prmt.b32": permute,
    "lop3.b32": look_up,
    "add.u32": lambda a, b: a + b,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": lambda a, b: a << b,
    "mov.b32": lambda a: a,
    "or.b32": lambda a, b: a | b,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.ne.u32": lambda a, b: a != b,
    "setp.gt.u32": lambda a, b: a > b,
    "selp.b32": lambda a, b, p: np.where(p, a, b),
}


def execute(asm, *inputs, results=1):
    """Run PTX on numpy arrays, and return the values of ``$0`` and other results."""
    registers = {f"${results + i}": x for i, x in enumerate(inputs)}

    def value(name):
        return registers[name] if name in registers else U32(int(name, 0))

    for line in re.sub(r"[{}]", "", asm).split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            condition, line = re.fullmatch(r"(?:@(\w+) )?(.*)", line.strip()).groups()
            opcode, operands = line.split(None, 1)
            target, *sources = operands.replace(" ", "").split(",")
            result = MEANINGS[opcode](*map(value, sources))
            if condition:
                result = np.where(registers[condition], result, registers[target])
            registers[target] = result
    return [registers[f"${i}"] for i in range(results)]


def assemblies(function, *dtypes):
    arguments = [jnp.zeros(8, dtype) for dtype in dtypes]
    eqns = jax.make_jaxpr(function)(*arguments).eqns
    return [eqn.params["asm"] for eqn in eqns if "asm" in eqn.params]


def assembly(function, *dtypes):
    (asm,) = assemblies(function, *dtypes)
    return asm


def masters():
    """float32 patterns: ties, their neighbours, special values, and others."""
    high = np.arange(2**16, dtype=U32) << U32(16)
    low = U32([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    random = np.random.default_rng(0).integers(0, 2**32, 2**16, dtype=U32)
    return np.concatenate([*(high | x for x in low), random])


def test_bfloat16_is_rounded_two_at_a_time():
    asm = assembly(instructions.round_to_bfloat16, np.float32)
    x = masters()
    want = operations.round_to_bfloat16(jnp.asarray(x.view(np.float32)))
    want = np.asarray(want).view(np.uint16)
    for other in (x[::-1], np.roll(x, 1), np.full_like(x, 0x7FFFFFFF)):
        (pair,) = execute(asm, x, other)
        np.testing.assert_array_equal(pair & U32(0xFFFF), want)
        (pair,) = execute(asm, other, x)
        np.testing.assert_array_equal(pair >> U32(16), want)


@pytest.mark.parametrize("numbers", [(0, 0, 0, 0), (3, 1, 0, 2), (0, 3, 2, 1)])
def test_four_bytes_become_a_word(numbers):
    words = np.random.default_rng(0).integers(0, 2**32, (4, 999), dtype=U32)

    def put(*words):
        return instructions.put_bytes([*map(Byte, words, numbers)])

    (got,) = execute(assembly(put, *[np.uint32] * 4), *words)
    fields = [x >> U32(8 * n) & U32(255) for x, n in zip(words, numbers, strict=True)]
    np.testing.assert_array_equal(got, np.uint32(put_fields(fields, 8)[0]))


@pytest.mark.parametrize("row", [0, 7])
def test_a_bit_is_set_for_each_of_two_elements_that_differ(row):
    def put(old, new):
        same = Difference(old, old)
        return instructions.put_differences([same] * row + [Difference(old, new)])

    asm = assemblies(put, jnp.bfloat16, jnp.bfloat16)[row]
    old = np.arange(2**16, dtype=U32)
    for other in (old, old ^ U32(0x8000)):
        pair, before = old | other << U32(16), np.full_like(old, 0x00400040)
        for flipped in U32(1) << np.arange(16, dtype=U32):
            (got,) = execute(asm, before, pair, pair ^ flipped)
            np.testing.assert_array_equal(got, before | U32(1 << row))
            (got,) = execute(asm, before, pair, pair ^ flipped << U32(16))
            np.testing.assert_array_equal(got, before | U32(1 << row + 16))
        (got,) = execute(asm, before, pair, pair)
        np.testing.assert_array_equal(got, before)


def test_a_master_stays_only_if_it_rounds_to_the_parameter():
    asm = assembly(instructions.unless_rounded, np.float32, jnp.bfloat16)
    x = masters()
    up, down = x + U32(0x8000) >> U32(16), x - U32(0x8000) >> U32(16)
    kept = 0
    for rounded in (x >> U32(16), up, down, x[::-1] >> U32(16)):
        param = jnp.asarray(rounded.astype(np.uint16).view(ml_dtypes.bfloat16))
        want = operations.unless_rounded(jnp.asarray(x.view(np.float32)), param)
        want = np.asarray(want).view(U32)
        both = execute(asm, x, x[::-1], rounded | rounded[::-1] << U32(16), results=2)
        for got, wanted in zip(both, (want, want[::-1]), strict=True):
            nan = np.isnan(wanted.view(np.float32))
            np.testing.assert_array_equal(np.isnan(got.view(np.float32)), nan)
            np.testing.assert_array_equal(got[~nan], wanted[~nan])
        kept += np.count_nonzero(want == x)
    assert len(x) < kept < 3 * len(x)


def test_a_product_and_a_sum_are_one_instruction_which_rounds_once():
    rule = with_peephole_rules(operations.multiply_add)
    asm = assembly(rule, np.float32, np.float32, np.float32)
    a, b, c = np.float32([[1 + 2**-12, 3], [1 + 2**-12, 5], [-1 - 2**-11, 7]])
    (got,) = execute(asm, a, b, c)
    np.testing.assert_array_equal(got, np.float32([2**-24, 22]))
    assert (a * b + c)[0] == 0, "rounding twice"


def test_powers_of_five_come_from_tables():
    n = np.arange(128, 136, dtype=U32)
    want = [0, *(5.0**i for i in range(7))]
    np.testing.assert_array_equal(operations.power_of_five(jnp.asarray(n)), want)
    (got,) = execute(assembly(instructions.power_of_five, np.uint32), n)
    np.testing.assert_array_equal(got, want)  # before the conversion to float32


def test_the_smaller_of_two_numbers_is_that_of_their_patterns():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0x800000, 0x7F800001, (2, 1000), np.uint32).view(np.float32)
    want = np.minimum(x, y)
    for smaller in (operations.smaller, instructions.smaller):
        np.testing.assert_array_equal(smaller(jnp.asarray(x), jnp.asarray(y)), want)


def test_nans_have_one_pattern():
    x = masters()
    nan = np.isnan(x.view(np.float32))
    for operation, instruction in (
        (operations.pattern_with_one_nan, instructions.pattern_with_one_nan),
        (operations.ordered_pattern, None),
    ):
        got = np.asarray(operation(jnp.asarray(x.view(np.float32)))).view(U32)
        np.testing.assert_array_equal(got, np.where(nan, U32(0x7FC00000), x))
        if instruction:  # a GPU's arithmetic gives only this NaN
            known = jnp.asarray(np.where(nan, U32(0x7FFFFFFF), x).view(np.float32))
            np.testing.assert_array_equal(instruction(known), got)


def test_a_nan_stays_one_after_rounding_its_pattern():
    x = masters()
    kept = np.asarray(operations.keep_nan(jnp.asarray(x.view(np.float32))))
    nan = np.isnan(x.view(np.float32))
    np.testing.assert_array_equal(kept[~nan], x[~nan])
    rounded = (kept[nan] + U32(0x8000)) & U32(0xFFFF0000)
    assert np.isnan(rounded.view(np.float32)).all()
    made_by_arithmetic = jnp.full(8, 0x7FFFFFFF, jnp.uint32).view(jnp.float32)
    np.testing.assert_array_equal(
        instructions.keep_nan(made_by_arithmetic),
        operations.keep_nan(made_by_arithmetic),
    )


def test_bfloat16_is_widened_by_a_shift():
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    short = with_peephole_rules(lambda x: x.astype(jnp.float32))
    names = [e.primitive.name for e in jax.make_jaxpr(short)(jnp.asarray(x)).eqns]
    assert "shift_left" in names
    got = np.asarray(short(jnp.asarray(x))).view(U32)
    np.testing.assert_array_equal(got, x.view(np.uint16).astype(U32) << U32(16))


def test_every_operation_but_one_has_a_rule():
    table = set(operations.OPERATIONS.values())
    of_table = {x for x in instructions.rules if not isinstance(x, core.Primitive)}
    assert of_table == table - {operations.pattern_above}


def test_a_call_of_an_operation_is_recognised():
    (eqn,) = jax.make_jaxpr(operations.ordered_pattern)(jnp.float32(1)).eqns
    assert operations.operation_of(eqn) is operations.ordered_pattern
    (other,) = jax.make_jaxpr(jax.jit(lambda x: x))(jnp.uint32(1)).eqns
    assert operations.operation_of(other) is other.primitive
