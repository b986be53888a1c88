"""Which parts of an inner transformation are elementwise in one leaf, as programs.

A fused kernel holds a few rows of one leaf. It can run whatever the inner
transformation computes for that leaf from the leaf's own elements (gradient, master,
moments) and from scalars, one element at a time. Scalars are computed outside, from
whatever they depend on: a schedule, a count, the global norm of all gradients.

:func:`program_of` follows the results of a leaf back to their inputs. It gives a
:class:`Program`, which is static and hashable, so that leaves with the same program
share one traced kernel; or raises :class:`NotElementwise` with the reason.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import Graph, Node

_ELEMENTWISE = frozenset(
    {
        p.abs_p, p.add_p, p.add_jaxvals_p, p.and_p, p.cbrt_p, p.ceil_p, p.clamp_p,
        p.convert_element_type_p, p.cos_p, p.div_p, p.eq_p, p.exp_p, p.exp2_p,
        p.expm1_p, p.floor_p, p.ge_p, p.gt_p, p.integer_pow_p, p.is_finite_p, p.le_p,
        p.log_p, p.log1p_p, p.logistic_p, p.lt_p, p.max_p, p.min_p, p.mul_p, p.ne_p,
        p.neg_p, p.not_p, p.or_p, p.pow_p, p.rem_p, p.rsqrt_p, p.select_n_p,
        p.shift_left_p, p.shift_right_arithmetic_p, p.shift_right_logical_p, p.sign_p,
        p.sin_p, p.sqrt_p, p.square_p, p.sub_p, p.tan_p, p.tanh_p, p.xor_p,
    }
)  # fmt: skip
_ONE_TO_ONE = frozenset({p.copy_p, p.stop_gradient_p})


def is_elementwise(primitive) -> bool:
    """Whether an element of its result is made of the same elements of its inputs."""
    return primitive in _ELEMENTWISE or primitive in _ONE_TO_ONE


class NotElementwise(Exception):
    """Why a leaf's update cannot run in a kernel."""


@dataclasses.dataclass(frozen=True)
class Ref:
    """A value of a program: a row, a scalar of the table, or a constant.

    Args:
      kind: ``"row"``, ``"scalar"`` or ``"constant"``.
      number: of the row or scalar.
      dtype: of a scalar or constant.
      value: a constant's bytes.
    """

    kind: typing.Literal["row", "scalar", "constant"]
    number: int = 0
    dtype: np.dtype | None = None
    value: bytes = b""


@dataclasses.dataclass(frozen=True)
class Step:
    """One elementwise operation; ``params`` are the primitive's."""

    primitive: typing.Any
    params: tuple[tuple[str, typing.Any], ...]
    inputs: tuple[Ref, ...]


MULTIPLY_ADD = "multiply_add"
"""In a :class:`Step`: ``a * b + c``, which a GPU does at once and rounds once."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What a leaf's update computes from its rows: steps, each making one more row.

    Args:
      inputs: how many rows are given.
      steps: in order.
      outputs: the results.
    """

    inputs: int
    steps: tuple[Step, ...]
    outputs: tuple[Ref, ...]

    def run(
        self,
        rows: Sequence[jax.Array],
        scalar: Callable[[Ref], jax.Array],
        multiply_add: Callable,
    ) -> list[jax.Array]:
        """The outputs, for rows of any one shape.

        Args:
          rows: the inputs.
          scalar: gives a rank-0 array for a scalar of the table.
          multiply_add: of three arrays.
        """
        rows = list(rows)
        shape = rows[0].shape

        def value(ref: Ref) -> jax.Array:
            if ref.kind == "row":
                return rows[ref.number]
            if ref.kind == "scalar":
                return jnp.broadcast_to(scalar(ref), shape)
            return jnp.full(shape, np.frombuffer(ref.value, ref.dtype)[0])

        for step in self.steps:
            inputs = [value(ref) for ref in step.inputs]
            if step.primitive == MULTIPLY_ADD:
                rows.append(multiply_add(*inputs))
            else:
                rows.append(step.primitive.bind(*inputs, **dict(step.params)))
        return [value(ref) for ref in self.outputs]

    def only(self, numbers: Sequence[int]) -> "Program":
        """The program of some of the outputs."""
        outputs = tuple(self.outputs[i] for i in numbers)
        return _without_dead_steps(dataclasses.replace(self, outputs=outputs))


