"""Compare AdamW with other libraries: bytes, programs, time, loss and errors.

    .venv/bin/python -m benchmarks peers --torch .venv-torch/bin/python

flashoptim-jax is included if it is installed. The PyTorch libraries run in a separate
process, with the Python that ``--torch`` names. It needs torch, and includes whichever
of torch-optimi, torchao, bitsandbytes and flashoptim are installed. Donated steps with
bfloat16 gradients are compiled for an H200, which needs the ``gpu-program`` extra.
Everything else runs on this machine. If an optimizer cannot run, its row states why.
"""

import functools
import importlib.metadata
import json
import subprocess
import time

import jax
import numpy as np

from benchmarks import ROOT, records
from benchmarks.peers import jax_peers
from tools import is_installed

NEEDS = ("jax_plugins.xla_cuda12",)

TORCH_BASELINE = "torch AdamW, float32"


def compiled_facts(peer: jax_peers.Peer) -> dict:
    """Return bytes and instructions of the compiled step on a 4096 x 4096 leaf."""
    from tools.gpu_program import steps
    from tools.gpu_program.machine_code import instructions_per_parameter
    from tools.gpu_program.targets import gpu_mesh, lower_for

    grads = steps.leaf(4096, 4096)
    params = steps.leaf(4096, 4096, dtype=peer.dtype)
    state = jax.eval_shape(functools.partial(peer.init, 1e-3), params)
    step = functools.partial(peer.step, 1e-3)
    lowered = lower_for(gpu_mesh(), step, params, state, grads, donate=(0, 1))
    one = steps.OptimizerStep(lowered, grads.size, steps.bytes_of(params, state))
    kernels = one.machine_code.values()
    return {
        "moved": one.moved,
        "temporary": one.temporary,
        "launches": sum(size > 4096 for _, size in one.launches),
        "instructions": sum(instructions_per_parameter(x, grads.size) for x in kernels),
    }


def jax_rows(seeds: int) -> dict[str, dict]:
    from tools.gpu_program.steps import gpt2

    here, fused = jax_peers.peers(), jax_peers.peers(fused_flash=True)
    has_compiler = is_installed("jax_plugins.xla_cuda12")
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
    """Return the rows of the PyTorch libraries, and their versions."""
    if python is None:
        return {"versions": {}, "rows": {"PyTorch": {"not_run": "no --torch given"}}}
    script = ROOT / "benchmarks" / "peers" / "torch_peers.py"
    command = [python, str(script), str(seeds)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        reason = f"{script.name} ended with {done.returncode}"
        return {"versions": {}, "rows": {"PyTorch": {"not_run": reason}}}
    return json.loads(done.stdout.splitlines()[-1])


def add_differences(rows: dict[str, dict]) -> None:
    """Add each loss minus the framework's float32 loss, in thousandths."""
    baseline = np.zeros(0)
    for name, row in rows.items():
        if name in (jax_peers.BASELINE, TORCH_BASELINE):
            baseline = np.asarray(row["losses"])
        if "losses" in row:
            row["more"] = (1e3 * (np.asarray(row["losses"]) - baseline)).tolist()


def text(record: dict) -> str:
    rows = record["rows"].items()
    more = {name: records.spread(x["more"]) for name, x in rows if "more" in x}
    return records.figures(record | {"loss minus float32's, 1e-3": more})


def measure(args) -> dict:
    theirs = torch_rows(args.torch, args.seeds)
    rows = jax_rows(args.seeds) | theirs["rows"]
    add_differences(rows)
    flash = "flashoptim-jax"
    has_flash = is_installed("flashoptim_jax")
    own = {flash: importlib.metadata.version(flash) if has_flash else None}
    return {"peers": theirs["versions"] | own, "rows": rows}


def main(argv: list[str] | None = None) -> None:
    options = records.Options(__doc__, seeds=5)
    options.add_argument("--torch", metavar="PYTHON", help="a Python with torch")
    args = options.parse_args(argv)
    ran = f"{records.ran_here()}; programs are compiled for an H200"
    records.run(__name__, args, measure, text, ran=ran)
