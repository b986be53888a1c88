"""Find the values of a loss that precision assignments round: its *tensors*.

Lee et al. 2023 round the result of every operator of a network: convolution, batch
normalization, activation. A jaxpr splits operators into smaller operations, for example
a batch normalization into ten. Compilers fuse these operations and do not store their
results, so rounding each of them would model a different network. Therefore, tensors
are the values that have to be stored:

* parameters that the loss depends on, and floating-point inputs that a matrix product
  reads, such as a network's inputs, but not its targets;
* results of matrix products (including convolutions), and of other operations that
  compilers do not fuse with their readers, such as carries of scans and maximum pools;
* other values that are needed later: by another matrix product, like the activation
  before the next layer, or after another product, like a residual connection.

To find the last kind, each value gets a *stage*: the largest number of matrix products
on a path to it. A value is needed later if an operation of a later stage reads it.

Some values are never tensors: scalars, constants, values that depend only on constants
and integers, such as masks, and values that the loss does not depend on, such as new
running statistics. Results of operations that only move elements, such as a reshape or
a slice, are not tensors either, because their elements are already rounded.
"""

import collections
import dataclasses
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from lowbit_optax._jaxprs.graph import Call, Node, made_of
from lowbit_optax._jaxprs.program import LossProgram
from lowbit_optax.precision.assignment import Kind, Tensor
from lowbit_optax.precision.operations import (
    Bodies,
    bodies_of,
    function_name,
    hides_tensors,
    is_float,
    is_move,
    is_product,
    is_stored,
)


@dataclasses.dataclass(eq=False)
class Value:
    """A value that the program computes or receives.

    Args:
      aval: shape and dtype.
      stage: the largest number of matrix products on a path to the value.
      depends: whether it depends on parameters or floating-point inputs.
      is_stored: whether it has to be stored, and is rounded if it is a float array.
      name, kind, repeats, group, made_by, read_by: see
        :class:`lowbit_optax.precision.Tensor`. ``group`` is None for unread values.
      origins: the values that it may equal, if no operation computes it. An input of a
        body equals the operand outside, and a result of a call with bodies equals an
        output of a body.
      carried: the value that replaces it in the next run of a body.
    """

    aval: typing.Any
    stage: int = 0
    depends: bool = False
    is_stored: bool = False
    name: str = ""
    kind: Kind = "value"
    repeats: int = 1
    group: int | None = None
    made_by: int | None = None
    read_by: list[int] = dataclasses.field(default_factory=list)
    origins: Sequence["Value"] = ()
    carried: "Value | None" = None

    def __post_init__(self):
        # Integers and masks are never rounded, whatever they depend on.
        self.depends &= jnp.issubdtype(self.aval.dtype, jnp.inexact)

    @property
    def is_tensor(self) -> bool:
        """Whether it is rounded: a stored float array that is computed here."""
        is_array = is_float(self.aval) and self.aval.ndim > 0 and not self.origins
        is_used = bool(self.read_by) if self.kind == "input" else self.group is not None
        return self.is_stored and self.depends and is_array and is_used

    def note_product(self, number: int) -> None:
        """Record that a matrix product reads the value, and thus its origins."""
        if number not in self.read_by:
            self.read_by.append(number)
            for origin in self.origins:
                origin.note_product(number)


