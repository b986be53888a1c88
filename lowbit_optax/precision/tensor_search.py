"""Which of a loss's values are tensors, in the sense of precision assignments.

Lee et al. 2023 round the result of every operator of a network: convolution, batch
normalisation, activation. A jaxpr has finer operations, ten of them in one batch
normalisation. A compiler fuses these and never stores their results, so rounding each
of them would model a different network. Tensors are therefore the values that have to
be stored:

* every parameter that the loss depends on, and every floating-point input that a matrix
  product reads (a network's inputs are rounded, its targets are not);
* the result of a matrix product (a product or convolution of any kind) or of another
  operation that is not fused with what reads it: a scan's carry, a maximum pool;
* every other value that is needed after a later matrix product: by the product itself
  (an activation before the next layer) or further on (a residual connection).

To find the last kind, each value has a *stage*: the number of matrix products on the
longest way to it. A value is needed later if something of a later stage reads it.

Some values are never tensors: scalars, constants, what is made of constants and
integers alone (masks), and what the loss does not depend on (new running statistics).
Nor are the results of operations that only move elements (a reshape, a slice), because
their elements have been rounded already.
"""

import dataclasses
import typing
from collections.abc import Collection, Sequence

import jax.numpy as jnp
from jax.extend.core import primitives

from lowbit_optax._jaxprs.graph import Call, Node, as_closed_jaxpr, called_jaxpr
from lowbit_optax._jaxprs.program import LossProgram, ScanCall
from lowbit_optax.precision.operations import (
    function_name,
    hides_tensors,
    is_conditional,
    is_float,
    is_loop,
    is_move,
    is_product,
    is_stored,
)
from pallas_kernels.jaxprs import ClosedJaxpr

Kind = typing.Literal["parameter", "input", "value", "iterated"]
"""``"iterated"`` is a value in the body of a while loop."""


