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
from collections.abc import Callable, Collection, Iterable, Sequence

import jax
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.graph import (
    Call,
    Node,
    called_jaxpr,
    calls_between,
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
    inputs = [Node(var.aval) for var in closed.jaxpr.invars]
    calls, outputs = _inlined(closed, inputs)
    going_on = [x for n, x in enumerate(outputs) if n not in gradients]
    first = calls_between(going_on, inputs)
    needed = set(first)
    waiting = [call for call in calls if call not in needed]
    made = _made_of(inputs[len(leaves) :], calls)
    of_gradients = filter(_is_product, waiting)
    read = made & {x for call in of_gradients for x in call.inputs}
    last = _last_products(first, read)
    if not last or last.keys() != read:
        return list(transposed(cotangents))
    known = dict(zip(inputs, (*leaves, *cotangents), strict=True))
    barriers = {call: tied for call in calls if _is_barrier(call)}
    run(first, known, barriers)
    behind = known | {
        value: tied((known[value], [known[x] for x in products]))[0]
        for value, products in last.items()
    }
    run(waiting, behind, barriers)
    return [value_of(x, behind | known) for x in outputs]


def _inlined(closed, inputs: list[Node]) -> tuple[list[Call], list[Node]]:
    """Calls and results of a jaxpr; functions under jit and checkpoints are inlined.

    A checkpoint's barrier keeps XLA from merging what follows with the forward pass. It
    becomes a call of the checkpoint's primitive, with as many results as operands.
    """
    calls: list[Call] = []

    def add(primitive, params, operands: Sequence[Node], like, context=None):
        number = len(calls)
        calls.append(Call(primitive, params, tuple(operands), number, context=context))
        return with_outputs(calls[-1], [x.aval for x in like])

    def behind_barrier(prevented, operands: list[Node]) -> list[Node]:
        if isinstance(prevented, bool):
            prevented = (prevented,) * len(operands)
        fenced = dict.fromkeys(itertools.compress(operands, prevented))
        before = [x for x in fenced if x.constant is None]
        behind = dict(zip(before, add(p.remat_p, {}, before, before), strict=True))
        return [
            behind.get(x, x) if is_prevented else x
            for x, is_prevented in zip(operands, prevented, strict=True)
        ]

    def read(eqn, operands: list[Node]) -> list[Node]:
        if eqn.primitive is p.remat_p:
            operands = behind_barrier(eqn.params["prevent_cse"], operands)
        if eqn.primitive in (p.jit_p, p.remat_p):
            return inline(called_jaxpr(eqn.params), operands, read)
        return add(eqn.primitive, eqn.params, operands, eqn.outvars, eqn.ctx)

    outputs = inline(closed, inputs, read)
    return calls, outputs


def _made_of(cotangents: Iterable[Node], calls: Iterable[Call]) -> set[Node]:
    """What is made of cotangents, and not computed again from the forward pass."""
    made = set(cotangents)
    for call in calls:
        if _is_barrier(call):
            pairs = zip(call.inputs, call.outputs, strict=True)
            made.update(after for before, after in pairs if before in made)
        elif made.intersection(call.inputs):
            made.update(call.outputs)
    return made


def _last_products(calls: Sequence[Call], values: set[Node]) -> dict[Node, list[Node]]:
    """By value, the results of the last products that read it."""
    found: dict[Node, list[Node]] = {}
    followed: set[Node] = set()
    for call in reversed(calls):
        is_followed = not followed.isdisjoint(call.outputs)
        if _is_product(call) and not is_followed:
            for value in values.intersection(call.inputs):
                found.setdefault(value, []).extend(call.outputs)
        if is_followed or _is_product(call):
            followed.update(call.inputs)
    return found


def _is_product(call: Call) -> bool:
    return call.primitive in _PRODUCTS


def _is_barrier(call: Call) -> bool:
    return call.primitive is p.remat_p