class TensorSearch:
    """Traces a loss and finds its tensors.

    Args:
      loss_fn: a function ``(params, *batch) -> loss``.
      has_aux: whether it returns ``(loss, aux)``.
      params, batch: arrays, or shapes and dtypes.

    Attributes:
      result: a tree with the shapes of the loss's result.
      program: the calls of the loss; functions under ``jit`` are inlined.
      bodies: the bodies that each call runs.
      tensors: the tensors, in the order in which they are computed.
      products: the number of matrix products.
      opaque: the names of calls with arrays inside that cannot be rounded.
      numbers: for each node that is a tensor, the index of the tensor.
      operands: for each ``dot_general`` outside of while loops, one entry for each of
        its operands: the indices of the tensors that the operand may equal, or () if it
        may equal another value, such as a constant.

    Raises:
      TypeError: if the loss is not a float scalar.
    """

    def __init__(self, loss_fn: Callable, has_aux: bool, params, batch: Sequence):
        arguments = params, *batch
        closed, self.result = jax.make_jaxpr(loss_fn, return_shape=True)(*arguments)
        loss = self.result[0] if has_aux else self.result
        if getattr(loss, "shape", None) != () or not is_float(loss):
            pair = "" if has_aux else "; if it returns (loss, aux), pass has_aux=True"
            raise TypeError(
                f"precision: the loss must be a float scalar, got {loss}{pair}"
            )
        self.program = LossProgram(closed, inline_all=True)
        self.products = 0
        self.bodies: dict[Call, Bodies] = {}
        self.opaque: list[str] = []
        self._values: dict[Node, Value] = {}
        self._operands: dict[Call, list[Value]] = {}
        self._kind: Kind = "value"  # the kind of the values that are read
        leaves = jax.tree_util.tree_leaves_with_path((params, batch))
        for (path, _), node in zip(leaves, self.program.inputs, strict=True):
            is_parameter = path[0].idx == 0
            name = "params" if is_parameter else "batch"
            self._values[node] = Value(
                node.aval,
                depends=True,
                is_stored=is_parameter,
                name=name + jax.tree_util.keystr(path[1:]),
                kind="parameter" if is_parameter else "input",
            )
        inputs = list(self._values.values())
        self._read(self.program, inputs, {self.program.outputs[0]}, "", 1)
        made = [(node, x) for node, x in self._values.items() if x.is_tensor]
        self.tensors = tuple(_records(value for _, value in made))
        self.numbers = {node: number for number, (node, _) in enumerate(made)}
        numbers = {value: number for number, (_, value) in enumerate(made)}
        self.operands = {
            call: tuple(_numbers_of(value, numbers) for value in operands)
            for call, operands in self._operands.items()
        }

    def made_in(self, program: LossProgram) -> list[int]:
        """Return the indices of the tensors that a program and its bodies compute."""
        found = []
        for call in program.calls:
            found += [self.numbers[x] for x in call.outputs if x in self.numbers]
            if call in self.bodies:
                for body in self.bodies[call].programs:
                    found += self.made_in(body)
        return found

    def _read(
        self,
        program: LossProgram,
        inputs: Sequence[Value],
        wanted: Collection[Node],
        path: str,
        repeats: int,
    ) -> list[Value]:
        """Read a program's calls in order, and return the values of its outputs.

        Args:
          program: the program of the loss or of a body.
          inputs: the values of its inputs.
          wanted: the outputs that the loss depends on.
          path: the prefix of names.
          repeats: the number of times that the program runs.
        """
        needed = set(made_of(wanted))
        known = dict(zip(program.inputs, inputs, strict=True))
        counts: collections.Counter[str] = collections.Counter()
        for call in program.calls:
            name = function_name(call)
            where = f"{path}{name}.{counts[name]}"
            counts[name] += 1
            if not needed.intersection(call.outputs):
                continue
            operands = [known.get(node) or Value(node.aval) for node in call.inputs]
            depends = any(x.depends for x in operands)
            # A loop over constants and integers does not contain tensors.
            is_read = depends or call.primitive is not primitives.while_p
            if call.primitive.name == "optimization_barrier":
                results = operands
            elif is_move(call):
                results = [operands[0]] * len(call.outputs)
                if call.primitive is primitives.name_p:
                    operands[0].is_stored = True
                    operands[0].name = path + call.params["name"]
            elif is_read and (bodies := bodies_of(call)):
                self.bodies[call] = bodies
                results = self._read_bodies(call, operands, needed, where, repeats)
            else:
                results = self._read_operator(call, operands, where, repeats)
            known.update(zip(call.outputs, results, strict=True))
        return [known.get(node) or Value(node.aval) for node in program.outputs]

    def _read_operator(
        self, call: Call, operands: list[Value], where: str, repeats: int
    ) -> list[Value]:
        """Read an operator as a whole, and return its results as new values."""
        depends = any(x.depends for x in operands)
        if depends and hides_tensors(call):
            self.opaque.append(where)
        makes_product = is_product(call)
        ends_stage = makes_product or is_stored(call)
        stage = max((x.stage for x in operands), default=0) + ends_stage
        product = self.products if makes_product else None
        for operand in operands:
            self._note_use(operand, stage, product)
        self.products += makes_product
        if call.primitive is primitives.dot_general_p and self._kind == "value":
            self._operands[call] = operands
        for i, node in enumerate(call.outputs):
            self._values[node] = Value(
                node.aval,
                stage=stage,
                depends=depends,
                is_stored=ends_stage,
                kind=self._kind,
                name=where if len(call.outputs) == 1 else f"{where}[{i}]",
                repeats=repeats,
                group=self.products,
                made_by=product,
            )
        return [self._values[node] for node in call.outputs]

    def _note_use(self, value: Value, stage: int, product: int | None) -> None:
        """Record that an operation, possibly a matrix product, reads a value."""
        if value.group is None:
            value.group = self.products
        if value.stage < stage:
            value.is_stored = True
        if product is not None:
            value.note_product(product)
        for origin in value.origins:
            self._note_use(origin, stage, product)

    def _read_bodies(
        self,
        call: Call,
        operands: list[Value],
        needed: set[Node],
        where: str,
        repeats: int,
    ) -> list[Value]:
        """Read the bodies of a call, including all branches of a conditional."""
        bodies = self.bodies[call]
        arguments = operands[bodies.first :]
        if call.primitive is primitives.remat_p:  # as if it were inlined
            (program,) = bodies.programs
            wanted = _wanted(call, program, bodies, needed)
            return self._read(program, arguments, wanted, where + "/", repeats)
        is_loop = call.primitive is primitives.while_p
        stage = max((x.stage for x in operands), default=0) + 1
        kind, self._kind = self._kind, "iterated" if is_loop else self._kind
        cases = []
        for i, program in enumerate(bodies.programs):
            wanted = _wanted(call, program, bodies, needed)
            path = f"{where}/branch{i}/" if len(bodies.programs) > 1 else where + "/"
            inside = _inside(program, bodies, arguments, stage)
            inputs = zip(arguments, program.inputs, strict=True)
            needed_inside = set(made_of(wanted))
            read = [x for x, node in inputs if node in needed_inside]
            outputs = self._read(program, inside, wanted, path, repeats * bodies.runs)
            results = zip(outputs, program.outputs, strict=True)
            for value in [*read, *(x for x, node in results if node in wanted)]:
                value.is_stored = True
            for operand in read:
                if operand.group is None:  # only moves or bodies read it
                    operand.group = self.products
            # The next run reads the new carry where this run reads the old one.
            carried = inside[bodies.constants :][: bodies.carry]
            for before, after in zip(carried, outputs, strict=False):
                before.carried = after
                for product in before.read_by:
                    after.note_product(product)
            cases.append(outputs)
        self._kind = kind
        if is_loop:  # a loop with zero iterations returns its operands
            cases.append(arguments[bodies.constants :])
        return [
            Value(
                node.aval,
                stage=max(x.stage for x in origins),
                depends=any(x.depends for x in origins),
                origins=origins,
            )
            for node, *origins in zip(call.outputs, *cases, strict=True)
        ]


