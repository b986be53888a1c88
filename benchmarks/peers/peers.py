"""AdamW of other libraries beside this one's: bytes, programs, time, loss, failures.

    .venv/bin/python -m benchmarks peers --torch .venv-torch/bin/python

flashoptim-jax takes part if it is installed. PyTorch's side runs in a process of its
own, by a Python that has torch and what it finds of torch-optimi, torchao, bitsandbytes
and flashoptim. Compiled facts are those of a donated step with bfloat16 gradients for
an H200, and need the ``gpu-program`` extra; all else runs on this host. What does not
run here is a row that says why.
"""

import argparse
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
import sys
import time

import jax
import numpy as np

from benchmarks import ROOT, records
from benchmarks.peers import jax_peers, tasks

TORCH_BASELINE = "torch AdamW, float32"
RECORD = ROOT / "benchmarks" / "peers" / "peers.json"
PACKAGES = ("jax", "jaxlib", "optax", "flashoptim-jax", "numpy")


def compiled_facts(peer: jax_peers.Peer) -> dict:
    """What the step on a leaf of 4096 x 4096, and on GPT-2's leaves, compiles to."""
    from tools.gpu_program import steps
    from tools.gpu_program.machine_code import instructions_per_parameter
    from tools.gpu_program.targets import gpu_mesh, lower_for

    def lowered(model):
        params = jax.tree.map(lambda x: steps.leaf(*x.shape, dtype=peer.dtype), model)
        state = jax.eval_shape(functools.partial(peer.init, 1e-3), params)
        step = functools.partial(peer.step, 1e-3)
        low = lower_for(gpu_mesh(), step, params, state, model, donate=(0, 1))
        size = sum(x.size for x in jax.tree.leaves(model))
        return steps.OptimizerStep(low, size, steps.bytes_of(params, state))

    one, whole = lowered(steps.leaf(4096, 4096)), lowered(steps.gpt2())
    found = [
        instructions_per_parameter(kernel, one.parameters)
        for kernel in one.machine_code.values()
    ]
    return {
        "moved": one.moved,
        "temporary": one.temporary,
        "instructions": sum(found),
        "gpt2_launches": len(whole.launches),
        "gpt2_temporary": whole.temporary,
    }


def jax_rows(seeds: int) -> dict[str, dict]:
    from tools.gpu_program.steps import gpt2

    here, fused = jax_peers.peers(), jax_peers.peers(fused_flash=True)
    has_compiler = importlib.util.find_spec("jax_plugins.xla_cuda12")
    rows = {}
    for name, peer in here.items():
        start = time.perf_counter()
        row = {"stored": jax_peers.stored(peer)}
        row["failures"], row["resume"] = jax_peers.failures(peer)
        row["losses"] = jax_peers.losses(peer, seeds)
        row["trace_seconds"] = jax_peers.seconds_to_trace(peer, gpt2())
        if has_compiler:
            row |= compiled_facts(fused[name])
        rows[name] = row
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    for name, ratio in jax_peers.time_ratios(here).items():
        rows[name]["time_ratio"] = ratio
    if jax_peers.FLASH not in rows:
        rows[jax_peers.FLASH] = {"not_run": "flashoptim-jax is not installed"}
    return rows


def torch_rows(python: str | None, seeds: int) -> dict:
    """The rows of PyTorch's side, and its versions."""
    if python is None:
        return {"versions": {}, "rows": {"PyTorch": {"not_run": "no --torch given"}}}
    script = ROOT / "benchmarks" / "peers" / "torch_peers.py"
    command = [python, str(script), str(seeds)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        reason = f"{script.name} ended with {done.returncode}"
        return {"versions": {}, "rows": {"PyTorch": {"not_run": reason}}}
    return json.loads(done.stdout.splitlines()[-1])


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def number(row: dict, key: str, form: str = ".1f") -> str:
    return format(row[key], form) if key in row else "-"


def table(heads, rows) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def short(x):
    """Floats of five digits."""
    if isinstance(x, dict):
        return {key: short(value) for key, value in x.items()}
    if isinstance(x, list):
        return [short(each) for each in x]
    return float(f"{x:.5g}") if isinstance(x, float) else x


def sizes(rows: dict[str, dict]) -> str:
    """Bytes, programs and times."""
    heads = [
        *("AdamW", "stored, B", "moved, B", "temporary, B", "instructions"),
        *("GPT-2: kernels", "s to trace", "CPU step"),
    ]
    lines = []
    for name, row in rows.items():
        if "not_run" in row:
            lines.append([name, f"not run: {row['not_run']}", *[""] * (len(heads) - 2)])
            continue
        cells = [number(row, "stored", ".2f")]
        cells += [number(row, key) for key in ("moved", "temporary", "instructions")]
        cells += [number(row, "gpt2_launches", "d"), number(row, "trace_seconds")]
        ratio = number(row, "time_ratio", ".2f")
        lines.append([name, *cells, ratio])
    return table(heads, lines)


def accuracies(rows: dict[str, dict]) -> str:
    """Loss and failures."""
    names = list(tasks.cases())
    lines, baseline = [], None
    for name, row in rows.items():
        if "not_run" in row:
            continue
        # Each side's first row is float32's.
        if name in (jax_peers.BASELINE, TORCH_BASELINE):
            baseline = np.asarray(row["losses"])
        more = 1e3 * (np.asarray(row["losses"]) - baseline)
        cells = [f"{more.mean():+.2f} ± {more.std(ddof=1):.2f}"]
        cells += [f"{row['failures'][case]:.2g}" for case in names]
        lines.append([name, *cells, row["resume"]])
    return table(["AdamW", "loss, 1e-3", *names, "resumed"], lines)


def draw(record: dict) -> None:
    print(sizes(record["rows"]), accuracies(record["rows"]), sep="\n\n")


def main(argv: list[str]) -> int:
    """Measures, prints both tables and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="5 by default")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch")
    parser.add_argument("--draw", action="store_true", help="only print what is there")
    args = parser.parse_args(argv)
    if args.draw:
        draw(json.loads(RECORD.read_text()))
        return 0
    start = time.perf_counter()
    theirs = torch_rows(args.torch, args.seeds)
    rows = jax_rows(args.seeds) | theirs["rows"]
    record = {
        "command": records.command(),
        "ran": f"CPU ({platform.machine()}); programs are compiled for an H200",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": round(time.perf_counter() - start),
        "versions": {x: version_of(x) for x in PACKAGES} | theirs["versions"],
        "rows": rows,
    }
    RECORD.write_text(json.dumps(short(record), indent=1) + "\n")
    draw(record)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
