"""Extract the elementwise update of one leaf from an inner transformation.

A fused kernel processes a few rows of one leaf. Each result may depend on scalars, and
on the elements of the leaf's arrays (gradient, master and moments) at the same index.
Scalars, such as a schedule, a count or the global norm of all gradients, are computed
outside of the kernel, from any values.

:func:`program_of` follows the results of a leaf back to their inputs and returns a
:class:`Program`. Programs are static and hashable, so leaves with the same program
share one traced kernel. If the update has no such program, :func:`program_of` raises
:class:`NotElementwise` with the reason.

A program that need not be exact multiplies by the inverse of a scalar, which is
computed once per leaf, instead of dividing by the scalar. It computes a product and a
sum in one operation, which rounds once.
"""

import collections
import dataclasses
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import (
    EXPENSIVE,
    SUMS,
    Call,
    Graph,
    Node,
    constant,
    is_constant_number,
    is_zero,
    made_of,
    primitive_of,
    varying_alike,
)
from pallas_kernels.operations import multiply_add


@dataclasses.dataclass(frozen=True)
class Ref:
    """Reference to a value of a program: a row, a scalar of the table, or a constant.

    Args:
      kind: ``"row"``, ``"scalar"`` or ``"constant"``.
      number: index of the row or scalar.
      dtype: dtype of the scalar or constant.
      value: bytes of the constant.
    """

    kind: typing.Literal["row", "scalar", "constant"]
    number: int = 0
    dtype: np.dtype | None = None
    value: bytes = b""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One elementwise operation, whose result is a row.

    ``primitive`` may be :func:`pallas_kernels.operations.multiply_add`.
    """

    primitive: typing.Any
    params: tuple[tuple[str, typing.Any], ...]
    inputs: tuple[Ref, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that updates a leaf. Each operation appends one row.

    Args:
      inputs: number of input rows.
      operations: the operations, in order.
      outputs: references to the results.
    """

    inputs: int
    operations: tuple[Operation, ...]
    outputs: tuple[Ref, ...]

    def run(
        self, rows: Sequence[jax.Array], scalars: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Return the outputs for input rows, which all have the same shape.

        ``scalars`` is the table of scalars, as :func:`encode_scalars` or
        :func:`plain_scalars` returns it.
        """
        rows = list(rows)
        shape = rows[0].shape

        def value(ref: Ref) -> jax.Array:
            if ref.kind == "row":
                return rows[ref.number]
            if ref.kind == "constant":
                return jnp.full(shape, np.frombuffer(ref.value, ref.dtype)[0])
            scalar = decode_scalar(scalars[ref.number], np.dtype(ref.dtype))
            return jnp.broadcast_to(scalar, shape)

        for operation in self.operations:
            inputs = varying_alike([value(ref) for ref in operation.inputs])
            if operation.primitive is multiply_add:
                rows.append(multiply_add(*inputs))
            elif operation.primitive is p.select_n_p and inputs[0].dtype != jnp.bool_:
                rows.append(_select_by_number(*inputs))
            else:
                rows.append(_computed(operation, inputs))
        return [value(ref) for ref in self.outputs]

    def only(self, numbers: Iterable[int]) -> "Program":
        """Return the program that computes only the outputs with the given indices."""
        outputs = tuple(self.outputs[i] for i in numbers)
        return dataclasses.replace(self, outputs=outputs).without_dead_operations()

    @property
    def scalars(self) -> list[Ref]:
        """The scalars that the program reads from the table."""
        refs = [*(ref for x in self.operations for ref in x.inputs), *self.outputs]
        return list(dict.fromkeys(ref for ref in refs if ref.kind == "scalar"))

    def reading(self, instead: Mapping[Ref, Ref]) -> "Program":
        """Return the program with each reference replaced as in ``instead``."""

        def renamed(refs: tuple[Ref, ...]) -> tuple[Ref, ...]:
            return tuple(instead.get(ref, ref) for ref in refs)

        operations = tuple(
            dataclasses.replace(x, inputs=renamed(x.inputs)) for x in self.operations
        )
        return Program(self.inputs, operations, renamed(self.outputs))

    def without_dead_operations(self) -> "Program":
        """Return the program with unused operations removed and rows renumbered."""
        rows = [Ref("row", self.inputs + i) for i in range(len(self.operations))]
        read = set(self.outputs)
        for row, operation in zip(rows[::-1], self.operations[::-1], strict=True):
            if row in read:
                read.update(operation.inputs)
        alive = [i for i, row in enumerate(rows) if row in read]
        operations = tuple(self.operations[i] for i in alive)
        program = dataclasses.replace(self, operations=operations)
        return program.reading({rows[i]: rows[n] for n, i in enumerate(alive)})


def encode_scalars(values: Sequence[jax.Array]) -> jax.Array:
    """Return scalars of up to 32 bits as one uint32 vector."""
    return jnp.stack([_to_word(jnp.asarray(x)) for x in values])


def plain_scalars(values: Sequence[jax.Array]) -> list[jax.Array]:
    """Convert bools to words; other scalars are unchanged and stay differentiable."""
    return [_to_word(x) if x.dtype == bool else x for x in map(jnp.asarray, values)]


def decode_scalar(word: jax.Array, dtype: np.dtype) -> jax.Array:
    """Convert a word back to a scalar; inverts :func:`encode_scalars`.

    A scalar that already has the given dtype is returned unchanged.
    """
    if word.dtype == dtype:
        return word
    if dtype == jnp.bool_:
        return word != jnp.uint32(0)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(word.astype(unsigned), dtype)


def _to_word(x: jax.Array) -> jax.Array:
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


ELEMENTWISE = frozenset(
    {
        p.abs_p, p.add_jaxvals_p, p.add_p, p.and_p, p.bitcast_convert_type_p, p.cbrt_p,
        p.ceil_p, p.clamp_p, p.convert_element_type_p, p.cos_p, p.div_p, p.eq_p,
        p.exp2_p, p.exp_p, p.expm1_p, p.floor_p, p.ge_p, p.gt_p, p.integer_pow_p,
        p.is_finite_p, p.le_p, p.log1p_p, p.log_p, p.logistic_p, p.lt_p, p.max_p,
        p.min_p, p.mul_p, p.ne_p, p.neg_p, p.not_p, p.or_p, p.pow_p, p.rsqrt_p,
        p.select_n_p, p.shift_left_p, p.shift_right_arithmetic_p,
        p.shift_right_logical_p, p.sign_p, p.sin_p, p.sqrt_p, p.square_p, p.sub_p,
        p.tan_p, p.tanh_p, p.xor_p,
    }
)  # fmt: skip
"""Primitives that GPU kernels support with both launchers.

TPU kernels support only the primitives that are also in
:mod:`pallas_kernels.fused_update.tpu.evaluation`. Float remainders are missing, because
Mosaic GPU's compiler does not support them.
"""

_ONE_TO_ONE = frozenset({p.copy_p, p.name_p, p.stop_gradient_p})


def is_elementwise(primitive) -> bool:
    """Return whether a result element depends only on operand elements at its index."""
    return primitive in ELEMENTWISE or primitive in _ONE_TO_ONE


def is_inside(call: Call, shape: tuple[int, ...]) -> bool:
    """Return whether the kernel of a leaf with this shape can compute a call."""
    is_repeat = call.primitive is p.broadcast_in_dim_p
    is_known = is_repeat or is_elementwise(call.primitive)
    return is_known and call.outputs[0].aval.shape == shape


class NotElementwise(Exception):
    """Raised with the reason why the update of a leaf cannot run in a kernel."""


class ScalarTable:
    """Table of the scalars that programs read, in the order of their first use.

    Args:
      graph: the graph of the programs.
      first: scalars at the start of the table, such as the scalars of a guard.
    """

    def __init__(self, graph: Graph, first: Iterable[Node] = ()):
        self.graph = graph
        self._numbers = {node: number for number, node in enumerate(first)}

    @property
    def nodes(self) -> list[Node]:
        return list(self._numbers)

    def ref(self, node: Node) -> Ref:
        """Add a scalar to the table unless it is constant; return its reference."""
        dtype = np.dtype(node.aval.dtype)
        if is_constant_number(node):
            return Ref("constant", 0, dtype, np.asarray(node.constant, dtype).tobytes())
        if dtype.itemsize > 4:
            raise NotElementwise(f"scalars must have at most 32 bits, got {dtype}")
        number = self._numbers.setdefault(node, len(self._numbers))
        return Ref("scalar", number, dtype)


_CONVERSIONS = frozenset({p.bitcast_convert_type_p, p.convert_element_type_p})


def _computed(operation: Operation, inputs: Sequence[jax.Array]) -> jax.Array:
    """Compute an operation, in 32 bits if its numbers have 8 or 16, and round.

    The GPU compilers do not have all operations of narrow numbers. Rounding a sum, a
    product, a quotient or a root twice gives the same number as rounding it once,
    because 32 bits are enough.
    """
    primitive, params = operation.primitive, dict(operation.params)
    numbers = [x.dtype for x in inputs if x.dtype != jnp.bool_]
    if primitive in _CONVERSIONS or not numbers or numbers[0].itemsize >= 4:
        return primitive.bind(*inputs, **params)
    narrow = given = numbers[0]
    if primitive is p.shift_right_logical_p:
        given = np.dtype(f"uint{8 * narrow.itemsize}")  # int32 would repeat the sign
    wide = jnp.float32 if jnp.issubdtype(narrow, jnp.floating) else jnp.int32
    inputs = [x.astype(given).astype(wide) if x.dtype == narrow else x for x in inputs]
    result = primitive.bind(*inputs, **params)
    return result if result.dtype == jnp.bool_ else result.astype(narrow)


def _select_by_number(which: jax.Array, *cases: jax.Array) -> jax.Array:
    """Do ``lax.select_n`` with bools and two cases, which Pallas lowers."""
    chosen = cases[0]
    for number, case in enumerate(cases[1:], 1):
        is_chosen = lax.eq(which, lax.full_like(which, number))
        chosen = lax.select(is_chosen, case, chosen)
    return chosen


def inputs_of(outputs: Sequence[Node], shape: tuple[int, ...]) -> set[Node]:
    """Return the graph's inputs that have the leaf's shape and affect the results.

    The computation need not be elementwise. The search stops at scalars, because they
    are computed outside of the kernel.
    """
    return {
        node
        for node in made_of(outputs, with_scalars=False)
        if node.call is None and node.constant is None and node.aval.shape == shape
    }


def program_of(
    outputs: Sequence[Node],
    inputs: Sequence[Node],
    scalars: ScalarTable,
    *,
    is_exact: bool = False,
) -> Program:
    """Return the program that computes the results of a leaf from rows of its arrays.

    Args:
      outputs: the results, which have the shape of the leaf.
      inputs: the leaf's gradient, master and moments, and arrays that are computed
        outside of the kernel. The first input has the shape of the leaf. Other inputs
        may have length 1 along some axes, and their rows repeat these elements.
      scalars: table to which the scalars of the program are added.
      is_exact: if True, keep every operation, so that the results match the results of
        the graph bit for bit.

    Raises:
      NotElementwise: if the results cannot be computed from these rows and scalars.
    """
    between = _between(outputs, inputs)
    uses = collections.Counter([*outputs, *(x for c in between for x in c.inputs)])
    candidates = ScalarTable(scalars.graph)
    builder = _ProgramBuilder(inputs, uses, candidates, is_exact)
    for call in between:
        builder.add(call)
    results = tuple(map(builder.ref, outputs))
    program = Program(len(inputs), tuple(builder.operations), results)
    program = program.without_dead_operations()
    # Add only the scalars that the remaining operations read, because a TPU uses 16 KiB
    # for each scalar in the table.
    nodes = candidates.nodes
    return program.reading({x: scalars.ref(nodes[x.number]) for x in program.scalars})


@dataclasses.dataclass(eq=False)
class _ProgramBuilder:
    """Builds the operations of a program node by node.

    ``uses`` maps each node to the number of times that the program reads it. For the
    other arguments, see :func:`program_of`.
    """

    inputs: Sequence[Node]
    uses: Mapping[Node, int]
    scalars: ScalarTable
    is_exact: bool

    def __post_init__(self):
        self.operations: list[Operation] = []
        self._rows = {node: Ref("row", i) for i, node in enumerate(self.inputs)}

    def ref(self, node: Node) -> Ref:
        """Return a reference to a node's row, or to a scalar of the table."""
        return self.scalars.ref(node) if node.is_scalar else self._rows[node]

    def add(self, call: Call) -> None:
        """Append a call, in a cheaper form if the program need not be exact."""
        (node,) = call.outputs
        if call.primitive in _ONE_TO_ONE or call.primitive is p.broadcast_in_dim_p:
            self._rows[node] = self.ref(call.inputs[0])
            return
        cheaper = None if self.is_exact else self._cheaper(call)
        self._rows[node] = cheaper or self._append(
            call.primitive, call.params, *map(self.ref, call.inputs)
        )

    def _cheaper(self, call: Call) -> Ref | None:
        """Append a cheaper form of a call and return its row, or return None."""
        primitive, operands = call.primitive, call.inputs
        dtype = call.outputs[0].aval.dtype
        # The inverse of a narrow number has too few bits.
        is_wide = dtype == jnp.float32
        if primitive is p.div_p and is_wide and operands[1].is_scalar:
            one = constant(dtype.type(1))
            inverse = self.scalars.graph.apply(lax.div, one, operands[1])
            float32 = np.dtype(np.float32)
            primitive, params, _ = primitive_of(lax.mul, float32, float32)
            factors = self.ref(operands[0]), self.ref(inverse)
            return self._append(primitive, params, *factors)
        term = without_zero(call)
        if term is not None:
            return self.ref(term)
        if primitive is p.add_p:
            for node, other in (operands, operands[::-1]):
                factors = self._factors(node)
                if factors is not None:
                    operands = *factors, self.ref(other)
                    return self._append(multiply_add, {}, *operands)
        return None

    def _append(self, primitive, params: Mapping, *operands: Ref) -> Ref:
        items = tuple(sorted(params.items()))
        try:
            hash(items)
        except TypeError:
            raise NotElementwise(f"{primitive} has parameters {params}") from None
        self.operations.append(Operation(primitive, items, operands))
        return Ref("row", len(self.inputs) + len(self.operations) - 1)

    def _factors(self, node: Node) -> tuple[Ref, ...] | None:
        """Return the factors of a float32 product that is used once, or None."""
        if node.is_scalar or self.uses[node] > 1 or node.call is None:
            return None
        ref = self.ref(node)
        number = ref.number - len(self.inputs)
        # A scalar that is broadcast has a number in the table of scalars instead.
        if ref.kind != "row" or number < 0 or node.aval.dtype != jnp.float32:
            return None
        operation = self.operations[number]
        return operation.inputs if operation.primitive is p.mul_p else None


def without_zero(call: Call) -> Node | None:
    """Return the term to which a call adds 0, or None for other calls."""
    if call.primitive in SUMS:
        for term, other in (call.inputs, call.inputs[::-1]):
            if is_zero(other):
                return term
    return None


def _between(outputs: Sequence[Node], inputs: Sequence[Node]) -> list[Call]:
    """Return the calls that compute a leaf's results from its inputs, in order."""
    calls = []
    for node in made_of(outputs, inputs, with_scalars=False):
        if node.call is None:
            kind = "a constant array" if node.constant is not None else "another array"
            raise NotElementwise(f"it uses {kind} of shape {list(node.aval.shape)}")
        _check_elementwise(node, node.call, inputs[0].aval.shape)
        calls.append(node.call)
    return sorted(calls, key=lambda call: call.number)


def _check_elementwise(node: Node, call: Call, shape: tuple[int, ...]) -> None:
    if not is_inside(call, shape):
        shapes = ", ".join(str(list(x.aval.shape)) for x in call.inputs)
        raise NotElementwise(
            f"{call.primitive} of {shapes or 'nothing'} to {list(node.aval.shape)} is "
            "not among the elementwise operations of kernels"
        )
    if jnp.issubdtype(node.aval.dtype, jnp.floating) and node.aval.dtype.itemsize > 4:
        raise NotElementwise(f"it computes in {node.aval.dtype}")


_MOVES = {"reshape", "reshard", "sharding_constraint", "slice", "squeeze", "transpose"}
_WRITTEN = _MOVES | {"shard_map"} | {x.name for x in EXPENSIVE}
"""The names of primitives whose results a kernel may read if they fit its leaf.

XLA writes these results to memory anyway. It would fuse other results, such as random
numbers, with the update, and reading them takes longer than XLA's whole update.
"""


def arrays_from_outside(outputs: Sequence[Node], own: Collection[Node]) -> list[Node]:
    """Return the arrays that a kernel must read in addition to the leaf's own arrays.

    Args:
      outputs: results with the shape of the leaf.
      own: the leaf's own arrays, which the result does not contain.

    Returns:
      Arrays that a kernel can read. If the results also depend on other arrays, no
      program of elementwise operations can compute them.
    """
    shape = outputs[0].aval.shape
    found, seen, waiting = [], set(own), list(outputs)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.call is not None and is_inside(node.call, shape):
            waiting += node.call.inputs
        elif _is_readable(node, shape):
            found.append(node)
    return found


def _is_readable(node: Node, shape: tuple[int, ...]) -> bool:
    """Return whether a kernel can read a node, and whether that is worthwhile."""
    dtype = node.aval.dtype
    if not jnp.issubdtype(dtype, jnp.number) or dtype.itemsize > 4:
        return False
    if node.aval.shape == shape:
        return node.call is None or node.call.primitive.name in _WRITTEN
    # An array of equal rank has length 1 or the length of the leaf along each axis.
    return len(node.aval.shape) == len(shape)
