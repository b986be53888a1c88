"""The tables of the front page match their records."""

import pytest

from benchmarks import records
from benchmarks.front import fit
from tests.helpers.places import ROOT


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_table_of_models_that_fit_matches_its_record(page):
    record = records.load(ROOT / "benchmarks/front/fit.json")
    assert fit.text(record) in (ROOT / page).read_text()
