"""Extract the elementwise parts of an inner transformation in one leaf as programs.

A fused kernel processes a few rows of one leaf. It can run every computation that uses
only the elements of this leaf (gradient, master, moments), one at a time, and scalars.
Scalars, such as a schedule, a count or the global norm of all gradients, are computed
outside, from any values.

:func:`program_of` follows the results of a leaf back to their inputs and returns a
:class:`Program`. Programs are static and hashable, so leaves with the same program
share one traced kernel. If there is no such program, it raises :class:`NotElementwise`
with the reason.

In a kernel, a division by a scalar is a multiplication by its inverse, which is
computed once per leaf, and a product and a sum are one operation that rounds once.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import (
    SUMS,
    Call,
    Graph,
    Node,
    constant,
    is_constant_number,
    is_zero,
    made_of,
    primitive_of,
)
from lowbit_optax._jaxprs.leaf_program import MULTIPLY_ADD, Operation, Program, Ref

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
"""Primitives that GPU kernels compute, with both launchers.

TPU kernels compute the primitives that are also in
:mod:`pallas_kernels.fused_update.tpu.rules`. Float remainders are missing, because
Mosaic GPU's compiler does not support them.
"""

_ONE_TO_ONE = frozenset({p.copy_p, p.stop_gradient_p})


def is_elementwise(primitive) -> bool:
    """Return whether elements of a result depend only on elements in the same place."""
    return primitive in ELEMENTWISE or primitive in _ONE_TO_ONE


class NotElementwise(Exception):
    """Raised with the reason why the update of a leaf cannot run in a kernel."""


class Scalars:
    """Table of the scalars that programs read, in the order of their first use."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._numbers: dict[Node, int] = {}

    @property
    def nodes(self) -> list[Node]:
        return list(self._numbers)

    def ref(self, node: Node) -> Ref:
        """Return the place of a scalar in the table, or a constant scalar."""
        dtype = np.dtype(node.aval.dtype)
        if is_constant_number(node):
            return Ref("constant", 0, dtype, np.asarray(node.constant, dtype).tobytes())
        if dtype.itemsize > 4:
            raise NotElementwise(f"scalars must have at most 32 bits, got {dtype}")
        number = self._numbers.setdefault(node, len(self._numbers))
        return Ref("scalar", number, dtype)


def inputs_of(outputs: Sequence[Node], shape: tuple[int, ...]) -> set[Node]:
    """Return the inputs with the shape of the leaf from which results are computed.

    The computation need not be elementwise. Scalars are not followed, because they are
    computed outside.
    """
    return {
        node
        for node in made_of(outputs, with_scalars=False)
        if node.call is None and node.constant is None and node.aval.shape == shape
    }


def program_of(
    outputs: Sequence[Node],
    inputs: Sequence[Node],
    scalars: Scalars,
    *,
    is_exact: bool = False,
) -> Program:
    """Return the program that computes the results of a leaf from its own rows.

    Args:
      outputs: results with the shape of the leaf.
      inputs: the leaf's gradient, master and moments, and arrays that are computed
        outside. The first has the shape of the leaf. Others may have one element along
        some axes, which their rows repeat.
      scalars: table to which scalars are added.
      is_exact: whether to keep every operation, so that the results are the same as the
        results of the graph, bit for bit.

    Raises:
      NotElementwise: if the results need more than these rows and scalars.
    """
    between = _between(outputs, inputs)
    uses = collections.Counter([*outputs, *(x for c in between for x in c.inputs)])
    candidates = Scalars(scalars.graph)
    builder = _ProgramBuilder(inputs, uses, candidates, is_exact)
    for call in between:
        builder.add(call)
    results = tuple(map(builder.ref, outputs))
    program = Program(len(inputs), tuple(builder.operations), results)
    program = program.without_dead_operations()
    # Leave scalars that only dead operations read out of the table, because a TPU uses
    # 16 KiB for each scalar.
    nodes = candidates.nodes
    return program.reading({x: scalars.ref(nodes[x.number]) for x in program.scalars})


@dataclasses.dataclass(eq=False)
class _ProgramBuilder:
    """The operations of a program, appended node by node.

    ``uses`` is the number of times that the program reads each node. The other
    arguments are as in :func:`program_of`.
    """

    inputs: Sequence[Node]
    uses: Mapping[Node, int]
    scalars: Scalars
    is_exact: bool

    def __post_init__(self):
        self.operations: list[Operation] = []
        self._rows = {node: Ref("row", i) for i, node in enumerate(self.inputs)}

    def ref(self, node: Node) -> Ref:
        """Return the row of a value, or its place in the table of scalars."""
        return self.scalars.ref(node) if node.is_scalar else self._rows[node]

    def add(self, call: Call) -> None:
        """Append a call, in the cheapest form unless it must be exact."""
        (node,) = call.outputs
        if call.primitive in _ONE_TO_ONE or call.primitive is p.broadcast_in_dim_p:
            self._rows[node] = self.ref(call.inputs[0])
            return
        cheaper = None if self.is_exact else self._cheaper(call)
        self._rows[node] = cheaper or self._append(
            call.primitive, call.params, *map(self.ref, call.inputs)
        )

    def _cheaper(self, call: Call) -> Ref | None:
        """Append cheaper operations for a call and return their row; usually None."""
        primitive, operands = call.primitive, call.inputs
        dtype = call.outputs[0].aval.dtype
        is_float = jnp.issubdtype(dtype, jnp.floating)
        if primitive is p.div_p and is_float and operands[1].is_scalar:
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
                    return self._append(MULTIPLY_ADD, {}, *operands)
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
        """Return the factors of a float32 product, if only one sum uses it."""
        if node.is_scalar or self.uses[node] > 1 or node.call is None:
            return None
        number = self.ref(node).number - len(self.inputs)
        if number < 0 or node.aval.dtype != jnp.float32:
            return None
        operation = self.operations[number]
        return operation.inputs if operation.primitive is p.mul_p else None


def without_zero(call: Call) -> Node | None:
    """Return the term to which a call adds 0; None for other calls."""
    if call.primitive in SUMS:
        for term, other in (call.inputs, call.inputs[::-1]):
            if is_zero(other):
                return term
    return None


def _between(outputs: Sequence[Node], inputs: Sequence[Node]) -> list[Call]:
    """Return the calls between the inputs of a leaf and its results, in order."""
    calls = []
    for node in made_of(outputs, inputs, with_scalars=False):
        if node.call is None:
            kind = "a constant array" if node.constant is not None else "another array"
            raise NotElementwise(f"it uses {kind} of shape {list(node.aval.shape)}")
        _check_elementwise(node, node.call, inputs[0].aval.shape)
        calls.append(node.call)
    return sorted(calls, key=lambda call: call.number)


def _check_elementwise(node: Node, call: Call, shape: tuple[int, ...]) -> None:
    primitive = call.primitive
    known = is_elementwise(primitive) or primitive is p.broadcast_in_dim_p
    if not (known and node.aval.shape == shape):
        shapes = ", ".join(str(list(x.aval.shape)) for x in call.inputs)
        raise NotElementwise(
            f"{primitive} of {shapes or 'nothing'} to {list(node.aval.shape)} is not "
            "among the elementwise operations of kernels"
        )
    if jnp.issubdtype(node.aval.dtype, jnp.floating) and node.aval.dtype.itemsize > 4:
        raise NotElementwise(f"it computes in {node.aval.dtype}")
