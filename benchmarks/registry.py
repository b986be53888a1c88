"""All benchmarks: the modules ``benchmarks.GROUP.NAME`` that have a ``main(argv)``.

A module may define two constants. ``MINUTES`` is the time that it takes on two CPU
cores without options. ``NEEDS`` names the modules that it requires and does not import,
such as XLA's compilers. Both are read from the source of the module, so listing the
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
      minutes: None if it takes hours or needs a GPU; ``all`` then skips it.
      needs: the names of the modules that it requires and does not import.
    """

    module: str
    summary: str
    minutes: float | None
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
    constants = {
        name: ast.literal_eval(assigned[name])
        for name in ("MINUTES", "NEEDS")
        if name in assigned
    }
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    module = f"benchmarks.{path.parent.name}.{path.stem}"
    return Benchmark(
        module, summary, constants.get("MINUTES"), constants.get("NEEDS", ())
    )


BENCHMARKS = {
    path.stem: found
    for path in sorted((ROOT / "benchmarks").glob("*/*.py"))
    if (found := _read(path))
}
