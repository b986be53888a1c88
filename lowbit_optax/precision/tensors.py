"""Which of a loss's values are tensors, in the sense of precision assignments.

Lee et al. 2023 round the result of every operator of a network: convolution, batch
normalisation, activation. A jaxpr has finer operations, ten of them in one batch
normalisation, which a compiler fuses and whose results are never stored; rounding each
would be another network. What is a tensor is therefore said by what has to be stored:

* every parameter that the loss depends on, and every floating-point input that a matrix
  product reads (a network's inputs are rounded, its targets are not);
* the result of a matrix product (a product or convolution of any kind) or of another
  operation that is not fused with what reads it: a scan's carry, a maximum pool;
* every other value that is needed after a later matrix product, as its operand (an
  activation before the next layer) or beside it (a residual connection).

For this each value has a *stage*: how many matrix products are on the longest way to
it. A value is needed later if something of a later stage reads it.

Not tensors are scalars, constants and what follows from constants and integers alone
(masks), values that the loss does not depend on (new running statistics), and what
only moves the elements of a tensor (a reshape, a slice): those are rounded already.
"""

import dataclasses
import math
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from lowbit_optax._jaxprs.program import LossProgram, Scan, Step, closed_jaxpr

_PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})
_STORED = frozenset(
    {
        "cholesky",
        "cond",
        "fft",
        "reduce_window_max",
        "reduce_window_min",
        "scan",
        "sort",
        "top_k",
        "triangular_solve",
        "while",
    }
)
"""Operations that are not fused with what they read and what reads them."""

_MOVES = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "dynamic_slice",
        "expand_dims",
        "name",
        "pad",
        "reshape",
        "rev",
        "sharding_constraint",
        "slice",
        "split",
        "squeeze",
        "transpose",
    }
)
"""Operations whose results hold elements of their (first) operand and zeros."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a loss, and with it its cotangent.

    Args:
      name: a parameter's or input's path, or the operation that makes it, numbered.
      kind: ``"parameter"``, ``"input"`` (without a cotangent) or ``"value"``.
      shape: of one of them.
      repeats: how many there are: a scan's body has as many as it has iterations.
      group: how many matrix products are before it in the program.
      made_by: number of the matrix product whose result it is, or None.
      read_by: numbers of the matrix products that read it.
    """

    name: str
    kind: str
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
        """Elements of the cotangent; an input has none."""
        return 0 if self.kind == "input" else self.size


@dataclasses.dataclass(eq=False)
class _Value:
    """What is known of a value while the program is read.

    Args:
      aval: shape and dtype.
      stage: matrix products on the longest way to it.
      depends: whether on parameters or floating-point inputs.
      is_tensor: whether it is to be rounded where it is made.
      origins: of a value that is rounded elsewhere, those it is: a scan's operand
        inside of its body, a body's result outside of it.
    """

    aval: typing.Any
    stage: int = 0
    depends: bool = False
    is_tensor: bool = False
    name: str = ""
    kind: str = "value"
    repeats: int = 1
    group: int | None = None
    made_by: int | None = None
    read_by: list[int] = dataclasses.field(default_factory=list)
    origins: tuple["_Value", ...] | None = None

    def __post_init__(self):
        # Integers and masks hold no precision, whatever they were computed from.
        self.depends &= jnp.issubdtype(self.aval.dtype, jnp.inexact)

    @property
    def can_be_tensor(self) -> bool:
        has_size = _is_float(self.aval) and self.aval.ndim > 0
        return self.depends and has_size and not self.origins


