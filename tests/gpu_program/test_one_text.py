"""GPU programs of one step have one text, so that the persistent cache finds them."""

from cached_step import printed


def test_the_programs_of_two_processes_are_equal():
    assert printed(1, "lower") == printed(2, "lower")
