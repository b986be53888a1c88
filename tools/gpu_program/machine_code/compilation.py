"""Compile a lowered program, or PTX, and read the machine code of its kernels."""

import collections
import dataclasses
import functools
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

import jax

from tools.gpu_program.dump import compile_with_dump
from tools.gpu_program.launch import Launch
from tools.gpu_program.machine_code.kernel import Kernel
from tools.gpu_program.machine_code.trip_counts import kernel_facts


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program, and its kernels by name."""

    compiled: jax.stages.Compiled
    kernels: dict[str, Kernel]


def missing_tools() -> str | None:
    """Return the reason why these functions cannot run, or None."""
    missing = [tool for tool in ("ptxas", "nvdisasm") if _find(tool) is None]
    if not missing:
        return None
    return f"needs {' and '.join(missing)}: install the gpu-program extra"


def program(lowered: jax.stages.Lowered) -> Program:
    """Compile a program and read the machine code of its kernels.

    Args:
      lowered: the program, from ``targets.lower_for``.
    """
    dump = compile_with_dump(lowered)
    launches, found = collections.defaultdict(list), {}
    for name, launch in launches_of(dump.thunks).values():
        launches[name].append(launch)
    sources = {source: None for source in dump.ptx}
    for kernel in dump.mosaic.values():
        launches[kernel.name].append(kernel.launch)
        sources[kernel.ptx] = None
    for source in sources:
        found |= kernels_of_ptx(source, launches)
    return Program(dump.compiled, found)


def kernels_of_ptx(
    source: str, launches: Mapping[str, Sequence[Launch]] | None = None
) -> dict[str, Kernel]:
    """Compile PTX and read the machine code of its kernels.

    Args:
      source: the PTX.
      launches: the launches of each kernel by name, if they are known.
    """
    architecture = re.findall(r"^\s*\.target (\w+)", source, re.M)[0]
    with tempfile.TemporaryDirectory() as folder:
        ptx = pathlib.Path(folder, "kernels.ptx")
        cubin = ptx.with_suffix(".cubin")
        ptx.write_text(source)
        report = run_tool("ptxas", "-v", f"-arch={architecture}", ptx, "-o", cubin)
        listing = run_tool("nvdisasm", "-c", cubin)
    sections = re.split(r"^\s*\.section\s+\.text\.(\S+?),.*$", listing, flags=re.M)
    code = dict(zip(sections[1::2], sections[2::2], strict=True))
    found = {}
    for part in report.split("Compiling entry function ")[1:]:
        name = part.split("'")[1]
        properties = part.split(f"Function properties for {name}\n", 1)[1]

        def number(pattern, text=properties):
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        found[name] = Kernel(
            name=name,
            registers=number(r"Used (\d+) registers"),
            stack=number(r"(\d+) bytes stack frame"),
            spill_stores=number(r"(\d+) bytes spill stores"),
            spill_loads=number(r"(\d+) bytes spill loads"),
            static_shared=number(r"(\d+) bytes smem"),
            launches=tuple((launches or {}).get(name, ())),
            **kernel_facts(code[name]),
        )
    return found


def launches_of(thunks: str) -> dict[int, tuple[str, Launch]]:
    """Return ``(name, launch)`` of each kernel, keyed by its index among the thunks."""
    form = (
        r"^\s*(\d+): .*?(\S+) grid: \[(.*?)\] threads: \[(.*?)\]"
        r"\s+shared_memory: (\d+) bytes"
    )
    axes = lambda text: tuple(map(int, text.split(", ")))
    return {
        int(number): (name, Launch(axes(grid), axes(block), int(shared)))
        for number, name, grid, block, shared in re.findall(form, thunks, re.M)
    }


@functools.cache
def _find(tool: str) -> pathlib.Path | None:
    # Prefer the tools of wheels, because this project chooses their versions. If there
    # are several, use the newest, which accepts the PTX of every JAX.
    wheels = [f for p in sys.path for f in pathlib.Path(p).glob(f"nvidia/*/bin/{tool}")]
    if wheels:
        return max(wheels, key=_release)
    found = shutil.which(tool)
    return pathlib.Path(found) if found else None


def _release(tool: pathlib.Path) -> tuple[int, ...]:
    """Return the CUDA release to which a tool belongs."""
    text = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    (version,) = re.findall(r"release ([\d.]+)", text)
    return tuple(map(int, version.split(".")))


def run_tool(tool: str, *arguments) -> str:
    """Run ptxas or nvdisasm, and return its report or its listing."""
    path = _find(tool)
    if path is None:
        raise FileNotFoundError(missing_tools())
    result = subprocess.run(
        [path, *arguments], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError(f"{tool}: {result.stdout}{result.stderr}")
    # ptxas prints its report to stderr; nvdisasm prints only warnings there.
    return result.stderr if tool == "ptxas" else result.stdout