class Tensors:
    """The tensors of a traced loss.

    Args:
      closed: the loss's jaxpr; the loss is its first output.
      names: of the inputs, parameters first.
      parameters: how many of the inputs are parameters.

    Attributes:
      program: its steps, functions under ``jit`` written out.
      tensors: a tuple of :class:`Tensor`, in the order in which they are made.
      products: how many matrix products there are.
      nested: by a step's id, the program of its body: scans and checkpoints.
    """

    def __init__(self, closed: core.ClosedJaxpr, names: Sequence[str], parameters: int):
        self.program = LossProgram(closed, write_out_all=True)
        self.products = 0
        self.nested: dict[int, LossProgram] = {}
        self._found: list[_Value] = []
        self._places: dict[tuple[int, int], _Value] = {}
        inputs = []
        for i, (name, number) in enumerate(
            zip(names, self.program.inputs, strict=True)
        ):
            kind = "parameter" if i < parameters else "input"
            value = _Value(self.program.aval(number), depends=True, name=name)
            value.kind, value.is_tensor = kind, kind == "parameter"
            self._place(self.program, number, value)
            inputs.append(value)
        self._read(self.program, inputs, {self.program.outputs[0]}, "", 1)
        self._numbers = {}
        tensors, names = [], {}
        for value in self._found:
            is_used = value.group is not None
            if value.kind == "input":
                is_used = bool(value.read_by)
            if value.is_tensor and value.can_be_tensor and is_used:
                self._numbers[id(value)] = len(tensors)
                tensors.append(_tensor(value, names))
        self.tensors = tuple(tensors)

    def number(self, program: LossProgram, value: int) -> int | None:
        """The number of the tensor that a value is to be rounded to where it is made.

        Args:
          program: the loss's, or a nested one.
          value: its number in it.
        """
        found = self._places.get((id(program), value))
        return None if found is None else self._numbers.get(id(found))

    def _place(self, program, number, value):
        self._places[id(program), number] = value
        self._found.append(value)

    def _read(
        self,
        program: LossProgram,
        inputs: Sequence[_Value],
        needed: set[int],
        path: str,
        repeats: int,
    ) -> list[_Value]:
        """Read a program's steps in order; returns its outputs' values."""
        needed = _needed(program, needed)
        known = dict(zip(program.inputs, inputs, strict=True))
        counts: dict[str, int] = {}
        for step in program.steps:
            name = step.eqn.primitive.name
            called = _called(step.eqn) or name
            number = counts[called] = counts.get(called, -1) + 1
            if not needed.intersection(step.outputs):
                continue
            operands = [
                known[n] if n in known else _Value(program.aval(n)) for n in step.inputs
            ]
            where = f"{path}{called}.{number}"
            if name == "optimization_barrier":
                results = operands
            elif name in _MOVES and _is_float(program.aval(step.outputs[0])):
                if name == "name" and operands[0].can_be_tensor:
                    operands[0].is_tensor, operands[0].name = True, path + _label(step)
                results = [operands[0]] * len(step.outputs)
            elif step.eqn.primitive is primitives.remat_p:
                results = self._read_body(step, operands, needed, where, repeats)
            elif step.scan is not None:
                results = self._read_scan(step, operands, needed, where, repeats)
            else:
                results = self._apply(program, step, operands, where, repeats)
            known.update(zip(step.outputs, results, strict=True))
        return [known.get(n) or _Value(program.aval(n)) for n in program.outputs]

    def _apply(self, program, step: Step, operands, where, repeats) -> list[_Value]:
        name = step.eqn.primitive.name
        is_product = name in _PRODUCTS or _holds_product(step.eqn)
        ends_stage = is_product or name in _STORED
        stage = max((x.stage for x in operands), default=0) + ends_stage
        for operand in operands:
            self._note_use(operand, stage, self.products if is_product else None)
        made_by = self.products if is_product else None
        self.products += is_product
        results = []
        for i, number in enumerate(step.outputs):
            value = _Value(
                program.aval(number),
                stage=stage,
                depends=any(x.depends for x in operands),
                is_tensor=ends_stage,
                name=where if len(step.outputs) == 1 else f"{where}[{i}]",
                repeats=repeats,
                group=self.products,
                made_by=made_by,
            )
            self._place(program, number, value)
            results.append(value)
        return results

    def _note_use(self, value: _Value, stage: int, product: int | None):
        """A value is read by something of this stage, a matrix product or not."""
        if value.group is None:
            value.group = self.products
        _store(value, stage)
        if product is not None and product not in value.read_by:
            value.read_by.append(product)
        for origin in value.origins or ():
            self._note_use(origin, stage, product)

    def _read_body(self, step, operands, needed, where, repeats) -> list[_Value]:
        """A checkpointed function is read as if it were written out."""
        body = LossProgram(closed_jaxpr(step.eqn.params["jaxpr"]), write_out_all=True)
        self.nested[id(step)] = body
        outputs = zip(step.outputs, body.outputs, strict=True)
        wanted = {inner for outer, inner in outputs if outer in needed}
        return self._read(body, operands, wanted, where + "/", repeats)

    def _read_scan(self, step, operands, needed, where, repeats) -> list[_Value]:
        scan: Scan = step.scan
        body = LossProgram(scan.body, write_out_all=True)
        self.nested[id(step)] = body
        wanted = _wanted(step, body, needed)
        read = _needed(body, wanted)
        stage = max((x.stage for x in operands), default=0) + 1
        depends = any(x.depends for x in operands)
        inside = []
        for i, (operand, number) in enumerate(zip(operands, body.inputs, strict=True)):
            if number in read:
                _store(operand, stage)
            is_carry = scan.constants <= i < scan.constants + scan.carry
            value = _Value(
                body.aval(number),
                stage=stage,
                depends=depends if is_carry else operand.depends,
                origins=(operand,),
            )
            inside.append(value)
        times = repeats * scan.length
        outputs = self._read(body, inside, wanted, where + "/", times)
        for i, output in enumerate(outputs):
            if body.outputs[i] in wanted and output.can_be_tensor:
                output.is_tensor = True  # the next iteration or a later stage reads it
            if i < scan.carry:
                for product in inside[scan.constants + i].read_by:
                    if product not in output.read_by:
                        output.read_by.append(product)
        for operand, number in zip(operands, body.inputs, strict=True):
            if operand.group is None and number in read:  # by what is no product
                operand.group = self.products
        return [
            _Value(
                step.eqn.outvars[i].aval,
                stage=output.stage,
                depends=output.depends,
                origins=(output,),
            )
            for i, output in enumerate(outputs)
        ]


