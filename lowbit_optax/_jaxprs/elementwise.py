"""Which parts of an inner transformation are elementwise in one leaf, as programs.

A fused kernel holds a few rows of one leaf. It can run whatever the inner
transformation computes for that leaf from the leaf's own elements (gradient, master,
moments) and from scalars, one element at a time. Scalars are computed outside, from
whatever they depend on: a schedule, a count, the global norm of all gradients.

:func:`program_of` follows the results of a leaf back to their inputs. It returns a
:class:`Program`, which is static and hashable, so that leaves with the same program
share one traced kernel. If there is none, it raises :class:`NotElementwise` with the
reason.
"""

import collections
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.corrected_averages import corrected_quotient, times_scalar
from lowbit_optax._jaxprs.graph import (
    Call,
    Graph,
    Node,
    is_constant_number,
    is_zero,
    params_of,
)
from lowbit_optax._jaxprs.leaf_program import (
    MULTIPLY_ADD,
    Operation,
    Program,
    Ref,
    without_dead_operations,
)

ELEMENTWISE = frozenset(
    {
        p.abs_p, p.add_p, p.add_jaxvals_p, p.and_p, p.cbrt_p, p.ceil_p, p.clamp_p,
        p.convert_element_type_p, p.cos_p, p.div_p, p.eq_p, p.exp_p, p.exp2_p,
        p.expm1_p, p.floor_p, p.ge_p, p.gt_p, p.integer_pow_p, p.is_finite_p, p.le_p,
        p.log_p, p.log1p_p, p.logistic_p, p.lt_p, p.max_p, p.min_p, p.mul_p, p.ne_p,
        p.neg_p, p.not_p, p.or_p, p.pow_p, p.rsqrt_p, p.select_n_p,
        p.shift_left_p, p.shift_right_arithmetic_p, p.shift_right_logical_p, p.sign_p,
        p.sin_p, p.sqrt_p, p.square_p, p.sub_p, p.tan_p, p.tanh_p, p.xor_p,
    }
)  # fmt: skip
"""What kernels compute, by any launcher.

Remainders of floats are not among it: Mosaic GPU's compiler has none.
"""

_ONE_TO_ONE = frozenset({p.copy_p, p.stop_gradient_p})


def is_elementwise(primitive) -> bool:
    """Whether an element of a primitive's result is made of those in its place."""
    return primitive in ELEMENTWISE or primitive in _ONE_TO_ONE


class NotElementwise(Exception):
    """Why a leaf's update cannot run in a kernel."""


class Scalars:
    """The table of scalars that programs read, in the order of their first use."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._numbers: dict[Node, int] = {}

    @property
    def nodes(self) -> list[Node]:
        """The scalars, in the order of their places in the table."""
        return list(self._numbers)

    def ref(self, node: Node) -> Ref:
        """The scalar's place in the table, or itself if it is a constant."""
        dtype = np.dtype(node.aval.dtype)
        if is_constant_number(node):
            return Ref("constant", 0, dtype, np.asarray(node.constant, dtype).tobytes())
        if dtype.itemsize > 4:
            raise NotElementwise(
                f"a scalar in it is {dtype}; kernels take up to 32 bits"
            )
        number = self._numbers.setdefault(node, len(self._numbers))
        return Ref("scalar", number, dtype)

    def inverse(self, node: Node) -> Node:
        """One over a float scalar: one division per leaf, not one per element."""
        one = Node(node.aval, constant=node.aval.dtype.type(1))
        return self.computed(p.div_p, lax.div, one, node)

    def computed(self, primitive, function: Callable, *inputs: Node) -> Node:
        """A float scalar made of others by a primitive, as ``function(x, y)`` does."""
        aval = inputs[-1].aval
        return self.graph.call(primitive, params_of(function), inputs, [aval])[0]