class Scalars:
    """The table of scalars that programs read, in the order of their first use."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self._inverses: dict[Node, Node] = {}
        self._numbers: dict[Node, int] = {}

    @property
    def nodes(self) -> list[Node]:
        return list(self._numbers)

    def ref(self, node: Node) -> Ref:
        """The scalar's place in the table, or itself if it is a constant."""
        dtype = np.dtype(node.aval.dtype)
        if node.constant is not None and not isinstance(node.constant, jax.Array):
            return Ref("constant", 0, dtype, np.asarray(node.constant, dtype).tobytes())
        if dtype.itemsize > 4:
            raise NotElementwise(
                f"a scalar in it is {dtype}; kernels take up to 32 bits"
            )
        number = self._numbers.setdefault(node, len(self._numbers))
        return Ref("scalar", number, dtype)

    def inverse(self, node: Node) -> Ref:
        """One over a float scalar: a division a leaf instead of one an element."""
        if node not in self._inverses:
            one = Node(node.aval, constant=node.aval.dtype.type(1))
            call = self.graph.call(p.div_p, {}, [one, node], [node.aval])
            self._inverses[node] = call[0]
        return self.ref(self._inverses[node])


def encode_scalars(values: Sequence[jax.Array]) -> jax.Array:
    """Scalars of up to 32 bits as one uint32 vector."""
    return jnp.stack([_to_word(jnp.asarray(x)) for x in values])


def decode_scalar(word: jax.Array, dtype: np.dtype) -> jax.Array:
    """A scalar back from its word, the inverse of :func:`encode_scalars`."""
    if dtype == jnp.bool_:
        return word != jnp.uint32(0)
    if dtype.itemsize == 4:
        return lax.bitcast_convert_type(word, dtype)
    unsigned = np.dtype(f"uint{8 * dtype.itemsize}")
    return lax.bitcast_convert_type(word.astype(unsigned), dtype)


def _to_word(x: jax.Array) -> jax.Array:
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)


def inputs_of(outputs: Sequence[Node], shape: tuple[int, ...]) -> set[Node]:
    """The inputs of a leaf's shape that results are made of, elementwise or not.

    Scalars are not followed: what they are made of is computed outside.
    """
    found, seen, waiting = set(), set(), list(outputs)
    while waiting:
        node = waiting.pop()
        if node in seen or node.is_scalar:
            continue
        seen.add(node)
        if node.call is not None:
            waiting.extend(node.call.inputs)
        elif node.constant is None and node.aval.shape == shape:
            found.add(node)
    return found


