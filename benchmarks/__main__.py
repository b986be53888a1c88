"""List the benchmarks, or run them.

    .venv/bin/python -m benchmarks                   # lists all
    .venv/bin/python -m benchmarks NAME --help       # lists the options of one
    .venv/bin/python -m benchmarks NAME ...          # runs it
    .venv/bin/python -m benchmarks all               # runs each in a separate process

Minutes were measured on two CPU cores, with the default options. A benchmark without
minutes takes hours or needs a GPU, and "all" skips it.
"""

import importlib
import subprocess
import sys
import time

from benchmarks import ROOT
from benchmarks.registry import BENCHMARKS, Benchmark
from tools import is_installed


def table() -> str:
    """Return the list of benchmarks, group by group."""
    lines = []
    for group in dict.fromkeys(each.group for each in BENCHMARKS.values()):
        lines.append(f"\n{group}")
        for name, each in BENCHMARKS.items():
            if each.group == group:
                time = f"{each.minutes:g} min" if each.minutes else ""
                lines.append(f"  {name:20} {time:>7}  {each.summary}")
    return "\n".join(lines)


def run(name: str, arguments: list[str]) -> int:
    """Run one benchmark in this process, and return its exit status."""
    # argparse shows this in the usage, and `records` stores it as the command.
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    try:
        found = importlib.import_module(BENCHMARKS[name].module).main(arguments)
    except ModuleNotFoundError as error:
        return needs(name, error.name)
    return found if isinstance(found, int) else 0


def missing(benchmark: Benchmark) -> list[str]:
    """Return the modules of ``NEEDS`` that are not installed."""
    return [x for x in benchmark.needs if not is_installed(x)]


def needs(name: str, *modules: str | None) -> int:
    """Print what a benchmark needs, and return the exit status."""
    print(f"{name} needs {', '.join(map(str, modules))}; CONTRIBUTING.md installs it")
    return 2


def run_all() -> int:
    """Run each benchmark in a separate process, and return the number of failures."""
    failed = []
    for name, each in BENCHMARKS.items():
        if each.minutes is None:
            print(
                f"+ {name}: skipped; it takes hours or needs a GPU, so run it alone",
                flush=True,
            )
            continue
        if absent := missing(each):
            print(f"+ {name}: skipped; needs {', '.join(absent)}", flush=True)
            continue
        command = [sys.executable, "-m", "benchmarks", name]
        print(f"+ {name}: about {each.minutes:g} minutes", flush=True)
        start = time.perf_counter()
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
        print(f"+ {name}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "list"):
        print((__doc__ or "").rstrip())
        print(table())
        return 0
    name, *arguments = argv
    if name == "all":
        return run_all()
    if name not in BENCHMARKS:
        print(f"{name}: no such benchmark; must be all, {', '.join(BENCHMARKS)}")
        return 2
    if absent := missing(BENCHMARKS[name]):
        return needs(name, *absent)
    return run(name, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
