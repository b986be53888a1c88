"""The notebooks of the documentation run, and their stored outputs are current."""

import nbformat
import pytest
from nbclient import NotebookClient

from tests.helpers.places import ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))


def _text_lines(notebook) -> list[int]:
    """Return the number of printed lines of each cell."""
    return [
        sum(out.get("text", "").count("\n") for out in cell.get("outputs", ()))
        for cell in notebook.cells
    ]


@pytest.mark.example
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_prints_as_many_lines_as_are_stored(path):
    stored = nbformat.read(path, as_version=4)
    again = nbformat.read(path, as_version=4)
    NotebookClient(again, timeout=300, resources={"metadata": {"path": ROOT}}).execute()
    assert _text_lines(again) == _text_lines(stored)
    assert sum(_text_lines(stored)) > 3


def test_every_tutorial_has_outputs_and_no_error():
    assert len(TUTORIALS) == 4
    for path in TUTORIALS:
        cells = nbformat.read(path, as_version=4).cells
        outputs = [out for cell in cells for out in cell.get("outputs", ())]
        kinds = {out.output_type for out in outputs}
        assert kinds <= {"stream", "display_data", "execute_result"}, path
        assert kinds, path