def trace(loss_fn, has_aux: bool, params, batch) -> tuple[Tensors, typing.Any]:
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
    named = lambda tree, root: [
        root + jax.tree_util.keystr(path)
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    names = named(params, "params")
    parameters = len(names)
    for i, argument in enumerate(batch):
        names += named(argument, f"batch[{i}]")
    return Tensors(closed, names, parameters), shapes


def _store(value: _Value, stage: int) -> None:
    """What is read in a later stage is a tensor."""
    if value.stage < stage and value.can_be_tensor:
        value.is_tensor = True


def _tensor(value: _Value, names: dict[str, int]) -> Tensor:
    again = names[value.name] = names.get(value.name, -1) + 1
    return Tensor(
        f"{value.name} ({again})" if again else value.name,
        value.kind,
        tuple(value.aval.shape),
        value.repeats,
        value.group,
        value.made_by,
        tuple(value.read_by),
    )


def _is_float(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _needed(program: LossProgram, outputs: set[int]) -> set[int]:
    """The values that these outputs are computed from, and themselves."""
    found = set(outputs)
    for step in reversed(program.steps):
        if found.intersection(step.outputs):
            found.update(step.inputs)
    return found


def _wanted(step: Step, body: LossProgram, needed: set[int]) -> set[int]:
    """A scan's body's outputs that what is needed of the scan is computed from."""
    scan = step.scan
    outputs = zip(step.outputs, body.outputs, strict=True)
    wanted = {inner for outer, inner in outputs if outer in needed}
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


def _holds_product(eqn) -> bool:
    return any(
        inner.primitive.name in _PRODUCTS or _holds_product(inner)
        for jaxpr in core.jaxprs_in_params(eqn.params)
        for inner in jaxpr.eqns
    )


def _called(eqn) -> str | None:
    """The name of the function with a derivative rule that an equation calls."""
    if eqn.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
        return None
    jaxpr = eqn.params.get("call_jaxpr")
    info = jaxpr and closed_jaxpr(jaxpr).jaxpr.debug_info
    return info and info.func_name.rpartition(".")[2]


def _label(step: Step) -> str:
    return step.eqn.params["name"]
