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
from unittest import mock

from tools.gpu_program.launch import Launch

_TARGET = 'custom_call_target="mosaic_gpu_v2"'
_ENTRY, _LOG = "_mosaic_gpu_kernel", ".mlir-passes.log"


@dataclasses.dataclass(frozen=True)
class MosaicKernel:
    """A kernel as a call launches it.

    Args:
      name: of the kernel, different from those of others in the program.
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


def dumped_to(folder: str) -> contextlib.AbstractContextManager:
    """Has Mosaic write what it compiles into this folder."""
    wanted = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1"}
    return mock.patch.dict(os.environ, wanted)


def remember(hlo: str, folder: str) -> None:
    """Keep the kernels of a program that were compiled for it.

    Args:
      hlo: the compiled program.
      folder: where :func:`dumped_to` had them written.
    """
    of_name = {}
    for file in sorted(pathlib.Path(folder).glob("*" + _LOG), key=_number):
        of_name.setdefault(_name(file), []).append(file)
    for _, name, digest in _calls(hlo):
        if digest not in _known and of_name.get(name):
            # They are compiled in the order in which they are called.
            _known[digest] = _read(name, of_name[name].pop(0))


def kernels_of(hlo: str) -> dict[str, MosaicKernel]:
    """The kernels of a program's calls, by the names of the instructions.

    Args:
      hlo: the compiled program.

    Raises:
      RuntimeError: if a kernel was compiled before, without being dumped.
    """
    found, entries = {}, {}
    for instruction, name, digest in _calls(hlo):
        if digest not in _known:
            raise RuntimeError(
                f"Mosaic wrote no PTX of {name}: was it compiled before?"
            )
        known, name = _known[digest], _known[digest].name
        if digest not in entries:
            count = sum(_known[other].name == name for other in entries)
            entries[digest] = f"{name}${count}" if count else name
        ptx = known.ptx.replace(name + _ENTRY, entries[digest])
        found[instruction] = dataclasses.replace(known, name=entries[digest], ptx=ptx)
    return found


def _calls(hlo: str) -> Iterator[tuple[str, str, str]]:
    """Of each call the instruction's name, the kernel's, and its module's hash."""
    for line in hlo.splitlines():
        if _TARGET in line:
            (instruction,) = re.findall(r"^\s*(?:ROOT )?%(\S+) =", line)
            # In the module: of a kernel on shards XLA knows only where it was called.
            (name,) = re.findall(r"\\00(?!stable)(\w+)_mosaic_gpu\\00", line)
            (digest,) = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', line)
            yield instruction, name, digest


def _read(name: str, log: pathlib.Path) -> MosaicKernel:
    source = log.with_name(log.name.removesuffix(_LOG) + ".ptx")
    return MosaicKernel(name, source.read_text(), *_host_code(log.read_text()))


def _name(file: pathlib.Path) -> str:
    return file.name.rpartition("_")[0]


def _number(file: pathlib.Path) -> int:
    return int(file.name.removesuffix(_LOG).rpartition("_")[2])


def _host_code(log: str) -> tuple[Launch, tuple[int, ...]]:
    """The launch, and the numbers of its arguments, from the code of the host."""
    text = log.partition("IR Dump Before SCFToControlFlowPass")[2].partition("\n//")[0]
    constants = _table(r"(%\w+) = arith.constant (\d+) : \w+", text)
    numbers = _table(r"(%\w+) = llvm.getelementptr %\w+\[(\d+)\]", text)
    loads = dict(re.findall(r"(%\w+) = llvm.load (%\w+) :", text))
    (found,) = re.findall(
        r"gpu.launch_func .*? blocks in \((.*?)\) threads in \((.*?)\)"
        r" +dynamic_shared_memory_size (%\w+) args\((.*?)\)",
        text,
    )
    grid, block = ([constants[x] for x in part.split(", ")] for part in found[:2])
    arguments = (x.split(" ")[0] for x in found[3].split(", "))
    # The first is loaded from where the others are counted from.
    launch = Launch((*grid,), (*block,), constants[found[2]])
    return launch, tuple(numbers.get(loads[x], 0) for x in arguments)


def _table(pattern: str, text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(pattern, text)}
