"""The figures of README's table of evidence are those of ``docs/evidence.md``."""

import re

from places import ROOT

FIGURE = re.compile(r"-?\d+(?:\.\d+)?(?: ± \d+(?:\.\d+)?)?%?")


def rows(page: str) -> list[list[str]]:
    lines = (ROOT / page).read_text().splitlines()
    tables = (line for line in lines if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in tables]


def test_each_figure_is_one_of_the_same_command_s():
    # In the page "the same" is the command of the row above.
    of_command: dict[str, str] = {}
    name = ""
    for cells in rows("docs/evidence.md"):
        command = re.fullmatch(r"`python -m benchmarks (\w+)`", cells[2])
        name = command[1] if command else name
        of_command[name] = of_command.get(name, "") + " ".join(cells)
    # In README it stands in brackets at the end, before where it ran.
    ours = []
    for claim, *others in rows("README.md"):
        if ran := re.fullmatch(r"(.*) \(`(\w+)`, [^()]+\)", others[-1]):
            ours.append((claim, *ran.groups()))
    assert len(ours) == 5
    for claim, here, command in ours:
        figures = FIGURE.findall(re.sub(r"`[^`]*`|float\d+|\d+-bit", "", here))
        assert figures, claim
        for figure in figures:
            assert figure in of_command[command], (command, figure)
