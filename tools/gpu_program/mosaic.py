"""Find the PTX and the launches of Mosaic GPU's kernels in a compiled program.

In the HLO of a program, a Mosaic kernel is only a custom call. While the program
compiles, Mosaic writes the PTX of its kernels, and the host code that launches them,
to the folder that an environment variable names.
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
    """A kernel and its launch.

    Args:
      name: a name that no other kernel of the program has.
      ptx: the source of the kernel.
      launch: the grid.
      arguments: for each parameter of the kernel, the index of an operand or result of
        the call. Indices of results follow the indices of operands.
    """

    name: str
    ptx: str
    launch: Launch
    arguments: tuple[int, ...]


# Mosaic compiles a kernel only once per process, so kernels are kept by their hash.
_known: dict[str, MosaicKernel] = {}


def dumped_to(folder: str) -> contextlib.AbstractContextManager:
    """Return a context in which Mosaic writes its compiled kernels to a folder."""
    wanted = {"MOSAIC_GPU_DUMP_TO": folder, "MOSAIC_GPU_DUMP_PTX": "1"}
    return mock.patch.dict(os.environ, wanted)


def remember(hlo: str, folder: str) -> None:
    """Store the kernels that Mosaic compiled for a program.

    Args:
      hlo: the HLO of the compiled program.
      folder: the folder of :func:`dumped_to`.
    """
    of_name = {}
    for file in sorted(pathlib.Path(folder).glob("*" + _LOG), key=_number):
        of_name.setdefault(_name(file), []).append(file)
    for _, name, digest in _calls(hlo):
        if digest not in _known and of_name.get(name):
            # Mosaic compiles kernels in the order of their calls.
            _known[digest] = _read(name, of_name[name].pop(0))


def kernels_of(hlo: str) -> dict[str, MosaicKernel]:
    """Return the Mosaic kernels of a program, keyed by the calling instruction.

    Args:
      hlo: the HLO of the compiled program.

    Raises:
      RuntimeError: if a kernel was compiled earlier, outside of :func:`dumped_to`.
    """
    found, entries = {}, {}
    for instruction, name, digest in _calls(hlo):
        if digest not in _known:
            raise RuntimeError(
                f"Mosaic wrote no PTX for {name}: was it compiled earlier?"
            )
        known, name = _known[digest], _known[digest].name
        if digest not in entries:
            count = sum(_known[other].name == name for other in entries)
            entries[digest] = f"{name}${count}" if count else name
        ptx = known.ptx.replace(name + _ENTRY, entries[digest])
        found[instruction] = dataclasses.replace(known, name=entries[digest], ptx=ptx)
    return found


def _calls(hlo: str) -> Iterator[tuple[str, str, str]]:
    """Yield the instruction, the kernel's name and the module's hash of each call."""
    for line in hlo.splitlines():
        if _TARGET in line:
            (instruction,) = re.findall(r"^\s*(?:ROOT )?%(\S+) =", line)
            # Read the name from the module. For a kernel on shards, XLA's metadata has
            # the name of the caller instead.
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
    """Read the launch and the indices of its arguments from the host code."""
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
    # The first argument has no offset in the host code.
    launch = Launch((*grid,), (*block,), constants[found[2]])
    return launch, tuple(numbers.get(loads[x], 0) for x in arguments)


def _table(pattern: str, text: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(pattern, text)}
