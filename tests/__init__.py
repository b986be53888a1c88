"""Tests. `tests.helpers` has what several files share."""
