"""The tensors of a traced loss, as records and by place in the traced program."""

import collections
import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from lowbit_optax._jaxprs.graph import Call, Node
from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax.precision.tensor_search import Kind, TensorSearch, Value


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


@dataclasses.dataclass(frozen=True, eq=False)
class TracedTensors:
    """A traced loss and its tensors.

    Args:
      program: the loss's calls, functions under ``jit`` inlined.
      bodies: by call, the programs of what it calls: of a scan, loop or checkpoint one,
        of a conditional one for each branch.
      tensors: in the order in which they are made.
      products: how many matrix products there are.
      opaque: names of the calls with arrays inside that cannot be looked into.
      numbers: of the tensors, by the node at which the tensor is made.
      operands: by ``dot_general`` outside of while loops, for each operand the numbers
        of the tensors that it may be; none if it may be no tensor, as a constant is.
    """

    program: LossProgram
    bodies: Mapping[Call, tuple[LossProgram, ...]]
    tensors: tuple[Tensor, ...]
    products: int
    opaque: tuple[str, ...]
    numbers: Mapping[Node, int]
    operands: Mapping[Call, tuple[tuple[int, ...], ...]]

    def made_in(self, program: LossProgram) -> list[int]:
        """Numbers of the tensors that a program makes, itself or in its bodies."""
        made = [node for call in program.calls for node in call.outputs]
        found = [self.numbers[node] for node in made if node in self.numbers]
        for call in program.calls:
            for body in self.bodies.get(call, ()):
                found += self.made_in(body)
        return found


def find_tensors(
    loss_fn, has_aux: bool, params, batch: Sequence
) -> tuple[TracedTensors, typing.Any]:
    """The tensors of a loss, and the shapes of its result as a tree.

    Args:
      loss_fn: called as ``loss_fn(params, *batch)``.
      has_aux: whether it returns ``(loss, aux)``.
      params, batch: arrays or their shapes and dtypes.
    """
    closed, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(params, *batch)
    loss = shapes[0] if has_aux else shapes
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(
        loss.dtype, jnp.floating
    ):
        raise TypeError(
            f"precision: the loss is {loss}; accepted is a float scalar"
            + ("" if has_aux else ", or with has_aux=True a pair of it and anything")
        )
    names = _paths(params, "params")
    parameters = len(names)
    for i, argument in enumerate(batch):
        names += _paths(argument, f"batch[{i}]")
    search = TensorSearch(closed, names, parameters)
    found = [(node, x) for node, x in search.values.items() if x.is_tensor]
    numbers = {value: number for number, (_, value) in enumerate(found)}
    tensors = TracedTensors(
        search.program,
        search.bodies,
        tuple(_records([value for _, value in found])),
        search.products,
        tuple(search.opaque),
        {node: numbers[value] for node, value in found},
        {
            call: tuple(_numbers_of(value, numbers) for value in operands)
            for call, operands in search.operands.items()
        },
    )
    return tensors, shapes


def _numbers_of(value: Value, numbers: Mapping[Value, int]) -> tuple[int, ...]:
    """Of the tensors that a value may be; none if it may be something else."""
    found, seen, left = set(), set(), [value]
    while left:
        value = left.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in numbers:
            found.add(numbers[value])
        elif value.origins:
            left += [*value.origins, *([value.carried] if value.carried else [])]
        else:
            return ()
    return tuple(sorted(found))


def _paths(tree, root: str) -> list[str]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [root + jax.tree_util.keystr(path) for path, _ in leaves]


def _records(values: Sequence[Value]) -> list[Tensor]:
    """Records of values, those of one name numbered."""
    counts: collections.Counter[str] = collections.Counter()
    tensors = []
    for value in values:
        earlier = counts[value.name]
        counts[value.name] += 1
        tensors.append(
            Tensor(
                f"{value.name} ({earlier})" if earlier else value.name,
                value.kind,
                tuple(value.aval.shape),
                value.repeats,
                value.group or 0,
                value.made_by,
                tuple(value.read_by),
            )
        )
    return tensors
