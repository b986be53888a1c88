"""The reader of HLO returns the right sizes for texts with known sizes."""

import doctest
import importlib
from unittest import mock

import jax
import pytest

from tools.hlo import copies, exchanged, kernels

PROGRAM = """HloModule step, is_scheduled=true

ENTRY %main (x: f32[256]) -> f32[256] {{
  %x = f32[256]{{0}} parameter(0)
  %pair = (f32[256]{{0}}, bf16[256]{{0}}) fusion(%x), kind=kLoop
  {part}
  ROOT %twice = f32[256]{{0}} fusion({operand}), kind=kLoop
  %again = f32[256]{{0}} copy(%twice)
}}
"""


@pytest.mark.parametrize(
    ("part", "operand"),
    [
        ("%p = bf16[256]{0} get-tuple-element(%pair), index=1", "%p"),
        # The syntax of JAX 0.12.
        ("", "%pair#1"),
    ],
)
def test_an_operand_that_is_part_of_a_tuple_counts_alone(part, operand):
    program = mock.create_autospec(jax.stages.Compiled, instance=True)
    program.as_text.return_value = PROGRAM.format(part=part, operand=operand)
    expected = [
        ("pair", 1024 + 1024 + 512),
        ("twice", 1024 + 512),
        ("again", 2 * 1024),
    ]
    assert kernels(program) == expected
    assert copies(program) == [1024]


LOOP = """HloModule step, is_scheduled=true

%condition (state: (s32[], f32[4])) -> pred[] {{
  %state = (s32[], f32[4]) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(6)
  ROOT %more = pred[] compare(%counter, %limit), direction=LT
}}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {{
  %old = (s32[], f32[4]) parameter(0)
  %x = f32[4]{{0}} get-tuple-element(%old), index=1
  %begun = f32[4]{{0}} all-reduce-start(%x), to_apply=%add
  ROOT %done = f32[4]{{0}} all-reduce-done(%begun)
}}

%one (y: f32[4]) -> f32[4] {{
  %y = f32[4]{{0}} parameter(0)
  ROOT %z = f32[4]{{0}} collective-permute(%y)
}}

%other (u: f32[4]) -> f32[4] {{
  ROOT %u = f32[4]{{0}} parameter(0)
}}

ENTRY %main (x: f32[4]) -> f32[4] {{
  %x.1 = f32[4]{{0}} parameter(0)
  %whole = f32[8]{{0}} all-gather(%x.1), dimensions={{0}}
  %moved = f32[4]{{0}} conditional(%x.1), branch_computations={{%one, %other}}
  ROOT %loop = (s32[], f32[4]) while(%x.1), condition=%condition, body=%body{written}
}}
"""


@pytest.mark.parametrize(
    ("written", "times"),
    [
        (', backend_config={"known_trip_count":{"n":"5"}}', 5),
        ("", 6),
    ],
)
def test_a_collective_in_a_loop_counts_once_per_iteration(written, times):
    program = mock.create_autospec(jax.stages.Compiled, instance=True)
    program.as_text.return_value = LOOP.format(written=written)
    want = {"all-gather": 32, "all-reduce": times * 16, "collective-permute": 16}
    assert exchanged(program) == want


OF_PTX = ("bits", "buffers", "floats", "lanes", "memory", "parser")
MODULES = ["hlo_arrays", "hlo_nodes", *(f"gpu_program.ptx.{x}" for x in OF_PTX)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    results = doctest.testmod(importlib.import_module(f"tools.{name}"))
    assert results.attempted
    assert not results.failed
