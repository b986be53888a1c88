"""Count the cycles and operations of TPU kernels in the schedule that libtpu writes.

A TPU starts one bundle of instructions per cycle, and each unit starts a limited number
of them. The compiler schedules all instructions, so cycles can be counted without a
TPU. The count does not include the time that the program waits for memory.
"""

import collections
import dataclasses
import os
import pathlib
import re
import tempfile

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*([> ]*)\{")
_LOOP = "LB"
"""The label of the first bundle of a loop."""
_OPERATION = re.compile(r"(?:= |; )\s*(v[a-z0-9_]+(?:\.[a-z0-9]+)*)")


@dataclasses.dataclass(frozen=True)
class Part:
    """The bundles at one depth of a kernel's loops.

    Args:
      bundles: the number of bundles. Each needs one cycle.
      units: the number of instructions per unit; ``VALU`` is vector arithmetic.
      operations: the number of vector instructions by name.
    """

    bundles: int
    units: collections.Counter
    operations: collections.Counter

    def __add__(self, other: "Part") -> "Part":
        return Part(
            self.bundles + other.bundles,
            self.units + other.units,
            self.operations + other.operations,
        )


_NOTHING = Part(0, collections.Counter(), collections.Counter())


def request_schedules() -> pathlib.Path:
    """Make libtpu write schedules into a new folder. Call this before it is loaded."""
    folder = tempfile.mkdtemp(prefix="schedules")
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = f"{given} {flags}".strip()
    return pathlib.Path(folder)


def parts_of(folder: pathlib.Path, kernel: str = "fused_update") -> dict[int, Part]:
    """Return the bundles of the last compiled kernel, keyed by depth.

    Bundles at depth 0 run once, and bundles at depth 1 run once per program. Bundles at
    depth 2 belong to the loops of each program; see :func:`loops_of`.

    Raises:
      FileNotFoundError: if no such kernel was compiled since :func:`request_schedules`.
    """
    parts: dict[int, Part] = {}
    for depth, _, part in _runs(folder, kernel):
        parts[depth] = parts.get(depth, _NOTHING) + part
    return parts


def loops_of(folder: pathlib.Path, kernel: str = "fused_update") -> list[Part]:
    """Return the loops of each program of the last compiled kernel, in order."""
    runs = _runs(folder, kernel)
    return [part for depth, label, part in runs if depth == 2 and label == _LOOP]


def _runs(folder: pathlib.Path, kernel: str) -> list[tuple[int, str | None, Part]]:
    """Group consecutive bundles that belong to the same depth and loop.

    Returns:
      ``(depth, label of the first bundle, bundles)`` for each group.
    """
    schedule = _last(folder, f"*{kernel}*final_bundles.txt", "schedule-analysis")
    used = _last(folder, f"*{kernel}*final_hlo-static-per-bundle-utilization.txt")
    lines = used.read_text().splitlines()
    start = lines.index("== UTILIZATION:")
    units = [name.strip() for name in lines[start - 2].split(",")]
    counts = [list(map(int, line.split())) for line in lines[start + 1 :] if line]
    bundles: list[tuple[int, str | None, str]] = []
    for line in schedule.read_text().splitlines():
        found = _BUNDLE.match(line)
        if found:
            bundles.append((found[2].count(">"), found[1], line))
        elif bundles:
            *place, text = bundles[-1]
            bundles[-1] = *place, text + line
    runs: list[tuple[int, str | None, Part]] = []
    for (depth, label, text), row in zip(bundles, counts, strict=True):
        part = Part(
            1,
            collections.Counter(dict(zip(units, row, strict=True))),
            collections.Counter(_OPERATION.findall(text)),
        )
        if runs and runs[-1][0] == depth and label != _LOOP:
            _, label, before = runs.pop()
            part = before + part
        runs.append((depth, label, part))
    return runs


def _last(folder: pathlib.Path, pattern: str, but: str = "\n") -> pathlib.Path:
    """Return the last file that matches a pattern and does not contain ``but``."""
    found = sorted(x for x in folder.glob(pattern) if but not in x.name)
    if not found:
        raise FileNotFoundError(f"no schedule {pattern} in {folder}")
    return found[-1]
