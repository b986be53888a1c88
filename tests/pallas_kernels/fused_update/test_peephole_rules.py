"""The operations in the body of a GPU kernel that shorter instructions replace.

The replacements are machine instructions, which run only on a GPU. These tests check
the jaxpr; tests in tests/gpu_program count the remaining instructions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fused_update.gpu.instructions import Byte
from pallas_kernels.fused_update.gpu.peephole import (
    with_peephole_rules as by_instructions,
)
from pallas_kernels.fused_update.gpu.triton_arrays import INSTRUCTIONS

X = jnp.linspace(0.5, 2, 8)


def with_peephole_rules(function):
    return by_instructions(function, INSTRUCTIONS)


def operations(function, *args):
    """Names of a function's operations that have short forms, in order."""
    short = jax.make_jaxpr(with_peephole_rules(function))(*args)
    return [eqn.params.get("asm", eqn.primitive.name).split()[0] for eqn in short.eqns]


@pytest.mark.parametrize(
    "divisor",
    [
        jnp.sqrt,
        lambda x: jnp.sqrt(x) + jnp.float32(1e-8),
        lambda x: jnp.float32(1e-8) + jnp.sqrt(x + jnp.float32(1)),
        lambda x: jnp.sqrt(x) + jnp.sqrt(x * x),
        jax.jit(jnp.sqrt),
    ],
)
def test_a_quotient_by_a_root_and_a_number_needs_no_division(divisor):
    found = operations(lambda x: x / divisor(x), X)
    assert "div" not in found
    assert "sqrt" not in found
    assert "rcp.approx.ftz.f32" in found
    assert "sqrt.approx.ftz.f32" in found


@pytest.mark.parametrize(
    "divisor",
    [
        lambda x: x,
        lambda x: jnp.sqrt(x) + x,
        lambda x: jnp.sqrt(x) - jnp.float32(1e-8),
        lambda x: jnp.sqrt(x) * jnp.float32(1e-30),
        lambda x: jnp.maximum(x, jnp.float32(1e-30)),
        lambda x: jnp.maximum(x, jnp.float32(1e-30)) * jnp.float32(0.5),
        lambda x: jnp.maximum(x, jnp.float32(1e-30)) * jnp.float32(1e-10),
        lambda x: jnp.maximum(x, jnp.float32(-1)) * jnp.float32(0.25),
    ],
)
def test_other_quotients_are_divisions(divisor):
    assert "div" in operations(lambda x: x / divisor(x), X)


def test_the_inverse_of_a_scale_needs_no_division():
    scale = lambda x: jnp.maximum(x, jnp.float32(2.0**-110)) * jnp.float32(2.0**-16)
    assert "div" not in operations(lambda x: jnp.float32(1) / scale(x), X)


WORDS = jnp.arange(8, dtype=jnp.uint32) * jnp.uint32(0x01234567)


def _byte_of(function, word=WORDS):
    """The number of the byte, and whether it is a byte of ``word`` itself."""
    run = by_instructions(lambda x: [function(x)], INSTRUCTIONS, of_8_bits=[0])
    (byte,) = run(word)
    assert isinstance(byte, Byte)
    return byte.number, bool((byte.word == word).all())


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (lambda x: x & jnp.uint32(255), 0),
        (lambda x: x >> jnp.uint32(8) & jnp.uint32(255), 1),
        (lambda x: x >> jnp.uint32(24), 3),
        (jax.jit(lambda x: x >> jnp.uint32(16) & jnp.uint32(255)), 2),
    ],
)
def test_a_shifted_or_masked_result_is_a_byte_of_its_word(function, number):
    assert _byte_of(function) == (number, True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x >> jnp.uint32(25),
        lambda x: x & jnp.uint32(127),
        lambda x: x >> jnp.uint32(12) & jnp.uint32(255),
    ],
)
def test_any_other_result_is_its_own_lowest_byte(function):
    number, is_the_word = _byte_of(function)
    assert number == 0
    assert not is_the_word


def test_a_result_that_the_body_reads_again_is_no_byte():
    def function(x):
        field = x >> jnp.uint32(24)
        return [field, field + jnp.uint32(1)]

    new = by_instructions(function, INSTRUCTIONS, of_8_bits=[0])(WORDS)
    assert not any(isinstance(x, Byte) for x in new)


def test_other_operations_do_not_change():
    def function(tree, number):
        return {"a": [jnp.where(tree["x"] > 1, number, tree["x"]), tree["y"] ^ 3]}

    arguments = {"x": X, "y": jnp.arange(3)}, jnp.float32(7)
    got, want = with_peephole_rules(function)(*arguments), function(*arguments)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
