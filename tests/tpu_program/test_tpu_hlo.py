"""The reader of TPU programs, on a text whose sizes are known."""

from unittest import mock

import jax

from tools.hlo import Instruction, collectives, copies, entry

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


def program():
    mocked = mock.create_autospec(jax.stages.Compiled, instance=True)
    mocked.as_text.return_value = PROGRAM
    return mocked


def test_operands_and_results_are_counted_without_padding_and_pairs_once():
    assert entry(program()) == [
        Instruction("start", "all-gather-start", 2048 + 4, 4096),
        Instruction("pair", "fusion", 4096 + 512, 4096 + 2048),
        Instruction("last", "custom-call", 4096, 512 + 4096),
    ]


def test_copies_and_collectives_are_found_anywhere():
    assert copies(program()) == [2048]
    assert collectives(program()) == ["all-gather"]
