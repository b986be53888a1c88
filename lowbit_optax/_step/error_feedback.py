"""Error feedback: the rounding error of a weight is added to its momentum.

This module is used for formats with ``error_feedback``: :mod:`.run` calls :func:`land`
for whole leaves, and the kernels of :mod:`.body` call :func:`fed`. Let w be a weight,
and m its momentum. The inner update is linear in both:

    w' = a w + c m + ...        m' = b m + ...

Over time, the momentum moves the weight to the target ``w + c m / (a - b)``. The
target does not change if the error ``e = w' - round(w')`` is removed from the weight
and ``e (a - b) / c`` is added to the momentum. For Adam, c is ``-eta b1 / ((1 - b1^t)
(sqrt(v / (1 - b2^t)) + eps))``, b is b1, and a is ``1 - eta lambda``.
:func:`feedback_of` derives a, b and c from the graph of the inner update.

The target is known before the weight is rounded, and the weight is rounded to the
neighbor that is nearer to the target. If the neighbor were chosen at random, the
weight would keep changing between both neighbors, because one step of the momentum
leads from one to the other. For a weight that should not move, the mean squared error
would be a sixth of the squared spacing instead of a twelfth.

If the learning rate falls, the momentum moves the weight less than this. If c is the
same for all elements, as in SGD, and falls to ``c r`` in the next step, the target is
``w + c r m / (a - b r)``, which is exact if c falls by the same ratio in every later
step. For Adam, r counts as 1, which loses the share ``(1 - r) / (1 - b r)`` of each
error.

The momentum stores errors in units of the learning rate. If the learning rate more than
doubles, the momentum would move the weight by several times the error, so :func:`fed`
reduces the momentum. The next c follows from the new state and the same gradient.
"""

import collections
import typing
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from lowbit_optax._jaxprs.elementwise import is_inside
from lowbit_optax._jaxprs.graph import (
    Graph,
    Node,
    calls_between,
    constant,
    is_zero,
    made_of,
    run,
)
from lowbit_optax._numerics.straight_through import straight_through
from lowbit_optax._step.inner_update import InnerUpdate
from lowbit_optax._step.leaf import Landed, StoredLeaf
from lowbit_optax._step.moments import MomentPlan
from lowbit_optax._step.step import Step

MOST_GROWTH = np.float32(2)
"""The factor by which the learning rate may grow before the momentum is reduced."""


class Feedback(typing.NamedTuple):
    """How the rounding errors of a leaf enter a moment.

    Args:
      part: the part of the inner state to which errors are added.
      rate: node of the change of the part per unit of error, ``1 / reach``.
      growth: node of ``MOST_GROWTH c / c_next``; at least ``MOST_GROWTH`` if the next
        update does not depend on the momentum.
      reach: node of the distance by which one unit of the part will still move the
        weight, ``c r / (a - b r)``.
    """

    part: int
    rate: Node
    growth: Node
    reach: Node


def field_of(leaf: StoredLeaf) -> str | None:
    """Return the name of the moment that receives the errors of a leaf, or None."""
    return leaf.format and leaf.format.error_feedback


def parts_for_errors(plan: MomentPlan) -> dict[int, int | None]:
    """Return the parts to which rounding errors are added, by index of the leaf.

    A leaf has None if its parameter has no moment of the name, although others do.
    """
    places = collections.defaultdict(list)
    for part, moment in plan.moments.items():
        places[moment.slot.field, moment.leaf].append(part)
    existing, found = {field for field, _ in places}, {}
    for i, leaf in enumerate(plan.leaves):
        field = field_of(leaf)
        if field is not None:
            parts = places.get((field, leaf.name), [])
            if len(parts) > 1 or (leaf.param.shape and field not in existing):
                raise _not_one(leaf, len(parts))
            found[i] = parts[0] if parts else None
    return found


def _not_one(leaf: StoredLeaf, count: int) -> ValueError:
    """Return the error for a leaf without a single moment for its rounding errors."""
    return ValueError(
        "lowbit: error_feedback must name one float32 moment of each parameter, got "
        f"{field_of(leaf)!r}, but params{leaf.name} has {count} of this name. Pass the "
        "field of the momentum, such as 'mu' for optax.adamw or 'trace' for "
        "optax.sgd(..., momentum=0.9), or error_feedback=None"
    )


def feedback_of(traced: InnerUpdate) -> dict[int, Feedback]:
    """Return the error feedback of leaves, and add its nodes to the graph."""
    found = {}
    for i, part in parts_for_errors(traced.step.plan).items():
        update = traced.nodes.updates[i]
        if not update.is_scalar and not is_zero(update):
            found[i] = _feedback(traced, i, part)
    return found


def _feedback(traced: InnerUpdate, number: int, part: int | None) -> Feedback:
    graph, nodes, leaf = traced.graph, traced.nodes, traced.step.leaves[number]
    if part is None:
        raise _not_one(leaf, 0)
    update, moment = nodes.updates[number], nodes.state[part]
    (c, b), is_linear = derivatives([update, nodes.new_state[part]], moment, graph)
    (a,), _ = derivatives([update], nodes.masters[number], graph)
    if is_zero(c) or not is_linear:
        raise ValueError(
            f"lowbit: error_feedback needs an update of params{leaf.name} that is "
            "linear in each element of its moment. It supports moments such as Adam's "
            "mu and SGD's trace. It does not support Muon, Lion and AdaBelief, nor "
            "updates that are clipped element by element after their moment"
        )
    pairs = zip(nodes.state, nodes.new_state, strict=True)
    after = dict(pairs if traced.keeps_structure else ())
    quotient = _quotient(c, graph)
    next_quotient = graph.replaced(quotient, after)
    is_uniform = c.is_scalar

    def values(a, b, c, top, bottom, next_top, next_bottom):
        growth = c * (MOST_GROWTH * _inverse(next_top)) * next_bottom
        # If the next c is 0, the growth is MOST_GROWTH, which changes no moment.
        growth += jnp.where(next_top == 0, MOST_GROWTH, np.float32(0))
        if is_uniform:
            # If c falls by this ratio in each step, the moment will move the weight by
            # c ratio / (a - b ratio). For other c, a kernel would compute the ratio of
            # each element.
            ratio = jnp.minimum(next_top * _inverse(top), 1.0)
            b, c, top = b * ratio, c * ratio, top * ratio
        slow = a + 1 - b
        return slow * _inverse(top) * bottom, growth, c * (1 / slow)

    nodes = a, b, c, *quotient, *next_quotient
    return Feedback(part, *graph.elementwise(values, *nodes))


