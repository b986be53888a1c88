"""Cycles of kernels in the compiler's schedule, per 1,024 parameters."""

import pytest

from tests.helpers.places import printed_by

pytest.importorskip("libtpu", reason="needs the tpu-program extra")

CYCLES = {
    ("lowbit_adamw", "v5e"): 31.0,
    ("lowbit_adamw", "v6e"): 27.0,
}


def test_kernels_take_few_cycles():
    # In a separate process, because libtpu reads the schedules' folder when it loads.
    steps = sorted({step for step, _ in CYCLES})
    printed = printed_by(
        "-m", "benchmarks", "tpu_cycles", "--steps", *steps, timeout=None
    )
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()]
    found = {(row[0], row[1]): float(row[2]) for row in rows if len(row) > 2 and row[2]
             and tuple(row[:2]) in CYCLES}  # fmt: skip
    assert found.keys() == CYCLES.keys()
    assert all(found[key] <= most for key, most in CYCLES.items()), found
