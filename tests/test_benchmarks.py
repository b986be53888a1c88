"""``python -m benchmarks gpu_step`` runs from a checkout and counts bytes correctly."""

import json
import math
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.example

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PARAMETERS = 64 * 64  # 4096 * 4096, every axis divided by 64
OPTIMIZERS = ("optax_adamw_float32", "extra_bits_adamw_8")

RECORD = {
    "device", "platform", "machine", "driver", "platform_version", "python", "jax",
    "versions", "date", "command", "options", "contract", "tests", "copy", "rows",
    "skipped", "elapsed_seconds",
}  # fmt: skip
ROW = {
    "set", "optimizer", "entry", "implementation", "leaves", "parameters", "rounds",
    "ms", "ms_low", "ms_high", "loop_ms", "stored_bytes", "stored_bytes_per_param",
    "moved_bytes", "moved_bytes_per_param", "gb_per_s", "copy_share",
    "loop_copy_share", "calls", "loop_calls", "ratio_to_float32",
    "temp_bytes_per_param", "compile_seconds", "loop_temp_bytes_per_param",
}  # fmt: skip
MAY_BE_ZERO = {"temp_bytes_per_param", "loop_temp_bytes_per_param"}


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    output = tmp_path_factory.mktemp("benchmarks") / "gpu_step.json"
    command = [sys.executable, "-m", "benchmarks", "gpu_step", "--no-tests"]
    command += ["--sets", "4096", "--scale", "64", "--formats", "nearest"]
    command += ["--optimizers", ",".join(OPTIMIZERS), "--output", str(output)]
    command += ["--rounds", "1", "--measure", "0.001", "--loop-steps", "2"]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "optax_adamw_float32, step" in done.stdout
    return json.loads(output.read_text())


def test_the_record_has_every_field(record):
    assert set(record) == RECORD
    assert all(set(row) == ROW for row in record["rows"])
    assert record["command"].startswith("python -m benchmarks gpu_step ")
    assert record["tests"] == {"status": "skipped", "reason": "--no-tests"}
    found = [(r["optimizer"], r["entry"], r["implementation"]) for r in record["rows"]]
    assert sorted(found) == [
        ("extra_bits_adamw_8", "step", "default"),
        ("extra_bits_adamw_8", "step", "xla"),
        ("extra_bits_adamw_8", "update", "default"),
        ("extra_bits_adamw_8", "update", "xla"),
        ("optax_adamw_float32", "step", "optax"),
    ]


def test_kernels_and_xla_path_agree(record):
    (row,) = record["contract"]["rows"]
    assert row["format"] == "nearest"
    assert row["parameters"] == row["residuals"] == row["moments"] == 0
    assert record["contract"]["ok"]


def test_figures_are_finite_and_positive(record):
    copies = record["copy"]["rows"]
    assert record["copy"]["best_gb_per_s"] == max(c["gb_per_s"] for c in copies)
    for row in [*record["rows"], *copies]:
        for name, value in row.items():
            if isinstance(value, int | float):
                assert math.isfinite(value), name
                assert value > 0 or (name in MAY_BE_ZERO and value == 0), name


def test_bytes_are_those_counted_by_hand(record):
    for row in record["rows"]:
        if row["optimizer"] == "optax_adamw_float32":
            # float32 parameter, mu and nu, read and written; a bfloat16 gradient;
            # an int32 count.
            stored = 12 * PARAMETERS + 4
        else:
            # bfloat16 parameter, 8 bits, float32 mu and nu; three counts and seeds.
            stored = (2 + 1 + 8) * PARAMETERS + 3 * 4
        assert row["parameters"] == PARAMETERS
        assert row["stored_bytes"] == stored
        assert row["moved_bytes"] == 2 * stored + 2 * PARAMETERS
        assert row["moved_bytes_per_param"] == row["moved_bytes"] / PARAMETERS
        speed = 1e-6 * row["moved_bytes"] / row["ms"]
        assert row["gb_per_s"] == pytest.approx(speed)
        share = speed / record["copy"]["best_gb_per_s"]
        assert row["copy_share"] == pytest.approx(share)
