"""Mosaic GPU's kernels in a compiled program.

XLA sees only calls. Mosaic writes the kernels' PTX, and the host code that launches
them, to the folder that an environment variable names while the program is compiled.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator

from tools.gpu_program.launch import Launch

_TARGET = 'custom_call_target="mosaic_gpu_v2"'
_SUFFIX = "_mosaic_gpu_kernel"


@dataclasses.dataclass(frozen=True)
class MosaicKernel:
    """A kernel as a call launches it.

    Args:
      name: of the kernel, different from those of others.
      ptx: its source.
      launch: its grid.
      arguments: for each parameter, which of the call's operands and results it is,
        counted through.
    """

    name: str
    ptx: str
    launch: Launch
    arguments: tuple[int, ...]


# By the hash of its module: Mosaic compiles a kernel once in a process.
_known: dict[str, MosaicKernel] = {}


@contextlib.contextmanager
def dumped_to(folder: str) -> Iterator[None]:
    """Has Mosaic write what it compiles into this folder."""
    wanted = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ |= wanted
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def kernels_of(hlo: str, folder: str) -> dict[str, MosaicKernel]:
    """The kernels of a program's calls, by the names of the instructions.

    Args:
      hlo: the compiled program.
      folder: where :func:`dumped_to` had them written.

    Raises:
      RuntimeError: if a kernel was compiled before, without being dumped.
    """
    files = sorted(pathlib.Path(folder).glob("*.mlir-passes.log"), key=_number)
    of_name = {}
    for file in files:
        of_name.setdefault(_stem(file)[0], []).append(file)
    found = {}
    for line in hlo.splitlines():
        if _TARGET not in line:
            continue
        (instruction,) = re.findall(r"^\s*(?:ROOT )?%(\S+) =", line)
        (name,) = re.findall(r'op_name="[^"]*?([^/"]*)/[^/"]*"', line)
        (digest,) = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', line)
        if digest not in _known:
            if not of_name.get(name):
                raise RuntimeError(
                    f"Mosaic wrote no PTX of {name}: was it compiled before?"
                )
            # They are compiled in the order in which they are called.
            _known[digest] = _read(name, of_name[name].pop(0))
        found[instruction] = _known[digest]
    return found


def _read(name: str, log: pathlib.Path) -> MosaicKernel:
    count = sum(_plain(known.name) == name for known in _known.values())
    unique = f"{name}.{count}" if count else name
    source = log.with_name(log.name.removesuffix(".mlir-passes.log") + ".ptx")
    entry = unique.replace(".", "$")
    ptx = source.read_text().replace(name + _SUFFIX, entry)
    grid, block, arguments = _host_code(log.read_text())
    return MosaicKernel(entry, ptx, Launch(grid, block, 0), arguments)


def _plain(entry: str) -> str:
    return entry.partition("$")[0]


def _stem(file: pathlib.Path) -> tuple[str, int]:
    name, _, number = file.name.removesuffix(".mlir-passes.log").rpartition("_")
    return name, int(number)


def _number(file: pathlib.Path) -> int:
    return _stem(file)[1]


def _host_code(log: str):
    """Grid, block, and the numbers of the arguments, from the code of the host."""
    text = log.partition("IR Dump Before SCFToControlFlowPass")[2]
    text = text[: text.index("gpu.launch_func") + 10000]
    constants = {
        name: int(value)
        for name, value in re.findall(r"(%\w+) = arith.constant (\d+) : index", text)
    }
    places = {}
    for name, base, index in re.findall(
        r"(%\w+) = llvm.getelementptr (%\w+)\[(\d+)\]", text
    ):
        del base
        places[name] = int(index)
    loads = {
        name: places.get(of, 0)
        for name, of in re.findall(r"(%\w+) = llvm.load (%\w+) :", text)
    }
    (launch,) = re.findall(
        r"gpu.launch_func .*? blocks in \((.*?)\) threads in \((.*?)\).*? args\((.*?)\)",
        text,
    )
    numbers = lambda part: tuple(constants[x] for x in part.split(", "))
    arguments = tuple(loads[x.split(" ")[0]] for x in launch[2].split(", "))
    return numbers(launch[0]), numbers(launch[1]), arguments
