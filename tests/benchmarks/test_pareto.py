"""The front of ``python -m benchmarks pareto``."""

from benchmarks.training import pareto


def test_the_front_has_what_nothing_of_as_few_bits_beats():
    bits = {"a": 16, "b": 16, "c": 24, "d": 32, "e": 96}
    loss = {"a": 3.0, "b": 2.0, "c": 2.0, "d": 1.0, "e": 1.5}
    assert pareto.front(bits, loss) == ["b", "d"]


def test_each_run_is_compared_with_float32_of_its_seed():
    runs = {
        "float32": {"digits": {"values": [1.0, 3.0]}},
        "nearest, 8": {"digits": {"values": [1.2, 3.2]}},
    }
    found = pareto.excess(runs, "digits")
    assert found["float32"]["mean"] == 0
    assert abs(found["nearest, 8"]["mean"] - 10) < 1e-9  # 0.2 of 2
    assert found["nearest, 8"]["std"] < 1e-9


def test_bits_are_of_weights_residuals_and_moments():
    """The scales of blocks are additional bits."""
    for name, least in (
        ("float32", 96),
        ("nearest, 32", 80),
        ("Kahan, 8", 48),
        ("+8, 8", 40),
        ("LPMM 10, 8", 26),
    ):
        assert least <= pareto.bits_of(name) < least + 1.5, name
