"""The lines of ``trends``, through differences with known slopes."""

import numpy as np
import pytest

from benchmarks.training import trends


def test_a_line_finds_its_slope_and_extrapolates():
    pairs = {10.0**x: [0.01 + 0.002 * x] * 3 for x in (4.5, 5.0, 6.0)}
    found = trends.line(pairs, at=1e8)
    assert found["slope"] == pytest.approx(0.002)
    assert found["interval of slope"] == pytest.approx([0.002, 0.002])
    assert found["value"] == pytest.approx(0.01 + 0.002 * 8)


def test_intervals_contain_the_true_line_in_95_percent_of_experiments():
    draw, inside = np.random.default_rng(0), []
    for _ in range(2000):
        pairs = {10.0**x: draw.normal(0.001 * x, 0.005, 4) for x in (4.7, 5.0, 5.3, 6)}
        found = trends.line(pairs, at=1e8)
        for name, true in (("slope", 0.001), ("value", 0.008)):
            low, high = found[f"interval of {name}"]
            inside.append(low <= true <= high)
    assert np.mean(inside) == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("points", [trends.SIZES, trends.LENGTHS])
def test_trainings_have_the_planned_lengths(points):
    for point in points:
        steps = point.settings["steps"]
        tokens = steps * point.settings["batch_size"] * point.model.context
        assert tokens / point.parameters == pytest.approx(point.ratio, rel=0.06)


def test_differences_are_paired_at_each_size():
    some, other = trends.SIZES[0], trends.SIZES[2]
    found = {
        some.row("float32"): {0: {"held_out": 1.0}},
        some.row("lowbit_adamw"): {0: {"held_out": 1.5}, 1: {"held_out": 9.0}},
        other.row("lowbit_adamw"): {0: {"held_out": 1.0}},
    }
    by_size = trends.figures(found)["by size"]["lowbit_adamw"]
    assert by_size["pairs"] == {some.parameters: [0.5]}
    assert "slope" not in by_size


def test_the_second_test_has_a_line_of_its_own():
    pairs = {"lowbit_adamw": {0: 1.5}, "lowbit_adamw (second test)": {14: 1.25}}
    found = {
        point.row(name): {seed: {"held_out": loss} for seed, loss in runs.items()}
        for point in trends.SIZES
        for name, runs in (pairs | {"float32": {0: 1.0, 14: 1.0}}).items()
    }
    figures, of_equivalence = trends.figures(found), trends.SIZES[2].parameters
    lines = figures["by size"], figures[trends.LATER]
    gaps = [line["lowbit_adamw"]["pairs"][of_equivalence] for line in lines]
    assert gaps == [[0.5], [0.5, 0.25]]
    planned = [line["lowbit_adamw"]["planned"][of_equivalence] for line in lines]
    assert planned == [14, 54]
