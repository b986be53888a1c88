"""The figures in the README match the pages that document the measurements."""

import re

from places import ROOT

README = (ROOT / "README.md").read_text()


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def _table(head: str) -> list[list[str]]:
    """Returns the cells of the table whose header begins with ``head``."""
    (block,) = re.findall(
        rf"^\| {head} .*\n\|[-|]+\n((?:\|.*\n)+)", README, re.MULTILINE
    )
    return [row.strip("| ").split(" | ") for row in block.splitlines()]


def test_losses_match_the_trained_gpts():
    losses = re.findall(r"-?0\.\d{4} ± 0\.\d{4}", README)
    assert len(losses) == 6
    for loss in losses:
        assert loss in _page("accuracy.md")


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
