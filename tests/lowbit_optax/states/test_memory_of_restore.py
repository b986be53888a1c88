"""Restoring a sharded run does not need twice its memory."""

import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.helpers.places import printed_by
from tests.helpers.processes import restore_and_measure as program

pytestmark = [
    pytest.mark.slow_to_compile,  # starts processes that each import JAX
    pytest.mark.standard_promotion,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

# Allows for Orbax's and the allocator's overhead, independent of the run's size.
_OVERHEAD = 30 * 2**20


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a run of 86 MB and a small one from eight devices."""
    folder = tmp_path_factory.mktemp("run")
    random = np.random.default_rng(0)

    def noise(like):
        # Small numbers are finite in all formats, and zstd cannot shrink them.
        x = random.integers(0, 2**8, like.shape, dtype=np.uint32).astype(like.dtype)
        return jax.device_put(x, like.sharding)

    for name, size in (("large", program.LARGE), ("small", program.SMALL)):
        shapes = program.shapes(*size, program.SPECS["rows"])
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder / name, jax.tree.map(noise, shapes))
    return folder


def _measure(*arguments) -> tuple[int, int]:
    held, grown = map(int, printed_by(program.__file__, *arguments).split()[-2:])
    return held, grown


@pytest.mark.parametrize("spec", program.SPECS)
def test_a_restored_run_is_not_held_twice(saved, spec):
    held, grown = _measure(saved, spec)
    assert held > 80e6
    assert grown < 2 * held


@pytest.mark.parametrize("spec", program.SPECS)
def test_a_limit_of_concurrent_bytes_bounds_the_extra_memory(saved, spec):
    held, grown = _measure(saved, spec, 0.01)
    assert grown < held + 10e6 + _OVERHEAD
