"""Values in an order that the compiler keeps, such as a cotangent before a gradient.

Of ``z = x @ w`` the backward pass computes two products, in any order::

    ct_x = ct_z @ w.T        the cotangent that goes on, which needs the weights
    ct_w = x.T @ ct_z        the gradient

In a loop over layers, weights are copied out of their stack. With the cotangent first,
the copy's memory is free for the gradient. A scheduler that hides latencies does not
see to that; a barrier does. It is only for layers whose gradients are all products of
their last cotangents, such as those of one matrix. In others, where activations wait
for a gradient, it would raise the memory of some and lower that of others.
"""

import itertools
import typing
from collections.abc import Callable, Collection, Sequence

import jax
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import (
    Call,
    Node,
    called_jaxpr,
    inline,
    run,
    value_of,
    with_outputs,
)


def tied(tree):
    """The same arrays, none of which can be used before all have been computed.

    Within ``shard_map``, arrays that vary over the same devices are tied, because JAX
    before 0.12 returns arrays from a barrier that all vary alike.

    >>> tied({"a": jax.numpy.float32(1), "b": ()})
    {'a': Array(1., dtype=float32), 'b': ()}
    """
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[object, list[int]] = {}
    for number, leaf in enumerate(leaves):
        varying = getattr(jax.typeof(leaf), "manual_axis_type", None)
        groups.setdefault(varying, []).append(number)
    for numbers in groups.values():
        arrays = lax.optimization_barrier([leaves[n] for n in numbers])
        for number, array in zip(numbers, arrays, strict=True):
            leaves[number] = array
    return structure.unflatten(leaves)


_PRODUCTS = frozenset({p.conv_general_dilated_p, p.dot_general_p})


def cotangents_first(
    transposed: Callable, cotangents: Sequence, gradients: Collection[int]
) -> list:
    """The results of a transposed derivative, gradients after what goes on.

    Args:
      transposed: a tree that is called with the cotangents, and returns a sequence.
      cotangents: arrays.
      gradients: numbers of the results that are gradients of parameters.
    """
    leaves, structure = jax.tree.flatten(transposed)
    closed = jax.make_jaxpr(
        lambda leaves, cotangents: list(structure.unflatten(leaves)(cotangents))
    )(leaves, cotangents)
    reader = _Reader()
    inputs = [Node(var.aval) for var in closed.jaxpr.invars]
    outputs = inline(closed, inputs, reader.read)
    order = _Order(reader, inputs[len(leaves) :], outputs, gradients)
    if not order.last:
        return list(transposed(cotangents))
    known = dict(zip(inputs, (*leaves, *cotangents), strict=True))
    order.run(known)
    return [value_of(x, known) for x in outputs]


class _Reader:
    """Reads calls; functions under jit and checkpoints are inlined.

    Attributes:
      calls: in order.
      fences: those of the calls that are a checkpoint's barrier.
    """

    def __init__(self):
        self.calls: list[Call] = []
        self.fences: dict[Call, Callable[[list], Sequence]] = {}

    def read(self, eqn, operands: list[Node]) -> Sequence[Node]:
        """The results of an equation."""
        if eqn.primitive is p.jit_p:
            return inline(called_jaxpr(eqn.params), operands, self.read)
        if eqn.primitive is p.remat_p:
            operands = self._fenced(eqn.params["prevent_cse"], operands)
            return inline(called_jaxpr(eqn.params), operands, self.read)
        made = self._add(eqn.primitive, eqn.params, operands, eqn.outvars)
        self.calls[-1].context = eqn.ctx
        return made

    def _add(self, primitive, params, operands, like) -> list[Node]:
        call = Call(primitive, params, tuple(operands), len(self.calls))
        self.calls.append(call)
        return with_outputs(call, [x.aval for x in like])

    def _fenced(self, prevented, operands: list[Node]) -> list[Node]:
        """Operands behind the barrier, by which nothing is merged with the forward."""
        if isinstance(prevented, bool):
            prevented = (prevented,) * len(operands)
        fenced = [
            yes and x.constant is None
            for x, yes in zip(operands, prevented, strict=True)
        ]
        before = list(dict.fromkeys(itertools.compress(operands, fenced)))
        made = self._add(p.remat_p, {}, before, before)
        self.fences[self.calls[-1]] = tied
        behind = dict(zip(before, made, strict=True))
        return [
            behind[x] if yes else x for x, yes in zip(operands, fenced, strict=True)
        ]


class _Order:
    """Runs calls for cotangents before those for gradients.

    Args:
      reader: of the calls.
      cotangents: what the derivative is called with.
      outputs: what the calls compute.
      gradients: numbers of the outputs that are gradients.

    Attributes:
      last: by cotangent that gradients are products of, what the layer's last products
        make of it; none if gradients are products of others, too.
    """

    def __init__(
        self,
        reader: _Reader,
        cotangents: list[Node],
        outputs: list[Node],
        gradients: Collection[int],
    ):
        self._fences = reader.fences
        needed = {x.call for n, x in enumerate(outputs) if n not in gradients}
        for call in reversed(reader.calls):
            if call in needed:
                needed.update(x.call for x in call.inputs)
        self._first = [call for call in reader.calls if call in needed]
        self._waiting = [call for call in reader.calls if call not in needed]
        # What is computed again from the forward pass is no cotangent.
        made = set(cotangents)
        for call in reader.calls:
            if call in reader.fences:
                pairs = zip(call.inputs, call.outputs, strict=True)
                made.update(after for before, after in pairs if before in made)
            elif made.intersection(call.inputs):
                made.update(call.outputs)
        self.last: dict[Node, list[Node]] = {}
        of_gradients = filter(_is_product, self._waiting)
        read = made & {x for call in of_gradients for x in call.inputs}
        followed: set[Node] = set()
        for call in reversed(self._first):
            is_followed = not followed.isdisjoint(call.outputs)
            if _is_product(call) and not is_followed:
                for value in read.intersection(call.inputs):
                    self.last.setdefault(value, []).extend(call.outputs)
            if is_followed or _is_product(call):
                followed.update(call.inputs)
        if read != self.last.keys():
            self.last = {}

    def run(self, known: dict[Node, typing.Any]) -> None:
        """Add the outputs of all calls to the values that are known."""
        run(self._first, known, self._fences)
        fenced = {
            value: tied((known[value], [known[x] for x in made]))[0]
            for value, made in self.last.items()
        }
        for call in self._waiting:
            local = {x: fenced.get(x, known.get(x)) for x in call.inputs if x in known}
            run([call], local, self._fences)
            known.update((x, local[x]) for x in call.outputs)


def _is_product(call: Call) -> bool:
    return call.primitive in _PRODUCTS
