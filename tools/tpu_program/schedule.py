"""Cycles and operations of a TPU kernel's loop, from the schedule that libtpu writes.

A TPU starts a bundle of instructions per cycle, at most so many of each unit. The
compiler schedules all of them, so that cycles can be counted without a TPU, but for
waiting on memory.
"""

import collections
import dataclasses
import os
import pathlib
import re
import tempfile

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*([> ]*)\{")
_OPERATION = re.compile(r"(?:= |; )\s*(v[a-z0-9_]+(?:\.[a-z0-9]+)*)")


@dataclasses.dataclass(frozen=True)
class Part:
    """The bundles at one depth of a kernel's loops.

    Args:
      bundles: how many, each a cycle.
      units: instructions per unit, such as ``VALU``, the vector arithmetic.
      operations: vector instructions by name.
    """

    bundles: int
    units: collections.Counter
    operations: collections.Counter


def request_schedules() -> pathlib.Path:
    """The new folder in which libtpu will write schedules; before it is loaded."""
    folder = tempfile.mkdtemp(prefix="schedules")
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    given = os.environ.get("LIBTPU_INIT_ARGS", "")
    os.environ["LIBTPU_INIT_ARGS"] = f"{given} {flags}".strip()
    return pathlib.Path(folder)


def parts_of(folder: pathlib.Path, kernel: str = "fused_update") -> dict[int, Part]:
    """By depth, the bundles of the kernel that was compiled last.

    Depth 0 runs once, 1 once per program, and 2 is the loop of each program.

    Raises:
      FileNotFoundError: if no such kernel was compiled since :func:`request_schedules`.
    """
    schedule = _last(folder, f"*{kernel}*final_bundles.txt", "schedule-analysis")
    used = _last(folder, f"*{kernel}*final_hlo-static-per-bundle-utilization.txt")
    lines = used.read_text().splitlines()
    start = lines.index("== UTILIZATION:")
    units = [name.strip() for name in lines[start - 2].split(",")]
    counts = [list(map(int, line.split())) for line in lines[start + 1 :] if line]
    bundles: list[tuple[int, str]] = []
    for line in schedule.read_text().splitlines():
        found = _BUNDLE.match(line)
        if found:
            bundles.append((found[1].count(">"), line))
        elif bundles:
            bundles[-1] = bundles[-1][0], bundles[-1][1] + line
    parts: dict[int, Part] = {}
    for (depth, text), row in zip(bundles, counts, strict=True):
        old = parts.get(depth, Part(0, collections.Counter(), collections.Counter()))
        parts[depth] = Part(
            old.bundles + 1,
            old.units + collections.Counter(dict(zip(units, row, strict=True))),
            old.operations + collections.Counter(_OPERATION.findall(text)),
        )
    return parts


def _last(folder: pathlib.Path, pattern: str, but: str = "\n") -> pathlib.Path:
    """The file that was written last."""
    found = sorted(x for x in folder.glob(pattern) if but not in x.name)
    if not found:
        raise FileNotFoundError(f"no schedule {pattern} in {folder}")
    return found[-1]