def _wanted(
    call: Call, program: LossProgram, bodies: Bodies, needed: set[Node]
) -> set[Node]:
    """Return the outputs of a body on which the needed results of its call depend."""
    if call.primitive is primitives.while_p:
        # Any carry may decide how often the loop runs.
        return set(program.outputs)
    results = zip(call.outputs, program.outputs, strict=True)
    wanted = {inner for outer, inner in results if outer in needed}
    first, carry = bodies.constants, bodies.carry
    carried = program.inputs[first : first + carry], program.outputs[:carry]
    while True:
        read = set(made_of(wanted))
        more = {after for before, after in zip(*carried, strict=True) if before in read}
        if more <= wanted:
            return wanted
        wanted |= more


def _inside(
    program: LossProgram, bodies: Bodies, arguments: Sequence[Value], stage: int
) -> list[Value]:
    """Return the inputs of a body. The carry of later runs may depend on all inputs."""
    depends = any(x.depends for x in arguments)
    carried = range(bodies.constants, bodies.constants + bodies.carry)
    return [
        Value(node.aval, stage, depends if i in carried else x.depends, origins=(x,))
        for i, (x, node) in enumerate(zip(arguments, program.inputs, strict=True))
    ]


def _numbers_of(value: Value, numbers: Mapping[Value, int]) -> tuple[int, ...]:
    """Return the indices of the tensors that a value may equal.

    Return () if the value may equal another value, such as a constant.
    """
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


def _records(values: Iterable[Value]) -> list[Tensor]:
    """Turn values into tensors with unique names."""
    counts: collections.Counter[str] = collections.Counter()
    tensors = []
    for value in values:
        earlier = counts[value.name]
        counts[value.name] += 1
        name = f"{value.name} ({earlier})" if earlier else value.name
        places = value.group or 0, value.made_by, tuple(value.read_by)
        shape = tuple(value.aval.shape)
        tensors.append(Tensor(name, value.kind, shape, value.repeats, *places))
    return tensors
