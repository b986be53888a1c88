"""Importing the package and compiling a step use nothing that JAX deprecates."""

import pytest

from pallas_kernels import platforms
from tests.helpers.places import run_python
from tests.helpers.processes import step_without_warnings
from tools import is_installed

CATEGORIES = ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")
KERNELS = {"cpu": "", "cuda": platforms.DEFAULT_LAUNCHER, "tpu": "tpu_custom_call"}


def compile_on(*arguments):
    errors = [f"-Werror::{category}" for category in CATEGORIES]
    return run_python(*errors, step_without_warnings.__file__, *arguments)


@pytest.mark.parametrize("platform", KERNELS)
def test_a_step_with_the_default_launcher_warns_of_nothing(platform):
    if platform == "tpu" and not is_installed("libtpu"):
        pytest.skip("needs the tpu-program extra")
    done = compile_on(platform)
    assert done.returncode == 0, done.stderr[-4000:]
    assert KERNELS[platform] in done.stdout


@pytest.mark.skipif(
    platforms.DEFAULT_LAUNCHER == "triton" or not platforms.has_triton(),
    reason="JAX does not deprecate Triton, or has removed it",
)
def test_a_step_by_triton_warns_where_mosaic_is_the_default():
    done = compile_on("cuda", "triton")
    assert done.returncode
    assert "DeprecationWarning: The Pallas Triton backend" in done.stderr
