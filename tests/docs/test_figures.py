"""Precise figures of the pages stand in a record, or in the output of a command.

A figure is precise if it has at least four significant digits and a decimal point or a
thousands separator, so that it hardly occurs in a record by chance.
"""

import bisect
import json
import pathlib
import re

import pytest

from tests.helpers.places import ROOT

PAGES = [
    ROOT / "README.md",
    *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "api"),
]
RECORDS = [*(ROOT / "benchmarks").rglob("*.json"), *(ROOT / "docs").rglob("*.json")]
UNITS = (1, 0.01, 1e3, 1e6, 1e9, 2**10, 2**20, 2**30)
SHAKESPEARE = "python -m benchmarks shakespeare", {"804,096"}
OF_COMMANDS = {
    "docs/index.md": SHAKESPEARE,
    "docs/accuracy.md": SHAKESPEARE,
    "docs/accuracy_records.md": SHAKESPEARE,
    "docs/ideas/release.md": (
        "python -m benchmarks release_memory",
        {"1,154", "1,464", "2,186", "3,105", "3,168", "3,338", "1,042", "1,041"}
        | {"4,007", "5,151", "10,280", "13,800", "14,066", "1,413", "15.35"},
    ),
    "docs/recipes/training_step.md": (
        "pytest tests/gpu_program/test_wrapped_steps.py",
        {"1,960", "2,121", "2,788"},
    ),
    "docs/reinforcement.md": ("python -m benchmarks reinforcement", {"0.1207"}),
    "docs/hardware_h200.md": ("python -m benchmarks first_device", {"10.26"}),
    "docs/recipes/save.md": ("ema_of_params(0.9999)", {"0.9999"}),
}
"""Figures that no file records: a command prints them, or computes them from a record,
or they are settings. The page must contain the command."""


def _numbers(record):
    if isinstance(record, dict):
        record = list(record.values())
    if isinstance(record, list):
        for each in record:
            yield from _numbers(each)
    elif isinstance(record, int | float) and not isinstance(record, bool):
        yield abs(record)


RECORDED = sorted(x for path in RECORDS for x in _numbers(json.loads(path.read_text())))


def _is_recorded(figure):
    digits = figure.replace(",", "")
    half = 0.5000001 * 10 ** -len(digits.partition(".")[2])
    for unit in UNITS:
        low, high = ((float(digits) + x) * unit for x in (-half, half))
        place = bisect.bisect_left(RECORDED, low)
        if place < len(RECORDED) and RECORDED[place] <= high:
            return True
    return False


def _precise_figures(text):
    text = re.sub(r"^```.*?^```|`[^`]*`|\]\([^)]*\)", "", text, flags=re.M | re.S)
    text = re.sub(r"\b(?:arXiv[: ]*)?\d{4}\.\d{5}\b", "", text)
    for figure in re.findall(r"(?<![\w.,/])\d[\d,]*(?:\.\d+)?(?![\w/]|\.\d)", text):
        figure = figure.rstrip(",")
        digits = figure if "." in figure else figure.rstrip("0,")
        is_precise = len(re.sub(r"\D", "", digits).lstrip("0")) >= 4
        if is_precise and re.search("[.,]", figure):
            yield figure


@pytest.mark.parametrize("page", PAGES, ids=lambda x: str(x.relative_to(ROOT)))
def test_precise_figures_have_a_record_or_a_command(page: pathlib.Path):
    text = page.read_text()
    command, printed = OF_COMMANDS.get(str(page.relative_to(ROOT)), ("", set()))
    assert command in text
    found = set(_precise_figures(text))
    assert {x for x in found - printed if not _is_recorded(x)} == set()


def test_a_wrong_figure_is_noticed():
    assert _is_recorded("151,450")
    assert list(_precise_figures("150,449 tokens, arXiv 2010.06192, 5.13")) == [
        "150,449"
    ]
    assert not _is_recorded("150,449")