def derivatives(
    results: Sequence[Node], of: Node, graph: Graph
) -> tuple[list[Node], bool]:
    """Return the elementwise derivatives of results with respect to an input.

    A scalar, such as a norm, counts as a constant even if it depends on the input.

    Args:
      results: float32 nodes with the shape of the input.
      of: the input.
      graph: the graph of all nodes, to which the derivatives are added.

    Returns:
      The derivatives, which are scalars or have the shape of the input, and whether
      each element of the results is linear in the element of the input at its index.
    """
    calls, made, is_linear = [], {of}, True
    for call in calls_between(results, [of], with_scalars=False):
        if made.isdisjoint(call.inputs):
            continue
        node = call.outputs[0]
        if is_inside(call, of.aval.shape) and node.aval.dtype == np.float32:
            calls.append(call)
            made.add(node)
        else:
            is_linear = False
    inputs = dict.fromkeys(x for y in calls for x in y.inputs if x not in made)
    repeats = [x for x in calls if x.primitive is p.broadcast_in_dim_p]

    wanted = [*results, *(call.outputs[0] for call in calls)]

    def derivative(x, *values):
        def function(x):
            known = {of: x, **dict(zip(inputs, values, strict=True))}
            run(calls, known, dict.fromkeys(repeats, list))
            return [known[y] if y in made else jnp.zeros_like(x) for y in wanted]

        return jax.jvp(function, [x], [jnp.ones_like(x)])[1]

    found = graph.elementwise(derivative, of, *inputs)
    found, within = found[: len(results)], found[len(results) :]
    # A function such as the sign has the derivative 0 and depends on the input.
    is_linear &= not any(map(is_zero, within))
    return found, is_linear and of not in made_of(found, with_scalars=False)


def _quotient(node: Node, graph: Graph) -> tuple[Node, ...]:
    """Return two nodes whose quotient is a node; if possible, the first is a scalar.

    Adam divides by a root, so the derivative of its update is a quotient of a scalar
    and an array, which can be inverted without a division of arrays.
    """
    call, one = node.call, constant(np.float32(1))
    if node.is_scalar:
        return node, one
    if call is not None and call.primitive is p.div_p:
        return call.inputs
    if call is not None and call.primitive is p.mul_p:
        for factor, other in (call.inputs, call.inputs[::-1]):
            if factor.is_scalar:
                top, bottom = _quotient(other, graph)
                return graph.apply(lax.mul, top, factor), bottom
    return one, graph.apply(lax.div, one, node)


def _inverse(x: jax.Array) -> jax.Array:
    """Return 1 / x, or 0 if x is 0, which passes JAX's checks for infinities."""
    is_zero = x == 0
    return jnp.where(is_zero, 0.0, 1 / jnp.where(is_zero, 1.0, x))


def land(
    step: Step,
    number: int,
    update,
    parts: dict,
    into: Feedback | None,
    values: Mapping,
) -> Landed:
    """Add an inner update to the master of a leaf, store it, and feed its error back.

    Args:
      step, number, update: see :meth:`.step.Step.landed`.
      parts: dict from part index to float32 part of the new state. The error is added
        to one of them.
      into: the feedback of the leaf, or None.
      values: dict from the nodes of the feedback to their values.
    """
    if into is None:
        return step.landed(number, update)
    moment = parts[into.part]
    rate, growth, reach = (values[node] for node in into[1:])
    landed = step.landed(number, update, moment * reach)
    feed = straight_through(fed)
    parts[into.part] = feed(moment, landed.error, rate, growth)
    return landed


def fed(
    moment: jax.Array, error: jax.Array, rate: jax.Array, growth: jax.Array
) -> jax.Array:
    """Return a new float32 momentum to which the rounding error of its weight is added.

    >>> import jax.numpy as jnp
    >>> one = jnp.float32(1)
    >>> fed(one, jnp.float32(0.5), -4 * one, 2 * one)  # 1/2 is two steps of -1/4
    Array(-1., dtype=float32)
    >>> fed(one, jnp.float32(0.0), -4 * one, one / 5)  # a 10 times larger next step
    Array(0.2, dtype=float32)
    """
    change = error * rate
    # With a learning rate of 0, the change is infinite or NaN. If a weight has had no
    # gradient yet, as in unused rows of an embedding, Adam multiplies the moment by 1 /
    # eps, so a low-bit moment would move the weight much further than the error.
    largest = jnp.float32(jnp.finfo(jnp.float32).max)
    is_known = (jnp.abs(change) <= largest) & (moment != jnp.float32(0))
    moment = jnp.where(is_known, moment + change, moment)
    factor = jnp.abs(growth)
    return moment * jnp.where(factor < jnp.float32(1), factor, jnp.float32(1))
