"""The reader of TPU programs, on texts with known sizes."""

from unittest import mock

import jax

from tools.hlo import collectives, copies, entry

PROGRAM = """HloModule step, is_scheduled=true

%body (x: bf16[8,128]) -> bf16[8,128] {
  ROOT %inner = bf16[8,128]{1,0:T(8,128)(2,1)} copy(%x)
}

ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0:T(8,128)} parameter(0)
  %start = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) all-gather-start(%x)
  %done = bf16[8,128]{1,0:T(8,128)(2,1)} all-gather-done(%start)
  %pair = (f32[8,128]{1,0:T(8,128)}, u4[8,128]{1,0:T(32,128)(8,1)}) fusion(%x, %done)
  %half = u4[8,128]{1,0:T(32,128)(8,1)} get-tuple-element(%pair), index=1
  ROOT %last = f32[8,128]{1,0:T(8,128)} custom-call(%half, /*index=1*/%x), metadata={}
}
"""
OF_PARTS = """HloModule step, is_scheduled=true

ENTRY %main (x: f32[4096,8]) -> f32[8,4096] {
  %x = f32[4096,8]{1,0:T(8,128)} parameter(0)
  %turned = f32[8,4096]{0,1:T(8,128)} bitcast(%x)
  %wide = f32[4096,128]{1,0:T(8,128)} reshape(%turned)
  %bytes = s8[4096]{0:T(1024)(128)(4,1)} custom-call(%wide)
  %a = ((s8[4096]{0}), s8[1024]{0:T(1024)(128)(4,1)S(1)}, s32[]) slice-start(%bytes)
  %a_end = s8[1024]{0:T(1024)(128)(4,1)S(1)} slice-done(%a)
  %b = (f32[4096,128]{1,0:T(8,128)S(1)}, f32[4096,128], u32[]) copy-start(%wide)
  %b_end = f32[4096,128]{1,0:T(8,128)S(1)} copy-done(%b)
  %c = s8[4096]{0:S(1)} custom-call(%a_end), custom_call_target="ConcatBitcast"
  ROOT %d = f32[4096,128]{1,0:T(8,128)S(1)} dynamic-update-slice(%b_end, %x, %i)
}
"""


def program(text=PROGRAM):
    mocked = mock.create_autospec(jax.stages.Compiled, instance=True)
    mocked.as_text.return_value = text
    return mocked


def test_an_asynchronous_pair_and_each_part_of_a_tuple_count_once():
    assert [(x.name, x.op, x.without_padding) for x in entry(program())] == [
        ("start", "all-gather-start", 2048 + 4096),
        ("pair", "fusion", 4096 + 512 + 4096 + 2048),
        ("last", "custom-call", 4096 + 512 + 4096),
    ]


def test_padding_counts_and_bytes_on_the_chip_are_separate():
    padded, column = 4096 * 128 * 4, 4096 * 8 * 4
    facts = [
        (x.name, x.without_padding, x.moved, x.of_memory)
        for x in entry(program(OF_PARTS))
    ]
    assert facts == [
        ("wide", padded + column, 2 * padded, 2 * padded),
        ("bytes", 4096 + padded, 4096 + padded, 4096 + padded),
        ("a", 2 * 1024, 2 * 1024, 1024),  # a slice reads no more than it writes
        ("b", 2 * padded, 2 * padded, padded),
        ("d", 2 * column, 2 * padded, padded),  # %x is copied to the chip
    ]


def test_copies_and_collectives_are_found_anywhere():
    assert copies(program()) == [2048]
    assert collectives(program()) == ["all-gather"]
