"""Programs of ``python -m benchmarks first_device`` compile for their target GPUs."""

import json

import pytest

from pallas_kernels.platforms import has_mosaic
from tests.helpers.places import run_python
from tools import is_installed

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
if not any(map(is_installed, PLUGINS)):
    pytest.skip("needs the gpu-program extra", allow_module_level=True)

SMALL = ("bits/kahan", "training/lowbit_adamw, released")


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_the_smallest_rehearsal_compiles(gpu, tmp_path):
    command = f"-m benchmarks first_device --rehearse {gpu} --size small --out".split()
    done = run_python(*command, tmp_path, "--only", *SMALL, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    name = f"first_device_rehearsal_{gpu.lower()}_small.json"
    record = json.loads((tmp_path / name).read_text())
    assert record["ran"] == f"compiled for an {gpu}; not run"
    launchers = ["triton"] + ["mosaic"] * has_mosaic() + ["xla"]
    kinds = ["even", "ragged", "many", "stacked"]
    bits, training = record["jobs"]
    assert [*bits["trials"]] == [f"{k}, {by}" for by in launchers for k in kinds]
    assert [p["program"] for p in training["programs"]] == ["init", "step"]
    for program in (*bits["programs"], *training["programs"]):
        assert set(program["seconds"]) == {"trace", "lower", "compile"}
