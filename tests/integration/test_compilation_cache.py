"""A process finds programs of another process in JAX's persistent cache.

A step's program therefore must not depend on the order of sets, on addresses of
objects, or on previous traces.
"""

import pytest

from tests.helpers.processes.cached_step import printed

pytestmark = pytest.mark.slow_to_compile


def test_a_second_process_compiles_nothing(tmp_path):
    misses, hits = map(int, printed(1, "run", str(tmp_path)).split())
    assert misses > 0
    assert hits == 0
    assert printed(2, "run", str(tmp_path)) == f"0 {misses}"