def program_of(
    outputs: Sequence[Node], inputs: Sequence[Node], scalars: Scalars
) -> Program:
    """The program that computes a leaf's results from its own rows.

    Args:
      outputs: results of the leaf's shape.
      inputs: the leaf's gradient, master and moments, all of its shape.
      scalars: the table to enter scalars in.

    Raises:
      NotElementwise: if they need more than these rows and scalars.
    """
    shape = inputs[0].aval.shape
    order = _order(outputs, inputs, shape)
    uses: dict[Node, int] = {}
    for node in [*outputs, *(i for n in order for i in n.call.inputs)]:
        uses[node] = uses.get(node, 0) + 1
    refs = {node: Ref("row", i) for i, node in enumerate(inputs)}
    steps: list[Step] = []

    def ref(node: Node) -> Ref:
        return scalars.ref(node) if node.is_scalar else refs[node]

    def add(primitive, params, operands: Sequence[Ref]) -> Ref:
        items = tuple(sorted(params.items()))
        try:
            hash(items)
        except TypeError:
            raise NotElementwise(f"{primitive} has parameters {params}") from None
        steps.append(Step(primitive, items, tuple(operands)))
        return Ref("row", len(inputs) + len(steps) - 1)

    def product(node: Node) -> Step | None:
        """The step of a product that nothing else uses, to be put into a sum."""
        if node.is_scalar or uses[node] > 1 or node.call is None:
            return None
        place = refs[node]
        step = (
            steps[place.number - len(inputs)] if place.number >= len(inputs) else None
        )
        if step is None or step.primitive is not p.mul_p:
            return None
        return step if np.dtype(node.aval.dtype) == np.float32 else None

    for node in order:
        primitive, operands = node.call.primitive, node.call.inputs
        if primitive in _ONE_TO_ONE or primitive is p.broadcast_in_dim_p:
            refs[node] = ref(operands[0])
        elif primitive is p.div_p and _is_float_scalar(operands[1]):
            refs[node] = add(
                p.mul_p, {}, [ref(operands[0]), scalars.inverse(operands[1])]
            )
        elif primitive in (p.add_p, p.add_jaxvals_p) and any(map(_is_zero, operands)):
            kept = operands[0] if _is_zero(operands[1]) else operands[1]
            refs[node] = ref(kept)
        elif primitive is p.add_p and any(map(product, operands)):
            first = next(i for i, each in enumerate(operands) if product(each))
            factors = product(operands[first]).inputs
            refs[node] = add(MULTIPLY_ADD, {}, [*factors, ref(operands[1 - first])])
        else:
            refs[node] = add(primitive, node.call.params, [ref(x) for x in operands])
    return _without_dead_steps(
        Program(len(inputs), tuple(steps), tuple(ref(node) for node in outputs))
    )


def _order(outputs, inputs, shape) -> list[Node]:
    """The nodes between a leaf's inputs and its results, in a valid order."""
    found, seen, waiting = [], set(inputs), list(outputs)
    while waiting:
        node = waiting.pop()
        if node in seen or node.is_scalar:
            continue
        seen.add(node)
        if node.call is None:
            kind = "a constant array" if node.constant is not None else "another array"
            raise NotElementwise(f"it uses {kind} of shape {list(node.aval.shape)}")
        _check_elementwise(node, shape)
        found.append(node)
        waiting.extend(node.call.inputs)
    return sorted(found, key=lambda node: node.call.number)


def _check_elementwise(node: Node, shape: tuple[int, ...]) -> None:
    primitive, operands = node.call.primitive, node.call.inputs
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


def _is_zero(node: Node) -> bool:
    """Whether it is the constant 0.0, added to nothing's effect (but for -0)."""
    if node.call is not None and node.call.primitive is p.broadcast_in_dim_p:
        (node,) = node.call.inputs
    constant = node.constant
    if constant is None or isinstance(constant, jax.Array) or not node.is_scalar:
        return False
    return bool(np.asarray(constant) == 0)


def _without_dead_steps(program: Program) -> Program:
    """Without products that went into sums, and renumbered."""
    alive, waiting = set(), list(program.outputs)
    while waiting:
        ref = waiting.pop()
        if ref.kind == "row" and ref.number not in alive:
            alive.add(ref.number)
            if ref.number >= program.inputs:
                waiting.extend(program.steps[ref.number - program.inputs].inputs)
    numbers = {i: i for i in range(program.inputs)}
    steps = []

    def renumber(ref: Ref) -> Ref:
        if ref.kind != "row":
            return ref
        return dataclasses.replace(ref, number=numbers[ref.number])

    for i, step in enumerate(program.steps, program.inputs):
        if i in alive:
            inputs = tuple(renumber(ref) for ref in step.inputs)
            steps.append(dataclasses.replace(step, inputs=inputs))
            numbers[i] = program.inputs + len(steps) - 1
    outputs = tuple(renumber(ref) for ref in program.outputs)
    return Program(program.inputs, tuple(steps), outputs)
