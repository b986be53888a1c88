"""In which order a layer's cotangents and gradients are computed.

Of ``z = x @ w`` the backward pass computes two products, in any order::

    ct_x = ct_z @ w.T        the cotangent that goes on, which needs the weights
    ct_w = x.T @ ct_z        the gradient

In a loop over layers, weights are copied out of their stack. With the cotangent first,
the copy's memory is free for the gradient. A scheduler that hides latencies does not
see to that. Here barriers do: a gradient's product begins when the cotangents made of
the same ``ct_z`` are there, and what is made of these begins when the gradient is.
"""

import itertools
import typing
from collections.abc import Callable, Collection, Sequence

import jax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.nodes import (
    Call,
    Node,
    called_jaxpr,
    inline,
    run,
    value_of,
    with_outputs,
)
from lowbit_optax.release.ordering import tied

_PRODUCTS = frozenset({p.conv_general_dilated_p, p.dot_general_p})


def cotangents_first(
    transposed: Callable, cotangents: Sequence, gradients: Collection[int]
) -> list:
    """The results of a transposed derivative, with barriers between its products.

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
    known = dict(zip(inputs, (*leaves, *cotangents), strict=True))
    _Order(reader, inputs[len(leaves) :], outputs, gradients).run(known)
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
        return self._add(eqn.primitive, eqn.params, operands, eqn.outvars)

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
    """Runs calls in an order, with barriers.

    Args:
      reader: of the calls.
      cotangents: what the derivative is called with.
      outputs: what the calls compute.
      gradients: numbers of the outputs that are gradients.
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
        # By cotangent that gradients are products of, the products that go on from it.
        self._products: dict[Node, list[Call]] = {}
        of_gradients = filter(_is_product, self._waiting)
        read = made & {x for call in of_gradients for x in call.inputs}
        for call in filter(_is_product, self._first):
            for value in read.intersection(call.inputs):
                self._products.setdefault(value, []).append(call)

    def run(self, known: dict[Node, typing.Any]) -> None:
        """Add the outputs of all calls to the values that are known."""
        fenced: dict[Node, typing.Any] = {}
        done: set[Call] = set()
        last_reader = {x: call for call in self._first for x in call.inputs}
        for call in self._first:
            run([call], known, self._fences)
            done.add(call)
            for value in dict.fromkeys(call.inputs):
                products = self._products.get(value, [])
                if call in products and done.issuperset(products):
                    made = [x for each in products for x in each.outputs]
                    fenced[value] = tied((known[value], [known[x] for x in made]))[0]
                    going_on = [x for x in made if x in last_reader]
                    _tie(known, going_on, self._run_waiting(known, fenced))
        for call in self._waiting:
            self._run(call, known, fenced)

    def _run_waiting(self, known, fenced) -> list[Node]:
        """Run what can be run for gradients; the results, if any is a product."""
        found = []
        for call in list(self._waiting):
            is_ready = all(
                x in fenced if x in self._products else x in known
                for x in call.inputs
                if x.constant is None
            )
            if is_ready:
                self._run(call, known, fenced)
                self._waiting.remove(call)
                found.append(call)
        if not any(map(_is_product, found)):
            return []
        read = {x for call in found for x in call.inputs}
        return [x for call in found for x in call.outputs if x not in read]

    def _run(self, call: Call, known, fenced) -> None:
        local = {x: fenced.get(x, known.get(x)) for x in call.inputs if x in known}
        run([call], local, self._fences)
        known.update((x, local[x]) for x in call.outputs)


def _tie(known: dict, going_on: list[Node], others: list[Node]) -> dict:
    """Tie values; those that go on take the old ones' place, the others are returned.

    Args:
      known: values by node.
      going_on: are read by what comes next.
      others: are not, or not in this place.
    """
    if not others or not going_on:
        return {}
    arrays = tied(([known[x] for x in going_on], [known[x] for x in others]))
    known.update(zip(going_on, arrays[0], strict=True))
    return dict(zip(others, arrays[1], strict=True))


def _is_product(call: Call) -> bool:
    return call.primitive in _PRODUCTS
