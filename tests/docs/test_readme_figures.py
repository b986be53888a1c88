"""The figures in the README match the pages that document the measurements."""

import json
import re

from places import ROOT

from benchmarks.records import shown

README = (ROOT / "README.md").read_text()


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def _table(head: str) -> list[list[str]]:
    """Returns the cells of the table whose header begins with ``head``."""
    (block,) = re.findall(
        rf"^\| {head} .*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE
    )
    return [row.strip("| ").split(" | ") for row in block.splitlines()]


def test_losses_are_those_of_the_experiment_with_the_most_seeds():
    path = ROOT / "benchmarks" / "training" / "shakespeare.json"
    runs = json.loads(path.read_text())["runs"]
    gap = lambda name: shown(runs[name]["gaps"]["validation"], 4)
    names = [("lowbit",), ("Kahan",), (), ("LPMM, 12 bits",)]
    names += [("factored", "factored, no extra bits"), ("bfloat16, nearest",)]
    for row, of_row in zip(_table("optimizer"), names, strict=True):
        assert re.findall(r"-?0\.\d+ ± 0\.\d+", row[2]) == list(map(gap, of_row)), row


def test_times_and_errors_match_the_pages_of_the_device_and_the_peers():
    peers, device = _page("peers.md"), _page("hardware.md")
    rows = _table("library")
    assert len(rows) == 7
    for library, _, time, *errors in rows:
        assert all(f"| {error} |" in peers for error in errors), library
        for figure in re.findall(r"\d+\.\d+", time):
            assert f"| {figure} |" in device, library


def test_large_models_match_the_compiled_ones():
    rows = _page("claims.md").partition("## Large models")[2]
    for billions in re.findall(r"(\d+\.\d) billion", README):
        assert f"| {billions} |" in rows
    peaks = re.findall(r"\d+\.\d\d(?= \|$)", rows, re.MULTILINE)
    named = set(re.findall(r"(\d+\.\d) GiB", README.partition("## Install")[0]))
    assert len(named) == 2
    assert named <= {f"{float(x):.1f}" for x in peaks}
