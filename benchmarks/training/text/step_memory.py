"""Memory of compiled training steps, as XLA plans it, as a table."""

from collections.abc import Mapping
from typing import NamedTuple

import jax


class Memory(NamedTuple):
    """Bytes of a compiled program, on one device.

    Attributes:
        arguments, outputs: what it is given and what it returns.
        aliased: of the outputs, those written where arguments were (donation).
        temporary: gradients, activations and whatever else it needs while it runs.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int

    @staticmethod
    def of(compiled: jax.stages.Compiled) -> "Memory":
        """The memory of a program from `jax.jit(f).lower(*args).compile()`."""
        found = compiled.memory_analysis()
        return Memory(
            found.argument_size_in_bytes,
            found.output_size_in_bytes,
            found.alias_size_in_bytes,
            found.temp_size_in_bytes,
        )

    @property
    def peak(self) -> int:
        """The most that is held at a time."""
        return self.arguments + self.outputs - self.aliased + self.temporary


def table(rows: Mapping[str, Memory]) -> str:
    """One line for each program, in MiB."""
    heads = [*Memory._fields, "peak"]
    lines = [" " * 18 + "".join(f"{head:>11}" for head in heads)]
    for name, memory in rows.items():
        sizes = [getattr(memory, head) / 2**20 for head in heads]
        lines.append(f"{name:18}" + "".join(f"{size:>11.2f}" for size in sizes))
    return "\n".join(lines)