def inputs_of(outputs: Sequence[Node], shape: tuple[int, ...]) -> set[Node]:
    """The inputs of a leaf's shape that results are made of, elementwise or not.

    Scalars are not followed: what they are made of is computed outside.
    """
    found: set[Node] = set()
    visited: set[Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in visited or node.is_scalar:
            continue
        visited.add(node)
        if node.call is not None:
            waiting.extend(node.call.inputs)
        elif node.constant is None and node.aval.shape == shape:
            found.add(node)
    return found


def program_of(
    outputs: Sequence[Node],
    inputs: Sequence[Node],
    scalars: Scalars,
    *,
    takes_factors_out: bool = True,
    is_exact: bool = False,
) -> Program:
    """The program that computes a leaf's results from its own rows.

    Args:
      outputs: results of the leaf's shape.
      inputs: the leaf's gradient, master and moments, all of its shape.
      scalars: the table to enter scalars in.
      takes_factors_out: whether scalar factors are; see
        :mod:`lowbit_optax._jaxprs.corrected_averages`.
      is_exact: whether every operation is taken as it is, so that the results are those
        of the graph bit for bit.

    Raises:
      NotElementwise: if they need more than these rows and scalars.
    """
    between = _between(outputs, inputs, inputs[0].aval.shape)
    reads = [*outputs, *(x for _, call in between for x in call.inputs)]
    uses = collections.Counter(reads)
    candidates = Scalars(scalars.graph)
    builder = _ProgramBuilder(inputs, uses, candidates, takes_factors_out)
    for node, call in between:
        (builder.add_exactly if is_exact else builder.add)(node, call)
    results = tuple(map(builder.ref, outputs))  # which may append operations
    program = without_dead_operations(
        Program(len(inputs), tuple(builder.operations), results)
    )
    # Divisors that a factor replaced are read by dead operations only. They take no
    # place in the table: a TPU gives each 16 KiB.
    nodes = candidates.nodes
    return program.with_scalars(
        {x: scalars.ref(nodes[x.number]) for x in program.scalars}
    )


class _ProgramBuilder:
    """The operations of a program, appended node by node.

    Args:
      inputs: the nodes that are the given rows.
      uses: by node, how often the program reads it.
      scalars: the table to enter scalars in.
      takes_factors_out: as for :func:`program_of`.
    """

    def __init__(
        self,
        inputs: Sequence[Node],
        uses: Mapping[Node, int],
        scalars: Scalars,
        takes_factors_out: bool,
    ):
        self.operations: list[Operation] = []
        self._given = len(inputs)
        self._uses, self._scalars = uses, scalars
        self._takes_factors_out = takes_factors_out
        self._rows = {node: Ref("row", i) for i, node in enumerate(inputs)}
        # By node, a row and the scalar that it is to be multiplied by.
        self._scaled: dict[Node, tuple[Ref, Node]] = {}

    def ref(self, node: Node) -> Ref:
        """Where the program finds a value: a row, or a scalar of the table."""
        if node.is_scalar:
            return self._scalars.ref(node)
        if node not in self._rows:
            self._rows[node] = self._times(*self._scaled[node])
        return self._rows[node]

    def add(self, node: Node, call: Call) -> None:
        """Append what computes a node, in the form that costs least."""
        scaled = self._quotient(call) or self._scaled_sum(call)
        if scaled is None:
            self._rows[node] = self._row_of(call)
        else:
            self._scaled[node] = scaled

    def add_exactly(self, node: Node, call: Call) -> None:
        """Append the operation that computes a node."""
        self._rows[node] = self._copied(call) or self._as_it_is(call)

    def _quotient(self, call: Call) -> tuple[Ref, Node] | None:
        """A quotient of corrected averages, as a row and its scalar factor."""
        found = corrected_quotient(call, self._uses)
        if found is None or not self._takes_factors_out:
            return None
        computed = self._scalars.computed
        factor = root = computed(p.sqrt_p, _sqrt, found.square_divisor)
        divisor = self._append(p.sqrt_p, params_of(_sqrt), [self.ref(found.square)])
        if found.eps is not None and not is_zero(found.eps):
            eps = self.ref(computed(p.mul_p, lax.mul, found.eps, root))
            divisor = self._append(p.add_p, params_of(lax.add), [divisor, eps])
        if found.mean_divisor is not None:
            factor = computed(p.div_p, lax.div, root, found.mean_divisor)
        operands = [self.ref(found.mean), divisor]
        return self._append(p.div_p, params_of(lax.div), operands), factor

    def _scaled_sum(self, call: Call) -> tuple[Ref, Node] | None:
        """``f q + d w`` with scalars f and d, as the row ``q + (d / f) w`` and f."""
        if call.primitive is not p.add_p:
            return None
        for node, other in (call.inputs, call.inputs[::-1]):
            product = times_scalar(other)
            if node in self._scaled and product is not None and self._uses[other] == 1:
                row, factor = self._scaled[node]
                share = self._scalars.computed(p.div_p, lax.div, product[1], factor)
                operands = [self.ref(product[0]), self.ref(share), row]
                return self._append(MULTIPLY_ADD, {}, operands), factor
        return None

    def _times(self, row: Ref, scalar: Node) -> Ref:
        operands = [row, self.ref(scalar)]
        return self._append(p.mul_p, params_of(lax.mul), operands)

    def _row_of(self, call: Call) -> Ref:
        primitive, operands = call.primitive, call.inputs
        copied = self._copied(call)
        if copied is not None:
            return copied
        if primitive is p.div_p and _is_float_scalar(operands[1]):
            return self._times(
                self.ref(operands[0]), self._scalars.inverse(operands[1])
            )
        product = times_scalar(call.outputs[0])
        if product is not None and product[0] in self._scaled:
            row, factor = self._scaled[product[0]]
            computed = self._scalars.computed
            return self._times(row, computed(p.mul_p, lax.mul, factor, product[1]))
        if primitive in (p.add_p, p.add_jaxvals_p) and any(map(is_zero, operands)):
            return self.ref(operands[0] if is_zero(operands[1]) else operands[1])
        if primitive is p.add_p:
            for node, other in (operands, operands[::-1]):
                product = self._product(node)
                if product is not None:
                    factors = [*product.inputs, self.ref(other)]
                    return self._append(MULTIPLY_ADD, {}, factors)
        return self._as_it_is(call)

    def _copied(self, call: Call) -> Ref | None:
        """The operand of a call that changes none of its elements."""
        is_copy = call.primitive in _ONE_TO_ONE
        if is_copy or call.primitive is p.broadcast_in_dim_p:
            return self.ref(call.inputs[0])
        return None

    def _as_it_is(self, call: Call) -> Ref:
        operands = [self.ref(x) for x in call.inputs]
        return self._append(call.primitive, call.params, operands)

    def _append(self, primitive, params: Mapping, operands: Sequence[Ref]) -> Ref:
        items = tuple(sorted(params.items()))
        try:
            hash(items)
        except TypeError:
            raise NotElementwise(f"{primitive} has parameters {params}") from None
        self.operations.append(Operation(primitive, items, tuple(operands)))
        return Ref("row", self._given + len(self.operations) - 1)

    def _product(self, node: Node) -> Operation | None:
        """The operation of a float32 product that only one sum uses, to be fused."""
        if node.is_scalar or self._uses[node] > 1 or node.call is None:
            return None
        number = self.ref(node).number - self._given
        if number < 0 or np.dtype(node.aval.dtype) != np.float32:
            return None
        operation = self.operations[number]
        return operation if operation.primitive is p.mul_p else None


def _between(
    outputs: Sequence[Node], inputs: Sequence[Node], shape: tuple[int, ...]
) -> list[tuple[Node, Call]]:
    """The nodes between a leaf's inputs and its results with their calls, in order."""
    found: dict[Node, Call] = {}
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in found or node in inputs or node.is_scalar:
            continue
        if node.call is None:
            kind = "a constant array" if node.constant is not None else "another array"
            raise NotElementwise(f"it uses {kind} of shape {list(node.aval.shape)}")
        _check_elementwise(node, node.call, shape)
        found[node] = node.call
        waiting.extend(node.call.inputs)
    return sorted(found.items(), key=lambda item: item[1].number)


def _check_elementwise(node: Node, call: Call, shape: tuple[int, ...]) -> None:
    primitive, operands = call.primitive, call.inputs
    fits = node.aval.shape == shape and all(
        x.is_scalar or x.aval.shape == shape for x in operands
    )
    known = is_elementwise(primitive)
    if primitive is p.broadcast_in_dim_p:
        known = operands[0].is_scalar or operands[0].aval.shape == shape
    if not (known and fits):
        shapes = ", ".join(str(list(x.aval.shape)) for x in operands)
        raise NotElementwise(
            f"{primitive} of {shapes or 'nothing'} to {list(node.aval.shape)} is not "
            "elementwise"
        )
    if jnp.issubdtype(node.aval.dtype, jnp.floating) and node.aval.dtype.itemsize > 4:
        raise NotElementwise(f"it computes in {node.aval.dtype}")


def _is_float_scalar(node: Node) -> bool:
    return node.is_scalar and jnp.issubdtype(node.aval.dtype, jnp.floating)


def _sqrt(x: jax.Array, y: jax.Array) -> jax.Array:
    del y
    return lax.sqrt(x)
