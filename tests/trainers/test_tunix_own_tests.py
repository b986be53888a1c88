"""Tunix's own tests of its trainer, run with optimizers of this package.

The Tunix package does not contain its tests. To run them, set the environment variable
``TUNIX`` to a checkout of Tunix at the tag of the installed version.
"""

import json
import os
import pathlib

import pytest

from tests.helpers.places import ROOT, run_python
from tests.helpers.side_by_side import OURS, note

pytest.importorskip("tunix", exc_type=ImportError)
FILE = pathlib.Path(os.environ.get("TUNIX", "-")) / "tests/sft/peft_trainer_test.py"
pytestmark = pytest.mark.skipif(
    not FILE.exists(), reason="TUNIX names no checkout of Tunix"
)
# These tests compare summed microbatches with whole batches, with a tolerance of 1e-7.
# kahan_adamw rounds its moments to bfloat16 stochastically, so a difference in the last
# bit of a gradient can change the last bit of a moment.
EXPECTED = {
    "kahan_adamw": {
        "test_gradient_accumulation_constant_schedule",
        "test_gradient_accumulation_scalar",
    }
}
FLAGS = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=1"


@pytest.mark.parametrize("name", OURS)
def test_tunix_tests_pass_as_expected(name):
    script = ROOT / "tests/helpers/processes/tunix_own_tests.py"
    ran = run_python(script, FILE, name, XLA_FLAGS=FLAGS, PYTHONPATH=str(ROOT))
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    failed = found["failed"]
    passed = f"{found['count'] - len(failed)} of {found['count']}"
    note("Tunix own tests", **{name: {"passed": passed, "failed": failed}})
    assert set(failed) == EXPECTED.get(name, set()), f"{passed} pass\n{ran.stderr}"
