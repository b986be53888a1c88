"""Which parts of an inner transformation are elementwise in one leaf, as programs.

A fused kernel holds a few rows of one leaf. It can run whatever the inner
transformation computes for that leaf from the leaf's own elements (gradient, master,
moments) and from scalars, one element at a time. Scalars are computed outside, from
whatever they depend on: a schedule, a count, the global norm of all gradients.

:func:`program_of` follows the results of a leaf back to their inputs. It returns a
:class:`Program`, which is static and hashable, so that leaves with the same program
share one traced kernel. If there is none, it raises :class:`NotElementwise` with the
reason.

Adam divides both of its averages by ``1 - b^t``:

    u  = (m / c1) / (sqrt(v / c2) + eps)
    w' = w - eta (u + d w)

In a kernel that is two products per element more than with the factors taken out:

    q  = m / (sqrt(v) + eps sqrt(c2)),    S = sqrt(c2) / c1
    w' = w - (eta S) (q + (d / S) w)

``S`` and the other factors are scalars, computed once per leaf. The averages must be
divided by scalars, not multiplied: c1 and c2 are then not infinite, so that S is not 0
and may be divided by.

A scalar over an array is not computed where only quotients and products with scalars
read it: ``s / (f / x)`` is ``(s / f) x``, and ``(f / x) / (g / y)`` is ``(f / g) (y /
x)``.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import (
    Call,
    Graph,
    Node,
    constant,
    is_constant_number,
    is_zero,
    made_of,
    primitive_of,
    without_zero,
)
from lowbit_optax._jaxprs.leaf_program import MULTIPLY_ADD, Operation, Program, Ref
from lowbit_optax._jaxprs.scalar_factors import corrected_quotient, times_scalar

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
"""The primitives that kernels of all launchers compute.

Float remainders are missing: Mosaic GPU's compiler has none.
"""

_ONE_TO_ONE = frozenset({p.copy_p, p.stop_gradient_p})


def is_elementwise(primitive) -> bool:
    """Whether an element of a result depends on the elements in its place only."""
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


def inputs_of(outputs: Sequence[Node], shape: tuple[int, ...]) -> set[Node]:
    """The inputs of a leaf's shape that results are made of, elementwise or not.

    Scalars are not followed: they are computed outside.
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
    takes_factors_out: bool = True,
    is_exact: bool = False,
) -> Program:
    """The program that computes a leaf's results from its own rows.

    Args:
      outputs: results of the leaf's shape.
      inputs: the leaf's gradient, master and moments, and what is computed outside.
        The first has the leaf's shape; others may have one element along some axes,
        and their rows repeat it.
      scalars: the table to enter scalars in.
      takes_factors_out: whether scalar factors of quotients are taken out.
      is_exact: whether every operation stays as it is, so that the results are those of
        the graph bit for bit.

    Raises:
      NotElementwise: if they need more than these rows and scalars.
    """
    between = _between(outputs, inputs)
    uses, candidates = _uses(outputs, between), Scalars(scalars.graph)
    builder = _ProgramBuilder(inputs, uses, candidates, takes_factors_out, is_exact)
    for call in between:
        builder.add(call)
    results = tuple(map(builder.ref, outputs))  # which may append operations
    program = Program(len(inputs), tuple(builder.operations), results)
    program = program.without_dead_operations()
    # Divisors that a factor replaced are read by dead operations only. They take no
    # place in the table: a TPU gives each 16 KiB.
    nodes = candidates.nodes
    return program.reading({x: scalars.ref(nodes[x.number]) for x in program.scalars})