@dataclasses.dataclass(eq=False)
class Value:
    """What is known of a value while the program is read.

    Args:
      aval: shape and dtype.
      stage: matrix products on the longest way to it.
      depends: whether on parameters or floating-point inputs.
      is_stored: whether it has to be stored, and is therefore rounded.
      name, kind, repeats, group, made_by, read_by: as in
        :class:`lowbit_optax.precision.Tensor`; no group if nothing reads it.
      origins: the values that it may be, if it is not made where it is read: inside of
        a scan or conditional the operand outside, and for a result of a scan or
        conditional the outputs of its bodies.
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
    origins: tuple["Value", ...] = ()
    carried: "Value | None" = None

    def __post_init__(self):
        # Integers and masks have no precision to lose, whatever they are made of.
        self.depends &= jnp.issubdtype(self.aval.dtype, jnp.inexact)

    @property
    def can_be_tensor(self) -> bool:
        """Whether it is a float array that depends on inputs and is made where read."""
        has_size = is_float(self.aval) and self.aval.ndim > 0
        return self.depends and has_size and not self.origins

    @property
    def is_tensor(self) -> bool:
        """Whether it is one, once the program has been read."""
        is_used = bool(self.read_by) if self.kind == "input" else self.group is not None
        return self.is_stored and self.can_be_tensor and is_used

    def store(self) -> None:
        """It has to be stored, if it is a value that can be rounded."""
        if self.can_be_tensor:
            self.is_stored = True

    def note_product(self, number: int) -> None:
        """A matrix product reads it, and so reads whichever of its origins it is."""
        if number not in self.read_by:
            self.read_by.append(number)
            for origin in self.origins:
                origin.note_product(number)

    def store_for(self, stage: int) -> None:
        """Store it if what reads it is of a later stage."""
        if self.stage < stage:
            self.store()


class TensorSearch:
    """Reads a traced loss and finds which of its values are tensors.

    Args:
      closed: the loss's jaxpr; the loss is its first output.
      names: of the inputs, parameters first.
      parameters: how many of the inputs are parameters.

    Attributes:
      program: its calls, functions under ``jit`` inlined.
      values: by node, in the order in which they are made; tensors are among them.
      products: how many matrix products there are.
      bodies: by call, the programs of what it calls: of a scan or checkpoint one, of a
        conditional one for each branch.
      opaque: names of the calls with arrays inside that cannot be looked into.
      operands: by ``dot_general`` that has a backward pass, what it reads.
    """

    def __init__(self, closed: ClosedJaxpr, names: Sequence[str], parameters: int):
        self.program = LossProgram(closed, inline_all=True)
        self.values: dict[Node, Value] = {}
        self.products = 0
        self.bodies: dict[Call, tuple[LossProgram, ...]] = {}
        self.opaque: list[str] = []
        self.operands: dict[Call, tuple[Value, ...]] = {}
        self._kind: Kind = "value"  # of the values that are read
        inputs = []
        for i, (name, node) in enumerate(zip(names, self.program.inputs, strict=True)):
            is_parameter = i < parameters
            value = Value(node.aval, depends=True, is_stored=is_parameter, name=name)
            value.kind = "parameter" if is_parameter else "input"
            self.values[node] = value
            inputs.append(value)
        self._read(self.program, inputs, {self.program.outputs[0]}, "", 1)

    def _read(
        self,
        program: LossProgram,
        inputs: Sequence[Value],
        wanted: Collection[Node],
        path: str,
        repeats: int,
    ) -> list[Value]:
        """Read a program's calls in order; returns its outputs' values.

        Args:
          program: the loss's, or that of a body.
          inputs: of it.
          wanted: the outputs that the loss depends on.
          path: what names begin with.
          repeats: how often the program runs.
        """
        needed = _needed(program, wanted)
        known = dict(zip(program.inputs, inputs, strict=True))
        counts: dict[str, int] = {}
        for call in program.calls:
            name = function_name(call)
            number = counts[name] = counts.get(name, -1) + 1
            if not needed.intersection(call.outputs):
                continue
            operands = [
                known[node] if node in known else Value(node.aval)
                for node in call.inputs
            ]
            place = f"{path}{name}.{number}", repeats
            if call.primitive.name == "optimization_barrier":
                results = operands
            elif is_move(call):
                results = self._move(call, operands, path)
            elif call.primitive is primitives.remat_p:
                results = self._read_checkpoint(call, operands, needed, *place)
            elif isinstance(call, ScanCall):
                results = self._read_scan(call, operands, needed, *place)
            elif is_conditional(call):
                results = self._read_conditional(call, operands, needed, *place)
            elif is_loop(call) and any(x.depends for x in operands):
                results = self._read_loop(call, operands, needed, *place)
            else:
                results = self._read_operator(call, operands, *place)
            known.update(zip(call.outputs, results, strict=True))
        return [known.get(node) or Value(node.aval) for node in program.outputs]

    def _move(self, call: Call, operands: list[Value], path: str) -> list[Value]:
        value = operands[0]
        if call.primitive is primitives.name_p and value.can_be_tensor:
            value.is_stored, value.name = True, path + call.params["name"]
        return [value] * len(call.outputs)

    def _read_operator(
        self, call: Call, operands: list[Value], where: str, repeats: int
    ) -> list[Value]:
        """Its results are values of their own; nothing inside of it is."""
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
            self.operands[call] = tuple(operands)
        for i, node in enumerate(call.outputs):
            self.values[node] = Value(
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
        return [self.values[node] for node in call.outputs]

    def _note_use(self, value: Value, stage: int, product: int | None) -> None:
        """Something of this stage reads a value, perhaps a matrix product."""
        if value.group is None:
            value.group = self.products
        value.store_for(stage)
        if product is not None:
            value.note_product(product)
        for origin in value.origins:
            self._note_use(origin, stage, product)

    def _read_checkpoint(self, call, operands, needed, where, repeats) -> list[Value]:
        """A checkpointed function is read as if it were inlined."""
        body = LossProgram(called_jaxpr(call.params), inline_all=True)
        self.bodies[call] = (body,)
        wanted = _wanted_results(call, body, needed)
        return self._read(body, operands, wanted, where + "/", repeats)

    def _read_conditional(self, call, operands, needed, where, repeats) -> list[Value]:
        """Every branch is read, one after the other, as if it were the one taken."""
        arguments = operands[1:]
        branches = tuple(
            LossProgram(branch, inline_all=True) for branch in call.params["branches"]
        )
        self.bodies[call] = branches
        stage = max((x.stage for x in operands), default=0) + 1
        cases = []
        for i, branch in enumerate(branches):
            wanted = _wanted_results(call, branch, needed)
            inside = [
                Value(node.aval, stage=stage, depends=x.depends, origins=(x,))
                for x, node in zip(arguments, branch.inputs, strict=True)
            ]
            path = f"{where}/branch{i}/"
            cases.append(
                self._read_body(branch, arguments, inside, wanted, path, repeats)
            )
        results = zip(call.outputs, zip(*cases, strict=True), strict=True)
        return [_made_inside(node, outputs) for node, outputs in results]

    def _read_scan(self, call: ScanCall, operands, needed, where, repeats):
        scan = call.scan
        body = LossProgram(scan.body, inline_all=True)
        self.bodies[call] = (body,)
        wanted = _wanted_in_scan(call, body, needed)
        stage = max((x.stage for x in operands), default=0) + 1
        depends = any(x.depends for x in operands)
        inside = []
        for i, (operand, node) in enumerate(zip(operands, body.inputs, strict=True)):
            is_carry = scan.constants <= i < scan.constants + scan.carry
            inside.append(
                Value(
                    node.aval,
                    stage=stage,
                    depends=depends if is_carry else operand.depends,
                    origins=(operand,),
                )
            )
        times = repeats * scan.length
        outputs = self._read_body(body, operands, inside, wanted, where + "/", times)
        # The next iteration reads a carry in the place of this one's.
        carried = inside[scan.constants : scan.constants + scan.carry]
        for before, after in zip(carried, outputs[: scan.carry], strict=True):
            before.carried = after
            for product in before.read_by:
                after.note_product(product)
        results = zip(call.outputs, outputs, strict=True)
        return [_made_inside(node, (output,)) for node, output in results]

    def _read_loop(self, call: Call, operands, needed, where, repeats):
        """A while loop's body, read once: how often it runs is not known."""
        first = call.params["cond_nconsts"]
        constants, operands = call.params["body_nconsts"], operands[first:]
        body = LossProgram(as_closed_jaxpr(call.params["body_jaxpr"]), inline_all=True)
        self.bodies[call] = (body,)
        # Which carries decide how often it runs is not followed: all do.
        wanted = set(body.outputs) if needed.intersection(call.outputs) else set()
        stage = max((x.stage for x in operands), default=0) + 1
        depends = any(x.depends for x in operands)
        inside = [
            Value(
                node.aval,
                stage=stage,
                depends=depends if i >= constants else operand.depends,
                origins=(operand,),
            )
            for i, (operand, node) in enumerate(zip(operands, body.inputs, strict=True))
        ]
        kind, self._kind = self._kind, "iterated"
        path = where + "/"
        outputs = self._read_body(body, operands, inside, wanted, path, repeats)
        self._kind = kind
        for before, after in zip(inside[constants:], outputs, strict=True):
            for product in before.read_by:
                after.note_product(product)
        # A loop that does not run at all returns its operands.
        results = zip(call.outputs, outputs, operands[constants:], strict=True)
        return [_made_inside(node, values) for node, *values in results]

    def _read_body(
        self,
        body: LossProgram,
        operands: Sequence[Value],
        inside: Sequence[Value],
        wanted: set[Node],
        path: str,
        repeats: int,
    ) -> list[Value]:
        """Read a body that stores what it reads and what it returns.

        Args:
          body: its program.
          operands: what it reads, as values outside of it.
          inside: the same values inside of it.
          wanted, path, repeats: as in :meth:`_read`.
        """
        needed = _needed(body, wanted)
        read = [
            (operand, value)
            for operand, value, node in zip(operands, inside, body.inputs, strict=True)
            if node in needed
        ]
        for operand, value in read:
            operand.store_for(value.stage)
        outputs = self._read(body, inside, wanted, path, repeats)
        for node, output in zip(body.outputs, outputs, strict=True):
            if node in wanted:
                output.store()
        for operand, _ in read:
            if operand.group is None:  # what reads it is no operator
                operand.group = self.products
        return outputs


