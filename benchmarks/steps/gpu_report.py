"""What ``gpu_step.py`` says: of the machine, and of the results."""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import subprocess

import jax

from benchmarks import records


def driver() -> str | None:
    """The NVIDIA driver's version, if nvidia-smi can be asked."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else None


def describe(args: argparse.Namespace) -> dict:
    """What the figures were measured on and with."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": jax.default_backend(),
        "machine": platform.machine(),
        "driver": driver(),
        "platform_version": device.client.platform_version,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "versions": {n: version(n) for n in ("jaxlib", "optax", "numpy", "torch")},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": records.command(),
        "options": vars(args),
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


COLUMNS = (
    ("ms", "ms", 10, 4),
    ("loop_ms", "loop ms", 10, 4),
    ("ratio_to_float32", "ratio", 7, 2),
    ("stored_bytes_per_param", "B/param", 9, 2),
    ("moved_bytes_per_param", "moved", 8, 2),
    ("gb_per_s", "GB/s", 9, 1),
    ("copy_share", "of copy", 9, 3),
    ("loop_copy_share", "in loop", 9, 3),
    ("temp_bytes_per_param", "temp", 8, 2),
)


def table(rows: list[dict]) -> str:
    """All rows, set by set."""
    head = "".join(f"{title:>{width}}" for _, title, width, _ in COLUMNS)
    lines = [f"{'set':10}{'step':45}{head}"]
    for row in rows:
        cells = [
            f"{'-':>{width}}" if row[key] is None else f"{row[key]:{width}.{digits}f}"
            for key, _, width, digits in COLUMNS
        ]
        name = f"{row['optimizer']}, {row['entry']} ({row['implementation']})"
        lines.append(f"{row['set']:10}{name:45}{''.join(cells)}")
    return "\n".join(lines)


def contract_lines(contract: dict, tests: dict) -> str:
    """The outcome of both checks."""
    lines = [f"kernels and XLA agree after {contract['steps']} steps: {contract['ok']}"]
    for row in contract["rows"]:
        found = row.get("error") or row.get("skipped")
        if not found:
            counts = [f"{row[k]} {k}" for k in ("parameters", "residuals", "moments")]
            found = f"{', '.join(counts)} of {row['elements']} elements differ"
        lines.append(f"  {row['format']:26}{found}")
    why = tests.get("reason") or (tests.get("output") or "").strip().split("\n")[-1]
    return "\n".join([*lines, f"tests: {tests['status']} ({why})"])


def skipped_lines(skipped: list[dict]) -> str:
    """Each reason once for a set, with what it kept from being timed."""
    found: dict[tuple, list[str]] = {}
    for line in skipped:
        what = f"{line['optimizer']} ({line['entry']})" if line.get("entry") else None
        what = (what or line["optimizer"]) + (" in a loop" if line.get("loop") else "")
        found.setdefault((line.get("set"), line["reason"]), []).append(what)
    return "\n".join(
        f"skipped: {f'{name}: ' if name else ''}{'; '.join(names)}: {reason}"
        for (name, reason), names in found.items()
    )


def save(record: dict, path: str) -> None:
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")
