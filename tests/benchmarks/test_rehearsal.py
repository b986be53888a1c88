"""``python -m benchmarks rehearsal``, and the page that shows its functions."""

import os
import re

import pytest
from places import ROOT, run_python

pytest.importorskip("orbax.checkpoint")

from benchmarks.training import rehearsal

pytestmark = pytest.mark.example

FOLDER = ROOT / "benchmarks" / "training" / "large_model"


def page_blocks() -> list[str]:
    """The programs of the page, in order."""
    page = (ROOT / "docs" / "large_model.md").read_text()
    return re.findall(r"```python\n(.*?)```", page, re.S)


def test_a_run_that_is_killed_and_resumed_loses_nothing(tmp_path):
    phases = {x.name: x for x in rehearsal.measure(tmp_path, steps=4, sizes={})}
    print(rehearsal.table(list(phases.values())))
    assert rehearsal.is_faithful(list(phases.values()))
    assert phases["float32"].loss < 5, "it should learn"
    # Its last checkpoint was incomplete.
    assert (phases["killed"].last, phases["resumed"].first) == (6, 5)
    compared = [name for name, x in phases.items() if x.bits is not None]
    assert compared == ["killed", "resumed", "released", "float16"]


def test_the_page_shows_the_functions_of_the_benchmark():
    files = "\n".join(path.read_text() for path in FOLDER.glob("*.py"))
    *functions, imports_or_main = page_blocks()
    assert len(functions) > 5
    for block in functions[1:]:
        for part in block.rstrip().split("\n\n\n"):
            assert part in files, part
    assert "main(" in imports_or_main


def test_the_program_of_the_page_trains_and_resumes(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("\n\n".join(page_blocks()))
    command = [str(file), str(tmp_path / "run"), "8"]
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    printed = ""
    for _ in range(2):
        ended = run_python(*command, JAX_PLATFORMS="cpu", XLA_FLAGS=flags)
        assert ended.returncode == 0, ended.stderr
        printed += ended.stdout
    assert "step 8: loss " in printed
