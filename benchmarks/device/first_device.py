"""Test and time the package on a new GPU in eight minutes.

    python -m benchmarks first_device                  # on a GPU
    python -m benchmarks first_device --rehearse H200  # only compiles the programs
    python -m benchmarks first_device --size small     # runs small sizes on any machine
    python -m benchmarks first_device --minutes 14 --text tinyshakespeare.txt

The command checks the results of the kernels bit by bit, times optimizer steps, trains
a GPT-2 124M, and times the first compilation, in this order. With ``--text``, it uses
the time that is left to train on the characters of Shakespeare. It needs jax for CUDA,
optax and numpy, and runs in a checkout. It writes the record after each result, so you
can stop it at any time. Jobs for which no time was left are in the record as not run.
"""

import argparse
import datetime
import fnmatch
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import time

import jax

from benchmarks import records
from benchmarks.device import (
    bits,
    first_compile,
    optimizers,
    shakespeare_runs,
    training,
)
from benchmarks.device import first_device_page as page
from benchmarks.device.supervisor import DONE, Supervisor, entry_of
from tools.gpu_program.targets import TARGETS

SECTIONS = {
    "bits": lambda: list(bits.FAMILIES),
    "step_times": optimizers.timed_here,
    "training": lambda: list(training.ROWS),
    "first_compile": lambda: list(first_compile.NAMES),
    "shakespeare_runs": lambda: list(shakespeare_runs.ROWS),
}
"""The sections in the order in which they run, and the names of their jobs."""

SHARED = ("describe", "bits")
"""Sections whose jobs may share the device, because they do not time it."""