@dataclasses.dataclass(eq=False)
class _ProgramBuilder:
    """The operations of a program, appended node by node.

    Args:
      inputs: the nodes that are the given rows.
      uses: by node, how often the program reads it; all divisions count as one.
      scalars: the table to enter scalars in.
      takes_factors_out, is_exact: as for :func:`program_of`.
    """

    inputs: Sequence[Node]
    uses: Mapping[Node, int]
    scalars: Scalars
    takes_factors_out: bool
    is_exact: bool

    def __post_init__(self):
        self.operations: list[Operation] = []
        self._apply = self.scalars.graph.apply
        self._rows = {node: Ref("row", i) for i, node in enumerate(self.inputs)}
        # By node, a row and the scalar that it is to be multiplied by.
        self._scaled: dict[Node, tuple[Ref, Node]] = {}
        # By node, a row and the scalar that it is to divide.
        self._inverse: dict[Node, tuple[Ref, Node]] = {}
        self._divisors: dict[Node, Ref] = {}

    def ref(self, node: Node) -> Ref:
        """Where the program finds a value: a row, or a scalar of the table."""
        if node.is_scalar:
            return self.scalars.ref(node)
        if node in self._rows:
            return self._rows[node]
        if node in self._scaled:
            row, factor = self._scaled[node]
            self._rows[node] = self._append(lax.mul, row, self.ref(factor))
        else:
            row, factor = self._inverse[node]
            self._rows[node] = self._append(lax.div, self.ref(factor), row)
        return self._rows[node]

    def add(self, call: Call) -> None:
        """Append a call, in the cheapest form unless it must be exact."""
        (node,) = call.outputs
        if call.primitive in _ONE_TO_ONE or call.primitive is p.broadcast_in_dim_p:
            self._rows[node] = self.ref(call.inputs[0])
        elif self.is_exact:
            self._rows[node] = self._as_it_is(call)
        else:
            self._add_cheapest(node, call)

    def _add_cheapest(self, node: Node, call: Call) -> None:
        """Append a call as a row, or as a row and a scalar that :meth:`ref` applies."""
        scaled = self._quotient(call) or self._scaled_sum(call)
        if scaled is not None:
            self._scaled[node] = scaled
            return
        inverse = self._over_row(call)
        if inverse is not None:
            self._inverse[node] = inverse
            return
        self._rows[node] = self._cheaper(call) or self._as_it_is(call)

    def _as_it_is(self, call: Call) -> Ref:
        operands = map(self.ref, call.inputs)
        return self._append_call(call.primitive, call.params, *operands)

    def _quotient(self, call: Call) -> tuple[Ref, Node] | None:
        """A quotient as a row and its scalar factor."""
        if call.primitive is not p.div_p or not self.takes_factors_out:
            return None
        numerator, divisor = call.inputs
        if divisor in self._inverse:
            row, factor = self._inverse[divisor]
            if numerator.is_scalar:
                return row, self._apply(lax.div, numerator, factor)
            if numerator in self._inverse:
                other, share = self._inverse[numerator]
                quotient = self._append(lax.div, row, other)
                return quotient, self._apply(lax.div, share, factor)
        found = corrected_quotient(call, self.uses)
        if found is None or numerator.is_scalar:
            return None
        mean, mean_divisor, corrected = found
        row, factor = self._divisor(divisor, *corrected)
        if mean_divisor is not None:
            factor = self._apply(lax.div, factor, mean_divisor)
        return self._append(lax.div, self.ref(mean), row), factor

    def _over_row(self, call: Call) -> tuple[Ref, Node] | None:
        """A scalar over an array, or a scalar times that, as a row and the scalar."""
        if not self.takes_factors_out or call.outputs[0].aval.dtype != jnp.float32:
            return None
        product = times_scalar(call.outputs[0])
        if product is not None and product[0] in self._inverse:
            row, factor = self._inverse[product[0]]
            return row, self._apply(lax.mul, factor, product[1])
        if call.primitive is not p.div_p or not call.inputs[0].is_scalar:
            return None
        numerator, divisor = call.inputs
        found = corrected_quotient(call, self.uses)
        if found is None:
            return self.ref(divisor), numerator
        row, factor = self._divisor(divisor, *found[2])
        return row, self._apply(lax.mul, numerator, factor)

    def _divisor(
        self, node: Node, square: Node, square_divisor: Node, eps: Node | None
    ) -> tuple[Ref, Node]:
        """A divisor ``sqrt(v / c2) + eps`` as a row to divide by, and a factor."""
        root = self._apply(lax.sqrt, square_divisor)
        if node not in self._divisors:
            row = self._append(lax.sqrt, self.ref(square))
            if eps is not None and not is_zero(eps):
                scaled_eps = self.ref(self._apply(lax.mul, eps, root))
                row = self._append(lax.add, row, scaled_eps)
            self._divisors[node] = row
        return self._divisors[node], root

    def _scaled_sum(self, call: Call) -> tuple[Ref, Node] | None:
        """``f q + d w`` with scalars f and d, as the row ``q + (d / f) w`` and f."""
        if call.primitive is not p.add_p:
            return None
        for node, other in (call.inputs, call.inputs[::-1]):
            product = times_scalar(other)
            if node in self._scaled and product is not None and self.uses[other] == 1:
                row, factor = self._scaled[node]
                share = self._apply(lax.div, product[1], factor)
                operands = self.ref(product[0]), self.ref(share), row
                return self._append_call(MULTIPLY_ADD, {}, *operands), factor
        return None

    def _cheaper(self, call: Call) -> Ref | None:
        """The row of a call by other operations than its own; None for most."""
        primitive, operands = call.primitive, call.inputs
        dtype = call.outputs[0].aval.dtype
        is_float = jnp.issubdtype(dtype, jnp.floating)
        if primitive is p.div_p and is_float and operands[1].is_scalar:
            # One division per leaf, not one per element.
            inverse = self._apply(lax.div, constant(dtype.type(1)), operands[1])
            return self._append(lax.mul, self.ref(operands[0]), self.ref(inverse))
        product = times_scalar(call.outputs[0])
        if product is not None and product[0] in self._scaled:
            row, factor = self._scaled[product[0]]
            factor = self._apply(lax.mul, factor, product[1])
            return self._append(lax.mul, row, self.ref(factor))
        term = without_zero(call)
        if term is not None:
            return self.ref(term)
        if primitive is p.add_p:
            for node, other in (operands, operands[::-1]):
                factors = self._factors(node)
                if factors is not None:
                    operands = *factors, self.ref(other)
                    return self._append_call(MULTIPLY_ADD, {}, *operands)
        return None

    def _append(self, function: Callable, *operands: Ref) -> Ref:
        """Append a function, which is one primitive, of float rows and scalars."""
        dtypes = [np.dtype(np.float32)] * len(operands)
        primitive, params, _ = primitive_of(function, *dtypes)
        return self._append_call(primitive, params, *operands)

    def _append_call(self, primitive, params: Mapping, *operands: Ref) -> Ref:
        items = tuple(sorted(params.items()))
        try:
            hash(items)
        except TypeError:
            raise NotElementwise(f"{primitive} has parameters {params}") from None
        self.operations.append(Operation(primitive, items, operands))
        return Ref("row", len(self.inputs) + len(self.operations) - 1)

    def _factors(self, node: Node) -> tuple[Ref, ...] | None:
        """The factors of a float32 product that only one sum uses, to be fused."""
        if node.is_scalar or self.uses[node] > 1 or node.call is None:
            return None
        number = self.ref(node).number - len(self.inputs)
        if number < 0 or node.aval.dtype != jnp.float32:
            return None
        operation = self.operations[number]
        return operation.inputs if operation.primitive is p.mul_p else None


