"""Roots and quotients of TPU kernels are JAX's, at zeros, infinities and NaNs too."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.fused_update.tpu.functions import Function
from pallas_kernels.fused_update.tpu.rules import RULES, quotient, root, rules_for

SPECIAL = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 1, -3, 1e-30, 2.5e30])


def test_quotients_are_those_of_jax_to_a_unit_in_the_last_place():
    x, y = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    with np.errstate(all="ignore"):
        want, inverse = x / y, np.float32(1) / y * np.float32(1 + 2.0**-13)
    got = quotient(jnp.asarray(x), jnp.asarray(y), jnp.asarray(inverse))
    is_normal = ~(np.abs(want) < 2.0**-126) | (x == 0)
    np.testing.assert_allclose(got[is_normal], want[is_normal], rtol=2.0**-22)


def test_roots_are_those_of_jax_to_a_unit_in_the_last_place():
    x = np.append(SPECIAL, np.float32([2.0**-126, np.finfo(np.float32).max]))
    with np.errstate(all="ignore"):
        want = np.sqrt(x)
    np.testing.assert_allclose(root(jnp.asarray(x)), want, rtol=2.0**-22)


def test_without_a_generation_there_are_only_jaxs():
    assert rules_for(None) is RULES
    function = Function(jnp.sqrt, jnp.zeros((8, 128)))
    assert function(jnp.full((8, 128), 2.0), known={})[0, 0] == np.sqrt(np.float32(2))


def test_bytes_in_reverse_lose_those_that_are_shifted_out():
    from pallas_kernels.operations import pattern_above, reverse_bytes

    words = jnp.broadcast_to(jnp.uint32(0x12345678), (8, 128))
    for places, want in ((0, 0x78563412), (8, 0x785634), (12, 0x78563)):
        function = Function(
            lambda x, n=places: reverse_bytes(x) >> jnp.uint32(n), words
        )
        got = function(words, known={})
        got = got if hasattr(got, "dtype") else got.value()
        assert int(got[0, 0]) == want
    base, most = jnp.int32(0x3F800000), jnp.int32(0x00FFFFFF)
    x = jnp.resize(jnp.asarray(SPECIAL), (8, 128))
    above = lambda x, base: pattern_above(x, jnp.broadcast_to(base, x.shape), most)
    got = Function(above, x, base)(x, base, known={})
    np.testing.assert_array_equal(got, above(x, base))