def _made_inside(node: Node, origins: Sequence[Value]) -> Value:
    """A call's result, which is one of these outputs of its bodies."""
    return Value(
        node.aval,
        stage=max(x.stage for x in origins),
        depends=any(x.depends for x in origins),
        origins=tuple(origins),
    )


def _needed(program: LossProgram, outputs: Collection[Node]) -> set[Node]:
    """The values that these outputs are computed from, and themselves."""
    found = set(outputs)
    for call in reversed(program.calls):
        if found.intersection(call.outputs):
            found.update(call.inputs)
    return found


def _wanted_results(call: Call, body: LossProgram, needed: set[Node]) -> set[Node]:
    """A body's outputs that are needed results of its call."""
    results = zip(call.outputs, body.outputs, strict=True)
    return {inner for outer, inner in results if outer in needed}


def _wanted_in_scan(call: ScanCall, body: LossProgram, needed: set[Node]) -> set[Node]:
    """The outputs of a scan's body that its needed results are computed from."""
    scan = call.scan
    wanted = _wanted_results(call, body, needed)
    carried = body.inputs[scan.constants : scan.constants + scan.carry]
    while True:
        read = _needed(body, wanted)
        more = {
            after
            for before, after in zip(carried, body.outputs[: scan.carry], strict=True)
            if before in read
        }
        if more <= wanted:
            return wanted
        wanted |= more
