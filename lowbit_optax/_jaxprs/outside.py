"""What a leaf's results need besides its own rows: arrays that XLA computes first.

Results may be elementwise but for a few arrays: a product of matrices, or sums over
rows and over columns. A kernel reads these like the leaf's own arrays. What has one
element along an axis is read as it is, and repeated in registers. Random bits are not
read at all: a kernel computes them from its elements' indices. Of a loop that XLA
unrolls, such as Muon's, the last turn may end with sums that the kernel computes.
"""

import dataclasses
from collections.abc import Collection, Sequence

import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.elementwise import NotElementwise, is_elementwise
from lowbit_optax._jaxprs.expansions import (
    erf_inv,
    is_erf_inv,
    is_threefry_bits,
    threefry_bits,
)
from lowbit_optax._jaxprs.graph import Call, Graph, Node, called_jaxpr


@dataclasses.dataclass(frozen=True)
class Outside:
    """An array that is computed outside of a kernel.

    Args:
      node: what the program reads, of the leaf's shape.
      stored: what is computed: the node, or the same with one element along some axes.
    """

    node: Node
    stored: Node


@dataclasses.dataclass(frozen=True)
class Completed:
    """Results as elementwise operations on a leaf's own arrays and on others.

    Args:
      outputs: the results.
      outside: the other arrays.
      index: the indices of the leaf's elements, uint32; None if nothing reads them.
    """

    outputs: list[Node]
    outside: list[Outside]
    index: Node | None


def completed(
    outputs: Sequence[Node],
    own: Collection[Node],
    graph: Graph,
    given: Collection[Node] = (),
) -> Completed:
    """Find what results of a leaf need besides its own arrays.

    Args:
      outputs: results of the leaf's shape.
      own: what the kernel has already.
      graph: to which nodes are added.
      given: what is computed outside in any case.

    Raises:
      NotElementwise: if an array is of a dtype that kernels do not read.
    """
    builder = _Builder(outputs[0].aval.shape, own, graph, given)
    for call in builder.inside(outputs):
        builder.add(call)
    found = [builder.operand(x) for x in outputs]
    return Completed(found, builder.outside, builder.index)


_VIEWS = (p.reshape_p, p.squeeze_p, p.broadcast_in_dim_p)


