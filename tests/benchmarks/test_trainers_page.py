"""The generated part of ``docs/trainers.md`` matches the record of the trainers."""

import re

from benchmarks import records
from benchmarks.trainers import trainers
from tests.helpers.places import ROOT


def test_the_page_is_drawn_from_the_record():
    record = records.load(trainers.RECORD)
    assert trainers.PAGE.read_text() == trainers.drawn(record)


def test_the_record_has_the_versions_that_ci_installs():
    pinned = (ROOT / "tests" / "trainers" / "requirements.txt").read_text()
    versions = dict(re.findall(r"^([\w-]+)==(\S+)$", pinned, re.MULTILINE))
    rows = records.load(trainers.RECORD)["rows"]
    for trainer, row in rows.items():
        if trainer != trainers.OWN_TESTS:
            assert row["version"] == versions[row["package"]], trainer


def test_notes_of_several_processes_are_one_row():
    notes = [
        {"trainer": "A", "restored": {"2 to 2: x": True}, "ours": {"x": {}}},
        {"trainer": "A", "restored": {"2 to 4: x": True}},
    ]
    row = trainers.merged(notes)["A"]
    assert row["restored"].keys() == {"2 to 2: x", "2 to 4: x"}
