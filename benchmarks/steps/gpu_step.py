"""Checks and times the AdamW steps on this machine's accelerator, in one command.

    python -m benchmarks gpu_step --output gpu_step.json

It needs jax, optax and numpy. First it checks that kernels and XLA path agree, then it
measures what a copy reaches, then it times every step on several sets of leaves; what
no time is left for is named as skipped. README.md beside this file says how to read it.
"""

import argparse
import importlib.util
import json
import subprocess
import sys

import jax

from benchmarks.leaf_sets import SETS, LeafSet
from benchmarks.steps import gpu_cases, gpu_contract, gpu_report, gpu_runs, gpu_timing
from benchmarks.steps.gpu_cases import BASELINE
from benchmarks.steps.gpu_timing import Budget
from benchmarks.training import command_line


def torch_rows(sets: list[LeafSet], args, copy: float, budget: Budget, rows: list):
    """The rows of torch's fused AdamW and what was skipped."""
    if importlib.util.find_spec("torch") is None:
        return [], [{"optimizer": "torch", "reason": "not installed"}]
    task = {
        "sets": {each.name: each.shapes for each in sets},
        "rounds": args.rounds,
        "measure": args.measure,
        "seconds": max(0.0, budget.left - 20),
        "rate": gpu_cases.RATE,
        "decay": gpu_cases.DECAY,
        "device": "cuda" if on_gpu() else "cpu",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.peers.torch_peer"],
            input=json.dumps(task),
            env=gpu_contract.child_environment(),
            capture_output=True,
            text=True,
            timeout=max(1.0, budget.left),
        )
    except subprocess.TimeoutExpired:
        return [], [{"optimizer": "torch", "reason": "no time left"}]
    if done.returncode:
        return [], [{"optimizer": "torch", "reason": done.stderr[-1000:]}]
    answer = json.loads(done.stdout.splitlines()[-1])
    found = [torch_row(each, sets, copy, rows) for each in answer["rows"]]
    return found, answer["skipped"]


def torch_row(answer: dict, sets: list[LeafSet], copy: float, rows: list) -> dict:
    leaf_set = next(each for each in sets if each.name == answer["set"])
    sizes = answer["stored_bytes"], answer["moved_bytes"]
    base = [
        r["ms"] for r in rows if (r["set"], r["optimizer"]) == (leaf_set.name, BASELINE)
    ]
    row = {
        "set": leaf_set.name,
        "optimizer": answer["optimizer"],
        "entry": "step",
        "implementation": "torch",
        **gpu_runs.row_of(answer["times"], [], sizes, leaf_set, copy),
        "calls": answer["calls"],
        "loop_calls": 0,
        "temp_bytes_per_param": None,
        "compile_seconds": None,
    }
    row["ratio_to_float32"] = row["ms"] / base[0] if base else None
    return row


def on_gpu() -> bool:
    return jax.default_backend() == "gpu"


def comma_separated(known):
    """An argument type: names out of those that are known."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        wrong = [name for name in names if name not in known]
        if wrong:
            raise argparse.ArgumentTypeError(
                f"{', '.join(wrong)}: not among {', '.join(known)}"
            )
        return names

    return parse


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names, formats = list(gpu_cases.optimizers()), list(gpu_contract.FORMATS)
    add = parser.add_argument
    add("--sets", type=comma_separated(SETS), default=list(SETS))
    add("--optimizers", type=comma_separated([*names, "torch"]), default=None)
    add("--formats", type=comma_separated(formats), default=formats)
    add("--rounds", type=int, default=7)
    add("--measure", type=float, default=0.05, help="seconds of one measurement")
    add("--loop-steps", type=int, default=20, help="steps in one jitted fori_loop")
    add("--scale", type=int, default=1, help="divides every axis, for a quick try")
    add("--seconds", type=float, default=420.0, help="what then remains is skipped")
    add("--output", default="runs/gpu_step.json", type=command_line.output_file)
    add("--no-tests", action="store_true", help="leave out pytest in a subprocess")
    args = parser.parse_args(argv)
    args.optimizers = args.optimizers or [*names, "torch"]
    return args


def run_tests(args, budget: Budget) -> dict:
    if args.no_tests:
        return {"status": "skipped", "reason": "--no-tests"}
    return gpu_contract.run_tests("cuda" if on_gpu() else "cpu", budget)


def not_installed(names: list[str]) -> list[dict]:
    """A line for each optional peer in Python that cannot be imported."""
    if "flash_adamw" in names or importlib.util.find_spec("flashoptim_jax"):
        return []
    return [{"optimizer": "flash_adamw", "reason": "flashoptim_jax: not installed"}]


def check(record: dict, args, budget: Budget) -> None:
    """Phase one: do the kernels compute the right thing?"""
    record["contract"] = gpu_contract.check_formats(
        args.formats, on_gpu() and args.scale == 1, budget.part(0.2)
    )
    record["tests"] = run_tests(args, budget.part(0.3))
    print(gpu_report.contract_lines(record["contract"], record["tests"]), flush=True)


def measure(record: dict, args, budget: Budget) -> None:
    """Phase two: the copy's bandwidth, and every step on every set."""
    shrink = args.scale * args.scale
    copies = gpu_timing.copy_bandwidth(shrink, args.rounds, args.measure)
    best = max(row["gb_per_s"] for row in copies)
    record["copy"] = {"best_gb_per_s": best, "rows": copies}
    print(f"copy: {best:.1f} GB/s read and written", flush=True)
    sets = [SETS[name].shrunk(args.scale) for name in args.sets]
    names = [name for name in args.optimizers if name != "torch"]
    record["skipped"] += not_installed(names)
    for number, leaf_set in enumerate(sets):
        part = budget.part(0.9 / (len(sets) - number))
        rows, skipped = gpu_runs.run_set(leaf_set, names, args, best, part, budget)
        record["rows"] += rows
        record["skipped"] += skipped
        gpu_report.save(record, args.output)
    if "torch" in args.optimizers:
        rows, skipped = torch_rows(sets, args, best, budget, record["rows"])
        record["rows"] += rows
        record["skipped"] += skipped


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    budget = Budget(args.seconds)
    record = {**gpu_report.describe(args), "rows": [], "skipped": []}
    print(f"jax {record['jax']} on {record['device']}, driver {record['driver']}")
    check(record, args, budget)
    gpu_report.save(record, args.output)
    measure(record, args, budget)
    record["elapsed_seconds"] = budget.spent
    gpu_report.save(record, args.output)
    print(gpu_report.table(record["rows"]))
    print(gpu_report.skipped_lines(record["skipped"]))
    print(f"{budget.spent:.0f} s; wrote {args.output}")
    failed = record["tests"]["status"] == "failed" or not record["contract"]["ok"]
    return int(failed)
