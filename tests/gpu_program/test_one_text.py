"""A step's GPU program always has the same text, so the persistent cache finds it."""

from tests.helpers.processes.cached_step import printed


def test_the_programs_of_two_processes_are_equal():
    assert printed(1, "lower") == printed(2, "lower")