SILENCE = 120.0
"""The number of seconds without an answer after which a process is killed."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=_positive, help="time limit; default: 8, or 120 to rehearse")
    add(
        "--out",
        type=pathlib.Path,
        default=records.ROOT / "runs",
        help="folder of the record; default: runs",
    )
    add(
        "--size",
        choices=("full", "small"),
        default="full",
        help="'small' also runs on a CPU",
    )
    add(
        "--rehearse",
        choices=TARGETS,
        metavar="GPU",
        help="only compile the programs, for an H100, H200 or B200",
    )
    add(
        "--only",
        nargs="+",
        metavar="PATTERN",
        help="run only these jobs, such as 'bits/*' or training/kahan_adamw",
    )
    add("--workers", type=int, help="number of processes that compile at the same time")
    add("--text", type=_file, help="tinyshakespeare.txt, to train on at the end")
    add(
        "--draw",
        action="store_true",
        help="only write the tables of docs/hardware_h200.md from the stored records",
    )
    return parser.parse_args(argv)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def _file(text: str) -> pathlib.Path:
    if not pathlib.Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return pathlib.Path(text).resolve()


def chosen(only: list[str] | None) -> list[dict]:
    """Return the entries of the chosen jobs in the record, in order."""
    jobs = [(section, name) for section, names in SECTIONS.items() for name in names()]
    wanted = lambda job: any(fnmatch.fnmatchcase("/".join(job), p) for p in only or "*")
    return [entry_of(*job) for job in jobs if wanted(job)]


def cuda_toolkit() -> str | None:
    """Return the root of a CUDA toolkit with ptxas and libdevice, or None.

    XLA and Mosaic run ptxas, and read libdevice, when they compile a program. If the
    libraries of CUDA are wheels and its compiler is not, JAX 0.11 uses the text "None"
    as the root of the toolkit. Then XLA only finds a toolkit in ``/usr/local/cuda``.
    """
    wheels = importlib.util.find_spec("nvidia")
    roots = [os.environ.get("CUDA_ROOT"), os.environ.get("CUDA_HOME")]
    roots += [f"{x}/cu13" for x in (wheels and wheels.submodule_search_locations) or ()]
    if nvcc := shutil.which("nvcc"):
        roots.append(str(pathlib.Path(nvcc).resolve().parent.parent))
    for root in (*roots, "/usr/local/cuda"):
        if root and _is_toolkit(pathlib.Path(root)):
            return root
    return None


def _is_toolkit(root: pathlib.Path) -> bool:
    needed = "bin/ptxas", "nvvm/libdevice/libdevice.10.bc"
    return all((root / each).exists() for each in needed)


def environment(args: argparse.Namespace, root: str | None) -> dict[str, str]:
    """Return the environment for the jobs' processes, which share device memory."""
    made = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    made.pop("JAX_COMPILATION_CACHE_DIR", None)
    if args.rehearse:
        made["JAX_PLATFORMS"] = "cpu"
    elif made.get("JAX_PLATFORMS") in ("cuda", "gpu"):
        made["JAX_PLATFORMS"] = "cuda,cpu"  # the CPU computes the reference
    if root:
        made["CUDA_ROOT"] = root
        made["PATH"] = os.pathsep.join([f"{root}/bin", made.get("PATH", "")])
    paths = [str(records.ROOT), made.get("PYTHONPATH", "")]
    made["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return made


def last_line(*command: str) -> str | None:
    """Return the last line that a program prints, or None if it is not found."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip().splitlines() or [None])[-1]


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cuda-nvcc",
    "optax", "numpy", "flashoptim-jax",
)  # fmt: skip


def described(args: argparse.Namespace, root: str | None) -> dict:
    """Return the part of the record that describes the command and the software."""
    ask = "--query-gpu=driver_version", "--format=csv,noheader"
    return {
        # The paths after --out and --text are meaningless on another machine.
        "command": re.sub(r" --out \S+|(?<=--text )\S*/", "", records.command()),
        "ran": "",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {n: v for n in PACKAGES if (v := version(n))},
        "driver": last_line("nvidia-smi", *ask),
        "ptxas": last_line(f"{root}/bin/ptxas", "--version") if root else None,
        "processors": os.cpu_count(),
        "size": args.size,
    }


def supervised(args, entries, env, workers, start, changed) -> None:
    """Run jobs until the time is over."""
    minutes = args.minutes or (120 if args.rehearse else 8)
    # The last two seconds are for killing processes and printing the tables.
    end = start + 60 * minutes - 2
    request = {"small": args.size == "small", "target": args.rehearse}
    Supervisor(
        entries,
        request | {"text": args.text and str(args.text), "end": end},
        env,
        workers,
        SHARED,
        end,
        SILENCE * (10 if args.rehearse else 1),
        changed,
        # Mosaic looks for libdevice in the working directory, and ignores CUDA_ROOT.
        folder=env.get("CUDA_ROOT"),
    ).run()


def device_of(args, env, start) -> tuple[dict | None, str]:
    """Return ``(description, reason)``; the reason states why JAX cannot start."""
    entry = entry_of("describe", "device")
    supervised(args, [entry], env, 1, start, lambda line: None)
    if entry["status"] != DONE:
        return None, entry["reason"]
    found = {
        key: entry[key] for key in entry if key not in entry_of("describe", "device")
    }
    return found, ""


def main(argv: list[str] | None = None) -> int:
    start = time.monotonic()
    args = parse_arguments(argv)
    if args.draw:
        return page.draw()
    entries = [e for e in chosen(args.only) if args.text or not _needs_text(e)]
    if not entries:
        print(f"--only: no job is named {' or '.join(args.only)}. The jobs are:")
        print(*(f"  {e['section']}/{e['name']}" for e in chosen(None)), sep="\n")
        print("Jobs in shakespeare_runs also need --text.")
        return 2
    if refusal := _unwritable(args.out):
        print(refusal)
        return 2
    root = cuda_toolkit()
    env = environment(args, root)
    found, why = device_of(args, env, start)
    if found is None:
        print(f"JAX cannot start here: {why}")
        return 2
    if found["platform"] != "gpu" and not args.rehearse and args.size != "small":
        print(
            f"JAX found no GPU, only {found['device']}. If this machine has one, check "
            "that jax's plugin for CUDA is installed. Without a GPU, compile all "
            "programs with --rehearse H200, or run small ones with --size small."
        )
        return 2
    return _run(args, entries, env, root, found, start)


def _unwritable(folder: pathlib.Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".first_device_{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return f"--out: cannot write to {folder} ({error.strerror})"
    return None


def _needs_text(entry: dict) -> bool:
    """Return whether a job needs ``--text``. These jobs start after all others."""
    return entry["section"] == "shakespeare_runs"


def _run(args, entries, env, root, found, start) -> int:
    kind = "rehearsal " + args.rehearse if args.rehearse else found["device"]
    name = re.sub(r"\W+", "_", f"{kind} {'small' if args.size == 'small' else ''}")
    path = args.out / f"first_device_{name.strip('_').lower()}.json"
    record = described(args, root) | {"device": found, "jobs": entries}
    record["ran"] = found["device"]
    if args.rehearse:
        record["ran"] = f"compiled for {page.article(args.rehearse)}; not run"
    elif found["platform"] == "cpu":
        record["ran"] = f"CPU ({platform.machine()})"

    def changed(line: str | None) -> None:
        record["elapsed_seconds"] = time.monotonic() - start
        records.write(path, record)
        if line:
            print(f"{record['elapsed_seconds']:5.0f} s  {line}", flush=True)

    changed(f"{record['ran']}, jax {jax.__version__}; the record is {path}")
    # SystemExit lets the supervisor kill its processes and complete the record.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cores = os.cpu_count() or 1
    workers = args.workers or (cores if args.rehearse else max(2, min(8, cores // 2)))
    try:
        for last in (False, True):
            some = [entry for entry in entries if _needs_text(entry) == last]
            supervised(args, some, env, workers, start, changed)
    except KeyboardInterrupt:
        print("stopped")
    print(page.section([record]))
    for line in page.inexact(entries):
        print(f"not exact: {line}")
    print(f"{record['elapsed_seconds']:.0f} s; the record is {path}")
    return int(not page.is_good(record))