class _Builder:
    """Makes the operations of a leaf's results anew, in forms that kernels have.

    Arrays that differ from the leaf in axes of length 1 have its shape there.

    Args:
      shape: of the leaf.
      own, graph, given: as for :func:`completed`.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        own: Collection[Node],
        graph: Graph,
        given: Collection[Node],
    ):
        self._shape, self._graph, self._given = shape, graph, frozenset(given)
        self._new = {node: node for node in own}
        self._turns: dict[Call, list[Node]] = {}
        self.outside: list[Outside] = []
        self.index: Node | None = None

    def inside(self, outputs: Sequence[Node]) -> list[Call]:
        """The calls that a kernel can compute, in order."""
        # By their numbers, a loop's last turn would come after what reads it.
        calls: list[Call] = []
        waiting, seen = [(node, False) for node in outputs], set()
        while waiting:
            node, is_ready = waiting.pop()
            node = self._resolved(node)
            if is_ready and node.call is not None:
                calls.append(node.call)
            if node in seen or node in self._new or node.aval.size == 1:
                continue
            seen.add(node)
            if node.call is not None and self._is_inside(node, node.call):
                waiting.append((node, True))
                waiting += [(x, False) for x in node.call.inputs]
        return calls

    def add(self, call: Call) -> None:
        """Compute a call by operations of kernels."""
        (node,) = call.outputs
        if is_threefry_bits(call):
            if self.index is None:
                self.index = Node(node.aval.update(shape=self._shape))
            new = self._graph.inlined(threefry_bits, call.inputs[0], self.index)
        elif self._is_view(call):
            new = self.operand(call.inputs[0])
        elif is_erf_inv(call):
            new = self._graph.inlined(erf_inv, *map(self.operand, call.inputs))
        else:
            operands = [self.operand(x) for x in call.inputs]
            new, params = node, dict(call.params)
            if operands != list(call.inputs):
                if call.primitive is p.broadcast_in_dim_p:
                    params |= {"shape": self._shape, "broadcast_dimensions": ()}
                aval = node.aval.update(shape=self._shape)
                (new,) = self._graph.call(call.primitive, params, operands, [aval])
        self._new[node] = new

    def operand(self, node: Node) -> Node:
        """A scalar, or an array of the leaf's shape, that stands for a value."""
        node = self._resolved(node)
        if node in self._new or node.is_scalar:
            return self._new.get(node, node)
        if node.aval.size == 1:
            new = self._graph.inlined(lambda x: lax.reshape(x, ()), node)
        else:
            new = self._from_outside(node)
        self._new[node] = new
        return new

    def _from_outside(self, node: Node) -> Node:
        dtype = node.aval.dtype
        if not jnp.issubdtype(dtype, jnp.number) or dtype.itemsize > 4:
            raise NotElementwise(f"it uses another array of {dtype}")
        stored = node
        if node.aval.shape != self._shape and self._is_like(node):
            node = stored = self._graph.inlined(
                lambda x: lax.reshape(x, self._shape), node
            )
        elif node.aval.shape != self._shape:
            axes = tuple(range(len(self._shape)))
            repeat = lambda x: lax.broadcast_in_dim(x, self._shape, axes)
            node = self._graph.inlined(repeat, stored)
        elif node.call is not None and node.call.primitive is p.broadcast_in_dim_p:
            kept = node.call.params["broadcast_dimensions"]
            gone = [axis for axis in range(len(self._shape)) if axis not in kept]
            expand = lambda x: lax.expand_dims(x, gone)
            stored = self._graph.inlined(expand, node.call.inputs[0])
        self.outside.append(Outside(node, stored))
        return node

    def _is_inside(self, node: Node, call: Call) -> bool:
        if not self._is_like(node) or node in self._given:
            return False
        if is_threefry_bits(call) or is_erf_inv(call) or self._is_view(call):
            return True
        if call.primitive is p.broadcast_in_dim_p:
            return call.inputs[0].aval.size == 1
        is_whole = node.aval.shape == self._shape
        return is_elementwise(call.primitive) and all(
            x.aval.size == 1 or self._is_like(x) or (is_whole and self._repeats(x))
            for x in call.inputs
        )

    def _resolved(self, node: Node) -> Node:
        """The node; of an unrolled loop that gives an array, the last turn's."""
        call = node.call
        if call is None or not self._is_like(node):
            return node
        if call not in self._turns:
            found = _with_last_turn_apart(self._graph, call)
            if found is None:
                return node
            # Of the turns before it XLA computes each in any case.
            before, self._turns[call] = found
            self._turns[before] = list(before.outputs)
        return self._turns[call][call.outputs.index(node)]

    def _is_like(self, node: Node) -> bool:
        """Whether it has the leaf's shape but for axes of length 1."""
        return _squeezed(node.aval.shape) == _squeezed(self._shape)

    def _is_view(self, call: Call) -> bool:
        """Whether a call only inserts or removes axes of length 1."""
        is_like = self._is_like(call.inputs[0]) and self._is_like(call.outputs[0])
        return call.primitive in _VIEWS and is_like

    def _repeats(self, node: Node) -> bool:
        """Whether it has one element or all along each of the leaf's axes."""
        shape = node.aval.shape
        pairs = zip(shape, self._shape, strict=False)
        return len(shape) == len(self._shape) and all(n in (1, m) for n, m in pairs)


def _with_last_turn_apart(graph: Graph, call: Call) -> tuple[Call, list[Node]] | None:
    """A scan that is unrolled, as one with a turn less, and what the last gives.

    None for other calls, and for scans with anything but constants and carries.
    """
    if call.primitive is not p.scan_p:
        return None
    params, body = call.params, called_jaxpr(call.params)
    pairs = [
        *zip(call.inputs, body.jaxpr.invars, strict=True),
        *zip(call.outputs, body.jaxpr.outvars, strict=True),
    ]
    # What a scan runs over has an axis more outside of its body.
    is_scanned = any(x.aval.shape != var.aval.shape for x, var in pairs)
    if is_scanned or not params["unroll"] == params["length"] > 1:
        return None
    turns = params["length"] - 1
    params = {**params, "length": turns, "unroll": turns}
    avals = [node.aval for node in call.outputs]
    before = graph.call(p.scan_p, params, call.inputs, avals)
    constants = call.inputs[: len(call.inputs) - len(before)]
    last = graph.results_of(body, [*constants, *before])
    (scan,) = {node.call for node in before if node.call is not None}
    return scan, last


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    return [n for n in shape if n != 1]
