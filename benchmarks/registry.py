"""All benchmarks: the modules ``benchmarks.GROUP.NAME`` that have a ``main(argv)``.

A module may define ``NEEDS``, which names the modules that it requires and does not
import, such as XLA's compilers. The source of a module is read, so listing the
benchmarks does not import them.
"""

import ast
import pathlib
from typing import NamedTuple

from benchmarks import ROOT


class Benchmark(NamedTuple):
    """A benchmark, as the source of its module describes it.

    Attributes:
      module: its full name.
      summary: the first line of its docstring.
      needs: the names of the modules that it requires and does not import.
    """

    module: str
    summary: str
    needs: tuple[str, ...]

    @property
    def group(self) -> str:
        """The folder of the module."""
        return self.module.split(".")[1]


def _read(path: pathlib.Path) -> Benchmark | None:
    """Return the benchmark of a file, or None if it has no ``main(argv)``."""
    tree = ast.parse(path.read_text())
    assigned = {
        x.targets[0].id: x.value
        for x in tree.body
        if isinstance(x, ast.Assign) and isinstance(x.targets[0], ast.Name)
    }
    mains = [
        x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name == "main"
    ]
    if "main" not in assigned and not any(main.args.args for main in mains):
        return None
    needs = ast.literal_eval(assigned["NEEDS"]) if "NEEDS" in assigned else ()
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    return Benchmark(f"benchmarks.{path.parent.name}.{path.stem}", summary, needs)


BENCHMARKS = {
    path.stem: found
    for path in sorted((ROOT / "benchmarks").glob("*/*.py"))
    if (found := _read(path))
}
