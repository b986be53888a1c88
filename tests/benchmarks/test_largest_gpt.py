"""The search for the largest model that fits, and the bytes of its steps."""

import jax
import pytest

from benchmarks.papers import gpt_steps, largest_gpt

pytestmark = pytest.mark.standard_promotion


@pytest.mark.parametrize("extra", [0, 30, -400, 2000])
@pytest.mark.parametrize("power", [1, 2])
def test_the_largest_number_fits_and_the_next_does_not(power, extra):
    calls = []

    def bytes_of(n):
        calls.append(n)
        return 70 + 10 * n**power + n // 3

    args = bytes_of, lambda n: 10 * n**power, 1234
    n, found = largest_gpt.largest(*args, extra)
    assert bytes_of(n) <= 1234 < bytes_of(n + 1)
    assert {n, n + 1} <= set(calls[:-2])
    assert 70 <= found <= 70 + n
    assert len(calls) - 2 <= 4


def test_no_number_is_largest_if_one_does_not_fit():
    assert largest_gpt.largest(lambda n: 10 + n, lambda n: n, 5)[0] == 0


def test_bytes_of_quantized_weights_are_counted():
    model = largest_gpt.MODEL
    size = gpt_steps.parameters(model)
    stored = {n: gpt_steps.stored(x, model) for n, x in largest_gpt.CASES.items()}
    exact = {"float32": 16, "LPMM, 12 bits": 5.57, "LPMM, 8 bits": 5.07}
    exact |= {"LPMM, 8 bits, release": 3.07}
    assert {n: x / size for n, x in stored.items()} == pytest.approx(exact, rel=0.003)


def test_scales_of_norms_of_many_layers_are_not_quantized():
    layers = gpt_steps.shapes(largest_gpt.MODEL._replace(layers=300), 8)["layers"]
    assert isinstance(layers["norm_1"], jax.ShapeDtypeStruct)
    assert not isinstance(layers["up"], jax.ShapeDtypeStruct)
