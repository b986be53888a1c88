"""List the benchmarks, or run one of them.

.venv/bin/python -m benchmarks                   # lists all
.venv/bin/python -m benchmarks NAME --help       # lists the options of one
.venv/bin/python -m benchmarks NAME ...          # runs it
"""

import importlib
import sys

from benchmarks.registry import BENCHMARKS, Benchmark
from tools import is_installed


def table() -> str:
    """Return the list of benchmarks, group by group."""
    lines = []
    for group in dict.fromkeys(each.group for each in BENCHMARKS.values()):
        lines.append(f"\n{group}")
        for name, each in BENCHMARKS.items():
            if each.group == group:
                lines.append(f"  {name:20}  {each.summary}")
    return "\n".join(lines)


def missing(benchmark: Benchmark) -> list[str]:
    """Return the modules of ``NEEDS`` that are not installed."""
    return [x for x in benchmark.needs if not is_installed(x)]


def run(name: str, arguments: list[str]) -> int:
    """Run one benchmark in this process, and return its exit status."""
    # argparse shows this in the usage, and `records` stores it as the command.
    sys.argv = [f"python -m benchmarks {name}", *arguments]
    absent = missing(BENCHMARKS[name])
    try:
        if not absent:
            module = importlib.import_module(BENCHMARKS[name].module)
            return module.main(arguments) or 0
    except ModuleNotFoundError as error:
        absent = [str(error.name)]
    print(f"{name} needs {', '.join(absent)}; see CONTRIBUTING.md to install it")
    return 2


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "list"):
        print((__doc__ or "").rstrip())
        print(table())
        return 0
    name, *arguments = argv
    if name not in BENCHMARKS:
        print(f"{name}: no such benchmark; must be one of {', '.join(BENCHMARKS)}")
        return 2
    return run(name, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
