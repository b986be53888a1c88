"""What precision assignments of a loss are made of: its tensors, in groups."""

import dataclasses
import math
import typing

import numpy as np

Kind = typing.Literal["parameter", "input", "value", "iterated"]
"""``"iterated"`` is a value in the body of a while loop."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a loss, and with it its cotangent.

    Args:
      name: a parameter's or input's path, or the operation that makes it, numbered.
      kind: ``"parameter"``, ``"input"``, ``"value"``, or ``"iterated"`` for a value in
        the body of a while loop. Inputs have no cotangents, nor have iterated values.
      shape: of one of them.
      repeats: how many there are: a scan's body has as many as it has iterations. A
        while loop is counted as one iteration, since theirs is not known.
      group: how many matrix products are before it in the program.
      made_by: number of the matrix product whose result it is, or None.
      read_by: numbers of the matrix products that read it.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    repeats: int
    group: int
    made_by: int | None
    read_by: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the forward tensor."""
        return math.prod(self.shape) * self.repeats

    @property
    def backward_size(self) -> int:
        """Elements of the cotangent; 0 if it has none."""
        return 0 if self.kind in ("input", "iterated") else self.size


@dataclasses.dataclass(frozen=True)
class PrecisionPlan:
    """What precision assignments of one loss are made of.

    Args:
      tensors: all of them, in the order in which they are made.
      products: how many matrix products the loss has.
      opaque: names of operations whose results are tensors, but not what they compute
        inside, such as a ``shard_map``.
    """

    tensors: tuple[Tensor, ...]
    products: int
    opaque: tuple[str, ...] = ()

    @property
    def groups(self) -> list[list[int]]:
        """Numbers of the tensors of each group, in order; empty groups are left out."""
        found: dict[int, list[int]] = {}
        for number, tensor in enumerate(self.tensors):
            found.setdefault(tensor.group, []).append(number)
        return [found[group] for group in sorted(found)]

    @property
    def size(self) -> int:
        """Elements of all forward tensors and cotangents."""
        return int(np.sum(self.sizes) + np.sum(self.backward_sizes))

    @property
    def sizes(self) -> np.ndarray:
        """Elements of each forward tensor, float64."""
        return np.array([t.size for t in self.tensors], np.float64)

    @property
    def backward_sizes(self) -> np.ndarray:
        """Elements of each cotangent, float64."""
        return np.array([t.backward_size for t in self.tensors], np.float64)
