"""The code and the names in ARCHITECTURE.md."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()


def code_of(path, name):
    """The source of a function without its docstring."""
    source = (ROOT / path).read_text()
    (node,) = (x for x in ast.parse(source).body if getattr(x, "name", "") == name)
    first, lines = node.body[0], source.splitlines()
    kept = lines[node.lineno - 1 : first.lineno - 1]
    return "\n".join(kept + lines[first.end_lineno : node.end_lineno])


def test_the_loop_is_the_code():
    (block,) = re.findall(r"```python\n(.*?)\n```", TEXT, re.DOTALL)
    assert block == code_of("lowbit_optax/_step/run.py", "_run_plan")


def test_every_class_in_the_table_exists():
    (table,) = re.findall(r"\| word \| meaning \|\n(.*?)\n\n", TEXT, re.DOTALL)
    words = {x for row in table.splitlines() for x in re.findall(r"`(\w+)`", row[:60])}
    folders = [ROOT / "lowbit_optax", ROOT / "pallas_kernels"]
    sources = [x.read_text() for folder in folders for x in folder.rglob("*.py")]
    class_or_type = r"^(?:class )?([A-Z]\w+)\b(?:\(|:| =)"
    defined = re.findall(class_or_type, "\n".join(sources), re.MULTILINE)
    assert len(words) > 20
    assert words - set(defined) == set()


def test_every_file_exists():
    folders = ["", "lowbit_optax/_step/", "lowbit_optax/", "pallas_kernels/"]
    paths = set(re.findall(r"`([\w/]+\.py|\w+/[\w/]*)`", TEXT))
    exists = lambda path: any((ROOT / folder / path).exists() for folder in folders)
    assert set(filter(exists, paths)) == paths