def _between(outputs: Sequence[Node], inputs: Sequence[Node]) -> list[Call]:
    """The calls between a leaf's inputs and its results, in order."""
    calls = []
    for node in made_of(outputs, inputs, with_scalars=False):
        if node.call is None:
            kind = "a constant array" if node.constant is not None else "another array"
            raise NotElementwise(f"it uses {kind} of shape {list(node.aval.shape)}")
        _check_elementwise(node, node.call, inputs[0].aval.shape)
        calls.append(node.call)
    return sorted(calls, key=lambda call: call.number)


def _uses(outputs: Sequence[Node], calls: Sequence[Call]) -> Mapping[Node, int]:
    """By node, how often the results and the calls read it.

    Divisors count once, however often they divide.
    """
    uses, divisors = collections.Counter(outputs), set()
    for call in calls:
        if call.primitive is p.div_p:
            numerator, divisor = call.inputs
            uses[numerator] += 1
            divisors.add(divisor)
        else:
            uses.update(call.inputs)
    uses.update(divisors)
    return uses


def _check_elementwise(node: Node, call: Call, shape: tuple[int, ...]) -> None:
    primitive = call.primitive
    known = is_elementwise(primitive) or primitive is p.broadcast_in_dim_p
    if not (known and node.aval.shape == shape):
        shapes = ", ".join(str(list(x.aval.shape)) for x in call.inputs)
        raise NotElementwise(
            f"{primitive} of {shapes or 'nothing'} to {list(node.aval.shape)} is not "
            "elementwise"
        )
    if jnp.issubdtype(node.aval.dtype, jnp.floating) and node.aval.dtype.itemsize > 4:
        raise NotElementwise(f"it computes in {node.aval.dtype}")
