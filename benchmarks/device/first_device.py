"""All that the first minutes on a GPU should answer, in eight of them.

    python -m benchmarks first_device                  # on a GPU
    python -m benchmarks first_device --rehearse H200  # compiles its programs only
    python -m benchmarks first_device --size small     # runs it all on any machine

In this order: whether kernels have the reference's bits, how long steps are, how a
GPT-2 124M trains, and how long the first compile is. It
needs jax for CUDA, optax and numpy, and runs from a checkout. The record is written
after each answer, so that it may be stopped at any time; what no time was left for is
in it as not run.
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
from benchmarks.device import bits, first_compile, optimizers, training
from benchmarks.device import first_device_page as page
from benchmarks.device.supervisor import DONE, Supervisor, entry_of
from tools.gpu_program.targets import TARGETS

SECTIONS = {
    "bits": lambda: list(bits.FAMILIES),
    "step_times": optimizers.timed_here,
    "training": lambda: list(training.ROWS),
    "first_compile": lambda: list(first_compile.NAMES),
}
"""In the order of the answers, with the names of their jobs."""

SHARED = ("describe", "bits")
"""Sections in which nothing is timed on the device."""

SILENCE = 120.0
"""Seconds without an answer after which a process is given up."""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=_positive, help="for all of it: 8, or 120 to rehearse")
    add("--out", type=pathlib.Path, default=records.ROOT / "runs", help="folder")
    add("--size", choices=("full", "small"), default="full")
    add("--rehearse", choices=TARGETS, metavar="GPU", help="H100, H200 or B200")
    add(
        "--only",
        nargs="+",
        metavar="PATTERN",
        help="jobs as section/name, such as 'bits/*'",
    )
    add("--workers", type=int, help="processes at once")
    add("--draw", action="store_true", help="only write the page of the records")
    return parser.parse_args(argv)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def chosen(only: list[str] | None) -> list[dict]:
    """The jobs in order, as the record has them."""
    jobs = [(section, name) for section, names in SECTIONS.items() for name in names()]
    wanted = lambda job: any(fnmatch.fnmatchcase("/".join(job), p) for p in only or "*")
    return [entry_of(*job) for job in jobs if wanted(job)]


def cuda_toolkit() -> str | None:
    """The root of a toolkit with ptxas and libdevice.

    Where CUDA's libraries are wheels and its compiler is not, JAX 0.11 takes "None" for
    the root, and XLA finds a toolkit in its usual place only.
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
    """The environment of the jobs' processes, which share the device's memory."""
    made = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    made.pop("JAX_COMPILATION_CACHE_DIR", None)
    if args.rehearse:
        made["JAX_PLATFORMS"] = "cpu"
    elif made.get("JAX_PLATFORMS") in ("cuda", "gpu"):
        made["JAX_PLATFORMS"] = "cuda,cpu"  # the reference is computed on the CPU
    if root:
        made["CUDA_ROOT"] = root
        made["PATH"] = os.pathsep.join([f"{root}/bin", made.get("PATH", "")])
    paths = [str(records.ROOT), made.get("PYTHONPATH", "")]
    made["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return made


def said_by(*command: str) -> str | None:
    """The last line that a program writes, if there is such a program."""
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
    """Where the record comes from."""
    ask = "--query-gpu=driver_version", "--format=csv,noheader"
    return {
        # The path after --out has a meaning on one machine only.
        "command": re.sub(r" --out \S+", "", records.command()),
        "ran": "",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {n: v for n in PACKAGES if (v := version(n))},
        "driver": said_by("nvidia-smi", *ask),
        "ptxas": said_by(f"{root}/bin/ptxas", "--version") if root else None,
        "processors": os.cpu_count(),
        "size": args.size,
    }


def supervised(args, entries, env, workers, start, changed) -> None:
    """Run jobs until the time is over."""
    minutes = args.minutes or (120 if args.rehearse else 8)
    Supervisor(
        entries,
        {"small": args.size == "small", "target": args.rehearse},
        env,
        workers,
        SHARED,
        # What is left is for ending processes, and for the table.
        start + 60 * minutes - 2,
        SILENCE * (10 if args.rehearse else 1),
        changed,
        # Mosaic looks for libdevice here, and in no toolkit that it is told of.
        folder=env.get("CUDA_ROOT"),
    ).run()


def device_of(args, env, start) -> tuple[dict | None, str]:
    """What a process finds of the device, or None and why."""
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
    entries = chosen(args.only)
    if not entries:
        print(f"no job is named {' or '.join(args.only)}; jobs are, for instance:")
        print(*(f"  {e['section']}/{e['name']}" for e in chosen(None)), sep="\n")
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
            f"JAX finds no GPU here, but {found['device']}. With a GPU, see whether "
            "jax's plugin for CUDA is installed. Without one, --rehearse H200 compiles "
            "all programs, and --size small runs them on what there is."
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
        return f"--out {folder}: nothing can be written there ({error.strerror})"
    return None


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
    # A run that is asked to end says what it has.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    cores = os.cpu_count() or 1
    workers = args.workers or (cores if args.rehearse else max(2, min(8, cores // 2)))
    try:
        supervised(args, entries, env, workers, start, changed)
    except KeyboardInterrupt:
        print("stopped")
    print(page.rendered(record))
    print(f"{record['elapsed_seconds']:.0f} s; the record is {path}")
    return int(not page.is_good(record))
